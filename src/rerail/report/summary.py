"""Finds a job's run directory and turns its journal into what the read commands show.

Called by `cli.report`, `cli.incidents` and `cli.status`. Reads only, also while the job runs.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from rerail.errors import UsageError
from rerail.flow import Action, AnyRecord, Decision, Diagnosis, Event, Fidelity, Recovery, Report, Signal
from rerail.report.seen import Seen, also_seen, places_seen
from rerail.report.spells import fault_time
from rerail.runtime.journal import FILE_NAME, Journal
from rerail.runtime.wire import HEALED

SKIPPED = "data.skipped"
_R = TypeVar("_R", Signal, Event, Diagnosis, Decision, Action)


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """All records of one incident, by kind."""

    report: Report
    signals: tuple[Signal, ...] = ()
    events: tuple[Event, ...] = ()
    diagnoses: tuple[Diagnosis, ...] = ()
    decisions: tuple[Decision, ...] = ()
    actions: tuple[Action, ...] = ()
    recovery: Recovery | None = None
    fault_at: float = 0.0
    """Wall clock of the fault; the report is dated by the end of the repair."""
    skipped: tuple[Signal, ...] = ()
    """Where ranks told which data they have left out because of it."""
    healed: Signal | None = None
    """What a rank told of the loss when a repair that was not exact had healed."""
    also_seen: tuple[Seen, ...] = ()
    """Faults of machines and training about the same time, that are not its cause."""


def run_root(env: Mapping[str, str] = os.environ) -> Path:
    """Where run directories live unless --run-dir says otherwise."""
    if env.get("RERAIL_HOME"):
        return Path(env["RERAIL_HOME"]).expanduser()
    if env.get("XDG_STATE_HOME"):
        return Path(env["XDG_STATE_HOME"]) / "rerail"
    return Path.home() / ".local" / "state" / "rerail"


def find_run(job: str = "", run_dir: str = "", env: Mapping[str, str] = os.environ) -> Path:
    """The run directory meant: the one given, the one of this job, or the newest."""
    if run_dir:
        path = Path(run_dir)
        if not (path / FILE_NAME).is_file():
            raise UsageError(f"{path} holds no journal", hint="--run-dir names the folder a job was started with")
        return path
    root = run_root(env)
    runs = {path.parent.name: path.parent for path in root.glob(f"*/{FILE_NAME}")} if root.is_dir() else {}
    if job:
        if job not in runs:
            known = ", ".join(sorted(runs)[-5:]) or "none"
            raise UsageError(f"no job {job!r} in {root}", hint=f"jobs there: {known}")
        return runs[job]
    if not runs:
        raise UsageError(
            f"no job has run yet (looked in {root})", hint="start one: rerail run train.py, or rerail demo"
        )
    return max(runs.values(), key=lambda path: (path / FILE_NAME).stat().st_mtime_ns)


@contextlib.contextmanager
def reading(run: Path) -> Iterator[Journal]:
    """The journal of a run, read-only."""
    journal = Journal(run / FILE_NAME, read_only=True)
    try:
        yield journal
    finally:
        journal.close()


def reports(journal: Journal) -> list[Report]:
    """Reports of all incidents that are over, oldest first."""
    return [record for record in journal.records(kind="report") if isinstance(record, Report)]


def fault_times(journal: Journal, found: Iterable[Report]) -> dict[int, float]:
    """Wall clock of the fault of each incident."""
    openings = journal.openings()
    recoveries = {one.id: one for one in journal.records(kind="recovery") if isinstance(one, Recovery)}
    return {
        one.incident: fault_time(one, recoveries.get(one.cause_id), openings.get(one.incident, one.at)) for one in found
    }


def seen(journal: Journal) -> list[Seen]:
    """Faults of machines, training and places for checkpoints that were told, and were not the cause of an incident."""
    diagnoses = _of(journal.records(kind="diagnosis"), Diagnosis)
    signals, events = _of(journal.records(kind="signal"), Signal), _of(journal.records(kind="event"), Event)
    found = [*also_seen(signals, events, {found.root for found in diagnoses}), *places_seen(signals)]
    return sorted(found, key=lambda one: one.first)


def story(journal: Journal, report: Report) -> Story:
    """Everything that led to this report."""
    records = journal.records(incident=report.incident)
    recoveries = [record for record in records if isinstance(record, Recovery)]
    left_out = {version for decision in _of(records, Decision) for version in decision.skips}
    told = [one for one in _of(journal.records(kind="signal"), Signal) if one.source == SKIPPED] if left_out else []
    began = min((record.at for record in records), default=report.at)
    return Story(
        healed=_healed(journal, report),
        report=report,
        signals=_of(records, Signal),
        events=_of(records, Event),
        diagnoses=_of(records, Diagnosis),
        decisions=_of(records, Decision),
        actions=_of(records, Action),
        recovery=recoveries[-1] if recoveries else None,
        fault_at=fault_times(journal, [report])[report.incident],
        skipped=tuple(one for one in told if one.step in left_out and one.at >= began),
        also_seen=tuple(one for one in seen(journal) if one.near(began, report.at)),
    )


def _healed(journal: Journal, report: Report) -> Signal | None:
    """The first word on it before the next repair."""
    if report.fidelity is not Fidelity.APPROXIMATE:
        return None
    later = min((one.at for one in reports(journal) if one.at > report.at), default=math.inf)
    told = (one for one in _of(journal.records(kind="signal"), Signal) if one.source == HEALED)
    return next((one for one in told if report.at <= one.at < later), None)


def _of(records: list[AnyRecord], kind: type[_R]) -> tuple[_R, ...]:
    return tuple(record for record in records if isinstance(record, kind))
