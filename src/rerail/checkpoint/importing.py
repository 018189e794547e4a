"""Turns weights of another kind into a committed step: safetensors, `torch.save` files, or torch's own DCP.

Nothing is unpickled, with one exception that has to be asked for: DCP describes itself in a pickle. The tensors are read
straight into the image of the file that is to be written, so that memory holds them once. Called by `rerail ckpt import`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import torch
from torch import nn

from rerail.checkpoint import header, names
from rerail.checkpoint.arena import Arena, Entry, Meta
from rerail.checkpoint.dtypes import code_of, dtype_of, view_of
from rerail.checkpoint.header import PAGE, SIZES
from rerail.checkpoint.saving import Order, Outcome, carry_out, claim_epoch
from rerail.checkpoint.tiers import Tier
from rerail.errors import CheckpointError, RerailError, StateError, UsageError

INDEX = "model.safetensors.index.json"
DCP = ".metadata"
_ZIP = b"PK\x03\x04"

Described = tuple[str, tuple[int, ...]]
"""Type by safetensors' names, and shape."""
Fill = Callable[[Mapping[str, torch.Tensor]], None]


class Source(NamedTuple):
    """Tensors somewhere else: what there is, and how to read some of them into tensors of ours."""

    kind: str
    tensors: dict[str, Described]
    fill: Fill
    left_out: list[str]
    """What is there besides tensors, and is not taken."""


def open_source(path: Path, *, trust_pickle: bool = False) -> Source:
    """Find out what lies at `path`. UsageError if it is nothing that can be read safely."""
    if path.is_dir():
        found = sorted(os.listdir(path))
        if DCP in found:
            return _dcp(path, trust_pickle=trust_pickle)
        if any(names.step_of(name) or names.epoch_of(name) for name in found):
            raise UsageError(f"{path} is a checkpoint root already", hint=f"rerail ckpt ls {path}")
        files = [path / name for name in found if name.endswith(".safetensors")]
        if files:
            return _safetensors(_indexed(path, files))
        raise UsageError(f"{path} holds neither a DCP checkpoint ({DCP}) nor safetensors files")
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    with open(path, "rb") as file:
        first = file.read(9)
    if first[8:9] == b"{":
        return _safetensors([path])
    return _torch_save(path, mapped=first.startswith(_ZIP))


def choose(source: Source, part: str, what: str) -> dict[str, str]:
    """Names in the job by names in the source: what lies under `part`, put under `what`."""
    inside = f"{part}." if part else ""
    chosen = {
        name: f"{what}.{name.removeprefix(inside)}" if what else name.removeprefix(inside)
        for name in source.tensors
        if name.startswith(inside)
    }
    if not chosen:
        parts = sorted({name.partition(".")[0] for name in source.tensors})
        shown = ", ".join(parts[:8]) + (f" and {len(parts) - 8} more" if len(parts) > 8 else "")
        raise UsageError(f"there are no tensors under {part!r}" if part else "there are no tensors in it", hint=shown)
    return chosen


class Wish(NamedTuple):
    """What the new step is to be."""

    step: int
    small: bytes
    """The small state of its only rank."""
    job: str
    versions: dict[str, str]
    scratch: str = ""
    """A directory to put the image together in; in memory when empty."""


def bring_in(source: Source, chosen: Mapping[str, str], tier: Tier, wish: Wish) -> Outcome:
    """Write the chosen tensors as a committed step, and read it back."""
    described = sorted(
        ((new, *source.tensors[old], old) for old, new in chosen.items()), key=lambda one: (-SIZES[one[1]], one[0])
    )
    head, placed = header.build([(new, code, shape) for new, code, shape, _ in described], {"format": "pt"})
    size = placed[-1].at + placed[-1].size
    with _memory(size, wish.scratch) as fd:
        arena = Arena(fd)
        arena.reserve(1, len(wish.small) + sum(len(one.key) + 96 for one in placed) + PAGE, size)
        slot = arena.begin(wish.step)
        if slot is None:
            raise StateError("a new arena has no free slot")
        memory, base = arena.slot_image(slot)
        memory[base : base + len(head)] = head
        source.fill({one[3]: view_of(memory, tensor, base) for one, tensor in zip(described, placed, strict=True)})
        entries = [
            Entry(one.key, one.dtype, one.shape, "cpu", one.at, one.shape, (0,) * len(one.shape)) for one in placed
        ]
        arena.seal(slot, wish.step, Meta(entries, len(entries), size, wish.small))
        return _commit(arena, tier, wish)


def _commit(arena: Arena, tier: Tier, wish: Wish) -> Outcome:
    order = Order(
        version=wish.step,
        epoch=claim_epoch(tier, wish.job),
        generation=0,
        rank=0,
        group=(0,),
        world_size=1,
        tiers=(tier.url,),
        job=wish.job,
        versions=wish.versions,
    )
    (outcome,) = carry_out(order, arena, set)
    if not outcome.ok:
        raise CheckpointError("; ".join(outcome.notes))
    if names.verified_name(0) not in tier.names(order.id.folder):
        raise CheckpointError(f"{tier.url}/{order.id.folder} was written, but does not read back as it should")
    return outcome


@contextlib.contextmanager
def _memory(size: int, scratch: str) -> Iterator[int]:
    if scratch:
        with tempfile.TemporaryFile(dir=scratch) as file:
            yield file.fileno()
        return
    free = psutil.virtual_memory().available
    if size > free:
        raise UsageError(
            f"{size:,} bytes are to be put together, and {free:,} bytes of memory are free",
            hint="--scratch DIR puts them together in a file there",
        )
    fd = os.memfd_create("rerail-import", os.MFD_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


# --- safetensors ---


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_index = msgspec.json.Decoder(_Index)


def _indexed(path: Path, files: list[Path]) -> list[Path]:
    """The files that an index names, if there is one; all of them otherwise."""
    index = path / INDEX
    if not index.exists():
        return files
    try:
        places = _index.decode(index.read_bytes()).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{index} is malformed: {error}") from error
    named = [path / name for name in sorted(set(places.values()))]
    missing = [file.name for file in named if file not in files]
    if missing:
        raise UsageError(f"{index} names {missing[0]}, which is not there")
    return named


def _safetensors(files: list[Path]) -> Source:
    places: dict[str, tuple[Path, header.Tensor]] = {}
    for path in files:
        size = path.stat().st_size
        try:
            with open(path, "rb") as file:
                length = header.header_size(file.read(8), size)
                file.seek(0)
                found, _ = header.parse(file.read(length), size)
        except CheckpointError as error:
            raise UsageError(f"{path}: {error}") from error
        for tensor in found:
            if tensor.key in places:
                raise UsageError(f"{tensor.key!r} is both in {places[tensor.key][0].name} and in {path.name}")
            places[tensor.key] = path, tensor

    def fill(wanted: Mapping[str, torch.Tensor]) -> None:
        for path in files:
            here = [name for name in wanted if places[name][0] == path]
            if not here:
                continue
            with open(path, "rb") as file:
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            for name in here:
                wanted[name].copy_(_from_mapped(memory, places[name][1]))

    return Source("safetensors", {name: (one.dtype, one.shape) for name, (_, one) in places.items()}, fill, [])


def _from_mapped(memory: mmap.mmap, tensor: header.Tensor) -> torch.Tensor:
    """Files of others need not be aligned: then a copy is."""
    if tensor.at % SIZES[tensor.dtype] == 0 or not tensor.size:
        return view_of(memory, tensor)
    aligned = torch.frombuffer(bytearray(memory[tensor.at : tensor.at + tensor.size]), dtype=torch.uint8)
    return aligned.view(dtype_of(tensor.dtype)).view(tensor.shape)


# --- torch.save ---


def _torch_save(path: Path, *, mapped: bool) -> Source:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # whatever a damaged or malicious file makes of torch's reader
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"{path} cannot be read without running code from it, or is damaged: {said}",
            hint="only tensors and plain data are read; save it again as torch.save(model.state_dict(), ...) or as safetensors",
        ) from error
    found: dict[str, torch.Tensor] = {}
    left_out: list[str] = []
    _flatten(state, "", found, left_out)

    def fill(wanted: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, target in wanted.items():
                target.copy_(found[name])

    return Source("torch.save", {name: _described(name, tensor) for name, tensor in found.items()}, fill, left_out)


def _flatten(value: Any, name: str, found: dict[str, torch.Tensor], left_out: list[str]) -> None:
    if isinstance(value, torch.Tensor):
        if name in found:
            raise UsageError(f"two tensors have the name {name!r} once nesting is written with dots")
        found[name or "tensor"] = value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _flatten(item, f"{name}.{key}" if name else str(key), found, left_out)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _flatten(item, f"{name}.{index}" if name else str(index), found, left_out)
    else:
        left_out.append(name)


def _described(name: str, tensor: torch.Tensor) -> Described:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
        raise UsageError(
            f"{name!r} is a {type(tensor).__name__} of layout {tensor.layout}: only plain tensors are taken"
        )
    return code_of(tensor.dtype), tuple(tensor.shape)


# --- DCP ---


def _dcp(path: Path, *, trust_pickle: bool) -> Source:
    if not trust_pickle:
        raise UsageError(
            f"{path} is a DCP checkpoint, and its {DCP} is a pickle: reading it can run any code its writer chose",
            hint="if you know who wrote it: --trust-pickle",
        )
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        metadata = FileSystemReader(path).read_metadata()
    except Exception as error:  # a pickle may fail in any way
        raise UsageError(f"{path / DCP} cannot be read: {error}") from error
    tensors: dict[str, Described] = {}
    left_out = []
    for name, one in metadata.state_dict_metadata.items():
        if isinstance(one, TensorStorageMetadata):
            tensors[name] = code_of(one.properties.dtype), tuple(one.size)
        else:
            left_out.append(name)

    def fill(wanted: Mapping[str, torch.Tensor]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # meant to be alone
                load(dict(wanted), storage_reader=FileSystemReader(path), no_dist=True)
        except RerailError:
            raise
        except Exception as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    return Source("DCP", tensors, fill, left_out)
