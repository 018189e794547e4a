"""`rerail policy replay`: walks the journal of a job and says what a policy would have done, beside what was done.

Called by `cli.policy`. Nothing is run again: each decision of the journal is held against the policy with the rungs that were
feasible then, and each event goes through the ledger at the time it had.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec

from rerail.config import Settings
from rerail.decide.axes import Admission, Axes, Running
from rerail.decide.budget import EVACUATE
from rerail.decide.escalate import Change, What
from rerail.decide.escalation import AT_ONCE
from rerail.decide.policy import Verdict
from rerail.decide.subjects import node_of
from rerail.detect.levels import Levels
from rerail.flow import AnyRecord, Candidate, Decision, Diagnosis, Event, Rung, Signal
from rerail.report.summary import find_run
from rerail.runtime.handling import Handling
from rerail.runtime.isolation import MANUAL
from rerail.runtime.journal import FILE_NAME, Journal
from rerail.runtime.quarantining import members_in
from rerail.wording import counted

NOTHING = "nothing"
"""What would be done where a policy leaves ranks in their places."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One decision, as it was and as it would be."""

    at: float
    code: str
    node: str
    done: Rung
    would: str
    """A rung, or NOTHING."""
    why: str
    verdict: Verdict


def replay(name: str, settings: Settings, origin: str, *, as_json: bool) -> int:
    """Print both, beside one another."""
    path = _journal_of(name)
    journal = Journal(path, read_only=True)
    try:
        records, members = journal.records(), members_in(journal.state())
    finally:
        journal.close()
    handling = Handling(settings, Levels.of(settings).catalog(), _job(records))
    handling.members = members
    steps, changes = walk(records, handling)
    if as_json:
        shown: dict[str, Any] = {
            "journal": str(path),
            "policy": origin,
            "decisions": [msgspec.to_builtins(step) for step in steps],
            "changes": [msgspec.to_builtins(change) for change in changes],
            "quarantine": sorted(handling.ledger.quarantine),
        }
        print(json.dumps(shown))
    else:
        print("\n".join(_described(steps, changes, handling, origin)))
    return 0


def walk(records: list[AnyRecord], handling: Handling) -> tuple[list[Step], list[Change]]:
    """All decisions, and what the ledger would have come to."""
    diagnoses = {one.id: one for one in records if isinstance(one, Diagnosis)}
    signals = {one.id: one for one in records if isinstance(one, Signal)}
    steps: list[Step] = []
    changes: list[Change] = []
    for record in records:
        if isinstance(record, Event):
            payload = signals[record.cause_id].payload if record.cause_id in signals else {}
            subject, over = str(payload.get("subject", "")), bool(payload.get("over"))
            changes += _ticks(handling, record.at)
            once = payload.get("detector") in (None, "kernel_log")
            seen = handling.seen(record, subject, over=over, once=once)
            changes += handling.note(seen, record.at)
            if payload.get("subject") and not (over or seen.mute_s) and seen.axes.admission is Admission.NO:
                changes += handling.isolate(seen, record.at)
        elif isinstance(record, Decision) and record.cause_id in diagnoses:
            steps.append(_step(record, diagnoses[record.cause_id], handling, changes))
    end = max((record.at for record in records), default=0.0)
    return steps, [*changes, *_ticks(handling, end + handling.book.storm_s)]


def _ticks(handling: Handling, until: float) -> list[Change]:
    """All deadlines up to a time, one after another."""
    changes: list[Change] = []
    while (due := handling.next_deadline()) is not None and due <= until:
        before = handling.ledger
        changes += handling.tick(due)
        if handling.ledger == before:
            break
    return changes


def _step(decision: Decision, diagnosis: Diagnosis, handling: Handling, changes: list[Change]) -> Step:
    verdict = handling.verdict(diagnosis.code, node=diagnosis.node)
    would: str = decision.rung
    if diagnosis.code == MANUAL:
        why = "put out of use by hand, whatever the policy says"
    elif diagnosis.rule == EVACUATE and not _leaves(diagnosis, verdict, handling, changes):
        would, why = NOTHING, f"only a monitor told, and rule {verdict.rule} lets the ranks stay"
    elif decision.rung in verdict.rungs:
        why = "the policy allows it"
    else:
        would = _cheapest(decision.candidates, verdict)
        why = f"rule {verdict.rule} does not allow {decision.rung}"
    return Step(
        at=decision.at,
        code=diagnosis.code,
        node=diagnosis.node,
        done=decision.rung,
        would=would,
        why=why,
        verdict=verdict,
    )


def _leaves(diagnosis: Diagnosis, verdict: Verdict, handling: Handling, changes: list[Change]) -> bool:
    """Whether ranks that still work would have had to leave their place: by the fault itself, or because it came often or lasted."""
    code, node = diagnosis.code, f"node:{diagnosis.node}"
    for entry in handling.ledger.quarantine.values():
        if (entry.code, node_of(entry.subject)) == (code, node) and entry.rule != AT_ONCE.id:
            return True
    stronger = [
        one for one in changes if one.what is What.STRONGER and (one.code, node_of(one.subject)) == (code, node)
    ]
    if any(_moves(one.axes) for one in stronger):
        return True
    return not verdict.mute_s and _moves(verdict.axes)


def _moves(axes: Axes) -> bool:
    return axes.admission is not Admission.YES and axes.running is not Running.NO


def _cheapest(candidates: tuple[Candidate, ...], verdict: Verdict) -> Rung:
    """Of what could be done then and may be done now; the job is stopped where nothing is left."""
    found = [one for one in candidates if one.feasible and one.rung in verdict.rungs and one.rung is not Rung.STOP]
    return min(found, key=lambda one: one.expected.total).rung if found else Rung.STOP


def _described(steps: list[Step], changes: list[Change], handling: Handling, origin: str) -> list[str]:
    told = [(change.at, f"{_clock(change.at)}  {change.what}: {change.text}") for change in changes]
    for step in steps:
        mark = "same" if step.done == step.would else "other"
        muted = f", muted for {step.verdict.mute_s:g} s" if step.verdict.mute_s else ""
        what = f"{step.code} on {step.node}: done {step.done}, would {step.would} ({mark}: {step.why})"
        asked = f"\n          {step.verdict.axes}{muted}" if step.code != MANUAL else ""
        told.append((step.at, f"{_clock(step.at)}  {what}{asked}"))
    lines = [text for _, text in sorted(told, key=lambda one: one[0])]
    other = sum(step.done != step.would for step in steps)
    lines.append(
        f"{origin}: {counted(len(steps), 'decision')}, {other} of them otherwise; "
        f"{counted(len(handling.ledger.quarantine), 'thing')} would be in quarantine"
    )
    return lines


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _journal_of(name: str) -> Path:
    path = Path(name)
    if name and path.is_file():
        return path
    if name and (path / FILE_NAME).is_file():
        return path / FILE_NAME
    return find_run(name) / FILE_NAME


def _job(records: list[AnyRecord]) -> str:
    return next((record.job for record in records), "")
