"""Keeps ranks out of places that are not to be used, and finds those that had better leave theirs.

Turns what is told of machines (`Handling` says what it means) into `Fleet.isolated`, which every placement asks, and into the
diagnosis that makes a rank move although it still works. Called by `runtime.controller`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from rerail.decide.axes import Admission, Axes, Repair, Running
from rerail.decide.budget import EVACUATE
from rerail.decide.escalate import Change, Ledger, What
from rerail.decide.escalation import AT_ONCE, BY_VOTE, Escalation, Seen
from rerail.decide.quarantine import Entry
from rerail.decide.subjects import kind_of, node_of, of_sighting
from rerail.detect.kernel_log import KernelLog
from rerail.flow import Diagnosis, Event, Place, Rung, Signal, new_id
from rerail.runtime.fleet import Fleet, Rank, RankState
from rerail.runtime.handling import Handling
from rerail.runtime.orders import CHECK, Chore, ChoreDone
from rerail.wording import counted

WHOLE_NODE = -1
SAID = (What.STRONGER, What.QUARANTINED, What.SPARED, What.STORM, What.PROBATION, What.BACK)
"""Changes that are worth a line on the screen."""
MANUAL = "place.quarantined"
"""Code of an evacuation that no fault has led to."""
NAMED = "training.replica_differs"
"""Code of a rank whose replicas agree on another state than it has: no monitor says so, but a vote."""
TRIES = 3
"""Times that a rank is to leave a place for the same better ones: another fault may have come in between."""


class Passing(NamedTuple):
    """A fault that stands."""

    code: str
    message: str
    axes: Axes
    at: float = 0.0
    """When it was seen last, by the wall clock."""
    lasting: bool = False
    """It counts for more than by itself until the ledger calls it over; otherwise until its monitor does."""


class Tried(NamedTuple):
    """How a rank was to leave its place, and did not."""

    free: frozenset[Place]
    """Where it could have gone."""
    times: int


class Isolation:
    """What is out of use, and who is there."""

    def __init__(self, fleet: Fleet, handling: Handling, tell: Callable[[str], None]) -> None:
        self._fleet, self._handling, self._tell = fleet, handling, tell
        self._passing: dict[tuple[str, str], Passing] = {}
        """Faults that keep new work away for as long as they stand, by code and subject."""
        self._seen: Ledger | None = None
        self._nowhere: set[str] = set()
        """Places that the job does not have, of which a fault was told."""
        self._checks: dict[str, str] = {}
        """Checks of what is on probation, by the order: those under way, and those that failed."""
        self._tried: dict[tuple[int, Place], Tried] = {}
        """Ranks that were to leave a place and did not, or had nowhere to go."""
        for one in handling.ledger.standing.values():  # of which a former controller was told
            if one.gone_since < 0 and (one.occurred or not one.seen.mute_s):
                self._stands(one.seen, one.last, one.seen.evidence)
        self.refresh()

    def heard(self, signal: Signal, event: Event) -> None:
        """A monitor has told of a machine, or a vote has named a rank."""
        if event.code == NAMED and event.rank >= 0:
            self.blamed(event)
            return
        subject, over = str(signal.payload.get("subject", "")), bool(signal.payload.get("over"))
        self._refresh_members()
        once = signal.payload.get("detector") == KernelLog.name
        seen = self._handling.seen(event, subject, over=over, once=once)
        self._say_if_nowhere(seen)
        self._take(self._handling.note(seen, event.at))
        if not seen.mute_s or over:
            self._stands(seen, event.at, event.message or f"{seen.subject}: {seen.code}")
        self.refresh()

    def _say_if_nowhere(self, seen: Seen) -> None:
        """A device that the job does not have is none of its matters, but whoever told of it may have meant another."""
        place, members = place_of(seen.subject), self._handling.members
        unknown = place is not None and f"node:{place.node}" in members and seen.subject not in members
        if unknown and not seen.over and seen.axes.admission is not Admission.YES and seen.subject not in self._nowhere:
            self._nowhere.add(seen.subject)
            here = sum(kind_of(one) == "device" and node_of(one) == node_of(seen.subject) for one in members)
            self._tell(
                f"{seen.subject}: there is no such place in this job, which has {counted(here, 'device')} there: "
                f"{seen.code} is written down and concerns no rank"
            )

    def _stands(self, seen: Seen, at: float, message: str, rule: Escalation = AT_ONCE) -> None:
        """A fault keeps new work away for good, or for as long as it is there."""
        key = seen.code, seen.subject
        known = self._passing.get(key)
        if known is not None and known.lasting:
            return
        if seen.over:
            self._passing.pop(key, None)
        elif seen.axes.admission is Admission.NO:
            self._take(self._handling.isolate(seen, at, rule))
        elif seen.axes.admission is Admission.NOT_NOW:
            self._passing[key] = Passing(seen.code, message, seen.axes, at)

    def blamed(self, event: Event) -> None:
        """A rank or node of the job broke: how often that happens is counted where its hardware is at fault.

        Of one that a vote has named, what the policy says of its place holds the first time.
        """
        rank, seen = self._fleet.ranks.get(event.rank), self._handling.seen(event)
        subject = f"node:{event.node}" if rank is None or seen.scope == "node" else f"device:{rank.place}"
        if not seen.hardware:
            return
        self._refresh_members()
        seen = self._handling.seen(event, subject)
        self._take(self._handling.note(seen, event.at))
        if event.code == NAMED and not seen.mute_s:
            self._stands(seen, event.at, event.message, BY_VOTE)
        self.refresh()

    def is_elsewhere(self, node: str, subject: str, rank: int) -> bool:
        """Whether what a monitor calls so is a device of this job, and not the one that this rank has."""
        self._refresh_members()
        named, one = of_sighting(node, subject, "device"), self._fleet.ranks.get(rank)
        device = self._handling.same.get(named, named)
        is_known = kind_of(device) == "device" and device in self._handling.members
        return is_known and one is not None and device != f"device:{one.place}"

    def tick(self, wall: float) -> None:
        """What the passing of time changes, and what people have changed meanwhile."""
        deadline = self._handling.next_deadline()
        if deadline is not None and deadline <= wall:
            self._take(self._handling.tick(wall))
        if self._handling.ledger is not self._seen:
            self.refresh()
            self._check_probation()

    def were_reset(self, ended: dict[Place, str], wall: float) -> None:
        """Faults that a reset repairs are gone with it, unless it has failed, which is said; what has ended is emptied."""
        for place, failed in ended.items():
            device = f"device:{place}"
            self._handling.reset_done(device, wall)
            if failed:
                self._tell(failed)
            else:
                self._passing = {key: one for key, one in self._passing.items() if key[1] != device}
            self.refresh()
        ended.clear()

    def _check_probation(self) -> None:
        """What was long enough without a fault is tested once more before it is used."""
        for entry in self._handling.ledger.quarantine.values():
            agent = self._fleet.agents.get(entry.subject.partition(":")[2].partition("/")[0])
            idle = agent is not None and agent.connected and agent.node not in self._fleet.placed()
            if entry.probation and agent is not None and idle and entry.subject not in self._checks.values():
                order = Chore(id=new_id("chore"), kind=CHECK)
                self._checks[order.id] = entry.subject
                agent.send(order)
                self._tell(f"{entry.subject} is on probation: rerail check --deep runs there")

    def checked(self, answer: ChoreDone) -> None:
        """A deep check is over."""
        subject = self._checks.get(answer.id, "")
        if subject and answer.ok:
            del self._checks[answer.id]
            self._handling.release(subject)
            self._tell(f"{subject} has passed its check and may be used again")
            self.refresh()
        elif subject:  # not asked again: somebody has to look at it
            self._tell(f"{subject} has not passed rerail check --deep and stays out of use: {answer.last_line}")

    def next_deadline(self, wall: float) -> float | None:
        """When to tick next, in monotonic seconds."""
        due = self._handling.next_deadline()
        return None if due is None else time.monotonic() + max(0.0, due - wall)

    def refresh(self) -> None:
        """`Fleet.isolated` as the ledger has it now."""
        ledger = self._seen = self._handling.ledger
        found: dict[Place, str] = {}
        doubted: set[Place] = set()
        for entry in ledger.quarantine.values():
            place = place_of(entry.subject)
            if place is not None and ledger.quarantined(entry.subject) is not None:
                found[place] = _out_of_use(entry)
                if entry.rule != AT_ONCE.id:
                    doubted.add(place)
        self._passing = {
            (code, sick): one
            for (code, sick), one in self._passing.items()
            if not one.lasting or f"{code}|{sick}" in ledger.standing
        }
        passing = {place: one.message for (_, sick), one in self._passing.items() if (place := place_of(sick))}
        taken = {rank.place for rank in self._fleet.ranks.values()}
        taken |= {Place(place.node, WHOLE_NODE) for place in taken}
        elsewhere = {place: why for place, why in passing.items() if place not in taken}
        certain = {place: why for place, why in found.items() if place not in doubted}
        # what passes, comes too often or was said by hand keeps nobody from going on where there is nothing better
        for isolated in ({**passing, **found}, {**elsewhere, **found}, found, certain):
            self._fleet.isolated = isolated
            if not self._fleet.homeless():
                break
        self._tried = {key: one for key, one in self._tried.items() if self._why(key[1])}

    def tell_of_the_start(self) -> None:
        """Who begins in a place that is out of use, for want of a better one."""
        for rank in self._fleet.ranks.values():
            if why := self._why(rank.place):
                self._tell(f"rank {rank.rank} starts on {rank.place}, though {why}: there is no other place")

    def evacuation(self, job: str, at: float) -> Diagnosis | None:
        """Ranks that still work where nobody should be, and for whom there is a better place; None: nobody has to leave."""
        fleet = self._fleet
        calm = fleet.aware and not fleet.dismissed and all(rank.trained for rank in fleet.members())
        calm = calm and not fleet.in_state(RankState.FINISHED)
        if not calm or not (self._passing or self._handling.ledger.quarantine):
            return None
        sick = [rank for rank in self._fleet.in_state(RankState.RUNNING) if self._must_leave(rank)]
        if not sick:
            return None
        place = sick[0].place
        code, why = self._code(place), self._why(place)
        leaving = [rank for rank in sick if self._code(rank.place) == code]
        if not self._can_reset(leaving, code, at):
            free = len(fleet.free())
            for rank in leaving[free:]:
                self._note_try(rank, stuck=True)
                self._tell(f"rank {rank.rank} stays in place, though {self._why(rank.place)}: there is no other place")
            leaving = leaving[:free]
        leaving = leaving[: len(fleet.members()) - 1]  # somebody has to keep the state; the last one is next
        if not leaving:
            return None
        for rank in leaving:
            self._note_try(rank, stuck=False)
        numbers, entry = tuple(rank.rank for rank in leaving), self._entry(place)
        return Diagnosis(
            id=new_id("diagnosis"),
            job=job,
            at=at,
            code=code,
            root="",
            node=place.node,
            ranks=numbers,
            hardware=True,
            transient=False,
            rule=EVACUATE,
            summary=why,
            evidence=entry.evidence if entry is not None else (),
        )

    def is_pointless(self, diagnosis: Diagnosis | None) -> bool:
        """All train on, and those who were to leave their places have nowhere to go any more."""
        fleet = self._fleet
        if diagnosis is None or diagnosis.rule != EVACUATE or fleet.generation != fleet.formed_generation:
            return False
        leaving = [fleet.ranks[rank] for rank in diagnosis.ranks]
        return len(fleet.free()) < len(leaving) and not self._can_reset(leaving, diagnosis.code, diagnosis.at)

    def _note_try(self, rank: Rank, *, stuck: bool) -> None:
        free, before = frozenset(self._fleet.free()), self._tried.get((rank.rank, rank.place))
        times = before.times if before is not None and free <= before.free else 0
        self._tried[rank.rank, rank.place] = Tried(free, TRIES if stuck else times + 1)

    def _tried_all(self, rank: Rank) -> bool:
        """Whether it need not be tried again, until there is a place that there was not."""
        tried = self._tried.get((rank.rank, rank.place))
        return tried is not None and tried.times >= TRIES and tried.free.issuperset(self._fleet.free())

    def _must_leave(self, rank: Rank) -> bool:
        if self._tried_all(rank):
            return False
        entry, passing = self._entry(rank.place), self._passing_at(rank.place)
        if entry is None:
            return passing is not None and passing.axes.running is not Running.NO
        # what a fault only keeps new work away from may finish what it does
        at_once = bool(entry.code) and entry.rule in (AT_ONCE.id, BY_VOTE.id)
        return not at_once or self._handling.verdict(entry.code, node=rank.node).axes.running is not Running.NO

    def _why(self, place: Place) -> str:
        entry, passing = self._entry(place), self._passing_at(place)
        return _out_of_use(entry) if entry is not None else passing.message if passing is not None else ""

    def _can_reset(self, leaving: list[Rank], code: str, at: float) -> bool:
        verdict = self._handling.verdict(code)
        wanted = verdict.axes.repair is Repair.RESET_DEVICE and Rung.RESET_DEVICE in verdict.rungs
        return wanted and all(
            self._fleet.agents[rank.node].resets
            and not self._was_reset(rank.place)
            and not self._handling.may_reset(f"device:{rank.place}", at)
            for rank in leaving
        )

    def _was_reset(self, place: Place) -> bool:
        """Whether that was tried since a fault was last seen there: what it did not help against, it will not the next time."""
        tried, entry, passing = (
            self._handling.last_reset(f"device:{place}"),
            self._entry(place),
            self._passing_at(place),
        )
        seen = max(entry.last_fault if entry is not None else 0.0, passing.at if passing is not None else 0.0)
        return tried is not None and tried >= seen

    def _code(self, place: Place) -> str:
        known = self._entry(place) or self._passing_at(place)
        return known.code if known is not None and known.code else MANUAL

    def _entry(self, place: Place) -> Entry | None:
        return self._handling.ledger.quarantined(f"device:{place}")

    def _passing_at(self, place: Place) -> Passing | None:
        subjects = (f"device:{place}", f"node:{place.node}")
        return next((one for (_, subject), one in self._passing.items() if subject in subjects), None)

    def _refresh_members(self) -> None:
        self._handling.members = members_of(self._fleet)
        self._handling.same = {
            f"device:{agent.node}/{name}": f"device:{agent.node}/{number}"
            for agent in self._fleet.agents.values()
            for number, address in enumerate(agent.accelerators)
            for name in spellings(address)
        }

    def _take(self, changes: Iterable[Change]) -> None:
        """What the ledger has come to: told, and acted on."""
        for change in changes:
            if change.what in SAID:
                self._tell(change.text)
            if change.what is What.STRONGER and change.rule:
                if change.axes.admission is not Admission.YES:
                    self._passing[change.code, change.subject] = Passing(
                        change.code, change.text, change.axes, change.at, lasting=True
                    )
            elif change.what is What.STRONGER:  # no longer muted
                seen = Seen(code=change.code, subject=change.subject, axes=change.axes, evidence=change.text)
                self._stands(seen, change.at, change.text)
                if change.axes.admission is Admission.YES:
                    self._tell(f"{change.subject}: nothing is done about {change.code} as long as no rank breaks of it")


def _out_of_use(entry: Entry) -> str:
    return f"{entry.subject} is out of use: {entry.reason or 'by hand'}"


def place_of(subject: str) -> Place | None:
    """Where ranks could be that a subject is about; None: nowhere, as for a link."""
    node, _, part = subject.partition(":")[2].partition("/")
    if kind_of(subject) == "node":
        return Place(node, WHOLE_NODE)
    return Place(node, int(part)) if kind_of(subject) == "device" and part.isdecimal() else None


def spellings(address: str) -> set[str]:
    """How drivers write a PCI address: with the function or without, with a long domain or none."""
    domain, _, rest = address.lower().partition(":")
    bare = rest.partition(".")[0]
    return {rest, bare, *(f"{form}:{tail}" for form in (domain, domain.zfill(8)) for tail in (rest, bare))}


def members_of(fleet: Fleet) -> frozenset[str]:
    """The nodes of a job and the devices that its ranks may have there."""
    devices = {f"device:{a.node}/{n}" for a in fleet.agents.values() for n in range(max(a.devices, a.slots))}
    placed = {f"device:{rank.place}" for rank in fleet.ranks.values()}
    return frozenset({f"node:{node}" for node in (*fleet.placed(), *fleet.agents)} | devices | placed)
