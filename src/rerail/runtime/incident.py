"""One open incident: gathers what was seen and done about one fault until it is over.

Made and read by `runtime.controller`; its records go to the journal under its number.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rerail.faults.catalog import Catalog
from rerail.flow import Action, AnyRecord, Decision, Diagnosis, Event, Role, Rung
from rerail.runtime.intake import Sighting

NEWCOMERS = 3
"""Replacements that may die while building before replacing is given up for this incident."""


@dataclass
class Incident:
    """Everything that belongs together. Times are monotonic."""

    number: int
    opened: float
    fault_version: int
    echo_deadline: float
    """Until then a root cause is waited for when only echoes have been seen."""
    detect_s: float = 0.0
    fresh: list[Event] = field(default_factory=list)
    """Events that no decision has answered yet."""
    events: list[Event] = field(default_factory=list)
    """Events that have been answered."""
    diagnosis: Diagnosis | None = None
    """The first one; it names the incident."""
    later: list[Diagnosis] = field(default_factory=list)
    """Of faults that came while the first was being repaired."""
    decision: Decision | None = None
    attempts: int = 0
    tried: dict[Rung, str] = field(default_factory=dict)
    """Rungs that have failed, or would for the same reason."""
    spared: set[Rung] = field(default_factory=set)
    """Those of them that were not even begun."""
    trusted: int = -1
    """The newest version to go on from, for as long as it lasts; -1: there is no such limit."""
    newcomers_lost: int = 0
    links: list[str] = field(default_factory=list)

    def failed(self, rungs: Sequence[Rung], why: str) -> None:
        """The first of these has come to nothing; the others are not worth a try any more."""
        self.spared |= {rung for rung in rungs[1:] if rung not in self.tried}
        self.tried |= dict.fromkeys(rungs, why)

    @property
    def attempted(self) -> list[Rung]:
        """Rungs that were begun and have failed."""
        return [rung for rung in self.tried if rung not in self.spared]

    def add(self, sighting: Sighting, event: Event) -> None:
        """One more thing seen."""
        seen = (*self.events, *self.fresh)
        if not seen or (event.role is Role.ROOT and not any(e.role is Role.ROOT for e in seen)):
            now = time.monotonic()
            self.detect_s = max(sighting.age_s, now - self.opened if seen else 0.0)
            if not self.attempts:  # what came before were its echoes
                self.opened = now
        if not any(_same(event, other) for other in seen):
            self.fresh.append(event)
        self.link((sighting.signal, event))

    def fold(self) -> None:
        """What is fresh follows from what is being repaired already."""
        self.events.extend(self.fresh)
        self.fresh.clear()

    def link(self, records: Iterable[AnyRecord]) -> None:
        self.links.extend(record.id for record in records)

    def decided(self, diagnosis: Diagnosis, decision: Decision) -> None:
        """One more attempt begins."""
        if self.diagnosis is None:
            self.diagnosis = diagnosis
        elif diagnosis.id not in (self.diagnosis.id, *(later.id for later in self.later)):
            self.later.append(diagnosis)
        self.decision = decision
        self.attempts += 1
        self.fold()
        self.link((diagnosis, decision))

    def newest_diagnosis(self) -> Diagnosis | None:
        return self.later[-1] if self.later else self.diagnosis

    def acted(self, actions: Iterable[Action]) -> None:
        self.link(actions)

    def newcomer_lost(self) -> None:
        """A replacement died before it could take part."""
        self.newcomers_lost += 1
        if self.newcomers_lost >= NEWCOMERS:
            self.tried[Rung.REPLACE_RANK] = f"{self.newcomers_lost} replacements died while they were built"


def _same(event: Event, other: Event) -> bool:
    return (event.code, event.rank, event.generation) == (other.code, other.rank, other.generation) and event.rank >= 0


def last_words(incident: Incident, decision: Decision, catalog: Catalog) -> tuple[str, int]:
    """Of a job that is stopped: what is said, with advice, and the rank whose traceback is the one to show, or -1."""
    diagnosis = incident.newest_diagnosis()
    summary = diagnosis.summary if diagnosis is not None else decision.why
    fault = catalog.get(diagnosis.code) if diagnosis is not None else None
    advice = f"\n  {fault.advice}" if fault is not None and fault.advice else ""
    root = next((event for event in incident.events if diagnosis is not None and event.id == diagnosis.root), None)
    return f"{summary}; {decision.why}{advice}", root.rank if root is not None else -1
