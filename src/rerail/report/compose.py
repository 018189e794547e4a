"""Turns a finished incident into its Recovery and Report, and into the one line people see. Pure.

Called by `runtime.controller` when an incident is over.
"""

from __future__ import annotations

from collections.abc import Mapping

from rerail.flow import Cost, Diagnosis, Fidelity, Recovery, Report, Rung, new_id
from rerail.recover.stages import Marks
from rerail.report.timeline import STAGES, Timeline, lost_steps, measure, phases
from rerail.runtime import plans
from rerail.runtime.fleet import Fleet
from rerail.runtime.incident import Incident
from rerail.runtime.plans import Source, Stale
from rerail.wording import counted, ranks


def timeline(incident: Incident, marks: Marks, fleet: Fleet, now: float) -> Timeline:
    """What is known of this incident's course, as the newest generation stands."""
    newest, ranks = fleet.generation, fleet.ranks.values()
    return Timeline(
        opened=marks.paused_at or incident.opened,
        detect_s=incident.detect_s,
        parked_at=marks.parked_at,
        formed_at=marks.formed_at,
        ended=marks.resumed_at or now,
        fault_version=incident.fault_version if not marks.paused_at else -1,
        resumed_version=marks.version,
        parked=marks.parked,
        formed={r.rank: r.formed for r in ranks if r.formed is not None and r.formed.generation == newest},
        resumed={r.rank: r.resumed for r in ranks if r.resumed is not None and r.resumed.generation == newest},
    )


def compose(
    incident: Incident, line: Timeline, sources: Mapping[int, Source], generation: int, wall: float, detail: str
) -> tuple[Recovery, Report]:
    """The last two records of an incident; `detail` says why it failed, or nothing."""
    diagnosis, decision = incident.diagnosis, incident.decision
    if diagnosis is None or decision is None:
        raise ValueError(f"incident {incident.number} has no decision yet; it cannot be reported")
    stopped = decision.rung is Rung.STOP
    ok = not detail and not stopped
    recovery = Recovery(
        id=new_id("recovery"),
        job=decision.job,
        at=wall,
        cause_id=decision.id,
        rung=decision.rung,
        generation=generation,
        ok=ok,
        attempts=incident.attempts,
        resumed_step=line.resumed_version if not stopped else -1,
        sources={rank: _found(source, line.resumed_version) for rank, source in sources.items()} if not stopped else {},
        phases=phases(line) if not stopped else (),
        detail=detail or decision.why,
    )
    report = Report(
        id=new_id("report"),
        job=decision.job,
        at=wall,
        cause_id=recovery.id,
        incident=incident.number,
        code=diagnosis.code,
        summary=_summary(diagnosis, incident.later),
        rung=decision.rung,
        ok=ok,
        cost=measure(line) if not stopped else Cost(detect=line.detect_s),
        lost_steps=lost_steps(line) if not stopped else 0,
        resumed_step=line.resumed_version if not stopped else -1,
        fidelity=Fidelity.APPROXIMATE if decision.rung in _HOW or _inexact(sources) else Fidelity.EXACT,
        attempts=incident.attempts,
        ranks=tuple(sorted({*diagnosis.ranks, *(rank for later in incident.later for rank in later.ranks)})),
        node=diagnosis.node,
        moves=decision.moves,
        links=(*incident.links, recovery.id),
    )
    return recovery, report


def controller_lost(diagnosis: Diagnosis, number: int, down_s: float, links: tuple[str, ...]) -> Report:
    """A new controller took over while every rank trained on: nothing was repaired and nothing lost."""
    return Report(
        id=new_id("report"),
        job=diagnosis.job,
        at=diagnosis.at,
        cause_id=diagnosis.id,
        incident=number,
        code=diagnosis.code,
        summary=diagnosis.summary,
        rung=Rung.RETRY_STEP,
        ok=True,
        cost=Cost(detect=down_s),
        attempts=0,
        node=diagnosis.node,
        links=links,
    )


def one_line(report: Report, recovery: Recovery) -> str:
    """What the user reads while the job runs."""
    ends = [phase.end for phase in recovery.phases if phase.name in STAGES]
    took = f"{max(ends):.2f} s" if ends else ""
    if report.rung is Rung.STOP:
        return f"{report.summary}: stopped, {recovery.detail}"
    if not report.ok:
        return f"{report.summary}: {recovery.detail}"
    if report.rung is Rung.RESTART_ALL:
        return f"{report.summary}: all ranks started again{f' in {took}' if took else ''} ({recovery.detail})"
    if report.rung is Rung.ROLL_BACK:
        lost = counted(report.lost_steps, "step")
        return (
            f"{report.summary}: all went back to step {report.resumed_step} in {took}, {lost} lost ({recovery.detail})"
        )
    if report.rung is Rung.RETRY_STEP:
        return f"{report.summary}: step {report.resumed_step + 1} retried in {took}"
    # a step that is computed is called by what it leads to, as everywhere
    replayed = (
        f"{report.lost_steps + 1} steps replayed" if report.lost_steps else f"step {report.resumed_step + 1} replayed"
    )
    found = f"found in {report.cost.detect:.1f} s, " if report.cost.detect >= 0.1 else ""
    places = ", ".join(f"rank {rank} on {place}" for rank, place in sorted(report.moves.items()))
    if report.rung is Rung.HOT_SWITCH:
        return f"{report.summary}: {places}; a pause of {took}, no step lost"
    moved = f" ({places})" if places else ""
    how = _HOW.get(report.rung) or _ALSO.get(report.rung, "replaced in {took}{moved}, survivors kept")
    done = how.format(took=took, moved=moved, ranks=ranks(report.ranks))
    return f"{report.summary}: {found}{done}, {replayed}"


_HOW = {
    Rung.SHRINK: "gone on with fewer ranks after {took}, batch and order of samples kept",
    Rung.GROW: "empty seats filled in {took}{moved}",
}
"""Rungs that change who adds up what: the same numbers within rounding, not the same bits."""
_ALSO = {Rung.RESET_DEVICE: "device of {ranks} reset and its process replaced in {took}, survivors kept"}


def _summary(first: Diagnosis, later: list[Diagnosis]) -> str:
    return "; then ".join(dict.fromkeys([first.summary, *(diagnosis.summary for diagnosis in later)]))


def source_in_words(source: Source) -> str:
    """Where one rank's state came from."""
    if source.stale is not None:
        return f"{_stale_in_words(source.stale)} (not exact)"
    if source.at >= 0:
        return f"its {source.kind if source.kind == 'snapshot' else 'state'} of step {source.at}, steps since then done again by it alone"
    return f"replica {source.rank}" if source.kind == "replica" else source.kind


def _stale_in_words(stale: Stale) -> str:
    of = f"{'the checkpoint' if stale.saved else 'its snapshot'} of step {stale.at}"
    on = f"on in a straight line from that of step {stale.before}"
    match stale.way:
        case plans.KEPT:
            return of
        case plans.SHADOW:
            line = f", {on}" if stale.before >= 0 else ""
            return f"its shadow of step {stale.version}{line}, all else from {of}"
        case plans.REPLICA:
            return f"parameters of rank {stale.rank}, all else from {of}"
        case plans.LINE if not stale.saved:
            return f"{of}, parameters {on}"
        case _:
            return f"{of}, parameters on as by predictor {stale.way}"


def _found(source: Source, resumed: int) -> str:
    """The same once all have gone on. What new processes of all ranks find in memory or on disk no plan can know."""
    if source.kind == "initial" and resumed > 0:
        return f"what was left of step {resumed} in memory, or saved"
    return source_in_words(source)


def _inexact(sources: Mapping[int, Source]) -> bool:
    return any(source.kind in ("stale", "behind") for source in sources.values())
