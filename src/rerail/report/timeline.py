"""Turns the marks of a recovery into its Cost: where each second of an interruption went. Pure.

Called by `runtime.controller` when an incident is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rerail.flow import Cost, Phase
from rerail.runtime.wire import Formed, Parked, Resumed

STAGES = ("reschedule", "form", "replay")
"""Phases that follow each other and make up the whole interruption; others tell what ranks did within them, or before a hot switch."""


@dataclass(frozen=True)
class Timeline:
    """What is known of one interruption. Times are monotonic seconds; 0 where a stage was not reached."""

    opened: float
    """When the first signal arrived."""
    detect_s: float = 0.0
    parked_at: float = 0.0
    formed_at: float = 0.0
    ended: float = 0.0
    fault_version: int = -1
    """The highest version completed when the fault was seen."""
    resumed_version: int = -1
    parked: Mapping[int, Parked] = field(default_factory=dict)
    formed: Mapping[int, Formed] = field(default_factory=dict)
    resumed: Mapping[int, Resumed] = field(default_factory=dict)


def lost_steps(line: Timeline) -> int:
    """Completed steps that are computed again. The interrupted one is not among them: it was never completed."""
    if line.resumed_version < 0:
        return 0
    return max(0, line.fault_version - line.resumed_version)


def measure(line: Timeline) -> Cost:
    """Seconds by T0..T4, as told by the slowest rank of each stage."""
    usual = max((r.usual_step_s for r in line.resumed.values()), default=0.0)
    until = line.parked_at or line.ended or line.opened
    extra = (r.step_s - r.usual_step_s for r in line.resumed.values() if r.usual_step_s > 0)
    # The interrupted step counts as one whole usual step: how far it had come nobody measured, and it is run again whole.
    replayed = lost_steps(line) + (1 if line.resumed else 0)
    return Cost(
        detect=line.detect_s,
        t0=usual * replayed + _again_s(line),
        t1=max(0.0, until - line.opened),
        t2=max((f.phases.get("communication", 0.0) for f in line.formed.values()), default=0.0),
        t3=max((f.phases.get("load", 0.0) for f in line.formed.values()), default=0.0),
        t4=max(0.0, max(extra, default=0.0)),
    )


def phases(line: Timeline) -> tuple[Phase, ...]:
    """The stages the controller saw, in seconds since the first signal."""
    found: list[Phase] = []
    start = 0.0
    # ranks of a script that knows nothing of rerail do not tell when they go on: then there is no end to speak of
    ended = line.ended if line.formed_at else 0.0
    formed_at = line.formed_at - _again_s(line) if line.formed_at else 0.0
    for name, at in zip(STAGES, (line.parked_at, formed_at, ended), strict=True):
        if at:
            end = max(start, at - line.opened)
            found.append(Phase(name=name, start=start, end=end))
            start = end
    return (*found, *_within_reschedule(line))


def _again_s(line: Timeline) -> float:
    """Seconds in which the others waited for those who did their steps again."""
    return max((formed.phases.get("again", 0.0) for formed in line.formed.values()), default=0.0)


def _within_reschedule(line: Timeline) -> Iterator[Phase]:
    """What the ranks themselves say of the time until they were parked: running out, building, rehearsing."""
    for rank, parked in sorted(line.parked.items()):
        end = 0.0
        for name, seconds in parked.phases.items():
            yield Phase(name=f"rank {rank}: {name.replace('_', ' ')}", start=end, end=end + seconds)
            end += seconds
