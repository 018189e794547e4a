"""Checkpoints in an object store, by URL: whatever fsspec has a driver for (s3://, gs://, az://, memory://).

An object is there whole or not at all, so no renaming is needed; a step disappears by its COMMIT first. Called through
`checkpoint.tiers`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import fsspec

from rerail.checkpoint.manifest import digest
from rerail.checkpoint.names import COMMIT
from rerail.checkpoint.tiers import Read, Source
from rerail.errors import CheckpointError


@contextlib.contextmanager
def _driver() -> Iterator[None]:
    """Drivers have errors of their own kinds (no credentials, no bucket, no network): here they are all OSErrors."""
    try:
        yield
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


class ObjectTier:
    """A folder of a bucket."""

    lasting = True

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            found: tuple[Any, str] = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"{url}: {error}") from error
        self._store, self._root = found

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    @_driver()
    def names(self, folder: str = "") -> list[str]:
        try:
            found = self._store.ls(self._path(folder), detail=False, refresh=True)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in found)

    @_driver()
    def size(self, path: str) -> int:
        return int(self._store.size(self._path(path)))

    @_driver()
    def get(self, path: str, limit: int) -> bytes:
        try:
            data = bytes(self._store.cat_file(self._path(path), end=limit + 1))
        except FileNotFoundError:
            raise
        except Exception:
            if self.size(path):
                raise
            return b""  # of an empty object some stores give no range
        if len(data) > limit:
            raise CheckpointError(f"{self.url}/{path} has more than {limit} bytes")
        return data

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[Read]:
        def read(offset: int, buffer: memoryview, size: int) -> None:
            with _driver():
                data = self._store.cat_file(self._path(path), start=offset, end=offset + size)
            if len(data) != size:
                raise CheckpointError(f"{self.url}/{path} ends at byte {offset + len(data)}: it has been cut short")
            buffer[:size] = data

        yield read

    @_driver()
    def make_folder(self, folder: str) -> None:
        self._store.makedirs(self._path(folder), exist_ok=True)

    @_driver()
    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        if exclusive:
            self._store.pipe_file(self._path(path), data, mode="create")
        else:
            self._store.pipe_file(self._path(path), data)

    @_driver()
    def put_large(self, path: str, source: Source, size: int, chunk: int) -> list[str]:
        hashes = []
        with self._store.open(self._path(path), "wb", block_size=max(chunk, 8 << 20)) as file:
            for offset in range(0, size, chunk):
                here = min(chunk, size - offset)
                part = source(offset, here)[:here]
                hashes.append(digest(part))
                file.write(part)
        if self.size(path) != size:
            raise OSError(f"{self.url}/{path} has {self.size(path)} bytes after {size} were written")
        return hashes

    @_driver()
    def remove(self, folder: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._store.rm_file(self._path(f"{folder}/{COMMIT}"))
        with contextlib.suppress(FileNotFoundError):
            self._store.rm(self._path(folder), recursive=True)
