"""Turns what a journal holds into spells of time: the runs of a job, its windows of training and its interruptions. Pure.

Called by `report.accounts`, which has `report.partition` make one line of time of them. Clocks of other nodes and clocks that were
set are no reason to refuse: what lies outside is cut off there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rerail.flow import Recovery, Report, Rung
from rerail.report.partition import Run, Stop, Window
from rerail.runtime.samples import Mark, MarkKind, Sample

OFF_S, SOON_S = 30.0, 10.0
"""A controller that is lost is back within seconds; where ranks have trained on meanwhile, it hears of their steps at once."""


def runs_of(samples: Sequence[Sample], marks: Sequence[Mark], records: tuple[float, float] | None) -> list[Run]:
    """Lives of the job, oldest first. `records`: when the first and the last record was made."""
    lives: list[list[Mark]] = []
    for mark in marks:
        if mark.kind is MarkKind.BEGIN or not lives or _was_off(mark, lives[-1], samples):
            lives.append([])
        lives[-1].append(mark)
    if not lives:  # written by a rerail that kept no such things
        return [Run(*records, silent=True, closed=False)] if records is not None else []
    found = []
    for place, life in enumerate(lives):
        begin = life[0].at
        until = lives[place + 1][0].at if place + 1 < len(lives) else float("inf")
        told = [one for one in samples if begin <= one.at < until]
        newest = records[1] if records is not None and place + 1 == len(lives) else begin
        found.append(
            _run(life, told, min(newest, until), max((one.step for one in samples if one.at < begin), default=-1))
        )
    return found


def _run(life: Sequence[Mark], told: Sequence[Sample], newest: float, reached: int) -> Run:
    """`newest`: when the last record was made; `reached`: the highest version of earlier runs."""
    begin, last = life[0].at, life[-1]
    trained = next((one for one in life if one.kind is MarkKind.TRAINED), None)
    if trained is None and life[0].kind is MarkKind.TAKEOVER:  # to this controller the first steps are not new
        moved = next((one for one in told if one.steps > 0), None)
        trained = Mark(moved.at - moved.span_s, MarkKind.TRAINED) if moved is not None else None
    repeated = max(0, reached - int(trained.detail)) if trained is not None and trained.detail.isdecimal() else 0
    closed = last.kind in (MarkKind.END, MarkKind.LEFT)
    end = max([last.at, *(one.at for one in told), *([] if closed else [newest])])
    return Run(
        begin=begin,
        end=max(begin, end),
        trained=trained.at if trained is not None else None,
        progress=max((one.moved for one in told if one.steps > 0), default=None),
        silent=not any(one.joined for one in told),
        closed=closed,
        repeated=repeated,
        lost=repeated * (mean_step(told) or 0.0),
    )


def _was_off(mark: Mark, life: Sequence[Mark], samples: Sequence[Sample]) -> bool:
    """Whether a controller took over when nothing of the job was left: long after the last sample, and nobody had trained on."""
    if mark.kind is not MarkKind.TAKEOVER:
        return False
    before = [one.at for one in samples if life[0].at <= one.at < mark.at]
    soon = [one for one in samples if mark.at <= one.at <= mark.at + SOON_S]
    return bool(before) and mark.at - max(before) > OFF_S and not any(one.steps > 0 for one in soon)


def mean_step(samples: Sequence[Sample]) -> float | None:
    """Seconds of a step; None where none was told."""
    told = sum(one.told for one in samples)
    spent = sum((one.data + one.compute + one.communication + one.checkpoint) * one.told for one in samples)
    return spent / told if told else None


def windows_of(samples: Sequence[Sample]) -> list[Window]:
    """Between each two moments at which new steps were complete: what share of the time they waited for something."""
    found: list[Window] = []
    since: float | None = None
    for sample in samples:
        if since is None:
            since = sample.at - sample.span_s
        if sample.steps <= 0 or sample.moved <= since:
            continue
        whole = sample.data + sample.compute + sample.communication + sample.checkpoint
        if sample.told and whole > 0:
            found.append(Window(since, sample.moved, sample.data / whole, sample.checkpoint / whole))
        since = sample.moved
    return found


def interruptions(
    openings: Mapping[int, float],
    reports: Mapping[int, Report],
    recoveries: Mapping[str, Recovery],
    runs: Sequence[Run],
) -> list[Stop]:
    """Those incidents that held up the training, in order. `openings`: when the first record of each was made."""
    found = []
    for number, opened in sorted(openings.items()):
        report = reports.get(number)
        if report is None:
            end = next((run.end for run in reversed(runs) if run.begin <= opened), opened)
            found.append(Stop(number, opened, opened, end, end, max(opened, end)))
        elif report.attempts or report.rung is Rung.STOP:  # else a controller was lost, and every rank trained on
            found.append(_stop(report, recoveries.get(report.cause_id), opened))
    return found


def fault_time(report: Report, recovery: Recovery | None, opened: float) -> float:
    """Wall clock of the fault that a report is of; the report itself is dated by the end of the repair."""
    if report.attempts or report.rung is Rung.STOP:
        return _stop(report, recovery, opened).begin
    return report.at - report.cost.detect


def _stop(report: Report, recovery: Recovery | None, opened: float) -> Stop:
    """Durations are the controller's own; only where it has none does the clock of the first record count."""
    cost, end = report.cost, report.at
    stages = {phase.name: phase for phase in recovery.phases} if recovery is not None else {}
    replay = stages.get("replay")
    signal = end - replay.end if replay is not None else min(opened, end)
    parked = signal + stages["reschedule"].end if "reschedule" in stages else end
    formed = signal + stages["form"].end if "form" in stages else end
    # a hot switch is made ready while training goes on: nothing stands still before the pause itself
    detect = cost.detect if report.rung is not Rung.HOT_SWITCH else 0.0
    return Stop(
        incident=report.incident,
        begin=signal - max(0.0, detect),
        signal=signal,
        parked=parked,
        formed=formed,
        end=end,
        communication=max(0.0, cost.t2),
        load=max(0.0, cost.t3),
        compile=max(0.0, cost.t4),
        lost=max(0.0, cost.t0),
    )
