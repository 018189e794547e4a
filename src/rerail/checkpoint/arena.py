"""Shared memory between a rank that saves and a process that writes: slots with a seal and a lock each.

    FREE        no seal, no lock
    FILLING     no seal, locked by the rank
    SEALED      sealed: whole, and of the version the seal names
    PERSISTING  sealed and locked by its reader; nobody fills it

The memory belongs to whoever made the descriptor (the agent, or the rank itself outside `rerail run`), so that it outlives
the rank. Locks are the kernel's, by process: whoever dies holds none. A slot's image is, byte for byte, the file that is
to be written. Behind the slots there may be room for a shadow (`checkpoint.shadow`), which is no affair of the reader's.
Called by `checkpoint.staging` on the rank's side and `checkpoint.saving` on the other. Needs no torch.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import struct
import zlib
from typing import NamedTuple

import msgspec

from rerail.checkpoint import room
from rerail.checkpoint.header import PAGE, SIZES, to_page
from rerail.checkpoint.tiers import Source
from rerail.errors import CheckpointError, StateError

MAGIC = 0x7265_7261_696C_0A03
_HEAD = struct.Struct("<QQQQQ")  # magic, slots, bytes of meta per slot, bytes of image per slot, bytes behind the slots
SEAL = struct.Struct("<qQII")  # version, length of meta, crc of meta, crc of the three before
NO_VERSION = -1


class NoRoom(StateError):
    """There is not enough memory for snapshots."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor in a slot: its local part, and which box of the whole tensor that is."""

    name: str
    dtype: str
    """By safetensors' names."""
    shape: tuple[int, ...]
    device: str
    at: int
    """Bytes from the start of the image."""
    whole: tuple[int, ...]
    start: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * SIZES[self.dtype]


class Meta(msgspec.Struct, frozen=True, array_like=True):
    """What a slot holds. The first `saved` entries go to disk, in a file of `file_size` bytes; the rest stays in memory."""

    entries: list[Entry]
    saved: int
    file_size: int
    small: bytes
    order: bytes = b""
    """How to save it, for whoever finds it when the rank is gone; empty where nobody asked for checkpoints."""


_meta = msgspec.msgpack.Decoder(Meta)


class Seal(NamedTuple):
    """A sealed slot."""

    version: int
    slot: int
    length: int
    crc: int


class Arena:
    """The slots behind one descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map: mmap.mmap | None = None
        self._slots = self._meta_bytes = self._image_bytes = self._behind = 0
        self._read: dict[int, int] = {}
        """Slots of the versions that are locked for reading here."""
        if os.fstat(fd).st_size >= PAGE:
            self._open()

    # --- reading ---

    def seals(self) -> list[Seal]:
        """Every sealed slot, oldest version first."""
        found = []
        for slot in range(self._slots):
            version, length, crc, head = SEAL.unpack_from(self._memory(), _seal_at(slot))
            if version >= 0 and head == seal_crc(version, length, crc):
                found.append(Seal(version, slot, length, crc))
        return sorted(found)

    def meta(self, version: int) -> Meta:
        """What is kept of a sealed version."""
        seal = self._find(version)
        base = self._base(seal.slot)
        data = self._memory()[base : base + seal.length]
        if zlib.crc32(data) != seal.crc:
            raise StateError(f"version {version} in this rank's arena has been overwritten")
        return _meta.decode(data)

    def image(self, version: int) -> memoryview:
        """The bytes of a sealed version's tensors, headed by a safetensors header."""
        base = self._base(self._find(version).slot) + self._meta_bytes
        return memoryview(self._memory())[base : base + self._image_bytes]

    def source(self, version: int, size: int) -> Source:
        """The first `size` bytes of that, to be written."""
        image = self.image(version)
        if len(image) < to_page(size):
            raise CheckpointError(f"{len(image)} bytes cannot be written as {to_page(size)}")
        return lambda offset, size: image[offset : offset + to_page(size)]

    def holds(self, version: int) -> bool:
        return any(seal.version == version for seal in self.seals())

    def lock_for_reading(self, version: int) -> bool:
        """Keep a sealed version from being overwritten until `unlock`. False if it is not there any more."""
        try:
            slot = self._find(version).slot
            fcntl.lockf(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, slot)
        except (StateError, BlockingIOError, PermissionError):
            return False
        if any(seal.slot == slot and seal.version == version for seal in self.seals()):
            self._read[version] = slot
            return True
        self._unlock_slot(slot)
        return False

    def unlock(self, version: int) -> None:
        slot = self._read.pop(version, None)
        if slot is not None:  # by its number: the seal may have been broken meanwhile
            self._unlock_slot(slot)

    # --- writing ---

    def reserve(self, slots: int, meta_bytes: int, image_bytes: int, most: int | None = None, behind: int = 0) -> None:
        """Make room for so many slots and `behind` bytes behind them, in at most `most` bytes.

        What was sealed is gone if the room was too small; if only that behind the slots was, it stays so.
        """
        meta_bytes, image_bytes, behind = to_page(meta_bytes), to_page(image_bytes), to_page(behind)
        fits = self._slots == slots and meta_bytes <= self._meta_bytes and image_bytes <= self._image_bytes
        if fits and (behind <= self._behind or self.seals()):
            return
        for slot in range(self._slots):
            if not self._try_lock(slot):
                raise StateError("the state has grown while its last checkpoint is still being written")
        # Python closes a descriptor of its own with the old map, and with it go all locks: not before the new one is there.
        old, self._map, self._slots = self._map, None, 0
        total = PAGE + slots * (meta_bytes + image_bytes) + behind
        try:
            os.ftruncate(self.fd, 0)
            room.take(self.fd, total, most)
        except OSError as error:
            raise NoRoom(
                f"no memory for {slots} snapshots of {image_bytes / (1 << 20):.1f} MiB each: {error.strerror}"
            ) from error
        self._map = mmap.mmap(self.fd, total)
        self._slots, self._meta_bytes, self._image_bytes, self._behind = slots, meta_bytes, image_bytes, behind
        for slot in range(slots):
            SEAL.pack_into(self._map, _seal_at(slot), NO_VERSION, 0, 0, 0)
            self._unlock_slot(slot)
        _HEAD.pack_into(self._map, 0, MAGIC, slots, meta_bytes, image_bytes, behind)
        del old

    def begin(self, version: int, pinned: frozenset[int] = frozenset(), *, renew: bool = False) -> int | None:
        """Break the seal of the slot to fill next and lock it: an old one that nobody reads. None if there is none.

        A version never has two slots: one that is pinned or being read is not begun again. Later versions are of a past in
        which the training was further: it has gone back, and will make them anew. `renew`: where all older ones are pinned
        or being read, and so stay, the newest one makes room for its successor.
        """
        self.drop_later(version, pinned)
        sealed = {seal.slot: seal.version for seal in self.seals()}
        newest = max((kept for kept in sealed.values() if kept <= version), default=NO_VERSION)
        same = [slot for slot, kept in sealed.items() if kept == version]
        if same and version in pinned:
            return None
        free = [slot for slot in range(self._slots) if slot not in sealed]
        old = sorted((kept, slot) for slot, kept in sealed.items() if kept != newest and kept not in pinned)
        last = [slot for slot, kept in sealed.items() if kept == newest and kept not in pinned and len(sealed) > 1]
        for slot in same or [*free, *(slot for _, slot in old), *(last if renew else [])]:
            if self._try_lock(slot):
                SEAL.pack_into(self._memory(), _seal_at(slot), NO_VERSION, 0, 0, 0)
                return slot
        return None

    def drop_behind(self, version: int) -> None:
        """Break the seals of all later versions: they are not to be trusted."""
        for seal in self.seals():
            if seal.version > version:
                self.drop(seal.version)

    def drop_later(self, version: int, pinned: frozenset[int] = frozenset()) -> None:
        """Break the seals of all later versions, but for those that somebody reads or is about to."""
        for seal in self.seals():
            if seal.version > version and seal.version not in pinned and self._try_lock(seal.slot):
                self.drop(seal.version)
                self._unlock_slot(seal.slot)

    def drop(self, version: int) -> None:
        """Break the seal of one."""
        for seal in self.seals():
            if seal.version == version:
                SEAL.pack_into(self._memory(), _seal_at(seal.slot), NO_VERSION, 0, 0, 0)

    def slot_image(self, slot: int) -> tuple[mmap.mmap, int]:
        """The memory, and where in it the image of a slot being filled starts."""
        return self._memory(), self._base(slot) + self._meta_bytes

    def behind(self) -> tuple[mmap.mmap | None, int, int]:
        """The memory, where in it the room behind the slots starts, and how large that is."""
        return self._map, self._base(self._slots), self._behind if self._map is not None else 0

    def seal(self, slot: int, version: int, meta: Meta) -> None:
        """The slot is whole."""
        memory, data = self._memory(), msgspec.msgpack.encode(meta)
        if len(data) > self._meta_bytes:
            raise StateError(f"the description of a snapshot has {len(data)} bytes; {self._meta_bytes} were reserved")
        base = self._base(slot)
        memory[base : base + len(data)] = data
        crc = zlib.crc32(data)
        SEAL.pack_into(memory, _seal_at(slot), version, len(data), crc, seal_crc(version, len(data), crc))
        self._unlock_slot(slot)

    def give_up(self, slot: int) -> None:
        """The slot was not filled to its end; it stays without a seal."""
        self._unlock_slot(slot)

    # --- the file ---

    def _open(self) -> None:
        size = os.fstat(self.fd).st_size
        memory = mmap.mmap(self.fd, size)
        magic, slots, meta_bytes, image_bytes, behind = _HEAD.unpack_from(memory, 0)
        if magic == MAGIC and PAGE + slots * (meta_bytes + image_bytes) + behind == size:
            self._map, self._slots, self._behind = memory, slots, behind
            self._meta_bytes, self._image_bytes = meta_bytes, image_bytes

    def refresh(self) -> None:
        """Look again: the other side may have made more room."""
        if self._map is None or os.fstat(self.fd).st_size != len(self._map):
            self._map, self._slots = None, 0
            if os.fstat(self.fd).st_size >= PAGE:
                self._open()

    def _memory(self) -> mmap.mmap:
        if self._map is None:
            raise StateError("this rank's arena holds no snapshot")
        return self._map

    def _base(self, slot: int) -> int:
        return PAGE + slot * (self._meta_bytes + self._image_bytes)

    def _find(self, version: int) -> Seal:
        for seal in self.seals():
            if seal.version == version:
                return seal
        raise StateError(f"version {version} is not in this rank's arena")

    def _try_lock(self, slot: int) -> bool:
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _unlock_slot(self, slot: int) -> None:
        fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, slot)


def _seal_at(slot: int) -> int:
    return 64 + 64 * slot


def seal_crc(version: int, length: int, crc: int) -> int:
    return zlib.crc32(struct.pack("<qQI", version, length, crc))
