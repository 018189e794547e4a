"""Reads a step into tensors of any layout: turns saved boxes and wanted boxes into the byte ranges to read.

Where a wanted part lies in one piece in the file it is copied straight into its tensor. Where it is scattered (a column
of a saved row shard) the span around it is read once and the part copied out of it. Called by `session.checkpoints` and
`checkpoint.api`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from rerail.checkpoint import boxes, collecting
from rerail.checkpoint.boxes import Box
from rerail.checkpoint.catalog import Part, Saved, Step
from rerail.checkpoint.dtypes import dtype_of
from rerail.checkpoint.header import SIZES
from rerail.checkpoint.reading import Copy, read
from rerail.errors import CheckpointError

FEW_RUNS = 16
"""Up to so many pieces are copied one by one."""
ROOM = 512 << 20
"""Bytes of spans that are held at the same time."""


class Wanted(NamedTuple):
    """A tensor to fill: the part of it that is local here."""

    name: str
    tensor: torch.Tensor
    whole: tuple[int, ...]
    start: tuple[int, ...]


class _Detour(NamedTuple):
    """A span of a saved box on its way to a part of a tensor."""

    span: torch.Tensor
    first_row: int
    source: Box
    target: Box
    into: torch.Tensor


@collecting.paused()
def load(step: Step, wanted: Sequence[Wanted]) -> int:
    """Fill all tensors; bytes read. CheckpointError before anything is changed if one is not in the step as it should be.

    An error found later, in the data themselves, leaves tensors partly filled: fill them from another step or stop.
    """
    saved = step.tensors()
    for target in wanted:
        _check(target, saved.get(target.name))
    copies: dict[int, list[Copy]] = defaultdict(list)
    detours: list[_Detour] = []
    landings: list[tuple[torch.Tensor, torch.Tensor]] = []
    total = room = 0

    def flush() -> None:
        nonlocal total, room
        for rank, some in copies.items():
            total += read(step.tier, step.id.folder, step.manifests[rank], some)
        for detour in detours:
            _copy_out(detour)
        for tensor, landing in landings:
            tensor.copy_(landing)
        copies.clear()
        detours.clear()
        landings.clear()
        room = 0

    with torch.no_grad():
        for target in wanted:
            if not target.tensor.numel():
                continue
            direct = target.tensor
            if direct.device.type != "cpu" or not direct.is_contiguous():
                direct = torch.empty(target.tensor.shape, dtype=target.tensor.dtype)
                landings.append((target.tensor, direct))
                room += direct.numel() * direct.element_size()
            box = Box(target.start, tuple(target.tensor.shape))
            for part in saved[target.name].parts:
                room += _plan(part, box, direct, SIZES[saved[target.name].dtype], copies, detours)
            if room > ROOM:
                flush()
        flush()
    return total


def _plan(
    part: Part, target: Box, tensor: torch.Tensor, item: int, copies: dict[int, list[Copy]], detours: list[_Detour]
) -> int:
    """Add what this part gives to the target; bytes of memory that takes."""
    if part.box == target:
        copies[part.rank].append(Copy(part.at, target.volume * item, tensor.data_ptr()))
        return 0
    common = boxes.intersection(part.box, target)
    if common is None:
        return 0
    address = tensor.data_ptr()
    if boxes.count_runs(part.box, target) <= FEW_RUNS:
        for run in boxes.runs(part.box, target):
            copies[part.rank].append(Copy(part.at + run.source * item, run.length * item, address + run.target * item))
        return 0
    # whole rows of the saved box, from the first that is needed to the last
    row = math.prod(part.box.shape[1:])
    first, rows = common.start[0] - part.box.start[0], common.shape[0]
    span = torch.empty((rows, *part.box.shape[1:]), dtype=tensor.dtype)
    copies[part.rank].append(Copy(part.at + first * row * item, rows * row * item, span.data_ptr()))
    detours.append(_Detour(span, common.start[0], part.box, target, tensor))
    return rows * row * item


def _copy_out(detour: _Detour) -> None:
    common = boxes.intersection(detour.source, detour.target)
    if common is None:
        return
    from_span = (detour.first_row, *detour.source.start[1:])
    source = tuple(slice(s - o, s - o + n) for s, o, n in zip(common.start, from_span, common.shape, strict=True))
    target = tuple(
        slice(s - o, s - o + n) for s, o, n in zip(common.start, detour.target.start, common.shape, strict=True)
    )
    detour.into[target].copy_(detour.span[source])


def _check(target: Wanted, saved: Saved | None) -> None:
    if saved is None:
        raise CheckpointError(f"{target.name!r} is not in the checkpoint")
    here, there = str(target.tensor.dtype).removeprefix("torch."), str(dtype_of(saved.dtype)).removeprefix("torch.")
    if (there, saved.shape) != (here, target.whole):
        raise CheckpointError(
            f"{target.name!r} is {here}{list(target.whole)} here, but {there}{list(saved.shape)} in the checkpoint"
        )
    inside = len(target.start) == target.tensor.dim() == len(target.whole) and all(
        0 <= begin <= begin + length <= whole
        for begin, length, whole in zip(target.start, target.tensor.shape, target.whole, strict=True)
    )
    if not inside:
        raise CheckpointError(
            f"{target.name!r} has the shape {list(target.whole)}: a part of {list(target.tensor.shape)} at "
            f"{list(target.start)} lies outside of it"
        )


def whole_tensor(step: Step, name: str) -> torch.Tensor:
    """One tensor of the job, put together from all its parts."""
    saved = step.tensors()[name]
    tensor = torch.empty(saved.shape, dtype=dtype_of(saved.dtype))
    load(step, [Wanted(name, tensor, saved.shape, (0,) * len(saved.shape))])
    return tensor
