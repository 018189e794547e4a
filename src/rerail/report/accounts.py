"""Turns a journal into a job's accounts: what every second of it went into, what each incident cost, and the ratios people ask for.

Called by `cli.report`; shown by `report.sheet`, `report.webpage` and `report.trace`. Reads by kind, so that a million records do
not matter. How the time is told from the journal stands in `report.spells`, which second is whose in `report.partition`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from rerail.flow import AnyRecord, Recovery, Report
from rerail.report.partition import PHASES, Cause, Piece, Run, Stop, partition
from rerail.report.spells import interruptions, mean_step, runs_of, windows_of
from rerail.runtime.journal import Journal
from rerail.runtime.samples import Mark, MarkKind, Sample

NO_FAULTS = ("node.back",)
"""Incidents that are none: seats are filled again."""
_R = TypeVar("_R", Report, Recovery)


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """What one incident cost the job, each second counted once."""

    number: int
    at: float
    """Wall clock of the fault."""
    code: str = ""
    summary: str = "the job ended before it was over"
    rung: str = ""
    """What was done; empty: nothing had to be."""
    ok: bool = False
    over: bool = False
    """False: the job ended, or stands, before it was."""
    ranks: tuple[int, ...] = ()
    node: str = ""
    lost_steps: int = 0
    detect_s: float = 0.0
    """From the fault to the first sign of it."""
    handle_s: float = 0.0
    """From there to the first step afterwards."""
    parts: dict[Cause, float] = {}
    """Seconds on the critical path: detection, and T0 to T4."""
    total_s: float = 0.0

    @property
    def fault(self) -> bool:
        return self.code not in NO_FAULTS


class Accounts(msgspec.Struct, frozen=True, kw_only=True):
    """One job's. Times are seconds; None is what is not known."""

    job: str
    begin: float
    """Wall clock."""
    wall_s: float
    """From the beginning of the first run to the end of the last, or to the last sign of it."""
    exit_code: int | None
    """None: no end was written down."""
    runs: int
    takeovers: int
    """Controllers that went on with the job of one that was lost."""
    parts: dict[Cause, float]
    """The wall time by cause; adds up to `wall_s`."""
    ettr: float | None
    """Effective training time ratio: the share of the wall time that is training."""
    steps: int | None
    """New steps completed."""
    lost_steps: int
    """Steps that had been completed and were computed again, also because a new run began with an older version."""
    step_s: float | None
    """Mean seconds of a step."""
    faults: int
    mtbf_s: float | None
    """Mean time between faults: the wall time over their number."""
    mttr_s: float | None
    """Mean time to repair: from a fault to the first new step, over the faults that held up the training and were repaired."""
    checkpoints: int | None
    """Versions that were saved."""
    checkpoint_s: float | None
    """What steps waited for snapshots and checkpoints, all together."""
    standby_s: float | None
    """Warm processes without a place, times the seconds they were held."""
    spare_s: float | None
    """Places for ranks that none had, times seconds."""
    incidents: list[Incident] = []
    pieces: list[Piece] = []
    samples: list[Sample] = []

    @property
    def badput(self) -> dict[Cause, float]:
        """All that is not training, the largest first."""
        rest = [
            (cause, seconds) for cause, seconds in self.parts.items() if cause is not Cause.TRAINING and seconds > 0
        ]
        return dict(sorted(rest, key=lambda one: -one[1]))

    @property
    def by_code(self) -> dict[str, tuple[int, float]]:
        """How often each fault was, and the seconds it cost; the most costly first."""
        found: dict[str, list[float]] = defaultdict(list)
        for incident in self.incidents:
            found[incident.code or "not over"].append(incident.total_s)
        return dict(sorted(((c, (len(s), sum(s))) for c, s in found.items()), key=lambda one: -one[1][1]))


def accounts(journal: Journal, job: str) -> Accounts | None:
    """Of the whole job so far; None: the journal holds nothing yet."""
    samples, marks = journal.history()
    reports = _of(journal.records(kind="report"), Report)
    openings = journal.openings()
    moments = [*(journal.ends() or ()), *openings.values(), *(one.at for one in reports)]
    runs = runs_of(samples, marks, (min(moments), max(moments)) if moments else None)
    if not runs:
        return None
    recoveries = {one.id: one for one in _of(journal.records(kind="recovery"), Recovery)}
    stops = interruptions(openings, {one.incident: one for one in reports}, recoveries, runs)
    pieces = partition(runs, stops, windows_of(samples))
    incidents = _incidents(stops, reports, pieces)
    return _summed(job, runs, pieces, incidents, samples, marks)


def _summed(
    job: str,
    runs: Sequence[Run],
    pieces: list[Piece],
    incidents: list[Incident],
    samples: list[Sample],
    marks: Sequence[Mark],
) -> Accounts:
    parts = dict.fromkeys(Cause, 0.0)
    for piece in pieces:
        parts[piece.cause] += piece.seconds
    begin, end = min(run.begin for run in runs), max(run.end for run in runs)
    wall, trained = max(0.0, end - begin), any(run.trained is not None for run in runs)
    faults = [one for one in incidents if one.fault]
    repaired = [one.total_s for one in faults if one.ok and one.total_s > 0]
    repeated = sum(run.repeated for run in runs)
    newest = marks[max((n for n, one in enumerate(marks) if one.kind is MarkKind.BEGIN), default=0) :]
    code = next((one.detail for one in reversed(newest) if one.kind is MarkKind.END), "") if runs[-1].closed else ""
    return Accounts(
        job=job,
        begin=begin,
        wall_s=wall,
        exit_code=int(code) if code.lstrip("-").isdecimal() else None,
        runs=len(runs),
        takeovers=sum(one.kind is MarkKind.TAKEOVER for one in marks),
        parts=parts,
        ettr=parts[Cause.TRAINING] / wall if trained and wall > 0 else None,
        steps=max(0, sum(one.steps for one in samples) - repeated) if trained else None,
        lost_steps=sum(one.lost_steps for one in incidents) + repeated,
        step_s=mean_step(samples),
        faults=len(faults),
        mtbf_s=wall / len(faults) if faults else None,
        mttr_s=sum(repaired) / len(repaired) if repaired else None,
        checkpoints=sum(one.saves for one in samples) if samples else None,
        checkpoint_s=parts[Cause.CHECKPOINT] if trained else None,
        standby_s=sum(one.standbys * one.span_s for one in samples) if samples else None,
        spare_s=sum(one.spares * one.span_s for one in samples) if samples else None,
        incidents=incidents,
        pieces=pieces,
        samples=samples,
    )


def _incidents(stops: Sequence[Stop], reports: Iterable[Report], pieces: Iterable[Piece]) -> list[Incident]:
    """One for each report, and for each interruption that has none."""
    spent: dict[int, dict[Cause, float]] = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
    for piece in pieces:
        if piece.incident:
            spent[piece.incident][piece.cause] += piece.seconds
    held = {one.incident: one for one in stops}
    told = {one.incident: one for one in reports}
    return [_incident(number, held.get(number), told.get(number), spent[number]) for number in sorted({*held, *told})]


def _incident(number: int, stop: Stop | None, report: Report | None, parts: dict[Cause, float]) -> Incident:
    handled = stop.end - stop.signal if stop is not None else 0.0
    total = sum(parts.values())
    if report is None:
        at = stop.begin if stop is not None else 0.0
        return Incident(number=number, at=at, handle_s=handled, parts=parts, total_s=total)
    return Incident(
        number=number,
        at=stop.begin if stop is not None else report.at - report.cost.detect,
        code=report.code,
        summary=report.summary,
        rung=report.rung.value if stop is not None else "",
        ok=report.ok,
        over=True,
        ranks=report.ranks,
        node=report.node,
        lost_steps=report.lost_steps,
        detect_s=report.cost.detect,
        handle_s=handled,
        parts=parts,
        total_s=total,
    )


def _of(records: list[AnyRecord], kind: type[_R]) -> list[_R]:
    return [record for record in records if isinstance(record, kind)]
