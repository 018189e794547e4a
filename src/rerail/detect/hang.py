"""Turns one look at a rank's step clock and process into the verdict that it hangs, or into nothing.

The threshold is learnt from the rank's own steps: max(hang_floor_s, hang_factor x median step). What counts:

    stopped     state T or t (SIGSTOP, a debugger): half the limit, at least 1 s; in every phase, joined or not
    frozen      the beat thread is silent and nothing runs: the limit; burning CPU: the busy limit
    stuck       the beat is fresh, but the rank stays in its own code (no collective under way): likewise
    waiting     in a collective: never a verdict, since the culprit is somebody else. When all ranks of the node wait
                beyond the limit, `all_waiting` says so, and the controller compares nodes

Not judged but for `stopped`: BUILDING (imports, downloads and compilation take what they take), OUTSIDE (evaluation and
checkpoints have no usual length), PARKED (waits for the controller by design), DONE. Before three steps are known the
busy limit is used for all: a first step compiles, allocates and reads data.

Pure: no clock, no I/O. Called by `runtime.watch` for each local rank every `beat_s`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from rerail.config import Settings
from rerail.runtime.clock import Phase, Reading

SOURCE = "step.hang"
STALLED_SOURCE = "collective.stalled"
MIN_STEPS = 3
"""Steps that must be known before a threshold counts as learnt."""
BUSY_SHARE = 0.1
"""Share of the stall spent on a CPU from which a rank counts as busy, its beat thread not being enough."""
_JUDGED = (Phase.COMPUTE, Phase.COMM, Phase.UPDATE, Phase.RUN_OUT)
_OWN_CODE = (Phase.COMPUTE, Phase.UPDATE, Phase.RUN_OUT)


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the kernel says of a rank's process."""

    state: str
    """State letter of /proc/<pid>/stat."""
    joined: bool
    """Whether the script has called rerail.join(): before, nobody beats its clock."""
    observed_s: float
    """How long this rank has been watched without a gap; no stall is older than that."""
    stopped_s: float = 0.0
    """How long it has been seen in state T without a break."""
    stall_s: float = 0.0
    """How long `cpu_s` has been counted; 0 before that."""
    cpu_s: float = 0.0
    """CPU seconds burnt by the process and all below it in that time."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """This rank hangs."""

    kind: str
    """`stopped`, `frozen` or `stuck`."""
    stalled_s: float
    state: str
    evidence: str


def payload_of(verdict: Verdict, stack: str = "") -> dict[str, str | int | float | bool]:
    """Of the signal that tells of it; `stack` is where the process stands, from `runtime.flight`."""
    stalled, evidence = round(verdict.stalled_s, 3), verdict.evidence + (f"\n{stack}" if stack else "")
    return {"evidence": evidence, "stalled_s": stalled, "state": verdict.state, "kind": verdict.kind}


def stalled_payload(
    node: str, waited: float, ranks: dict[int, Reading], told: str = ""
) -> dict[str, str | int | float | bool]:
    """Of the signal that all ranks of a node wait: which has begun how many collectives, and what each waits in;
    `told` is what their flight recorders say."""
    waiting: dict[str, list[int]] = {}
    for rank, reading in ranks.items():
        waiting.setdefault(reading.collective or "a collective", []).append(rank)
    each = "; ".join(
        f"{name} on rank{'s' if len(some) > 1 else ''} {', '.join(map(str, some))}" for name, some in waiting.items()
    )
    return {
        "evidence": f"all {len(ranks)} ranks of {node} have waited for {waited:.1f} s: {each}"
        + (f"\n{told}" if told else ""),
        "stalled_s": round(waited, 3),
        "collectives": ",".join(f"{rank}:{reading.collectives}" for rank, reading in ranks.items()),
    }


def limit(durations: Sequence[float], settings: Settings) -> float:
    """Seconds without progress after which an idle rank hangs."""
    if len(durations) < MIN_STEPS:
        return max(settings.hang_floor_s, settings.busy_floor_s)
    return max(settings.hang_floor_s, settings.hang_factor * statistics.median(durations))


def busy_limit(durations: Sequence[float], settings: Settings) -> float:
    """The same for a rank that burns CPU: it may be compiling."""
    usual = statistics.median(durations) if durations else 0.0
    return max(settings.busy_floor_s, settings.busy_factor * usual, limit(durations, settings))


def stopped_limit(durations: Sequence[float], settings: Settings) -> float:
    """The same for a stopped process. It cannot be busy, so half the time is enough; a debugger's glance is shorter."""
    usual = statistics.median(durations) if durations else 0.0
    full = max(settings.hang_floor_s, settings.hang_factor * usual)
    return min(full, max(1.0, full / 2))


def stall_age(reading: Reading, facts: Facts) -> float:
    """For how long the rank has shown no progress of its own; 0 where its phase is not judged."""
    if not facts.joined or reading.phase not in _JUDGED:
        return 0.0
    age = reading.beat_age
    if reading.phase in _OWN_CODE and reading.pending_age == 0.0:
        age = max(age, reading.phase_age)
    return min(age, facts.observed_s)


def judge(reading: Reading, facts: Facts, settings: Settings) -> Verdict | None:
    """The verdict on one rank, or None while there is no reason to worry."""
    if facts.state in ("T", "t"):
        return _judge_stopped(reading, facts, settings)
    age = stall_age(reading, facts)
    idle_limit = limit(reading.durations, settings)
    if age <= idle_limit or facts.stall_s <= 0.0:
        return None
    busy = facts.state == "R" or facts.cpu_s > BUSY_SHARE * facts.stall_s
    allowed = busy_limit(reading.durations, settings) if busy else idle_limit
    if age <= allowed:
        return None
    at = f"at step {reading.step + 1}" if reading.step >= 0 else "before its first step"
    how = f"{facts.cpu_s:.1f} s of CPU in {facts.stall_s:.1f} s, limit {allowed:.1f} s"
    if min(reading.beat_age, facts.observed_s) > idle_limit:
        return Verdict(
            kind="frozen",
            stalled_s=age,
            state=facts.state,
            evidence=f"no sign of life for {age:.1f} s {at}, process state {facts.state} ({how})",
        )
    return Verdict(
        kind="stuck",
        stalled_s=age,
        state=facts.state,
        evidence=f"stuck in its own code {at} for {age:.1f} s, phase {reading.phase.name.lower()} ({how})",
    )


def _judge_stopped(reading: Reading, facts: Facts, settings: Settings) -> Verdict | None:
    if facts.joined:
        age, allowed = min(reading.beat_age, facts.observed_s), stopped_limit(reading.durations, settings)
    else:
        age, allowed = facts.stopped_s, settings.hang_floor_s
    if age <= allowed:
        return None
    how = "SIGSTOP" if facts.state == "T" else "a debugger"
    return Verdict(
        kind="stopped",
        stalled_s=age,
        state=facts.state,
        evidence=f"process is stopped (state {facts.state}, by {how}) for {age:.1f} s",
    )


def all_waiting(readings: Sequence[Reading], observed_s: float, settings: Settings) -> float:
    """Seconds for which all ranks of the node have waited in a collective beyond their limit; 0 when they have not."""
    shortest = float("inf")
    for reading in readings:
        waited = reading.pending_age
        if reading.phase is Phase.COMM:
            waited = max(waited, reading.phase_age)
        waited = min(waited, observed_s)
        if reading.phase not in _JUDGED or waited <= limit(reading.durations, settings):
            return 0.0
        shortest = min(shortest, waited)
    return shortest if readings else 0.0
