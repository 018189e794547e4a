"""Saves that other ranks wait for in vain: tells them so, or makes good what a lost process owed them.

A rank that leaves a save out says it at once. A newcomer looks at what its predecessor left behind: what lies whole in
memory is saved after all, the rest is given up. A new start of the job gives up the unfinished saves of the one before,
whose persisters would keep slots of the arenas until their deadline. Called by `session.checkpoints`, in the background.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from rerail.checkpoint import catalog, names
from rerail.checkpoint.arena import Arena
from rerail.checkpoint.declining import decline
from rerail.checkpoint.names import StepId
from rerail.checkpoint.saving import GONE_S, Order
from rerail.checkpoint.tiers import Tier
from rerail.checkpoint.writer import Writer
from rerail.errors import CheckpointError, StateError
from rerail.session.reaching import answering

_order = msgspec.json.Decoder(Order)

WRITING_S = 600.0
"""Seconds that a save under way may take before it is looked for no more."""


def in_background(task: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=task, name="rerail-owed", daemon=True)
    thread.start()
    return thread


class Newcomer(NamedTuple):
    """A process that took the place of another, at the step behind which it did."""

    rank: int
    coordinator: int
    """The lowest rank there is."""
    now: StepId
    """The version it is at, were it to save it."""
    begun: int
    """The version whose save it has begun itself."""

    def owes(self, step: StepId) -> bool:
        """Whether a save of this job may be one of its predecessor's."""
        epoch, version, generation = self.now
        before = step.step <= version and step.step != self.begun
        return step.epoch == epoch and (step.generation < generation or (step.generation == generation and before))


def settle(tiers: Sequence[Tier], who: Newcomer, arena: Arena | None, save: Callable[[Order], None]) -> None:
    """A newcomer's: saves of this job that lack its predecessor's part. The coordinator's part is also to commit."""
    tiers = answering(tiers, write=True)

    def open_to(rank: int | None) -> set[StepId]:
        return {step for step in _unfinished(tiers, rank) if who.owes(step)}

    with contextlib.suppress(OSError, CheckpointError):
        lacking = open_to(who.rank)
        uncommitted = open_to(None) - lacking if who.rank == who.coordinator else set[StepId]()
        for step in sorted(lacking | uncommitted):
            order = _kept(arena, step)
            if order is not None:
                save(order)
                uncommitted.discard(step)
            elif step in lacking:
                decline(tiers, step, who.rank, "it was lost before its part was copied", who.coordinator)
        _give_up(tiers, uncommitted, who.rank, "it was lost before it could commit", lambda: open_to(None))


def give_up_for(tiers: Sequence[Tier], epoch: int, version: int, ranks: Sequence[int], coordinator: int) -> None:
    """For ranks that are gone and have no successor: saves up to this version that lack their part, or their word."""

    def open_to(rank: int | None) -> set[StepId]:
        return {step for step in _unfinished(tiers, rank) if step.epoch == epoch and step.step <= version}

    why = "it was lost, and the job goes on without it"
    with contextlib.suppress(OSError, CheckpointError):
        for rank in ranks:
            for step in sorted(open_to(rank)):
                decline(tiers, step, rank, why, coordinator)
        if coordinator in ranks:
            _give_up(tiers, open_to(None), coordinator, why, lambda: open_to(None))


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


def _give_up(
    tiers: Sequence[Tier], steps: set[StepId], coordinator: int, why: str, still_open: Callable[[], set[StepId]]
) -> None:
    """Saves whose coordinator is lost behind its own part; not at once, since its persister may be alive elsewhere."""
    if steps:
        time.sleep(GONE_S)
        for step in sorted(steps & still_open()):
            decline(tiers, step, coordinator, why, coordinator)


def _unfinished(tiers: Sequence[Tier], rank: int | None) -> set[StepId]:
    """Saves neither committed nor given up, to which `rank` has not given its part."""
    done = {names.COMMIT, names.ABORT, names.COPYING, names.ELSEWHERE}
    if rank is not None:
        done |= {names.manifest_name(rank), names.failure_name(rank)}
    found, committed = set[StepId](), set[StepId]()
    for tier in tiers:
        for name in tier.names():
            step = names.step_of(name)
            if step is not None:
                there = set(tier.names(name))
                if not done & there:
                    found.add(step)
                if names.COMMIT in there:
                    committed.add(step)
    return found - committed


def _kept(arena: Arena | None, step: StepId) -> Order | None:
    """The order by which a version in memory is to be saved, if it is the one the others wait for."""
    try:
        order = _order.decode(arena.meta(step.step).order) if arena is not None else None
    except (StateError, msgspec.DecodeError):
        return None
    return order if order is not None and order.id == step else None
