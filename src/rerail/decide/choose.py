"""Turns a Diagnosis and the Situation into a Decision: which rung, by which rule, and what the others would have cost.

Of the rungs that answer the fault, are allowed and have nothing in their way, the one that costs least until it has
succeeded wins; the others are what is fallen back to. Pure: no clock, no I/O. Called by `runtime.controller` and by the
simulator.
"""

from __future__ import annotations

import msgspec

from rerail.config import EXIT_FAILED
from rerail.decide.ladder import LADDER, Strategy
from rerail.decide.ladder.strategy import Reason
from rerail.decide.setbacks import is_setback
from rerail.decide.situation import Situation, Tally
from rerail.decide.verdicts import VERDICTS, Verdict
from rerail.flow import Candidate, Cost, Decision, Diagnosis, Rung, new_id

UNSUITED = "it does not help against this"
MOVES = (Rung.SWAP_DEVICE, Rung.SWAP_NODE, Rung.HOT_SWITCH)
UNFIT_ODDS = 0.02
"""Of a rung that leaves the fault as it is: taken only where everything else is dearer still."""


def choose(diagnosis: Diagnosis, now: Situation, *, at: float) -> Decision:
    """The cheapest rung that can be taken; to stop is the last of them, and can always be."""
    candidates = _candidates(diagnosis, now)
    possible = sorted(
        (c for c in candidates.values() if c.feasible), key=lambda c: (_rank(c, candidates, now), _price(c))
    )
    verdict = next((one for one in VERDICTS if one.applies(diagnosis, now)), None)
    rung = Rung.STOP if verdict is not None else possible[0].rung
    strategy = next(one for one in LADDER if one.rung is rung)
    reason = _reason(strategy, verdict, diagnosis, now, candidates)
    exit_code = verdict.exit_code if verdict is not None else EXIT_FAILED
    return Decision(
        id=new_id("decision"),
        job=diagnosis.job,
        at=at,
        cause_id=diagnosis.id,
        rung=rung,
        fallbacks=tuple(c.rung for c in possible if c.rung is not rung) if verdict is None else (),
        rule=reason.rule,
        why=reason.why,
        ranks=strategy.replaces(diagnosis, now),
        moves=strategy.moves(diagnosis, now),
        candidates=tuple(candidates.values()),
        skips=now.setbacks.added if is_setback(diagnosis) and rung is not Rung.STOP else {},
        budget_left=max(0, now.restarts_allowed - now.budget.restarts_used),
        exit_code=exit_code if rung is Rung.STOP else 0,
    )


def _reason(
    strategy: Strategy,
    verdict: Verdict | None,
    diagnosis: Diagnosis,
    now: Situation,
    candidates: dict[Rung, Candidate],
) -> Reason:
    if verdict is not None:
        return Reason(verdict.id, verdict.why(now))
    if strategy.rung is Rung.STOP:
        rule = "budget-used-up" if now.budget.restarts_used >= now.restarts_allowed else "nothing-left"
        return Reason(rule, candidates[Rung.RESTART_ALL].why)
    reason = strategy.answers(diagnosis, now)
    if strategy.rung is Rung.RESTART_ALL:
        wanted = (Rung.ROLL_BACK,) if is_setback(diagnosis) else (Rung.RETRY_STEP, Rung.REPLACE_RANK)
        finer = [candidates[one] for one in wanted]
        blocked = [c.why for c in finer if not c.feasible and c.why != UNSUITED]
        if blocked:
            return Reason("restart", blocked[-1])
    assert reason is not None, "what is feasible answers the fault"
    return reason


def _rank(candidate: Candidate, candidates: dict[Rung, Candidate], now: Situation) -> int:
    """Where the policy wants a device recovered before its work is moved away: moves come behind the reset."""
    rungs = list(now.rungs)
    if candidate.rung not in MOVES or candidate.rung not in rungs or not candidates[Rung.RESET_DEVICE].feasible:
        return 0
    return int(Rung.RESET_DEVICE in rungs and rungs.index(Rung.RESET_DEVICE) < rungs.index(candidate.rung))


def _price(candidate: Candidate) -> float:
    return float("inf") if candidate.rung is Rung.STOP else candidate.price


def _candidates(diagnosis: Diagnosis, now: Situation) -> dict[Rung, Candidate]:
    """All rungs with their prices. As long as it was never taken, a restart of all is not thought to be cheaper than less."""
    found: dict[Rung, Candidate] = {}
    floor = 0.0
    for strategy in LADDER:
        obstacle = _obstacle(strategy, diagnosis, now)
        seen, usual = now.history.get(strategy.rung), strategy.usual
        lift = max(0.0, floor - usual.total) if strategy.rung is Rung.RESTART_ALL else 0.0
        found[strategy.rung] = Candidate(
            rung=strategy.rung,
            feasible=not obstacle,
            why=obstacle or "feasible",
            expected=_sum(seen or msgspec.structs.replace(usual, t1=usual.t1 + lift), strategy.besides(diagnosis, now)),
            odds=now.tallies.get(strategy.rung, Tally()).odds * _fitness(strategy.rung, now),
        )
        floor = max(floor, seen.total if seen else usual.total if not obstacle else 0.0)
    return found


def _fitness(rung: Rung, now: Situation) -> float:
    """A restart of all may use spares; then it is another matter."""
    return UNFIT_ODDS if rung in now.unfit and not (rung is Rung.RESTART_ALL and now.free) else 1.0


def _sum(one: Cost, other: Cost) -> Cost:
    return Cost(**{name: getattr(one, name) + getattr(other, name) for name in Cost.__struct_fields__})


def _obstacle(strategy: Strategy, diagnosis: Diagnosis, now: Situation) -> str:
    rung = strategy.rung
    if rung in now.tried:
        return now.tried[rung]
    if strategy.answers(diagnosis, now) is None:
        # what stands in its way says more than that it would not have helped
        return strategy.obstacle(diagnosis, now) or UNSUITED
    if now.rungs and rung not in now.rungs and rung is not Rung.STOP:
        return "the policy does not allow it for this fault"
    gone = strategy.replaces(diagnosis, now)
    if now.places and len(gone) >= len(now.places) and set(now.places) <= set(gone):
        return "no rank would be left that keeps the state"
    return strategy.obstacle(diagnosis, now)


def exit_code_of(decision: Decision) -> int:
    """What the job exits with when this decision ends it."""
    return decision.exit_code or EXIT_FAILED
