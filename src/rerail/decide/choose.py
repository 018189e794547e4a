"""Turns a Diagnosis and the Situation into a Decision: which rung, by which rule, and what the others would have cost.

Pure: no clock, no I/O. Called by `runtime.controller` and by the simulator.
"""

from __future__ import annotations

from rerail.config import EXIT_FAILED
from rerail.decide.rules import RULES, Rule, Situation
from rerail.flow import Candidate, Cost, Decision, Diagnosis, Rung, new_id

DEFAULT_COST = {
    Rung.RETRY_STEP: Cost(t1=0.05, t2=0.02),
    Rung.REPLACE_RANK: Cost(t1=0.3, t2=0.02, t3=0.05),
    Rung.RESTART_ALL: Cost(t0=5.0, t1=2.0, t2=0.1, t3=1.0),
    Rung.STOP: Cost(),
}
"""Expected before this job has had a recovery of that kind: orders of magnitude, measured on small models."""


def choose(diagnosis: Diagnosis, now: Situation, *, at: float) -> Decision:
    """The first rule that applies and whose rung is feasible."""
    candidates = {rung: _candidate(rung, diagnosis, now) for rung in Rung}
    rule = next(r for r in RULES if r.applies(diagnosis, now) and candidates[r.rung].feasible)
    rungs = list(Rung)
    later = rungs[rungs.index(rule.rung) + 1 :]
    return Decision(
        id=new_id("decision"),
        job=diagnosis.job,
        at=at,
        cause_id=diagnosis.id,
        rung=rule.rung,
        fallbacks=tuple(rung for rung in later if candidates[rung].feasible),
        rule=rule.id,
        why=_why(rule, candidates),
        ranks=_replaced(rule.rung, diagnosis),
        candidates=tuple(candidates.values()),
        budget_left=max(0, now.restarts_allowed - now.budget.restarts_used),
        exit_code=rule.exit_code if rule.rung is Rung.STOP else 0,
    )


def _replaced(rung: Rung, diagnosis: Diagnosis) -> tuple[int, ...]:
    if rung is not Rung.REPLACE_RANK:
        return ()
    return diagnosis.lost or diagnosis.ranks


def _why(rule: Rule, candidates: dict[Rung, Candidate]) -> str:
    if rule.id == "restart":
        blocked = [c for c in candidates.values() if c.rung in (Rung.RETRY_STEP, Rung.REPLACE_RANK) and not c.feasible]
        return blocked[-1].why if blocked else rule.why
    if rule.id == "budget-used-up":
        return candidates[Rung.RESTART_ALL].why
    return rule.why


def _candidate(rung: Rung, diagnosis: Diagnosis, now: Situation) -> Candidate:
    obstacle = now.tried.get(rung, "") or _obstacle(rung, diagnosis, now)
    return Candidate(
        rung=rung,
        feasible=not obstacle,
        why=obstacle or "feasible",
        expected=now.history.get(rung, DEFAULT_COST[rung]),
    )


def _obstacle(rung: Rung, diagnosis: Diagnosis, now: Situation) -> str:
    """Why this rung cannot be taken now, or nothing."""
    if rung is Rung.STOP:
        return ""
    if rung is Rung.RESTART_ALL:
        if now.budget.restarts_used < now.restarts_allowed:
            return ""
        return f"restart budget used up ({now.budget.restarts_used} of {now.restarts_allowed})"
    if not now.aware:
        return "the script does not call rerail.join(), so its ranks cannot be repaired in place"
    if now.exited:
        return f"{now.exited} ranks have ended already"
    if not now.survivors:
        return "no rank has survived"
    if not now.in_training:
        return "not every rank has completed a step yet"
    if rung is Rung.RETRY_STEP:
        return f"{_names(diagnosis.lost)} cannot go on" if diagnosis.lost else ""
    if not (diagnosis.lost or diagnosis.ranks):
        return "no rank is broken"
    return "" if now.nodes_up else "the node of a lost rank is not connected"


def _names(ranks: tuple[int, ...]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(rank) for rank in ranks)


def exit_code_of(decision: Decision) -> int:
    """What the job exits with when this decision ends it."""
    return decision.exit_code or EXIT_FAILED
