"""Turns records into the plain text people read: one incident as a page, all of them as a table. Pure.

Called by `cli.report`, `cli.incidents` and the demo.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from rerail.faults.catalog import Catalog
from rerail.flow import Decision, Diagnosis, Recovery, Report, Rung, Severity
from rerail.report.seen import Seen, told_in
from rerail.report.summary import Story
from rerail.wording import counted, ranks

BAR_WIDTH = 20
SEEN_ROWS, SEEN_WIDTH = 20, 80
SKIPPED_WORDS = "left out of the training "
"""What ranks begin with when they tell of it."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_DONE = {
    Rung.RETRY_STEP: "step retried",
    Rung.ROLL_BACK: "rolled back",
    Rung.HOT_SWITCH: "switched to a spare",
    Rung.REPLACE_RANK: "rank replaced",
    Rung.RESET_DEVICE: "device reset",
    Rung.SWAP_DEVICE: "moved to a spare device",
    Rung.SWAP_NODE: "moved to a spare node",
    Rung.GROW: "empty seats filled",
    Rung.SHRINK: "went on with fewer ranks",
    Rung.RESTART_ALL: "all restarted",
    Rung.STOP: "stopped",
}


def bar(value: float, largest: float, width: int = BAR_WIDTH) -> str:
    """A bar of block characters, precise to an eighth of one; anything that is not shown as zero has one."""
    if value < 0.005 or largest <= 0:  # shown as 0.00 s
        return ""
    eighths = max(1, round(value / largest * width * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def seconds(value: float) -> str:
    """Seconds as a person would write them: two decimals below ten."""
    return f"{value:.2f} s" if value < 10 else f"{value:,.1f} s"


def done(report: Report) -> str:
    """What was done about it, in two words."""
    return "taken over" if report.code == "controller.lost" and not report.attempts else _DONE[report.rung]


def render(story: Story, catalog: Catalog) -> str:
    """One incident as a page."""
    report = story.report
    lines = [
        _heading(report, story.fault_at or report.at),
        *_cause(story, catalog),
        *_near(story.also_seen),
        *_handling(story),
        "",
        *costs(report),
    ]
    advice = catalog.get(report.code)
    if advice is not None and advice.advice:
        lines += ["", f"  {advice.advice}"]
    return "\n".join([*lines, "more: rerail incidents · rerail status · rerail report N --json"])


def blind(report: Report) -> bool:
    """Whether nobody knows when the training went on: all ranks were started again, and none told a step."""
    return report.rung is Rung.RESTART_ALL and report.ok and report.resumed_step < 0


def costs(report: Report) -> list[str]:
    """Where the time went, with bars."""
    cost = report.cost
    if blind(report):
        return [
            f"  {'detect':<17}{seconds(cost.detect):>8}",
            "  T0 to T4 are not known: the script does not call rerail.join(), and its ranks tell no steps",
        ]
    rows = [
        ("T0 lost work", cost.t0),
        ("detect", cost.detect),
        ("T1 reschedule", cost.t1),
        ("T2 communication", cost.t2),
        ("T3 load", cost.t3),
        ("T4 compile", cost.t4),
    ]
    largest = max(value for _, value in rows)
    lines = [f"  {name:<17}{seconds(value):>8}  {bar(value, largest)}".rstrip() for name, value in rows]
    return [*lines, f"  {'total':<17}{seconds(cost.total):>8}"]


def table(reports: Sequence[Report], fault_times: Mapping[int, float]) -> str:
    """All incidents, one line each, with the times of their faults."""
    if not reports:
        return "no incidents"
    head = ("#", "when", "what", "done", "lost", "detect", "T0", "T1", "T2", "T3", "T4", "total")
    return "\n".join(
        aligned(
            [head, *(_row(report, fault_times.get(report.incident, report.at)) for report in reports)], left={1, 2, 3}
        )
    )


def aligned(rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Rows with their columns below one another: words from the `left`, all others from the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def seen_table(found: Sequence[Seen]) -> list[str]:
    """What was told of machines and training, one line each, and nothing where nothing was."""
    if not found:
        return []
    rows = [(_clock(one.first), one.code, _where(one), _often(one), _shown(one)) for one in _foremost(found)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["also seen, and no incident by itself:"]
    lines += ["  ".join(["", *(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]) for row in rows]
    if len(found) > len(rows):
        lines.append(f"  and {len(found) - len(rows)} more (--json shows all)")
    return [line.rstrip() for line in lines]


def _near(found: Sequence[Seen]) -> list[str]:
    lines = [
        f"{_clock(one.first)}  {one.code}, {_where(one)}, {_often(one)}: {_shown(one)}" for one in _foremost(found)
    ]
    if len(found) > len(lines):
        lines.append(f"and {len(found) - len(lines)} more (--json shows all)")
    return [f"  {'' if number else 'also seen':<14}{line}" for number, line in enumerate(lines)]


def _foremost(found: Sequence[Seen]) -> list[Seen]:
    """Where there are too many, those that matter most; in the order they began."""
    order = list(Severity)
    gravest = sorted(found, key=lambda one: -order.index(one.severity))[:SEEN_ROWS]
    return sorted(gravest, key=lambda one: one.first)


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _where(one: Seen) -> str:
    what = f"rank {one.rank}" if one.rank >= 0 else one.subject
    return f"{one.node}, {what}" if what else one.node


def _often(one: Seen) -> str:
    times = "once" if one.count == 1 else f"{one.count} times"
    return f"{times}, over" if one.over else times if one.passing else f"{times}, not over"


def _shown(one: Seen) -> str:
    """The evidence tells more than a title, unless the line for people has it already."""
    text = one.message if not one.evidence or one.evidence in one.message else one.evidence.strip().splitlines()[0]
    return text if len(text) <= SEEN_WIDTH else text[: SEEN_WIDTH - 1] + "…"


def _row(report: Report, at: float) -> tuple[str, ...]:
    cost = report.cost
    when = _clock(at)
    figures = (cost.detect, cost.t0, cost.t1, cost.t2, cost.t3, cost.t4, cost.total)
    what = report.summary if len(report.summary) <= 60 else report.summary[:59] + "…"
    verdict = done(report) if report.ok or report.rung is Rung.STOP else f"{done(report)}, failed"
    lost, told = str(report.lost_steps), [f"{f:.2f}" for f in figures]
    if blind(report):
        lost, told = "-", [told[0], *("-" for _ in told[1:])]
    return (str(report.incident), when, what, verdict, lost, *told)


def _heading(report: Report, at: float) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    where = [f"node {report.node}"] if report.node else []
    if report.ranks:
        where.append(ranks(report.ranks))
    return f"incident {report.incident}   {when}   {', '.join(where)}"


def _cause(story: Story, catalog: Catalog) -> list[str]:
    report, diagnosis = story.report, story.diagnoses[0] if story.diagnoses else None
    fault = catalog.get(report.code)
    lines = [f"  {'root cause':<14}{report.code}  {fault.title if fault is not None else report.summary}"]
    lines.append(f"  {'':<14}{report.summary}")
    if diagnosis is not None:
        lines += [f"  {'':<14}| {line}" for line in diagnosis.evidence]
        lines += _echoes(story, diagnosis)
    return lines


def _echoes(story: Story, diagnosis: Diagnosis) -> list[str]:
    roots = {found.root for found in story.diagnoses}
    told = told_in(story.signals)  # of these the page speaks below
    kinds = Counter(event.code for event in story.events if event.id not in roots and event.cause_id not in told)
    if not kinds:
        return []
    text = ", ".join(f"{count} x {code}" for code, count in kinds.items())
    return [f"  {'echoes':<14}{text} (folded by rule {diagnosis.rule})"]


def _handling(story: Story) -> list[str]:
    report = story.report
    lines = []
    for decision in story.decisions:
        lines += [f"  {'decision':<14}{_decision(decision)}", f"  {'':<14}because {decision.why}"]
        lines += [f"  {'left out':<14}{text}" for text in _left_out(decision, story)]
    if report.attempts > 1:
        lines.append(f"  {'attempts':<14}{report.attempts}")
    if story.recovery is not None and not report.ok:
        lines.append(f"  {'outcome':<14}{story.recovery.detail}")
    elif report.resumed_step >= 0:
        source = _sources(story.recovery)
        lines.append(
            f"  {'resumed at':<14}step {report.resumed_step:,} (lost {report.lost_steps} steps, {report.fidelity}{source})"
        )
    if story.healed is not None:
        lines.append(f"  {'healed':<14}{story.healed.payload.get('message', '')}")
    return lines


def _decision(decision: Decision) -> str:
    ranks = f" {', '.join(map(str, decision.ranks))}" if decision.ranks else ""
    later = ", ".join(rung.value.replace("_", " ") for rung in decision.fallbacks) or "nothing"
    return f"{decision.rung.value.replace('_', ' ')}{ranks}  (rule {decision.rule}; next: {later})"


def _left_out(decision: Decision, story: Story) -> list[str]:
    """Data that are passed over: as a rank told when it did so, or, before that, for which step."""
    told = {one.step: str(one.payload.get("message", "")).removeprefix(SKIPPED_WORDS) for one in story.skipped}
    return [
        told.get(version)
        or f"{counted(count, 'batch') if count == 1 else f'{count} batches'} before step {version + 1}"
        for version, count in decision.skips.items()
    ]


def _sources(recovery: Recovery | None) -> str:
    """Where state came from, for ranks that did not keep their own."""
    if recovery is None:
        return ""
    found = [f"rank {rank} from {source}" for rank, source in recovery.sources.items() if source != "own"]
    if not found:
        return ": every rank kept its own state"
    return ": " + ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
