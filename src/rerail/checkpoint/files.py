"""Checkpoints in a directory: durable small files, and large ones written past the page cache in parallel.

Durable means: the data are synced, then the name is there, then the directory that holds the name is synced. A sync that
fails is never asked again on the same file: what the kernel dropped it does not report twice. Called through
`checkpoint.tiers`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from rerail.checkpoint.header import to_page
from rerail.checkpoint.manifest import digest
from rerail.checkpoint.names import TRASH
from rerail.checkpoint.tiers import Read, Source
from rerail.errors import CheckpointError

WRITERS = 8
"""Chunks on their way to the disk at the same time."""
HASHERS = 2
"""Threads that take checksums while the disk is busy with the same chunks."""
_NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOTSUP}


class FileTier:
    """A directory on a local or shared file system."""

    lasting = True

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()
        self.url = str(self.root)

    def names(self, folder: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self.root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, path: str) -> int:
        return os.stat(self.root / path).st_size

    def get(self, path: str, limit: int) -> bytes:
        with open(self.root / path, "rb") as file:
            too_long = os.fstat(file.fileno()).st_size > limit
            data = b"" if too_long else file.read(limit + 1)
        if too_long or len(data) > limit:
            raise CheckpointError(f"{self.root / path} has more than {limit} bytes")
        return data

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[Read]:
        fd = _open_past_cache(self.root / path)

        def read(offset: int, buffer: memoryview, size: int) -> None:
            done, padded = 0, buffer[: to_page(size)]
            while done < size:
                got = os.preadv(fd, [padded[done:]], offset + done)
                if got <= 0:
                    raise CheckpointError(f"{path} ends at byte {offset + done}: it has been cut short")
                done += got

        try:
            yield read
        finally:
            os.close(fd)

    def make_folder(self, folder: str) -> None:
        self._make_root(self.root)
        if not folder:
            return
        try:
            os.mkdir(self.root / folder)
        except FileExistsError:
            sync_directory(self.root / folder)  # whoever died here may have left names that are not on the disk yet
        sync_directory(self.root)

    def _make_root(self, path: Path) -> None:
        if path.is_dir():
            return
        self._make_root(path.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        sync_directory(path.parent)

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        target = self.root / path
        # The name appears only when all of it is on the disk.
        first = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}"
        with _new_file(first, direct=False) as (fd, _):
            write_fully(fd, memoryview(data), 0)
            os.fsync(fd)
        try:
            if exclusive:
                _link(first, target, data)
            else:
                os.rename(first, target)
        finally:
            with contextlib.suppress(OSError):  # after a rename there is nothing left to remove
                first.unlink()
        try:
            sync_directory(target.parent)
        except OSError:
            # others must not count on a name that a power cut may take away
            with contextlib.suppress(OSError):
                target.unlink()
            raise

    def put_large(self, path: str, source: Source, size: int, chunk: int) -> list[str]:
        padded = to_page(size)
        with _new_file(self.root / path) as (fd, direct):
            if size:
                os.posix_fallocate(fd, 0, padded if direct else size)  # a full disk says so before anything is written
            hashes = self._write_chunks(fd, source, padded if direct else size, size, chunk)
            if direct and padded != size:
                os.ftruncate(fd, size)
            os.fsync(fd)
            sync_directory((self.root / path).parent)
        return hashes

    @staticmethod
    def _write_chunks(fd: int, source: Source, until: int, size: int, chunk: int) -> list[str]:
        def one(offset: int) -> str:
            here = min(chunk, size - offset)
            part = source(offset, here)
            found = hashers.submit(digest, part[:here])
            try:
                write_fully(fd, part[: min(chunk, until - offset)], offset)
            finally:
                wait([found])  # the buffer is the source's again
            return found.result()

        with (
            ThreadPoolExecutor(HASHERS, thread_name_prefix="rerail-hash") as hashers,
            ThreadPoolExecutor(WRITERS, thread_name_prefix="rerail-write") as pool,
        ):
            futures = [pool.submit(one, offset) for offset in range(0, size, chunk)]
            try:
                return [future.result() for future in futures]
            finally:
                for future in futures:
                    future.cancel()
                wait(futures)

    def remove(self, folder: str) -> None:
        trash = self.root / folder
        with contextlib.suppress(FileNotFoundError):
            if not folder.startswith(TRASH):
                trash = self.root / f"{TRASH}{folder}-{uuid.uuid4().hex[:8]}"
                os.rename(self.root / folder, trash)
                sync_directory(self.root)
            shutil.rmtree(trash, ignore_errors=True)


@contextlib.contextmanager
def _new_file(path: Path, *, direct: bool = True) -> Iterator[tuple[int, bool]]:
    """A new file, opened past the page cache where that is possible. It is deleted again if anything goes wrong."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o644)
    except OSError as error:
        if not direct or error.errno not in _NO_DIRECT:
            raise
        # Some file systems create the file before they refuse the flag.
        path.unlink(missing_ok=True)
        fd, direct = os.open(path, flags, 0o644), False
    try:
        yield fd, direct
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(fd)


def _link(first: Path, target: Path, data: bytes) -> None:
    """Give a whole file its name, unless another has it."""
    try:
        os.link(first, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # without links the name is claimed by its creation, and the file is whole a moment later
        with _new_file(target, direct=False) as (fd, _):
            write_fully(fd, memoryview(data), 0)
            os.fsync(fd)


def write_fully(fd: int, data: memoryview, offset: int) -> None:
    """All of the data, however many calls it takes."""
    done = 0
    while done < len(data):
        written = os.pwrite(fd, data[done:], offset + done)
        if written <= 0:
            raise OSError(errno.EIO, "a write wrote nothing")
        done += written


def _open_past_cache(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
