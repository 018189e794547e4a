"""State dictionaries as bytes and back, without pickle.

A tensor in a state dictionary either travels inside (small) or is left out under a name and travels by itself (large).
Called by `session.tracked`, `session.transfer` and `session.pieces`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import msgspec
import torch

from rerail.errors import StateError

INLINE_LIMIT = 16 << 10
"""Bytes. Larger tensors are left out of the small state."""
_TENSOR, _TUPLE = 1, 2
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    try:
        return _DTYPES[name]
    except KeyError:
        raise StateError(f"unknown tensor type {name!r} in saved state") from None


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Raw bytes of a tensor, whatever its type and device."""
    host = tensor.detach().to("cpu").contiguous()
    return ctypes.string_at(host.data_ptr(), host.numel() * host.element_size()) if host.numel() else b""


def tensor_from(data: bytes, dtype: str, shape: list[int]) -> torch.Tensor:
    """The tensor these bytes were."""
    if not data:
        return torch.empty(shape, dtype=dtype_of(dtype))
    return torch.frombuffer(bytearray(data), dtype=dtype_of(dtype)).reshape(shape)


def _packed(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        packed = msgspec.msgpack.encode((dtype_name(item.dtype), list(item.shape), tensor_bytes(item)))
        return msgspec.msgpack.Ext(_TENSOR, packed)
    if isinstance(item, torch.Size):
        return tuple(item)
    if hasattr(item, "item") and callable(item.item):  # NumPy scalars
        return item.item()
    raise TypeError(f"{type(item).__module__}.{type(item).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_packed)


def encode(value: Any, where: str) -> bytes:
    """Plain data with small tensors as bytes. `where` names the object in the error."""
    try:
        return _encoder.encode(value)
    except TypeError as error:
        raise StateError(
            f"the state of {where} holds a {error}, which cannot be written down exactly. "
            "Track an object whose state_dict() holds numbers, strings, lists, dictionaries and tensors only."
        ) from None


def decode(data: bytes) -> Any:
    """What `encode` was given; tuples come back as lists."""

    def hook(code: int, body: memoryview) -> Any:
        if code != _TENSOR:
            raise StateError(f"unknown item {code} in saved state")
        dtype, shape, raw = msgspec.msgpack.decode(body, type=tuple[str, list[int], bytes])
        return tensor_from(raw, dtype, shape)

    return msgspec.msgpack.decode(data, ext_hook=hook)


def take_out_tensors(value: Any, prefix: str, found: dict[str, torch.Tensor]) -> Any:
    """A copy of nested plain data in which large tensors are replaced by their names; they are put into `found`."""
    if isinstance(value, torch.Tensor):
        if value.numel() * value.element_size() <= INLINE_LIMIT:
            return value
        found[prefix] = value
        return {"__tensor__": prefix}
    if isinstance(value, dict):
        return {key: take_out_tensors(item, f"{prefix}.{key}", found) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [take_out_tensors(item, f"{prefix}.{index}", found) for index, item in enumerate(value)]
    return value


def put_in_tensors(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The inverse of `take_out_tensors`."""
    if isinstance(value, dict):
        if set(value) == {"__tensor__"}:
            return tensors[value["__tensor__"]]
        return {key: put_in_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [put_in_tensors(item, tensors) for item in value]
    return value
