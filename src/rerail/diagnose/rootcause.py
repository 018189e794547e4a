"""Turns the events of one incident into a Diagnosis: which of them is the root cause, which are its echoes.

Pure: no clock, no I/O. Called by `runtime.controller` whenever an incident has new events, and by the simulator.

The root is the earliest cause, not the first line that arrived: when a rank dies, its peers may report failed
collectives before the agent has collected its exit status. A failed collective therefore never is a root while
something else can be; the caller waits a short window for that something before it asks again with `waited=True`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rerail.flow import Diagnosis, Event, Role, new_id

EVIDENCE_LINES, FRAMES = 6, 8
EVIDENCE_WIDTH = 400


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the fleet knows beyond the events."""

    gone: frozenset[int] = frozenset()
    """Ranks whose process has ended or must be ended (hung)."""


def diagnose(events: Sequence[Event], facts: Facts, *, at: float, waited: bool) -> Diagnosis | None:
    """The root cause of these events, or None while only echoes have been seen and a root may still come."""
    roots = [event for event in events if event.role is Role.ROOT]
    takeover = next((event for event in events if event.code == "controller.lost"), None)
    if not roots and takeover is None and not waited:
        return None
    if roots:
        root, rule = _first_cause(roots)
    elif takeover is not None:
        root, rule = takeover, "takeover"
    else:
        root, rule = _among_echoes(events)
    broken = _broken(root, roots)
    return Diagnosis(
        id=new_id("diagnosis"),
        job=root.job,
        at=at,
        cause_id=root.id,
        code=root.code,
        root=root.id,
        node=root.node,
        ranks=tuple(sorted({*broken, *facts.gone})),
        lost=tuple(sorted(facts.gone)),
        step=root.step if root.trusted >= 0 else max(event.step for event in events),
        echoes=tuple(event.id for event in events if event.id != root.id),
        transient=root.transient,
        confidence="low" if rule in ("collective-alone", "fewest-collectives") else "high",
        rule=rule,
        summary=_summary(root, events, rule),
        evidence=_evidence(root),
        trusted=min((event.trusted for event in events if event.trusted >= 0), default=-1),
    )


def because_of(diagnosis: Diagnosis, cause: Event) -> Diagnosis:
    """The same incident, whose cause has come to light: the kernel's word on a killed process, a device's on its loss."""
    return msgspec.structs.replace(
        diagnosis,
        code=cause.code,
        root=cause.id,
        cause_id=cause.id,
        echoes=(diagnosis.root, *diagnosis.echoes),
        transient=cause.transient,
        rule="machine",
        summary=f"{diagnosis.summary}: {cause.message}",
        evidence=_evidence(cause),
    )


def _among_echoes(events: Sequence[Event]) -> tuple[Event, str]:
    """Nobody died, hung or raised: the rank that the others have overtaken, or else the first to complain."""
    late = [event for event in events if event.code == "collective.stalled" and event.rank >= 0]
    if late:
        return late[-1], "fewest-collectives"
    return min(events, key=lambda event: (event.first_seen, event.rank)), "collective-alone"


def _first_cause(roots: Sequence[Event]) -> tuple[Event, str]:
    """A lost node explains everything on it; the same error on several ranks is one error; else the earliest."""
    nodes = [event for event in roots if event.code == "node.lost"]
    if nodes:
        return min(nodes, key=lambda event: event.first_seen), "node-lost"
    first = min(roots, key=lambda event: event.first_seen)
    same = [event for event in roots if (event.code, _gist(event)) == (first.code, _gist(first))]
    if len(same) > 1:
        return min(same, key=lambda event: (event.first_seen, event.rank)), "same-error-everywhere"
    return first, "earliest-root"


def _broken(root: Event, roots: Sequence[Event]) -> set[int]:
    """Ranks with a fault of their own: the root's, and those of other roots that are not merely the same error."""
    others = {event.rank for event in roots if (event.code, _gist(event)) != (root.code, _gist(root))}
    return {rank for rank in {root.rank, *others} if rank >= 0}


def _gist(event: Event) -> str:
    """The message without its rank, so that the same error on two ranks compares equal."""
    return event.message.replace(f"rank {event.rank}", "rank")


def _summary(root: Event, events: Sequence[Event], rule: str) -> str:
    if rule == "collective-alone":
        return f"{root.message}; no rank died, hung or raised"
    if rule == "fewest-collectives":
        return f"all ranks wait in a collective, and rank {root.rank} is behind the others"
    text = root.message
    if rule == "same-error-everywhere":
        ranks = {event.rank for event in events if event.code == root.code}
        text = f"{text} (the same on {len(ranks)} ranks)"
    return text


def _evidence(root: Event) -> tuple[str, ...]:
    lines = [line.rstrip() for line in root.evidence.splitlines() if line.strip()]
    # of a traceback the last lines tell most, of a hang the first: what was seen, and the innermost frames
    shown = lines[:FRAMES] if root.code == "process.hung" else lines[-EVIDENCE_LINES:]
    return tuple(line[:EVIDENCE_WIDTH] for line in shown)
