"""Saves that other ranks wait for in vain: tells them so, or makes good what a lost process owed them.

A rank that leaves a save out says it at once. A newcomer looks at what its predecessor left behind: what lies whole in
memory is saved after all, the rest is given up. A new start of the job gives up the unfinished saves of the one before,
whose persisters would keep slots of the arenas until their deadline. Called by `session.checkpoints`, in the background.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import msgspec

from rerail.checkpoint import catalog, names
from rerail.checkpoint.arena import Arena
from rerail.checkpoint.declining import decline
from rerail.checkpoint.names import StepId
from rerail.checkpoint.saving import Order
from rerail.checkpoint.tiers import Tier
from rerail.checkpoint.writer import Writer
from rerail.errors import CheckpointError, StateError
from rerail.session.reaching import answering

WRITING_S = 600.0
"""Seconds that a save under way may take before it is looked for no more."""


def in_background(task: Callable[[], None]) -> None:
    threading.Thread(target=task, name="rerail-owed", daemon=True).start()


def settle(tiers: Sequence[Tier], mine: StepId, rank: int, arena: Arena | None, save: Callable[[Order], None]) -> None:
    """A newcomer's: saves of this job that lack this rank's part, but for `mine`, which this process has begun."""
    tiers = answering(tiers, write=True)
    with contextlib.suppress(OSError, CheckpointError):
        for step in _unfinished(tiers, rank):
            if step.epoch != mine.epoch or step == mine:
                continue
            order = _kept(arena, step)
            if order is not None:
                save(order)
            else:
                decline(tiers, step, rank, "it was lost before its part was copied")


def give_up_for(tiers: Sequence[Tier], epoch: int, version: int, ranks: Sequence[int], coordinator: int) -> None:
    """For ranks that are gone and have no successor: saves up to this version that lack their part."""
    with contextlib.suppress(OSError, CheckpointError):
        for rank in ranks:
            for step in _unfinished(tiers, rank):
                if step.epoch == epoch and step.step <= version:
                    decline(tiers, step, rank, "it was lost, and the job goes on without it", coordinator)


def give_up_older(tiers: Sequence[Tier], epoch: int) -> None:
    """Rank 0's, at a new start: what earlier epochs have not finished they never will."""
    tiers = answering(tiers, write=True)
    with contextlib.suppress(OSError, CheckpointError):
        for step in _unfinished(tiers, None):
            if step.epoch < epoch:
                decline(tiers, step, 0, f"the job was started again (epoch {epoch})")


def distrust_later(tiers: Sequence[Tier], saves: tuple[int, int, int], trusted: int, writer: Writer | None) -> None:
    """Rank 0's, when the training has gone wrong: saves of its epoch beyond `trusted`, up to the generation it is in."""
    epoch, _, generation = saves
    for last in (False, True):
        with contextlib.suppress(OSError, CheckpointError):
            for step in {step for tier in tiers for name in tier.names() if (step := names.step_of(name)) is not None}:
                if step.epoch == epoch and step.step > trusted and step.generation <= generation:
                    catalog.distrust(tiers, step, f"the training had gone wrong behind step {trusted}")
        if writer is not None and not last:
            writer.wait(WRITING_S)  # what is being written shows only then


def _unfinished(tiers: Sequence[Tier], rank: int | None) -> Iterator[StepId]:
    """Saves neither committed nor given up, to which `rank` has not given its part."""
    done = {names.COMMIT, names.ABORT, names.COPYING, names.ELSEWHERE}
    if rank is not None:
        done |= {names.manifest_name(rank), names.failure_name(rank)}
    for tier in tiers:
        for name in tier.names():
            step = names.step_of(name)
            if step is not None and not done & set(tier.names(name)):
                yield step


def _kept(arena: Arena | None, step: StepId) -> Order | None:
    """The order by which a version in memory is to be saved, if it is the one the others wait for."""
    try:
        order = msgspec.json.decode(arena.meta(step.step).order, type=Order) if arena is not None else None
    except (StateError, msgspec.DecodeError):
        return None
    return order if order is not None and order.id == step else None
