"""Folds what was told of machines and training, and was no incident by itself, into one entry for each fault and place. Pure.

Called by `report.summary`; shown by `report.text`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable

import msgspec

from rerail.detect.kernel_log import KernelLog
from rerail.detect.monitor import SOURCE as MACHINE
from rerail.flow import Event, Severity, Signal
from rerail.runtime.machines import HEALTH, WINDOW_S

VERDICTS = "training.replica"
PLACE_OUT, PLACE_BACK = "checkpoint.tier_out", "checkpoint.tier_back"
"""Sources of what ranks tell of places for checkpoints."""
_PLACE = re.compile(r"the place (.+?) for checkpoints ")


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of one device, node or rank, however often it was told."""

    code: str
    node: str
    rank: int = -1
    subject: str = ""
    """Of what: `gpu3`, `mlx5_0/1`."""
    severity: Severity = Severity.ERROR
    first: float
    """Wall clock, as all times here."""
    last: float
    count: int = 1
    over: bool = False
    over_at: float = 0.0
    passing: bool = False
    """A line of a log: said once, and never taken back."""
    message: str = ""
    evidence: str = ""

    def near(self, begin: float, end: float) -> bool:
        """Whether it was there in this time, or shortly before. Which replica was wrong shows when it is all over."""
        if self.code.startswith(VERDICTS):
            return self.last >= begin
        until = self.over_at if self.over else self.last if self.passing else math.inf
        return self.first <= end and until >= begin - WINDOW_S


def told_in(signals: Iterable[Signal]) -> dict[str, Signal]:
    """Those signals that tell how machines and training are, by id."""
    return {signal.id: signal for signal in signals if signal.source.startswith(HEALTH)}


def also_seen(signals: Iterable[Signal], events: Iterable[Event], named: Collection[str] = ()) -> list[Seen]:
    """In the order they began, without the events that were `named` as the cause of an incident, and what repeats them."""
    told, events = told_in(signals), list(events)
    causes = [event for event in events if event.id in named]
    found: dict[tuple[str, str, int, str], Seen] = {}
    for event in events:
        signal = told.get(event.cause_id)
        if signal is None or any(_same(event, cause) for cause in causes):
            continue
        subject = str(signal.payload.get("subject", "")) if signal.source == MACHINE else ""
        key = (event.code, event.node, event.rank, subject)
        if signal.payload.get("over"):
            for one in found:  # an end that names no device is that of all
                if not found[one].over and (one == key or (not subject and one[:3] == key[:3])):
                    found[one] = msgspec.structs.replace(found[one], over=True, over_at=event.at)
            continue
        before = found.get(key)
        found[key] = Seen(
            code=event.code,
            node=event.node,
            rank=event.rank,
            subject=subject,
            severity=event.severity,
            first=before.first if before is not None else event.at,
            last=event.at,
            count=before.count + 1 if before is not None else 1,
            passing=signal.payload.get("detector") == KernelLog.name,
            message=event.message,
            evidence=event.evidence,
        )
    return sorted(found.values(), key=lambda one: one.first)


def places_seen(signals: Iterable[Signal]) -> list[Seen]:
    """Places for checkpoints that were out, by node and place, in the order they went."""
    found: dict[tuple[str, str], Seen] = {}
    for signal in signals:
        message = str(signal.payload.get("message", ""))
        told = _PLACE.search(message)
        if signal.source not in (PLACE_OUT, PLACE_BACK) or told is None:
            continue
        key = (signal.node, told[1])
        before = found.get(key)
        if signal.source == PLACE_BACK:
            if before is not None:
                found[key] = msgspec.structs.replace(before, over=True, over_at=signal.at)
            continue
        found[key] = Seen(
            code=PLACE_OUT,
            node=signal.node,
            subject=told[1],
            severity=Severity.DEGRADED,
            first=before.first if before is not None else signal.at,
            last=signal.at,
            count=before.count + 1 if before is not None else 1,
            message=message[told.end() :],
        )
    return sorted(found.values(), key=lambda one: one.first)


def _same(event: Event, cause: Event) -> bool:
    return (event.code, event.node) == (cause.code, cause.node) and abs(event.at - cause.at) <= WINDOW_S
