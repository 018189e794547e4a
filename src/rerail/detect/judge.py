"""Turns readings into faults that begin and end: compares each with the conditions of the catalogue. Pure but for the time it is told.

Called by `detect.monitor` for every reading. A fault begins when its condition has held for `for_s`, is told once, and ends
when the condition no longer holds. A counter that was reset (a driver reload) starts anew and is no fault.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import msgspec

from rerail.detect.detector import Reading, Value
from rerail.faults.catalog import Condition, Fault

SPARSE = 1.5
"""Windows between two looks at a counter that still count as one."""


class Finding(msgspec.Struct, frozen=True):
    """A fault has begun, or is over."""

    fault: Fault
    reading: Reading
    begins: bool
    before: Value | None = None
    """For a counter: what it was at the beginning of the window."""

    @property
    def text(self) -> str:
        """For people: what was read."""
        value = self.reading.value
        told = f"{value:g}" if isinstance(value, int | float) else value
        change = f", was {self.before:g}" if isinstance(self.before, int | float) else ""
        note = f" ({self.reading.note})" if self.reading.note else ""
        return f"{self.reading.subject}: {self.reading.name} = {told}{change}{note}"


class _Track:
    """One condition on one subject."""

    def __init__(self) -> None:
        self.holds_since: float | None = None
        self.told = False
        self.history: deque[tuple[float, float]] = deque()
        """Values of a counter, each with the time it was last seen; equal ones in a row are one."""

    def compare(self, condition: Condition, value: Value, now: float) -> tuple[bool, Value | None]:
        """Whether it holds now, and what the counter was before."""
        if condition.rises is None:
            return _holds(condition, value), None
        number = _number(value)
        if number is None:
            return False, None
        if self.history and number < self.history[-1][1]:
            self.history.clear()
        since, last_look = now - condition.within_s, self.history[-1][0] if self.history else now
        if now - SPARSE * condition.within_s <= last_look < since:
            since = last_look  # looked at about as seldom as the window is long: then from one look to the next
        if self.history and self.history[-1][1] == number:
            self.history.pop()
        self.history.append((now, number))
        while self.history[0][0] < since:
            self.history.popleft()
        lowest = self.history[0][1]
        return number - lowest >= condition.rises, lowest


class Judge:
    """Remembers what has been read of every subject."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._by_reading: dict[str, list[tuple[Fault, Condition]]] = {}
        for fault in faults:
            if fault.reading is not None:
                self._by_reading.setdefault(fault.reading.name, []).append((fault, fault.reading))
        self._tracks: dict[tuple[str, str], _Track] = {}

    def take(self, reading: Reading, now: float) -> list[Finding]:
        """What begins or ends with this reading."""
        found = []
        for fault, condition in self._by_reading.get(reading.name, ()):
            if reading.momentary:
                if _holds(condition, reading.value):
                    found.append(Finding(fault, reading, True))
                continue
            track = self._tracks.setdefault((fault.code, reading.subject), _Track())
            holds, before = track.compare(condition, reading.value, now)
            if not holds:
                track.holds_since = None
                if track.told:
                    track.told = False
                    found.append(Finding(fault, reading, False, before))
                continue
            if track.holds_since is None:
                track.holds_since = now
            if not track.told and now - track.holds_since >= condition.for_s:
                track.told = True
                found.append(Finding(fault, reading, True, before))
        return found

    def forget(self, finding: Finding) -> None:
        """It could not be told: if it still holds at the next reading, it begins then."""
        track = self._tracks.get((finding.fault.code, finding.reading.subject))
        if track is not None:
            track.told = False

    def known(self, name: str) -> bool:
        """Whether any fault depends on this reading."""
        return name in self._by_reading


def _holds(condition: Condition, value: Value) -> bool:
    if condition.is_ is not None:
        return _same(value, condition.is_)
    if condition.is_not is not None:
        return not _same(value, condition.is_not)
    number = _number(value)
    if number is None:
        return False
    if condition.above is not None:
        return number > condition.above
    return condition.below is not None and number < condition.below


def _same(value: Value, wanted: Value) -> bool:
    if isinstance(value, str) and isinstance(wanted, str):
        return value == wanted
    left, right = _number(value), _number(wanted)
    return left == right if left is not None and right is not None else str(value) == str(wanted)


def _number(value: Value) -> float | None:
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return None if math.isnan(number) else number
