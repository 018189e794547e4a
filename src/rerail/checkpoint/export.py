"""Turns a saved step into files that others read: Hugging Face style, one safetensors file, or torch's own DCP.

Everything is written under a temporary name beside the target and renamed when all of it is on the disk. Every byte is
checked as it is read, and at most twice `ROOM` bytes of tensors are held at a time, whatever the size of the model. Called by
`rerail ckpt export`; `stream` also by `rerail ckpt diff`.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from rerail.checkpoint import header, reshard
from rerail.checkpoint.boxes import Box
from rerail.checkpoint.catalog import Saved, Step
from rerail.checkpoint.dtypes import dtype_of, view_of
from rerail.checkpoint.files import sync_directory, write_fully
from rerail.checkpoint.header import SIZES
from rerail.checkpoint.names import owner_and_name
from rerail.checkpoint.reshard import Wanted
from rerail.errors import CheckpointError, UsageError

FORMS = ("hf", "safetensors", "dcp")
SHARD_BYTES = 5 * 10**9
"""Bytes of one file of a Hugging Face style directory at most; a tensor that is larger has a file to itself."""
ROOM = 64 << 20
"""Bytes of tensors that are read at a time; the piece before may still be held while the next is read."""
Advance = Callable[[int], None]


class Plan(NamedTuple):
    """What is to be exported: the saved name behind each name in the files."""

    step: Step
    saved: dict[str, Saved]
    names: dict[str, str]
    from_ranks: int
    """How many of them are some rank's own, taken from the lowest rank that has them."""

    @property
    def size(self) -> int:
        return sum(bytes_of(self.saved[name]) for name in self.names.values())


def bytes_of(saved: Saved) -> int:
    return math.prod(saved.shape) * SIZES[saved.dtype]


def plan(step: Step, what: str) -> Plan:
    """Choose the tensors of the object tracked as `what`, without that prefix; all, under their full names, for ""."""
    saved = step.tensors()
    if not what:
        return Plan(step, saved, {name: name for name in saved}, 0)
    names: dict[str, str] = {}
    owned: dict[str, tuple[int, str]] = {}
    for name in saved:
        rank, plain = owner_and_name(name)
        if not plain.startswith(f"{what}."):
            continue
        short = plain.removeprefix(f"{what}.")
        if rank < 0:
            names[short] = name
        elif short not in owned or rank < owned[short][0]:
            owned[short] = rank, name
    from_ranks = {short: name for short, (_, name) in owned.items() if short not in names}
    if not names and not from_ranks:
        there = sorted({owner_and_name(name)[1].partition(".")[0] for name in saved})
        raise UsageError(
            f"step {step.id.step} has no tensors of {what!r}",
            hint=f"it has those of: {', '.join(there) or 'nothing'} (choose with --what NAME, or --all)",
        )
    return Plan(step, saved, {**names, **from_ranks}, len(from_ranks))


def write(chosen: Plan, target: Path, form: str, advance: Advance, shard_bytes: int = SHARD_BYTES) -> list[str]:
    """Write the plan to `target`, a file for `safetensors` and a directory otherwise; the names of the files."""
    if target.exists() or target.is_symlink():
        hint = "choose a name that is free; nothing is ever overwritten"
        if form == "safetensors" and target.is_dir():
            hint = f"with --as safetensors, --to names the file: {target / 'model.safetensors'}"
        raise UsageError(f"{target} exists already", hint=hint)
    target.parent.mkdir(parents=True, exist_ok=True)
    _check_room(target.parent, chosen.size * (2 if form == "dcp" else 1))
    with _temporary(target) as draft:
        if form == "safetensors":
            _write_file(draft, chosen, list(chosen.names), advance)
            return [target.name]
        draft.mkdir()
        written = (
            _write_dcp(draft, chosen, advance) if form == "dcp" else _write_hf(draft, chosen, advance, shard_bytes)
        )
        sync_directory(draft)
        return written


def stream(step: Step, wanted: Sequence[tuple[str, Saved]], room: int = ROOM) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor, in order and in pieces that follow each other in memory; small ones are read together."""
    batch: list[Wanted] = []
    held = 0
    for name, saved in wanted:
        for box in _pieces(saved, room):
            size = box.volume * SIZES[saved.dtype]
            if batch and held + size > room:
                yield from _loaded(step, batch)
                batch, held = [], 0
            batch.append(Wanted(name, torch.empty(box.shape, dtype=dtype_of(saved.dtype)), saved.shape, box.start))
            held += size
    yield from _loaded(step, batch)


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B") if size else memoryview(b"")


def _loaded(step: Step, batch: list[Wanted]) -> Iterator[tuple[str, torch.Tensor]]:
    reshard.load(step, batch)
    for one in batch:
        yield one.name, one.tensor


def _pieces(saved: Saved, room: int) -> Iterator[Box]:
    """Boxes of at most `room` bytes (one row at least) that follow each other in row-major order."""
    dim = next((index for index, length in enumerate(saved.shape) if length != 1), -1)
    if dim < 0 or bytes_of(saved) <= room:
        yield Box((0,) * len(saved.shape), saved.shape)
        return
    row = bytes_of(saved) // saved.shape[dim]
    rows = max(1, room // row)
    for first in range(0, saved.shape[dim], rows):
        start, shape = [0] * len(saved.shape), list(saved.shape)
        start[dim], shape[dim] = first, min(rows, saved.shape[dim] - first)
        yield Box(tuple(start), tuple(shape))


# --- one file ---


def _write_file(path: Path, chosen: Plan, keys: Iterable[str], advance: Advance) -> list[header.Tensor]:
    # wide types first: every tensor is aligned without a gap, which safetensors does not allow
    ordered = sorted(keys, key=lambda key: -SIZES[chosen.saved[chosen.names[key]].dtype])
    picked = [(key, chosen.saved[chosen.names[key]]) for key in ordered]
    head, placed = header.build([(key, saved.dtype, saved.shape) for key, saved in picked], {"format": "pt"})
    size = len(head) + sum(tensor.size for tensor in placed)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(fd, 0, size)  # a full disk says so before anything is read
        write_fully(fd, memoryview(head), 0)
        at = len(head)
        for _, tensor in stream(chosen.step, [(chosen.names[key], saved) for key, saved in picked]):
            data = raw(tensor)
            write_fully(fd, data, at)
            at += len(data)
            advance(len(data))
        os.fsync(fd)
    finally:
        os.close(fd)
    return placed


# --- a directory ---


def _write_hf(draft: Path, chosen: Plan, advance: Advance, shard_bytes: int) -> list[str]:
    shards = _shards(chosen, shard_bytes)
    if len(shards) == 1:
        _write_file(draft / "model.safetensors", chosen, shards[0], advance)
        return ["model.safetensors"]
    places: dict[str, str] = {}
    for number, keys in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(draft / name, chosen, keys, advance)
        places.update(dict.fromkeys(keys, name))
    index = {"metadata": {"total_size": chosen.size}, "weight_map": dict(sorted(places.items()))}
    with open(draft / "model.safetensors.index.json", "xb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return [*dict.fromkeys(places.values()), "model.safetensors.index.json"]


def _shards(chosen: Plan, shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    held = 0
    for key, name in chosen.names.items():
        size = bytes_of(chosen.saved[name])
        if shards[-1] and held + size > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(key)
        held += size
    return shards


def _write_dcp(draft: Path, chosen: Plan, advance: Advance) -> list[str]:
    """torch writes what it is given at once: so it is given tensors that lie in a file, which memory need not hold."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    detour = draft / ".all.safetensors"
    placed = _write_file(detour, chosen, list(chosen.names), advance)
    with open(detour, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    detour.unlink()
    state = {tensor.key: view_of(memory, tensor) for tensor in placed}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # this process is meant to be alone
        save(state, storage_writer=FileSystemWriter(draft, sync_files=True), no_dist=True)
    return sorted(os.listdir(draft))


# --- the disk ---


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """A name beside the target that becomes the target's when all went well, and is gone otherwise."""
    draft = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}"
    try:
        yield draft
        os.rename(draft, target)
        sync_directory(target.parent)
    finally:
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        else:
            draft.unlink(missing_ok=True)


def _check_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise CheckpointError(f"{folder}: {size:,} bytes are to be written, and the disk has {free:,} left")
