"""torch's types by safetensors' names and back, and tensors that lie in shared or mapped memory.

Called by `checkpoint.staging`, `checkpoint.reshard`, the importers and exporters, and `session.restore`.
"""

from __future__ import annotations

import math
import mmap
from typing import Protocol

import torch

from rerail.errors import StateError

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
_TYPES = {code: dtype for dtype, code in _CODES.items()}


def code_of(dtype: torch.dtype) -> str:
    try:
        return _CODES[dtype]
    except KeyError:
        raise StateError(f"tensors of type {dtype} cannot be saved: safetensors has no name for it") from None


def dtype_of(code: str) -> torch.dtype:
    try:
        return _TYPES[code]
    except KeyError:
        raise StateError(f"unknown tensor type {code!r}") from None


class Placed(Protocol):
    """A tensor by where it lies: an entry of an arena's slot, or of a safetensors header."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def at(self) -> int: ...


def view_of(memory: mmap.mmap | memoryview, placed: Placed, base: int = 0) -> torch.Tensor:
    """The tensor that lies in this memory, `placed.at` bytes behind `base`, without a copy."""
    dtype, count = dtype_of(placed.dtype), math.prod(placed.shape)
    if not count:
        return torch.empty(placed.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=base + placed.at).view(placed.shape)
