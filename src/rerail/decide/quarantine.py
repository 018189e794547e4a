"""What is kept out of use, since when, why and until when: turns faults and orders of people into a quarantine. Pure.

Part of the ledger (`decide.escalate`). Sticky: nothing leaves it because a fault has gone. It leaves by hand, or when it was
without a fault for the time of the rule that put it there and then passes `rerail check --deep` (probation).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from rerail.decide.subjects import kind_of, node_of
from rerail.errors import UsageError
from rerail.wording import guess

BY_RERAIL = "rerail"
EVIDENCE = 5
"""Sightings that are kept with an entry."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is out of use."""

    subject: str
    reason: str
    since: float
    """Wall clock."""
    by: str = BY_RERAIL
    """Who put it there: `rerail`, or a person."""
    rule: str = ""
    code: str = ""
    evidence: tuple[str, ...] = ()
    release_s: float = 0.0
    """Seconds without a fault before probation; 0: by hand only."""
    last_fault: float = 0.0
    probation: bool = False
    """Free of faults for long enough; usable once `rerail check --deep` has passed."""

    @property
    def ends(self) -> float | None:
        """When it turns into probation if nothing happens; None if it does not by itself."""
        return self.last_fault + self.release_s if self.release_s and not self.probation else None


Entries = Mapping[str, Entry]


def covering(entries: Entries, subject: str) -> Entry | None:
    """The entry that keeps it out of use: its own, or its node's."""
    return entries.get(subject) or entries.get(node_of(subject))


def usable(entries: Entries, members: Iterable[str]) -> list[str]:
    """Of the nodes and devices of a job those that may be used."""
    return [one for one in members if covering(entries, one) is None]


def takes_the_last(entries: Entries, members: Collection[str], subject: str) -> str:
    """What the job would have none of without this one, as `is the last node`, `has the last devices`; or nothing."""
    if kind_of(subject) == "link":
        return ""
    without = {**entries, subject: Entry(subject=subject, reason="", since=0.0)}
    for kind in ("node", "device") if kind_of(subject) == "node" else ("device", "node"):
        # of a large job the first that is usable ends the search
        if any(kind_of(one) == kind and covering(without, one) is None for one in members):
            continue
        if usable(entries, [one for one in members if kind_of(one) == kind]):
            return f"is the last {kind}" if kind_of(subject) == kind else f"has the last {kind}s"
    return ""


def added(entries: Entries, entry: Entry, members: Collection[str], *, force: bool = False) -> dict[str, Entry]:
    """With one more, as a person wants it. Refused where nothing would be left to train on."""
    if not force and (last := takes_the_last(entries, members, entry.subject)):
        raise UsageError(
            f"{entry.subject} {last} of this job that may be used: with it in quarantine nothing could train",
            hint="release another one first, or add --force",
        )
    return {**entries, entry.subject: entry}


def released(entries: Entries, subject: str) -> dict[str, Entry]:
    """Without that one; an error with what was probably meant if it is not there."""
    if subject not in entries:
        raise UsageError(f"{subject} is not in quarantine{guess(subject, entries)}", hint=_listing(entries, subject))
    return {name: entry for name, entry in entries.items() if name != subject}


def _listing(entries: Entries, subject: str) -> str:
    if node_of(subject) in entries:
        return f"its node is: release {node_of(subject)}"
    return f"in quarantine: {', '.join(sorted(entries))}" if entries else "nothing is (rerail quarantine list)"
