"""What a running job has to expect: turns the faults it has had into two rates that every rank can go on with by itself. Pure.

Made by `runtime.experience` for the plan of each generation; read by `session.snapshotting` and `session.checkpoints`, which plan
with it until the next fault. Without one the rate falls from minute to minute, as it would if it were estimated anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from rerail.planner.rates import DAY_S, Rate, estimate


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """Faults of one kind from here on."""

    per_s: float = 1 / DAY_S
    weight: float = 1.0
    """How many faults the rate stands on: the fewer, the sooner time without any lowers it."""

    def between_s(self, since_s: float = 0.0) -> float:
        """Mean seconds between two, as it looks when this long none has come."""
        return 1 / self.per_s + max(0.0, since_s) / self.weight


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """By what is left to go on from."""

    behind: Course = Course()
    """Faults after which ranks go back to a snapshot in memory."""
    lost: Course = Course()
    """Faults that lose the snapshots, too: only a checkpoint is left."""


LEAST_SHARE = 0.05
"""However little recoveries seem to cost: one that does not heal costs all."""
SURE = 0.2
"""Standard deviation of what a recovery that is not exact is expected to cost, as a share of going back."""


class Healed(msgspec.Struct, frozen=True, kw_only=True):
    """A fault after which nobody went back, though a shard was lost: all went on, and it cost a share of that."""

    at: float
    rho: float
    saved: bool = False
    """A checkpoint was all that was left."""


def healed(at: float, figures: Mapping[str, Any]) -> Healed | None:
    """From what was told when the loss was back: what was measured, as far as it is sure, and what was expected, as far as it is not."""
    behind = float(figures.get("behind", 0.0))
    if behind <= 0:
        return None
    prior = float(figures.get("expected", behind)) / behind
    lag, error = float(figures.get("lag", 0.0)), float(figures.get("lag_error", 0.0))
    weight = (behind * SURE / error) ** 2 if "lag" in figures and error > 0 else 0.0
    rho = (prior + weight * lag / behind) / (1 + weight)
    return Healed(at=at, rho=min(max(rho, 0.0), 1.0), saved=bool(figures.get("saved", False)))


def look_ahead(
    behind: Sequence[float],
    lost: Sequence[float],
    began: float,
    now: float,
    prior: float,
    others: Sequence[Healed] = (),
) -> Outlook:
    """From when such faults came, oldest first, and since when the job runs: all in seconds of one clock. `others` count by their share."""
    return Outlook(
        behind=_course(behind, [one for one in others if not one.saved], began, now, prior),
        lost=_course(lost, [one for one in others if one.saved], began, now, prior),
    )


def rate_of(times: Sequence[float], began: float, now: float, prior: float) -> Rate:
    """The rate of faults that came at these times."""
    marks = [min(began, *times, now), *times]
    gaps = [later - earlier for earlier, later in pairwise(marks)]
    return estimate(gaps, now - marks[-1], prior)


def _course(times: Sequence[float], others: Sequence[Healed], began: float, now: float, prior: float) -> Course:
    """sum(lambda_i rho_i): rho is 1 where work is computed again."""
    rate = rate_of(sorted([*times, *(one.at for one in others)]), began, now, prior)
    counted = len(times) + len(others)
    share = (len(times) + sum(one.rho for one in others)) / counted if counted else 1.0
    return Course(per_s=rate.per_s * max(share, LEAST_SHARE), weight=rate.weight)
