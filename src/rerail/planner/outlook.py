"""What a running job has to expect: turns the faults it has had into two rates that every rank can go on with by itself. Pure.

Made by `runtime.experience` for the plan of each generation; read by `session.snapshotting` and `session.checkpoints`, which plan
with it until the next fault. Without one the rate falls from minute to minute, as it would if it were estimated anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

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


def look_ahead(behind: Sequence[float], lost: Sequence[float], began: float, now: float, prior: float) -> Outlook:
    """From when such faults came, oldest first, and since when the job runs: all in seconds of one clock."""
    return Outlook(behind=_course(behind, began, now, prior), lost=_course(lost, began, now, prior))


def rate_of(times: Sequence[float], began: float, now: float, prior: float) -> Rate:
    """The rate of faults that came at these times."""
    marks = [min(began, *times, now), *times]
    gaps = [later - earlier for earlier, later in pairwise(marks)]
    return estimate(gaps, now - marks[-1], prior)


def _course(times: Sequence[float], began: float, now: float, prior: float) -> Course:
    rate = rate_of(times, began, now, prior)
    return Course(per_s=rate.per_s, weight=rate.weight)
