"""The rules that pick a rung of the ladder: a table from what is known to what is done. Pure.

Read by `decide.choose`. The first rule whose condition holds and whose rung is feasible wins, so the order is the policy.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rerail.config import EXIT_DO_NOT_REQUEUE, EXIT_FAILED
from rerail.decide.budget import Budget
from rerail.flow import Cost, Diagnosis, Rung


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a decision may depend on besides the diagnosis."""

    aware: bool
    """Every rank has called rerail.join() and its groups can be rebuilt."""
    in_training: bool
    """Every survivor has completed a step, so it can be interrupted and has something to keep."""
    settled: bool = False
    """The script has run for a while; an error now is not a failure to start."""
    programming: bool = False
    """The fault is of the kind that fails in the same way each time: a wrong name, a missing module."""
    survivors: int
    nodes_up: bool = True
    """The nodes of all lost ranks are connected."""
    exited: int = 0
    """Ranks that have ended with exit code 0."""
    tried: dict[Rung, str] = {}
    """Rungs that have failed in this incident, with the reason."""
    budget: Budget = Budget()
    restarts_allowed: int = 3
    no_progress_limit: int = 3
    history: dict[Rung, Cost] = {}
    """Mean cost of each rung in this job so far."""


class Rule(msgspec.Struct, frozen=True):
    """When `applies` holds, take `rung`."""

    id: str
    rung: Rung
    applies: Callable[[Diagnosis, Situation], bool]
    why: str
    exit_code: int = 0


BAD_LUCK = 5
"""Different faults in a row may be this many times as many as the same one before the job counts as standing still."""


def _stands_still(_: Diagnosis, now: Situation) -> bool:
    if not now.aware:
        return now.budget.error_count >= now.no_progress_limit
    return now.budget.stuck >= now.no_progress_limit or now.budget.standing >= BAD_LUCK * now.no_progress_limit


REPLICAS = ("training.replicas_tie", "training.replica_differs")
UNBROKEN = ("collective-alone", "takeover")
"""Diagnoses in which no rank has a fault of its own."""


def _raised(diagnosis: Diagnosis, _: Situation) -> bool:
    return not diagnosis.lost and diagnosis.rule not in UNBROKEN


RULES = (
    Rule(
        "cannot-start",
        Rung.STOP,
        lambda d, now: now.programming and not now.in_training and not now.settled,
        "the script fails before training begins, and would fail in the same way again",
        EXIT_DO_NOT_REQUEUE,
    ),
    Rule(
        "no-progress",
        Rung.STOP,
        _stands_still,
        "the job has failed again and again without completing a new step",
        EXIT_DO_NOT_REQUEUE,
    ),
    Rule(
        "replicas-differ",
        Rung.RETRY_STEP,
        lambda d, now: d.code in REPLICAS and not d.lost,
        "all go back to where the replicas agreed and compute the same again: whoever was wrong shows",
    ),
    Rule(
        "raised-once",
        Rung.RETRY_STEP,
        lambda d, now: _raised(d, now) and now.budget.raised_count <= 1,
        "first time at this step, and every process is alive",
    ),
    Rule(
        "raised-again",
        Rung.REPLACE_RANK,
        _raised,
        "the step raised again when it was retried: the process itself may be broken",
    ),
    Rule(
        "rank-lost",
        Rung.REPLACE_RANK,
        lambda d, now: bool(d.lost),
        "the other ranks are alive and keep their state",
    ),
    Rule(
        "all-alive",
        Rung.RETRY_STEP,
        lambda d, now: d.rule in UNBROKEN,
        "every rank is alive: new connections are all it needs",
    ),
    Rule("restart", Rung.RESTART_ALL, lambda d, now: True, "no finer repair is possible"),
    Rule("budget-used-up", Rung.STOP, lambda d, now: True, "restart budget used up", EXIT_FAILED),
)
