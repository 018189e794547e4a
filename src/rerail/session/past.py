"""What checkpoints hold of this rank's parameters, as windows: one row for each checkpoint, a part of one parameter at a time.

Streamed: no more is held than `ROOM` bytes, however large the shard is, and every byte is checked as it is read. Called by `session.mending`
when a predictor is to guess what a lost shard would be by now.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from rerail.checkpoint import reshard
from rerail.checkpoint.catalog import Step
from rerail.checkpoint.layout import Piece
from rerail.checkpoint.reshard import Wanted
from rerail.rehab.predictors import Times, Window
from rerail.session.loading import Sources
from rerail.session.pieces import Pieces

if TYPE_CHECKING:
    from rerail.session.job import Job

ROOM = 64 << 20


class Part(NamedTuple):
    """Some rows of one parameter, where they are in memory and in the whole tensor."""

    piece: Piece
    tensor: torch.Tensor
    start: tuple[int, ...]


def windows(job: Job, steps: Sequence[Step], version: int, room: int = ROOM) -> Iterator[tuple[torch.Tensor, Window]]:
    """Every part of every parameter with its past, for a guess at what it is at `version`. `steps`: oldest first."""
    times = Times(tuple(float(step.id.step) for step in steps), float(version))
    group: list[Part] = []
    size = 0
    for part in _parts(job, room // (8 * len(steps))):
        # a row as it is saved, and as it is looked at
        needed = part.tensor.numel() * len(steps) * (part.tensor.element_size() + 4)
        if group and size + needed > room:
            yield from _read(job, steps, times, group)
            group, size = [], 0
        group.append(part)
        size += needed
    yield from _read(job, steps, times, group)


def _read(
    job: Job, steps: Sequence[Step], times: Times, group: Sequence[Part]
) -> Iterator[tuple[torch.Tensor, Window]]:
    rows: list[list[torch.Tensor]] = [[] for _ in group]
    for step in steps if group else ():
        sources, wanted = Sources(step.tensors(), job.rank), []
        for part, kept in zip(group, rows, strict=True):
            row = torch.empty(part.tensor.shape, dtype=part.tensor.dtype)
            kept.append(row)
            wanted.append(Wanted(sources.of(part.piece.name, mine_first=False), row, part.piece.whole, part.start))
        reshard.load(step, wanted)
    for part, kept in zip(group, rows, strict=True):
        yield part.tensor, Window(torch.stack([row.reshape(-1).float() for row in kept]), times)
        kept.clear()


def _parts(job: Job, most: int) -> Iterator[Part]:
    """Parameters that numbers can be guessed for, none of the parts with more elements than `most` if it has several rows."""
    trained = {one.data_ptr() for one in job._tracked.parameters().values() if one.is_floating_point() and one.numel()}
    for piece in Pieces(job._tracked, job.rank, job.world_size).all():
        tensor = piece.tensor
        if tensor.data_ptr() not in trained or not tensor.numel():
            continue
        if not tensor.dim():
            yield Part(piece, tensor, piece.start)
            continue
        rows = max(1, most // max(1, math.prod(tensor.shape[1:])))
        for at in range(0, tensor.shape[0], rows):
            yield Part(piece, tensor[at : at + rows], (piece.start[0] + at, *piece.start[1:]))
