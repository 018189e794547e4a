"""How a lost shard could be put together that is not exact: turns what its process and the survivors hold into ways, cheapest first. Pure.

    replica      the parameters are on another rank as well, which is as new as the survivors are (ZeRO: only moments are lost)
    shadow       a copy of the parameters alone, a few steps old, in this rank's arena or on another node
    linear, ...  a predictor's guess, where the survivors' own past has shown that it pays
    kept         as they were in the snapshot or the checkpoint that all else comes from

What each costs in the end is known from trials (docs/benchmarks.md), as a share of the steps since that snapshot or checkpoint:
computing them again is 1. Called by `recover.rehabilitate`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from rerail.runtime.plans import KEPT, LINE, MARGIN, REPLICA, SHADOW, Stale
from rerail.runtime.wire import Parked

COSTS = {REPLICA: 0.03, SHADOW: 0.09, KEPT: 0.40}
"""At the end of a run, which is where they cost most."""


class Base(NamedTuple):
    """Where all of a lost shard can come from."""

    at: int
    saved: bool


class Guess(NamedTuple):
    """What the survivors expect of a predictor."""

    name: str
    cost: float
    """Against what is kept: 1 is no better."""
    needs: int
    """Checkpoints without which it cannot say anything."""
    teacher: int


def guesses(survivors: Mapping[int, Parked]) -> list[Guess]:
    """Predictors that would pay, by most of those who have tried them; cheapest first. A newcomer has not tried any."""
    found = []
    for name in {name for p in survivors.values() for name in p.guesses}:
        tried = {rank: p.guesses[name] for rank, p in survivors.items() if name in p.guesses}
        cost = median(cost for cost, _ in tried.values())
        if cost < MARGIN:
            found.append(Guess(name, cost, max(needs for _, needs in tried.values()), min(tried)))
    return sorted(found, key=lambda guess: (guess.cost, guess.name))


def ways(p: Parked, survivors: Mapping[int, Parked], version: int, base: Base) -> list[Stale]:
    """All there are to bring one lost rank to a version."""
    here = Stale(at=base.at, saved=base.saved, expected=COSTS[KEPT])
    found = [here]
    givers = [rank for rank in p.weights if rank in survivors and survivors[rank].version == version]
    if givers:
        found.append(_by(here, REPLICA, COSTS[REPLICA], rank=min(givers)))
    shadow = max((one for one in p.shadows if base.at < one <= version), default=-1)
    if shadow >= 0:
        on = _before(p.shadows, shadow, version)
        found.append(_by(here, SHADOW, COSTS[SHADOW], version=shadow, before=on))
    if base.saved:
        known = sum(one <= base.at for one in p.saved)
        found += [
            _by(here, one.name, COSTS[KEPT] * one.cost, rank=one.teacher)
            for one in guesses(survivors)
            if one.needs <= known
        ]
    else:
        cost = median(one.straight for one in survivors.values())
        before = _before(p.snapshots, base.at, version)
        if cost < MARGIN and before >= 0:
            found.append(_by(here, LINE, COSTS[KEPT] * cost, before=before))
    return sorted(found, key=lambda one: one.expected)


def best(found: Sequence[Stale], refused: Collection[str]) -> Stale | None:
    """The cheapest that has not been tried in vain."""
    return next((one for one in found if one.way not in refused), None)


def _by(here: Stale, way: str, expected: float, *, version: int = -1, before: int = -1, rank: int = -1) -> Stale:
    return Stale(
        at=here.at, saved=here.saved, way=way, version=version, before=before, rank=rank, expected=round(expected, 3)
    )


def _before(kept: Sequence[int], at: int, version: int) -> int:
    """Where a straight line through `at` to `version` begins; -1: further than it was seen to go, noise is all there is."""
    before = max((one for one in kept if one < at), default=-1)
    return before if before >= 0 and 0 < version - at <= at - before else -1
