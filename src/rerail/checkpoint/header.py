"""The header of a safetensors file: turns a list of tensors into bytes that end on a page, and back.

Any safetensors reader opens what comes out: JSON may end in spaces, so the data behind it starts at a multiple of 4096
and can be written past the page cache. Called by `checkpoint.staging`, `checkpoint.verify` and the importers.
"""

from __future__ import annotations

import math
import mmap
import struct
import threading
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from rerail.errors import CheckpointError

PAGE = 4096
LARGEST = 100 << 20
"""Bytes. safetensors itself refuses longer headers."""
SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8,
}  # fmt: skip
"""Bytes of one element, by safetensors' names."""
_LENGTH = struct.Struct("<Q")


def to_page(size: int) -> int:
    """The size, rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


class PageBuffer(threading.local):
    """Memory that begins on a page, one piece for each thread, to be used again and again."""

    _buffer = memoryview(b"")

    def of(self, size: int) -> memoryview:
        """This thread's, with room for `size` bytes in whole pages."""
        if len(self._buffer) < to_page(size):
            self._buffer = memoryview(mmap.mmap(-1, to_page(size)))
        return self._buffer


class Tensor(NamedTuple):
    """One tensor in a file. `at` counts from the start of the file."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    at: int

    @property
    def size(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_entry = msgspec.json.Decoder(_Entry)


def build(tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: dict[str, str]) -> tuple[bytes, list[Tensor]]:
    """The header for these (key, dtype, shape), and where in the file each one's data goes: close together, in order."""
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset, placed = 0, []
    for key, dtype, shape in tensors:
        size = math.prod(shape) * SIZES[dtype]
        entries[key] = _Entry(dtype, list(shape), (offset, offset + size))
        placed.append((key, dtype, tuple(shape), offset))
        offset += size
    text = msgspec.json.encode(entries)
    text += b" " * (-(_LENGTH.size + len(text)) % PAGE)
    if len(text) > LARGEST:
        raise CheckpointError(f"a safetensors header of {len(text)} bytes: at most {LARGEST} are allowed")
    data = _LENGTH.pack(len(text)) + text
    return data, [Tensor(key, dtype, shape, at + len(data)) for key, dtype, shape, at in placed]


def header_size(first: bytes, file_size: int) -> int:
    """How long the header is, from a file's first eight bytes."""
    if len(first) < _LENGTH.size:
        raise CheckpointError("too short for a safetensors file")
    (length,) = _LENGTH.unpack_from(first)
    if length > LARGEST or _LENGTH.size + length > file_size:
        raise CheckpointError(f"not a safetensors file: its header would have {length} bytes")
    return int(_LENGTH.size + length)


def parse(data: bytes, file_size: int) -> tuple[list[Tensor], dict[str, str]]:
    """Tensors and metadata of a header; every range is checked against the file."""
    try:
        raw = msgspec.json.decode(data[_LENGTH.size :], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop("__metadata__", b"{}"), type=dict[str, str])
        entries = {key: _entry.decode(value) for key, value in raw.items()}
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CheckpointError(f"not a safetensors header: {error}") from error
    found = []
    for key, entry in entries.items():
        begin, end = entry.data_offsets
        size = SIZES.get(entry.dtype, -1) * math.prod(entry.shape)
        if size < 0 or any(length < 0 for length in entry.shape) or begin < 0 or end - begin != size:
            raise CheckpointError(f"safetensors header: {key!r} is {entry.dtype}{entry.shape} in {end - begin} bytes")
        if len(data) + end > file_size:
            raise CheckpointError(f"safetensors header: {key!r} ends behind the end of the file")
        found.append(Tensor(key, entry.dtype, tuple(entry.shape), len(data) + begin))
    return found, metadata
