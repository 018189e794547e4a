"""Where checkpoints lie: one small protocol for directories and object stores, and how a URL becomes one.

A tier stores files in folders one level deep, makes small writes atomic and durable, and never changes a file that is
there. Called by `checkpoint.saving`, `checkpoint.catalog` and `checkpoint.reading`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from rerail.errors import CheckpointError

Read = Callable[[int, memoryview, int], None]
Source = Callable[[int, int], memoryview]
"""source(offset, size): those bytes in a page-aligned buffer that is padded to a page; good until the same thread's next call."""


class Tier(Protocol):
    """A place for checkpoints. Every path is `folder/name` or `name`, made by `checkpoint.names`."""

    @property
    def url(self) -> str: ...

    @property
    def lasting(self) -> bool:
        """False: it holds the newest step only, whatever the rules say, and goes when the job does."""

    def names(self, folder: str = "") -> list[str]:
        """Names in a folder, files and folders alike; none if it is not there."""

    def size(self, path: str) -> int:
        """Bytes of a file. FileNotFoundError if it is not there."""

    def get(self, path: str, limit: int) -> bytes:
        """A whole small file. CheckpointError if it is longer than `limit`."""

    def reading(self, path: str) -> AbstractContextManager[Read]:
        """Open a file: read(offset, buffer, size) fills the first `size` bytes of a page-aligned buffer, any thread."""

    def make_folder(self, folder: str) -> None:
        """Make sure that a folder is there, durably."""

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        """Write a small file: whole and durable on return, or not there. `exclusive`: FileExistsError if it is."""

    def put_large(self, path: str, source: Source, size: int, chunk: int) -> list[str]:
        """Write the first `size` bytes of `source`, asked for in chunks by several threads; the checksum of each."""

    def remove(self, folder: str) -> None:
        """Take a folder out of sight at once, then delete it."""


def tier_at(url: str) -> Tier:
    """The tier behind a path, file:// or object store URL."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme == "file":
        from rerail.checkpoint.files import FileTier

        return FileTier(rest if separator else url)
    if scheme == "nodes" and not rest:
        from rerail.checkpoint.nodes import of_this_job

        return of_this_job()
    if not rest:
        raise CheckpointError(
            f"{url!r} is not a place for checkpoints: a path or a URL such as s3://bucket/folder is needed"
        )
    from rerail.checkpoint.objects import ObjectTier

    return ObjectTier(url)
