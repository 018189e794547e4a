"""What is wrong with the machines of a job: remembers what monitors have told, and offers it as the cause of an incident.

Called by `runtime.controller`. A broken device is no incident by itself: ranks that do not mind it train on. When one of
them breaks, what was seen on its node shortly before, or comes to light shortly after, may be the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from rerail.detect.kernel_log import KernelLog
from rerail.detect.monitor import SOURCE as MACHINE
from rerail.diagnose.classify import Classifier
from rerail.diagnose.rootcause import because_of
from rerail.flow import AnyRecord, Event, Role, Severity, Signal
from rerail.runtime.incident import Incident
from rerail.runtime.training import VOTE

OF_TRAINING = "training."
HEALTH = (MACHINE, OF_TRAINING)
"""Sources of signals that tell how machines and training are, and that nothing has broken yet."""
WINDOW_S = 120.0
"""Seconds between a fault of the machine and one of a rank in which the first may be the cause of the second."""
NEAR_S = 20.0
"""The same for faults that the catalogue does not know to go together."""
KILLED = "process.killed"
WORDLESS = (KILLED, "process.crashed", "process.hung", "node.lost", "rank.not_parked", "collective.failed")
OF_ONE_DEVICE = (KILLED, "process.crashed", "process.hung", "rank.not_parked")
"""Ends of a rank that the device of another one is no reason for; of its collectives it may be one."""
MOMENT_S = 0.001
KEPT = 1000
FOLD_S = 5.0
PASSING_S = 1800.0
_T = TypeVar("_T")
LOUD = (Severity.ERROR, Severity.CRITICAL, Severity.DEGRADED)
"""What is worth a line on the screen."""


class Machines:
    """Faults of machines that have begun and not ended."""

    def __init__(
        self,
        classifier: Classifier,
        tell: Callable[[str], None],
        pid_of: Callable[[int], int] = lambda rank: 0,
        told: Callable[[Signal, Event], None] = lambda signal, event: None,
        elsewhere: Callable[[str, str, int], bool] = lambda node, subject, rank: False,
    ) -> None:
        self._told_of_machine, self._elsewhere = told, elsewhere
        self._classifier, self._tell, self._pid_of = classifier, tell, pid_of
        self._advised: set[str] = set()
        self._victims: dict[str, tuple[int, Event]] = {}
        """Records of the out-of-memory killer, by their id: which process it has ended."""
        self._pids: dict[str, int] = {}
        """Of ranks that were killed, by the event that tells of it; as they were at that time."""
        self._passing: set[tuple[str, str, str]] = set()
        self._told: dict[str, float] = {}
        self._standing: dict[tuple[str, str, str], Event] = {}

    def heard(self, signal: Signal, incident: Incident | None) -> list[tuple[int, AnyRecord]]:
        """Records of one word of a monitor. Of an open incident it may be the cause, told later than the rank died."""
        event = self.take(signal)
        if signal.source == MACHINE or (signal.source == VOTE and event.rank >= 0):
            self._told_of_machine(signal, event)
        number = incident.number if incident is not None else 0
        records: list[tuple[int, AnyRecord]] = [(number, signal), (number, event)]
        told = incident.diagnosis if incident is not None else None
        if incident is None or told is None or told.code == event.code:
            return records
        causes = {one.id: one for one in self.causes_of(incident.events)}
        if event.id in causes and (len(causes) == 1 or self._surely(event, incident.events)):
            incident.diagnosis = because_of(told, event)
            incident.link((signal, event))
            records.append((number, incident.diagnosis))
        return records

    def take(self, signal: Signal) -> Event:
        """One word of a monitor; the event it is."""
        event = self._classifier.classify(signal)
        subject = str(signal.payload.get("subject", ""))
        key = (event.node, event.code, subject)
        if signal.payload.get("over"):
            # a line that names no device ends the fault on all of them
            ended = [k for k in self._standing if k == key or (not subject and k[:2] == key[:2])]
            gone = [self._standing.pop(one) for one in ended]
            others = any(node == event.node and code == event.code for node, code, _ in self._standing)
            if gone and not (others and signal.source != MACHINE):
                self._tell(f"{event.node}: {event.code} is over{f' ({subject})' if subject else ''}")
            return event
        if victim := int(signal.payload.get("victim", 0)):
            self._victims[event.id] = victim, event
            _forget_oldest(self._victims)
        known = self._standing.pop(key, None)
        self._standing[key] = event
        if signal.payload.get("detector") == KernelLog.name:
            self._passing.add(key)
        while len(self._standing) > KEPT:
            oldest = next(iter(self._standing))
            self._passing.discard(oldest)
            del self._standing[oldest]
        # what concerns the training is told by every rank at once
        again = signal.source != MACHINE and event.at - self._told.get(event.code, 0.0) < FOLD_S
        anew = known is None or signal.source == VOTE  # a verdict is no state that lasts
        if anew and not again and event.severity in LOUD:
            self._told[event.code] = event.at
            seen = event.evidence[:200]
            text = f"{event.message} ({event.code})" + (f": {seen}" if seen not in event.message else "")
            self._tell(text + self._advice(event.code))
        return event

    def _advice(self, code: str) -> str:
        """On a line of its own, once in a job."""
        fault = self._classifier.catalog.get(code)
        if fault is None or not fault.advice or code in self._advised:
            return ""
        self._advised.add(code)
        return f"\n  {fault.advice}"

    def causes_of(self, events: Sequence[Event]) -> list[Event]:
        """Faults of the same machines that explain these events: by the catalogue, or by being grave and near in time."""
        for event in events:
            if event.code == KILLED and event.rank >= 0 and event.id not in self._pids:
                self._pids[event.id] = self._pid_of(event.rank)
                _forget_oldest(self._pids)
        known = {one.id: (one, subject) for (_, _, subject), one in self._standing.items()}
        own = [record for _, record in self._victims.values() if self._surely(record, events)]
        known |= {one.id: (one, "") for one in own if one.id not in known}
        nodes = {event.node for event in events}
        found = [
            one
            for one, subject in known.values()
            if one.node in nodes
            and one.role is Role.ROOT
            and any(
                self._explains(one, event) and not self._of_another(one, subject, event, events) for event in events
            )
        ]
        first = min((event.first_seen for event in events), default=0.0)
        # the kernel says it before the process is gone, but its log may be read after
        return [
            msgspec.structs.replace(one, first_seen=min(one.first_seen, first - MOMENT_S))
            if self._surely(one, events)
            else one
            for one in found
        ]

    def _surely(self, cause: Event, events: Sequence[Event]) -> bool:
        """Whether it names the very process of a rank that was killed."""
        victim = self._victims.get(cause.id, (0,))[0]
        return victim > 0 and any(self._pids.get(event.id) == victim for event in events if event.node == cause.node)

    def _explains(self, cause: Event, effect: Event) -> bool:
        apart, catalog = abs(effect.first_seen - cause.last_seen), self._classifier.catalog
        fault, known = catalog.get(effect.code), catalog.get(cause.code)
        if apart > WINDOW_S or known is None or cause.code.startswith(OF_TRAINING) or self._another(cause, effect):
            return False
        if fault is not None and fault.is_caused_by(cause.code):
            return True
        # a device that has just gone is no chance companion of a process that dies without a word; of one that says why, it may be
        return known.hardware and cause.severity is Severity.CRITICAL and apart < NEAR_S and effect.code in WORDLESS

    def _of_another(self, cause: Event, subject: str, effect: Event, events: Sequence[Event]) -> bool:
        """Whether it is about a device that another rank has than those that ended; what a collective says of it may still be so."""
        if effect.code in OF_ONE_DEVICE:
            return self._elsewhere(cause.node, subject, effect.rank)
        fault, ended = self._classifier.catalog.get(effect.code), [e for e in events if e.code in OF_ONE_DEVICE]
        is_known = fault is not None and fault.is_caused_by(cause.code)
        return bool(ended) and not is_known and all(self._elsewhere(cause.node, subject, e.rank) for e in ended)

    def _another(self, cause: Event, effect: Event) -> bool:
        """Whether the out-of-memory killer has ended another process than this rank's, or `cause` only counts that it did."""
        pid = self._pids.get(effect.id, 0)
        if not pid or effect.code != KILLED:
            return False
        if cause.id in self._victims:
            return self._victims[cause.id][0] != pid  # of the same node, or it would not be asked
        fault = self._classifier.catalog.get(cause.code)
        near = [
            victim
            for victim, record in self._victims.values()
            if fault is not None and fault.is_caused_by(record.code) and record.node == cause.node
            if abs(record.at - cause.at) < NEAR_S
        ]
        return bool(near) and pid not in near

    def standing(self, now: float) -> list[Event]:
        """For `rerail status`. What a log said once nobody takes back: it is history after a while."""
        return [e for key, e in self._standing.items() if key not in self._passing or now - e.at < PASSING_S]


def _forget_oldest(book: dict[str, _T]) -> None:
    while len(book) > KEPT:
        del book[next(iter(book))]
