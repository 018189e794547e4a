"""The ledger of what has gone wrong where: turns sightings of faults into counts, stronger answers and quarantines. Pure.

Kept in the journal, so a new controller goes on counting where the old one ended. Called by `runtime.handling`.

A sighting becomes a *standing* fault; when it has stood long enough it *occurs*; an occurrence that is no part of a storm is
*counted*; and counts lead to what the rules say (`decide.escalation`). Each stage waits by deadlines (`next_deadline`,
`tick`), and times are those of the faults, not of the ticks: being late changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from typing import TypeVar

import msgspec

from rerail.decide.axes import Axes
from rerail.decide.escalation import AT_ONCE, STORM_SUBJECTS, WITHIN_MAX_S, Book, Escalation, Seen
from rerail.decide.quarantine import EVIDENCE, Entry, added, covering, released, takes_the_last
from rerail.decide.subjects import kind_of, node_of, several
from rerail.wording import counted

KEPT = 1000
"""Standing faults and counters kept at most; beyond that the oldest go."""
MOMENT_S = 0.001
_V = TypeVar("_V")


class What(StrEnum):
    """Kinds of change."""

    STRONGER = "stronger"
    QUARANTINED = "quarantined"
    SPARED = "spared"
    """It should be in quarantine and is not, because it is the last one."""
    STORM = "storm"
    """Not counted: the same on several at once."""
    PROBATION = "probation"
    BACK = "back"
    """A fault during probation."""
    OVER = "over"


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is different now; told to people, and acted on."""

    what: What
    subject: str
    at: float
    text: str
    code: str = ""
    rule: str = ""
    axes: Axes = Axes()
    """Of a stronger answer: what the fault counts for now. Without a rule: a mute window is over, and it counts as any other."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that is there, or has not been gone for long enough."""

    seen: Seen
    since: float
    last: float
    gone_since: float = -1.0
    """-1: it is there."""
    once: bool = False
    """Known from lines of a log only."""
    occurred: bool = False
    lasts_s: float = 0.0
    gone_s: float = 0.0

    @property
    def lasted(self) -> float:
        """How long it has stood as far as is known; for one that still stands see `stood`."""
        return (self.last if self.once else self.gone_since) - self.since

    def stood(self, at: float) -> bool:
        """Whether it has stood long enough to count."""
        return (at - self.since if self.gone_since < 0 else self.lasted) >= self.lasts_s

    def gone(self, at: float) -> bool:
        """Whether it is over for good."""
        return 0 <= self.gone_since < at and at - self.gone_since >= self.gone_s

    @property
    def deadline(self) -> float | None:
        """When it will count, or be over."""
        if self.gone_since >= 0:
            return max(self.gone_since + self.gone_s, self.gone_since + MOMENT_S)
        return None if self.occurred else self.since + self.lasts_s


class Occurrence(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that has stood long enough; settled when it is known whether it is part of a storm."""

    seen: Seen
    at: float
    due: float
    settled: bool = False


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """All that is remembered. Values only: it goes through the journal and comes back the same."""

    standing: dict[str, Standing] = {}
    occurrences: tuple[Occurrence, ...] = ()
    counts: dict[str, tuple[float, ...]] = {}
    """Times, by rule, code and subject."""
    quarantine: dict[str, Entry] = {}
    restarts: dict[str, tuple[float, ...]] = {}
    """Of `rank:3`, `node:n1` and `job`."""
    resets: dict[str, tuple[float, ...]] = {}

    def note(self, seen: Seen, at: float, book: Book, members: Collection[str] = ()) -> tuple[Ledger, list[Change]]:
        """One sighting. `members` are the nodes and devices of the job; unknown when empty."""
        turn = _Turn(self, book, members)
        turn.note(seen, at)
        turn.advance(at)
        return turn.ledger(), turn.changes

    def tick(self, at: float, book: Book, members: Collection[str] = ()) -> tuple[Ledger, list[Change]]:
        """What has become true by now."""
        turn = _Turn(self, book, members)
        turn.advance(at)
        return turn.ledger(), turn.changes

    def isolate(
        self, seen: Seen, at: float, book: Book, members: Collection[str] = (), rule: Escalation = AT_ONCE
    ) -> tuple[Ledger, list[Change]]:
        """Out of use at once, because of what this fault is."""
        turn = _Turn(self, book, members)
        turn.put_away(rule, seen, at, seen.code)
        return turn.ledger(), turn.changes

    def next_deadline(self) -> float | None:
        """When to tick next; None if nothing is waited for."""
        busy = {one.seen.subject for one in self.standing.values() if one.gone_since < 0}
        times = [one.deadline for one in self.standing.values()]
        times += [one.due for one in self.occurrences if not one.settled]
        times += [entry.ends for entry in self.quarantine.values() if not _is_about(entry.subject, busy)]
        return min((time for time in times if time is not None), default=None)

    def quarantined(self, subject: str) -> Entry | None:
        """The entry that keeps it, or its node, out of use."""
        return covering(self.quarantine, subject)

    def add(self, entry: Entry, members: Collection[str] = (), *, force: bool = False) -> Ledger:
        """By hand; UsageError where nothing would be left."""
        return msgspec.structs.replace(self, quarantine=added(self.quarantine, entry, members, force=force))

    def release(self, subject: str) -> Ledger:
        """By hand, or because a check has passed. Its counts begin anew; UsageError if it is not there."""
        rest = released(self.quarantine, subject)
        counts = {key: times for key, times in self.counts.items() if not key.endswith(f"|{subject}")}
        return msgspec.structs.replace(self, quarantine=rest, counts=counts)

    def may_reset(self, device: str, at: float, book: Book) -> str:
        """Why this device cannot be reset now, or nothing."""
        if not book.resets:
            return "resets are switched off (setting reset_limit)"
        used = _within(self.resets.get(device, ()), at, book.reset_window_s)
        if len(used) < book.resets:
            return ""
        hours = book.reset_window_s / 3600
        return f"reset budget of {device} is used up ({len(used)} in {hours:g} h)"

    def reset_done(self, device: str, at: float, book: Book) -> Ledger:
        """Count one reset."""
        resets = {**self.resets, device: (*_within(self.resets.get(device, ()), at, book.reset_window_s), at)}
        return msgspec.structs.replace(self, resets=resets)

    def may_restart(self, whose: Iterable[str], at: float, book: Book) -> str:
        """Why these must not be started anew now, or nothing. `rank:3`, `node:n1`, `job`."""
        for who in whose:
            limit = book.restarts.get(who.partition(":")[0])
            used = _within(self.restarts.get(who, ()), at, book.restart_window_s)
            if limit is not None and len(used) >= limit:
                return f"{who.replace(':', ' ')} was started anew {counted(len(used), 'time')} within {book.restart_window_s:g} s, which is the limit"
        return ""

    def restarted(self, whose: Iterable[str], at: float, book: Book) -> Ledger:
        """Count one restart of each."""
        new = {who: (*_within(self.restarts.get(who, ()), at, book.restart_window_s), at) for who in whose}
        return msgspec.structs.replace(self, restarts={**self.restarts, **new})


class _Turn:
    """One change of a ledger under way."""

    def __init__(self, ledger: Ledger, book: Book, members: Collection[str]) -> None:
        self._ledger, self._book, self._members = ledger, book, members
        self._standing, self._counts = dict(ledger.standing), dict(ledger.counts)
        self._occurrences, self._quarantine = list(ledger.occurrences), dict(ledger.quarantine)
        self.changes: list[Change] = []

    def ledger(self) -> Ledger:
        return msgspec.structs.replace(
            self._ledger,
            standing=_newest(self._standing, lambda one: one.last),
            occurrences=tuple(sorted(self._occurrences, key=_order)),
            counts=_newest(self._counts, lambda times: times[-1]),
            quarantine=self._quarantine,
        )

    def note(self, seen: Seen, at: float) -> None:
        key = f"{seen.code}|{seen.subject}"
        known = self._standing.get(key)
        if seen.over:
            if known is not None and known.gone_since < 0 and known.last < at:
                self._standing[key] = msgspec.structs.replace(known, gone_since=at)
                self._touch(seen.subject, at)
            return
        self._fault_on(seen, at)
        if known is None or known.gone(at):
            known = Standing(
                seen=seen,
                since=at,
                last=at,
                once=True,
                lasts_s=self._book.lasts_s(seen),
                gone_s=self._book.gone_s(seen),
            )
        newest = seen if at > known.last else max(seen, known.seen, key=msgspec.json.encode)
        once = known.once and seen.once
        at = max(at, known.last)
        self._standing[key] = msgspec.structs.replace(
            known, seen=newest, last=at, once=once, gone_since=at if once else -1.0
        )

    def _fault_on(self, seen: Seen, at: float) -> None:
        """A thing in quarantine is not free of faults."""
        for subject in {seen.subject, node_of(seen.subject)} & set(self._quarantine):
            entry = self._quarantine[subject]
            if entry.probation:
                text = f"{subject} is out of use as before: {seen.code} came during its probation"
                self._tell(What.BACK, seen, at, text, subject=subject, rule=entry.rule)
        self._touch(seen.subject, at)

    def _touch(self, subject: str, at: float) -> None:
        """Its time without a fault begins now."""
        for one in {subject, node_of(subject)} & set(self._quarantine):
            entry = self._quarantine[one]
            self._quarantine[one] = msgspec.structs.replace(
                entry, last_fault=max(entry.last_fault, at), probation=False
            )

    def advance(self, at: float) -> None:
        """Whatever is due by now, in the order in which it fell due."""
        for key, one in sorted(self._standing.items()):
            if not one.occurred and one.stood(at):
                self._standing[key] = one = msgspec.structs.replace(one, occurred=True)
                self._occur(one.seen, one.since + one.lasts_s)
            if one.gone(at):
                del self._standing[key]
                if one.occurred and not one.once:
                    text = f"{one.seen.subject}: {one.seen.code} has been gone for {one.gone_s:g} s and counts as over"
                    self._tell(What.OVER, one.seen, at, text)
        due = [occurrence for occurrence in self._occurrences if not occurrence.settled and occurrence.due <= at]
        for occurrence in sorted(due, key=_order):
            self._settle(occurrence)
        self._occurrences = [
            one for one in self._occurrences if not one.settled or at - one.at <= 2 * self._book.storm_s
        ]
        self._end_quarantines(at)

    def _occur(self, seen: Seen, at: float) -> None:
        kind = kind_of(seen.subject)
        alone = bool(self._members) and kind != "link" and not several(self._members, kind, STORM_SUBJECTS)
        due = at if alone else at + self._book.storm_s
        self._occurrences.append(Occurrence(seen=msgspec.structs.replace(seen, once=False), at=at, due=due))
        own = next((rule for rule in self._book.rules_for(seen) if not rule.together), None)
        if seen.mute_s:
            self._tell(What.STRONGER, seen, at, f"{seen.subject}: {seen.code} still stands after {seen.mute_s:g} s")
        if own is not None and own.admission is not None and own.lasts_s:
            axes = seen.axes.worst(Axes(admission=own.admission))
            text = f"{seen.subject}: {seen.code} has lasted {own.lasts_s:g} s: admission {axes.admission}"
            self._tell(What.STRONGER, seen, at, text, rule=own.id, axes=axes)

    def _settle(self, one: Occurrence) -> None:
        self._occurrences[self._occurrences.index(one)] = msgspec.structs.replace(one, settled=True)
        seen, storm_s = one.seen, self._book.storm_s
        others = {
            other.seen.subject
            for other in self._occurrences
            if other.seen.code == seen.code
            and kind_of(other.seen.subject) == kind_of(seen.subject)
            and abs(other.at - one.at) <= storm_s
        }
        if len(others) >= STORM_SUBJECTS:
            text = f"{seen.subject}: {seen.code} is not counted: {', '.join(sorted(others)[:8])} had it within {storm_s:g} s, so it is software"
            self._tell(What.STORM, seen, one.at, text)
            return
        for rule in self._book.rules_for(seen):
            if rule.times or rule.then:
                self._count(rule, seen, one.at)

    def _count(self, rule: Escalation, seen: Seen, at: float) -> None:
        key = f"{rule.id}||{seen.subject}" if rule.together else f"{rule.id}|{seen.code}|{seen.subject}"
        times = self._counts[key] = (*_within(self._counts.get(key, ()), at, WITHIN_MAX_S), at)
        number = len(_within(times, at, rule.within_s))
        often = (
            f"{'faults' if rule.together else seen.code} {counted(number, 'time')} within {rule.within_s / 3600:g} h"
        )
        if rule.then and number >= 2 and seen.again != Axes():
            axes = seen.axes.worst(seen.again)
            self._tell(What.STRONGER, seen, at, f"{seen.subject}: {often}: {axes}", rule=rule.id, axes=axes)
        if not rule.times or number < rule.times:
            return
        if rule.admission is not None and not rule.lasts_s:
            axes = seen.axes.worst(Axes(admission=rule.admission))
            self._tell(What.STRONGER, seen, at, f"{seen.subject}: {often}: {axes}", rule=rule.id, axes=axes)
        if rule.quarantine:
            self.put_away(rule, seen, at, often)

    def put_away(self, rule: Escalation, seen: Seen, at: float, often: str) -> None:
        """Into quarantine, unless it is there already or is the last one."""
        subject = seen.subject
        if covering(self._quarantine, subject) is not None:
            return
        if last := takes_the_last(self._quarantine, self._members, subject):
            text = f"{subject} had {often} and belongs into quarantine (rule {rule.id}), but {last} that may be used: it stays in use"
            self._tell(What.SPARED, seen, at, text, rule=rule.id)
            return
        evidence = [seen.evidence] if seen.evidence else []
        evidence += [
            one.seen.evidence
            for one in sorted(self._standing.values(), key=lambda one: (one.since, one.seen.code))
            if one.seen.subject == subject and one.seen.evidence not in ("", seen.evidence)
        ]
        self._quarantine[subject] = Entry(
            subject=subject,
            reason=often,
            since=at,
            rule=rule.id,
            code=seen.code,
            evidence=tuple(evidence[:EVIDENCE]),
            release_s=rule.release_s,
            last_fault=at,
        )
        until = (
            f"for {rule.release_s / 3600:g} h without a fault, then probation"
            if rule.release_s
            else "until it is released"
        )
        self._tell(
            What.QUARANTINED, seen, at, f"{subject} is out of use {until}: {often} (rule {rule.id})", rule=rule.id
        )

    def _end_quarantines(self, at: float) -> None:
        busy = {one.seen.subject for one in self._standing.values() if one.gone_since < 0}
        for subject, entry in sorted(self._quarantine.items()):
            if entry.ends is not None and entry.ends <= at and not _is_about(subject, busy):
                self._quarantine[subject] = msgspec.structs.replace(entry, probation=True)
                text = f"{subject} had no fault for {entry.release_s / 3600:g} h: on probation, usable once rerail check --deep has passed"
                self.changes.append(
                    Change(what=What.PROBATION, subject=subject, at=at, text=text, code=entry.code, rule=entry.rule)
                )

    def _tell(
        self,
        what: What,
        seen: Seen,
        at: float,
        text: str,
        *,
        subject: str = "",
        rule: str = "",
        axes: Axes | None = None,
    ) -> None:
        self.changes.append(
            Change(
                what=what,
                subject=subject or seen.subject,
                at=at,
                text=text,
                code=seen.code,
                rule=rule,
                axes=axes or seen.axes,
            )
        )


def _is_about(subject: str, busy: Collection[str]) -> bool:
    """Whether one of these is this, or a part of it."""
    return any(subject in (one, node_of(one)) for one in busy)


def _within(times: tuple[float, ...], at: float, window_s: float) -> tuple[float, ...]:
    return tuple(time for time in times if at - time < window_s)


def _order(one: Occurrence) -> tuple[float, str, str]:
    return one.at, one.seen.subject, one.seen.code


def _newest(found: dict[str, _V], age: Callable[[_V], float]) -> dict[str, _V]:
    """The newest of them, if there are too many."""
    if len(found) <= KEPT:
        return found
    return dict(sorted(found.items(), key=lambda item: age(item[1]))[-KEPT:])
