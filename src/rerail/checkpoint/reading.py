"""Verified reads: no byte of a shard reaches anyone before the checksum of its chunk is right.

Chunks are read in parallel, past the page cache, each into a buffer of its thread; only the chunks that are needed are
read. Called by `checkpoint.reshard`, `checkpoint.saving` (reading back) and `rerail ckpt verify`. Needs no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from rerail.checkpoint import names
from rerail.checkpoint.header import PageBuffer
from rerail.checkpoint.manifest import RankManifest, digest
from rerail.checkpoint.tiers import Source, Tier
from rerail.errors import CheckpointError

AHEAD = 1024
"""Chunks that are handed to the readers at once."""
MARK = 1 << 16
"""Bytes of a mark beside a shard."""
READERS = 8
"""Chunks on their way from the disk at the same time."""


class Damaged(CheckpointError):
    """The bytes of a shard are not those that were saved."""

    def __init__(self, what: str, rank: int) -> None:
        super().__init__(what)
        self.rank = rank
        """Whose shard it is."""


class Copy(NamedTuple):
    """Bytes wanted from a shard: where they are in the file, and the address they go to."""

    at: int
    size: int
    address: int


class _Part(NamedTuple):
    start: int
    address: int
    size: int


def read(tier: Tier, folder: str, manifest: RankManifest, wanted: Sequence[Copy]) -> int:
    """Copy the wanted bytes out of a shard; how many bytes were read for it. CheckpointError if any is not right."""
    parts: dict[int, list[_Part]] = defaultdict(list)
    chunk = manifest.chunk
    for at, size, address in wanted:
        while size > 0:
            index, start = divmod(at, chunk)
            here = min(size, chunk - start)
            parts[index].append(_Part(start, address, here))
            at, address, size = at + here, address + here, size - here

    def deliver(index: int, buffer: memoryview, source: int) -> None:
        for start, address, size in parts[index]:
            ctypes.memmove(address, source + start, size)

    return _read_chunks(tier, folder, manifest, sorted(parts), deliver)


def verify(tier: Tier, folder: str, manifest: RankManifest, progress: Callable[[int], None] = lambda size: None) -> int:
    """Read a whole shard and check it; how many bytes it has."""
    if not manifest.file:
        return 0
    return _read_chunks(
        tier, folder, manifest, range(len(manifest.hashes)), lambda _, buffer, __: progress(len(buffer))
    )


def mark(tier: Tier, folder: str, rank: int, problem: str = "") -> None:
    """Leave beside a shard what reading it has found: nothing but a name if it is right, the reason if it is not."""
    tier.put(f"{folder}/{names.verified_name(rank)}", problem.encode()[:MARK])


def _read_chunks(
    tier: Tier,
    folder: str,
    manifest: RankManifest,
    chunks: Sequence[int],
    deliver: Callable[[int, memoryview, int], None],
) -> int:
    if not chunks:
        return 0

    def one(index: int) -> int:
        size = min(manifest.chunk, manifest.size - index * manifest.chunk)
        found = source(index * manifest.chunk, size)
        deliver(index, found[:size], ctypes.addressof(ctypes.c_char.from_buffer(found)))
        return size

    with (
        verified(tier, folder, manifest) as source,
        ThreadPoolExecutor(READERS, thread_name_prefix="rerail-read") as pool,
    ):
        return sum(
            size for first in range(0, len(chunks), AHEAD) for size in pool.map(one, chunks[first : first + AHEAD])
        )


@contextlib.contextmanager
def verified(tier: Tier, folder: str, manifest: RankManifest) -> Iterator[Source]:
    """The shard as a source that gives whole chunks, each only when its checksum is right."""
    path = f"{folder}/{manifest.file}"
    pages = PageBuffer()
    with contextlib.ExitStack() as opened:
        with _reading(path):
            found = tier.size(path)
            if found != manifest.size:
                raise Damaged(f"{path} has {found} bytes, its manifest says {manifest.size}", manifest.rank)
            read_file = opened.enter_context(tier.reading(path))

        def source(offset: int, size: int) -> memoryview:
            buffer = pages.of(manifest.chunk)
            with _reading(path):
                read_file(offset, buffer, size)
            index = offset // manifest.chunk
            if digest(buffer[:size]) != manifest.hashes[index]:
                raise Damaged(f"{path}: chunk {index} ({size} bytes) does not match its checksum", manifest.rank)
            return buffer

        yield source


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    """What the disk says against it, or that it is gone, means that the step is damaged."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
