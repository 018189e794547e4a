"""Memory snapshots of this rank's state, in an arena that belongs to the agent and outlives the process.

Two slots take turns; a slot is sealed after it is whole, so that a rank killed in the middle leaves the older one good.
Called by `session.job` every k steps and by a successor that restores. Not a checkpoint: it is gone with the node.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import zlib
from typing import NamedTuple

import msgspec
import torch

from rerail.errors import StateError
from rerail.session import plain

MAGIC = 0x7265_7261_696C_0A01
HEADER = 4096
META = 8 << 20
"""Bytes kept for the table of tensors and the small state in front of each slot's tensors."""
ALIGN = 64
_HEAD = struct.Struct("<QQ")  # magic, bytes per slot
_SEAL = struct.Struct("<qQII")  # version, length of meta, crc of meta, crc of the three before


class Meta(msgspec.Struct, frozen=True, array_like=True):
    """What a slot holds: (name, dtype, shape, device, offset) of every tensor, then the small state of the same version."""

    table: list[tuple[str, str, list[int], str, int]]
    small: bytes


class Snapshot(NamedTuple):
    """A sealed slot as read: tensors are views of the arena."""

    version: int
    small: bytes
    tensors: dict[str, torch.Tensor]
    table: list[tuple[str, str, list[int], str]]
    """What each tensor is, in the same order."""


class Arena:
    """The two slots behind one file descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map: mmap.mmap | None = None
        self._slot_bytes = 0
        if os.fstat(fd).st_size > HEADER:
            self._open()

    def versions(self) -> tuple[int, ...]:
        """Sealed versions, tensors included, oldest first."""
        return tuple(sorted(version for version, *_ in self._seals() if self._meta(version).table))

    def small_versions(self) -> tuple[int, ...]:
        """Sealed versions with at least the small state."""
        return tuple(sorted(version for version, *_ in self._seals()))

    def write(self, version: int, tensors: dict[str, torch.Tensor], small: bytes) -> None:
        """Copy the state into the slot that does not hold the newest version, then seal it."""
        table, size = [], META
        for name, tensor in tensors.items():
            table.append((name, plain.dtype_name(tensor.dtype), list(tensor.shape), tensor.device.type, size))
            size += -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN
        meta = msgspec.msgpack.encode(Meta(table, small))
        if len(meta) > META:
            raise StateError(f"the description of a snapshot has {len(meta)} bytes; at most {META} fit")
        self._reserve(size)
        memory = self._memory()
        sealed = {version: slot for version, slot, *_ in self._seals()}
        slot = sealed.get(version, 1 - sealed[max(sealed)] if sealed else 0)
        _SEAL.pack_into(memory, _seal_at(slot), -1, 0, 0, 0)
        base = HEADER + slot * self._slot_bytes
        for (*_, offset), tensor in zip(table, tensors.values(), strict=True):
            if tensor.numel():
                view = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=base + offset)
                view.view(tensor.shape).copy_(tensor)
        memory[base : base + len(meta)] = meta
        crc = zlib.crc32(meta)
        _SEAL.pack_into(memory, _seal_at(slot), version, len(meta), crc, _seal_crc(version, len(meta), crc))

    def read(self, version: int) -> Snapshot:
        """A sealed version; its tensors are views, copy them out."""
        memory, meta = self._memory(), self._meta(version)
        base = HEADER + self._slot_of(version) * self._slot_bytes
        tensors = {}
        for name, dtype, shape, _, offset in meta.table:
            count, kind = math.prod(shape), plain.dtype_of(dtype)
            flat = torch.empty(0, dtype=kind)
            if count:
                flat = torch.frombuffer(memory, dtype=kind, count=count, offset=base + offset)
            tensors[name] = flat.view(shape)
        return Snapshot(version, meta.small, tensors, [entry[:4] for entry in meta.table])

    # --- the file ---

    def _reserve(self, slot_bytes: int) -> None:
        page = mmap.PAGESIZE
        slot_bytes = -(-slot_bytes // page) * page
        if self._map is not None and slot_bytes <= self._slot_bytes:
            return
        self._map, self._slot_bytes = None, 0
        try:
            os.ftruncate(self._fd, 0)
            os.posix_fallocate(self._fd, 0, HEADER + 2 * slot_bytes)
        except OSError as error:
            os.ftruncate(self._fd, 0)
            raise StateError(
                f"no memory for snapshots: two times {slot_bytes >> 20} MiB were asked for ({error.strerror})"
            ) from error
        self._map = mmap.mmap(self._fd, HEADER + 2 * slot_bytes)
        self._slot_bytes = slot_bytes
        for slot in (0, 1):
            _SEAL.pack_into(self._map, _seal_at(slot), -1, 0, 0, 0)
        _HEAD.pack_into(self._map, 0, MAGIC, slot_bytes)

    def _open(self) -> None:
        size = os.fstat(self._fd).st_size
        memory = mmap.mmap(self._fd, size)
        magic, slot_bytes = _HEAD.unpack_from(memory, 0)
        if magic == MAGIC and HEADER + 2 * slot_bytes == size:
            self._map, self._slot_bytes = memory, slot_bytes

    def _memory(self) -> mmap.mmap:
        if self._map is None:
            raise StateError("this rank's arena holds no snapshot")
        return self._map

    def _seals(self) -> list[tuple[int, int, int]]:
        """(version, slot, length of meta) of every sealed slot."""
        found = []
        for slot in (0, 1) if self._map is not None else ():
            version, length, crc, head = _SEAL.unpack_from(self._memory(), _seal_at(slot))
            if version >= 0 and head == _seal_crc(version, length, crc):
                found.append((version, slot, length))
        return found

    def _slot_of(self, version: int) -> int:
        for sealed, slot, _ in self._seals():
            if sealed == version:
                return slot
        raise StateError(f"version {version} is not in this rank's arena")

    def _meta(self, version: int) -> Meta:
        for sealed, slot, length in self._seals():
            if sealed == version:
                base = HEADER + slot * self._slot_bytes
                return msgspec.msgpack.decode(self._memory()[base : base + length], type=Meta)
        raise StateError(f"version {version} is not in this rank's arena")


def _seal_at(slot: int) -> int:
    return 64 + 64 * slot


def _seal_crc(version: int, length: int, crc: int) -> int:
    return zlib.crc32(struct.pack("<qQI", version, length, crc))
