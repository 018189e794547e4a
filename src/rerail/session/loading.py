"""Brings a rank to the state of a saved step, whatever layout and number of ranks it was saved with.

Called by `session.checkpoints` on every rank before the first step.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from rerail.checkpoint import reshard
from rerail.checkpoint.catalog import Saved, Step
from rerail.checkpoint.dtypes import dtype_of
from rerail.checkpoint.names import owned_name, owner_and_name
from rerail.checkpoint.reshard import Wanted
from rerail.errors import CheckpointError
from rerail.session import plain, restore, rng
from rerail.session.cursor import Position
from rerail.session.pieces import Pieces
from rerail.session.small import Small, decode

if TYPE_CHECKING:
    from rerail.session.job import Job


def load(job: Job, step: Step) -> None:
    """Tensors, schedules, random state and place in the data of `step`."""
    restore.small(job, tensors(job, step), fresh=True)


def tensors(job: Job, step: Step) -> Small:
    """Tensors and the schedules that go with them; the rest of its small state is given back."""
    saved = step.tensors()
    small = _small_of(step, job.rank, job.world_size)
    pieces = Pieces(job._tracked, job.rank, job.world_size)
    pieces.make_room(saved)
    sources = Sources(saved, job.rank)
    of_objects = pieces.object_names()
    wanted = [
        Wanted(sources.of(piece.name, mine_first=piece.changing), piece.tensor, piece.whole, piece.start)
        for piece in pieces.all()
        if owner_and_name(piece.name)[1] not in of_objects
    ]
    taken_out = {}
    for name in _references(plain.decode(small.objects)):
        source = sources.of(name, mine_first=True)
        taken_out[name] = tensor = torch.empty(saved[source].shape, dtype=dtype_of(saved[source].dtype))
        wanted.append(Wanted(source, tensor, tuple(tensor.shape), (0,) * tensor.dim()))
    reshard.load(step, wanted)
    pieces.forget_unsaved(saved)
    job._tracked.load_small_objects(small.objects, taken_out)
    job._tracked.clear_gradients()
    return small


def _small_of(step: Step, rank: int, world_size: int) -> Small:
    """This rank's own small state; with another number of ranks, the nearest to it."""
    before = step.commit.world_size
    kept = rank % before if rank % before in step.manifests else min(step.manifests)
    try:
        small = decode(step.manifests[kept].small)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"the small state of rank {kept} cannot be read: {error}") from error
    if kept == rank and before == world_size:
        return small
    position = small.position
    if position.terms is not None:  # dealt: batches are counted for the whole job, and begin anywhere
        return small if kept == rank else msgspec.structs.replace(small, random=rng.capture())
    if rank == 0:
        print(
            f"rerail: saved by {_ranks(before)}, read by {world_size}: the tensors are exact, the place in the data is that "
            "of the same number of samples, random states start anew where a rank is new",
            file=sys.stderr,
        )
    moved = Position(
        position.epoch,
        position.index * before // world_size,
        position.epoch_random,
        None,
        position.samples * before // world_size,
    )
    random = small.random if rank < before else rng.capture()
    return msgspec.structs.replace(small, position=moved, random=random)


class Sources:
    """Under which of the saved names a tensor is to be found."""

    def __init__(self, saved: dict[str, Saved], rank: int) -> None:
        self._saved, self._rank = saved, rank
        self._copies: dict[str, list[str]] = {}
        for name in sorted(saved, key=lambda name: (len(name), name)):
            self._copies.setdefault(owner_and_name(name)[1], []).append(name)

    def of(self, name: str, *, mine_first: bool) -> str:
        """Its own name or the job's; else the lowest rank's copy, so that all ranks of a new layout take the same."""
        of_job = owner_and_name(name)[1]
        mine = [owned_name(self._rank, of_job)] if mine_first else []
        for candidate in (*mine, name, of_job, *self._copies.get(of_job, [])):
            if candidate in self._saved:
                return candidate
        raise CheckpointError(
            f"{of_job!r} is not in the checkpoint: the script builds another model than the one saved"
        )


def _references(state: Any) -> list[str]:
    """Names of the tensors that were taken out of nested plain data."""
    if isinstance(state, dict):
        if set(state) == {"__tensor__"}:
            return [state["__tensor__"]]
        return [name for value in state.values() for name in _references(value)]
    if isinstance(state, list):
        return [name for value in state for name in _references(value)]
    return []


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
