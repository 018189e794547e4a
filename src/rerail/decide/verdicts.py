"""When no repair is tried at all: a table from what is known to the reason to stop. Pure.

Read by `decide.choose` before it compares the rungs; the first that holds counts.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rerail.config import EXIT_DO_NOT_REQUEUE
from rerail.decide.ladder.strategy import in_place_obstacle
from rerail.decide.setbacks import REFUSED, is_setback
from rerail.decide.situation import Situation
from rerail.flow import Diagnosis, Rung

BAD_LUCK = 5
"""Different faults in a row may be this many times as many as the same one before the job counts as standing still."""


class Verdict(msgspec.Struct, frozen=True):
    """When `applies` holds, the job stops."""

    id: str
    applies: Callable[[Diagnosis, Situation], bool]
    why: Callable[[Situation], str]
    exit_code: int = EXIT_DO_NOT_REQUEUE


def _stands_still(diagnosis: Diagnosis, now: Situation) -> bool:
    if is_setback(diagnosis) or diagnosis.code == REFUSED:
        return False  # these have a count of their own, and there are only so many ways that can be refused
    if not now.aware:
        return now.budget.error_count >= now.no_progress_limit
    return now.budget.stuck >= now.no_progress_limit or now.budget.standing >= BAD_LUCK * now.no_progress_limit


def _nothing_before(diagnosis: Diagnosis, now: Situation) -> bool:
    """All ranks would start again from what is wrong."""
    cannot = Rung.ROLL_BACK in now.tried or bool(in_place_obstacle(now))
    return is_setback(diagnosis) and not diagnosis.lost and not now.kept_before and cannot


VERDICTS = (
    Verdict(
        "cannot-start",
        lambda d, now: now.programming and not now.in_training and not now.settled,
        lambda now: "the script fails before training begins, and would fail in the same way again",
    ),
    Verdict(
        "stays-bad",
        lambda d, now: is_setback(d) and bool(now.setbacks.hopeless(now.roll_back_limit)),
        lambda now: now.setbacks.hopeless(now.roll_back_limit),
    ),
    Verdict(
        "nothing-before",
        _nothing_before,
        lambda now: "neither a snapshot nor a checkpoint from before the fault is kept; job.checkpoints() keeps some",
    ),
    Verdict(
        "no-progress",
        _stands_still,
        lambda now: "the job has failed again and again without completing a new step",
    ),
)
