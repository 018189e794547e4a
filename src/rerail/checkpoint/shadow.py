"""The shadow of a rank: its parameters alone, in half precision, in two halves behind the slots of its arena that are written in turns.

    a half   description (what lies where), then the image; its seal says which version that is, and is broken before anything is
             written: a process that ends in the middle leaves the other half

Only the rank itself writes and reads it, or the process that takes its place when it is gone, so there are no locks. Called by
`checkpoint.casting` and `session.shadowing`. Needs no torch.
"""

from __future__ import annotations

import mmap
import zlib

import msgspec

from rerail.checkpoint.arena import NO_VERSION, SEAL, Arena, Entry, seal_crc
from rerail.checkpoint.header import PAGE, to_page
from rerail.errors import StateError

_entries = msgspec.msgpack.Decoder(list[Entry])

HALVES = 2


def describe(entries: list[Entry]) -> bytes:
    """What `Shadow.entries` gives back."""
    return msgspec.msgpack.encode(entries)


def room_for(description: bytes, image_bytes: int) -> int:
    """Bytes that an arena needs behind its slots."""
    return PAGE + HALVES * (to_page(len(description)) + to_page(image_bytes))


class Shadow:
    """Both halves behind the slots of one arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    @property
    def empty(self) -> bool:
        """Whether the arena has not been made yet."""
        return self._arena.behind()[0] is None

    # --- reading ---

    def versions(self) -> tuple[int, ...]:
        """Of the halves that are whole, oldest first."""
        return tuple(sorted(version for version, _, _ in self._sealed().values()))

    def entries(self, version: int) -> list[Entry]:
        """What is kept of a version."""
        half, length, crc = self._find(version)
        at = self._base(half)
        data = self._memory()[at : at + length]
        if zlib.crc32(data) != crc:
            raise StateError(f"the shadow of version {version} in this rank's arena has been overwritten")
        return _entries.decode(data)

    def image(self, version: int) -> memoryview:
        """The bytes of its tensors."""
        half, length, _ = self._find(version)
        base = self._base(half)
        return memoryview(self._memory())[base + to_page(length) : base + self._half_bytes()]

    # --- writing ---

    def begin(self, version: int, description: bytes, image_bytes: int) -> int | None:
        """Break the seal of the half to fill next: the older one. None: they are too small.

        Versions that are not older are of a past in which the training was further.
        """
        if to_page(len(description)) + to_page(image_bytes) > self._half_bytes():
            return None
        self.drop_behind(version - 1)
        sealed = self._sealed()
        half = min(range(HALVES), key=lambda one: sealed[one][0] if one in sealed else NO_VERSION)
        self._break(half)
        base = self._base(half)
        self._memory()[base : base + len(description)] = description
        return half

    def place(self, half: int, description: bytes) -> tuple[mmap.mmap, int]:
        """The memory, and where in it the image of a half being filled starts."""
        return self._memory(), self._base(half) + to_page(len(description))

    def seal(self, half: int, version: int, description: bytes) -> None:
        """The half is whole."""
        crc = zlib.crc32(description)
        checked = seal_crc(version, len(description), crc)
        SEAL.pack_into(self._memory(), self._seal_at(half), version, len(description), crc, checked)

    def drop_behind(self, version: int) -> None:
        """Break the seals of all later versions: the training has gone back, or they are not to be trusted."""
        for half, (kept, _, _) in self._sealed().items():
            if kept > version:
                self._break(half)

    def drop(self, version: int) -> None:
        """Break the seal of one."""
        for half, (kept, _, _) in self._sealed().items():
            if kept == version:
                self._break(half)

    # --- the halves ---

    def _sealed(self) -> dict[int, tuple[int, int, int]]:
        """By half: version, length and checksum of its description."""
        found = {}
        for half in range(HALVES) if self._half_bytes() else ():
            version, length, crc, checked = SEAL.unpack_from(self._memory(), self._seal_at(half))
            if version >= 0 and length <= self._half_bytes() and checked == seal_crc(version, length, crc):
                found[half] = (version, length, crc)
        return found

    def _find(self, version: int) -> tuple[int, int, int]:
        for half, (kept, length, crc) in self._sealed().items():
            if kept == version:
                return half, length, crc
        raise StateError(f"there is no shadow of version {version} in this rank's arena")

    def _break(self, half: int) -> None:
        SEAL.pack_into(self._memory(), self._seal_at(half), NO_VERSION, 0, 0, 0)

    def _memory(self) -> mmap.mmap:
        memory, _, _ = self._arena.behind()
        if memory is None:
            raise StateError("this rank's arena holds no shadow")
        return memory

    def _seal_at(self, half: int) -> int:
        return self._arena.behind()[1] + 64 * half

    def _base(self, half: int) -> int:
        return self._arena.behind()[1] + PAGE + half * self._half_bytes()

    def _half_bytes(self) -> int:
        """Of each; 0: there is no room for any."""
        room = self._arena.behind()[2]
        return (room - PAGE) // HALVES // PAGE * PAGE if room > PAGE else 0
