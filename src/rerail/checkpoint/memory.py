"""Checkpoints in the memory of one process: what a depot without a disk keeps. Called by `checkpoint.depot`."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from rerail.checkpoint.header import to_page
from rerail.checkpoint.manifest import digest
from rerail.checkpoint.tiers import Read, Source
from rerail.errors import CheckpointError

FILLERS = 3
"""Chunks that are fetched, copied and compared at the same time."""
_Stored = bytes | memoryview


class MemoryTier:
    """Files by folder and name, `limit` bytes of them at most, and no more than `spare()` at once. Safe to use from many threads."""

    lasting = False

    def __init__(self, limit: int, spare: Callable[[], int] = lambda: sys.maxsize) -> None:
        self.url = "memory"
        self._limit, self._used, self._spare = limit, 0, spare
        self._folders: dict[str, dict[str, _Stored]] = defaultdict(dict)
        self._lock = threading.Lock()

    def names(self, folder: str = "") -> list[str]:
        with self._lock:
            found = self._folders.get(folder, {})
            return sorted([*found, *(name for name in self._folders if name)] if not folder else found)

    def size(self, path: str) -> int:
        return len(self._stored(path))

    def get(self, path: str, limit: int) -> bytes:
        found = self._stored(path)
        if len(found) > limit:
            raise CheckpointError(f"{path} has more than {limit} bytes")
        return bytes(found)

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[Read]:
        found = memoryview(self._stored(path))

        def read(offset: int, buffer: memoryview, size: int) -> None:
            if offset + size > len(found):
                raise CheckpointError(f"{path} ends at byte {len(found)}: it has been cut short")
            buffer[:size] = found[offset : offset + size]

        yield read

    def make_folder(self, folder: str) -> None:
        with self._lock:
            self._folders[folder] = self._folders[folder]

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        with self._room(len(data)):
            self._store(path, bytes(data), exclusive=exclusive)

    def put_large(self, path: str, source: Source, size: int, chunk: int) -> list[str]:
        with self._room(size):
            room = memoryview(mmap.mmap(-1, to_page(size) or mmap.PAGESIZE))[:size]

            def one(offset: int) -> str:
                here = min(chunk, size - offset)
                found, target = source(offset, here), room[offset : offset + here]
                if found.readonly:
                    target[:] = found[:here]
                else:  # the same, but the other threads can run meanwhile
                    ctypes.memmove(_address(target), _address(found), here)
                return digest(target)

            with ThreadPoolExecutor(FILLERS, thread_name_prefix="rerail-fill") as pool:
                hashes = list(pool.map(one, range(0, size, chunk)))
            self._store(path, room, exclusive=True)
        return hashes

    def remove(self, folder: str) -> None:
        with self._lock:
            self._used -= sum(len(stored) for stored in self._folders.pop(folder, {}).values())

    @contextlib.contextmanager
    def _room(self, size: int) -> Iterator[None]:
        """Take that much of the limit; given back if the file does not come to be."""
        if size > self._spare():
            raise OSError(errno.ENOSPC, f"{size} bytes do not fit: the machine can spare {max(0, self._spare())}")
        with self._lock:
            if self._used + size > self._limit:
                what = f"{size} bytes do not fit: {self._used} of {self._limit} are in use (setting node_store)"
                raise OSError(errno.ENOSPC, what)
            self._used += size
        try:
            yield
        except BaseException:
            with self._lock:
                self._used -= size
            raise

    def _store(self, path: str, data: _Stored, *, exclusive: bool) -> None:
        folder, _, name = path.rpartition("/")
        with self._lock:
            if folder and folder not in self._folders:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
            there = self._folders[folder].get(name)
            if there is not None and exclusive:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            self._used -= len(there) if there is not None else 0
            self._folders[folder][name] = data

    def _stored(self, path: str) -> _Stored:
        folder, _, name = path.rpartition("/")
        with self._lock:
            found = self._folders.get(folder, {}).get(name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
