"""Turns a job's accounts into tables, and those into plain text or Markdown. Pure.

Called by `cli.report`; `report.webpage` shows the same tables on its page, so that every form says the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rerail.report.accounts import Accounts, Incident
from rerail.report.partition import MEANING, PHASES, Cause
from rerail.report.text import aligned, bar
from rerail.wording import counted

ROWS = 30
"""Incidents shown as text: the most costly ones."""
SHORT = {cause: cause.value.split()[0] for cause in PHASES}
NOT_KNOWN = "not known"


@dataclass(frozen=True)
class Table:
    """A heading, the names of the columns, the rows, and what is to be said beneath."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: frozenset[int]
    """Columns of words; the others are numbers."""
    note: str = ""

    @property
    def named(self) -> list[int]:
        """Columns that have a name; the others hold bars of block characters, for terminals."""
        return [column for column, name in enumerate(self.head) if name]


def duration(value: float | None) -> str:
    """Seconds, and for people in larger units beside it."""
    if value is None:
        return NOT_KNOWN
    if value < 120:
        return f"{value:,.2f} s"
    days, rest = divmod(round(value), 86400)
    hours, rest = divmod(rest, 3600)
    parts = [(days, "d"), (hours, "h"), (rest // 60, "min"), (rest % 60, "s")]
    told = [f"{n} {unit}" for n, unit in parts if n][:2]
    return f"{value:,.0f} s ({' '.join(told)})"


def percent(value: float | None) -> str:
    return NOT_KNOWN if value is None else f"{100 * value:.2f} %"


def heading(told: Accounts) -> str:
    """What the report is of, in one line."""
    return f"job {told.job}   began {clock(told.begin)}, {ending(told)}, {duration(told.wall_s)} in all"


def ending(told: Accounts) -> str:
    if told.exit_code is not None:
        return f"ended with exit code {told.exit_code}"
    return "no end is written down: it runs still, or was ended from outside (counted until the last sign of it)"


def clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def tables(told: Accounts, most: int = ROWS) -> list[Table]:
    """All there is to read, the most important first."""
    found = [_figures(told), _causes(told)]
    if told.incidents:
        found += [_codes(told), _incidents(told, most)]
    return found


def as_text(told: Accounts) -> str:
    """For a terminal."""
    lines = [heading(told)]
    for table in tables(told):
        lines += ["", table.title, *_aligned(table)]
        lines += [f"  {table.note}"] if table.note else []
    return "\n".join(
        [*lines, "more: rerail report job --format html --out report.html · rerail report N · rerail incidents"]
    )


def as_markdown(told: Accounts) -> str:
    """For a page that people edit."""
    lines = [f"# {_escaped(heading(told))}"]
    for table in tables(told, len(told.incidents)):
        rule = {column: ":--" if column in table.left else "--:" for column in table.named}
        rows: list[Mapping[int, str]] = [
            dict(enumerate(table.head)),
            rule,
            *(dict(enumerate(row)) for row in table.rows),
        ]
        lines += ["", f"## {table.title}", ""]
        lines += ["| " + " | ".join(_escaped(row[column]) for column in table.named) + " |" for row in rows]
        lines += ["", table.note] if table.note else []
    return "\n".join(lines)


def _figures(told: Accounts) -> Table:
    steps = NOT_KNOWN if told.steps is None else f"{told.steps:,}"
    saves = "" if told.checkpoints is None else f"; {counted(told.checkpoints, 'checkpoint')} saved"
    rows = [
        ("wall time", duration(told.wall_s), "from the beginning of the first run to the end of the last"),
        ("ETTR (goodput)", percent(told.ettr), "effective training time ratio: training over wall time"),
        ("steps", steps, f"new ones completed; mean of a step: {_seconds(told.step_s)}"),
        ("lost steps", f"{told.lost_steps:,}", "had been completed, and were computed again"),
        ("faults", f"{told.faults:,}", "incidents, also those that held up nothing"),
        ("MTBF", _of_faults(told, told.mtbf_s), "mean time between faults: wall time over faults"),
        ("MTTR", _of_faults(told, told.mttr_s), "mean time to repair: from a fault to the first new step, where it held up the training"),
        ("checkpoint cost", duration(told.checkpoint_s), f"what steps waited for snapshots and checkpoints{saves}"),
        ("standby time", duration(told.standby_s), "warm processes without a place, times the seconds they were held"),
        ("spare time", duration(told.spare_s), "places for ranks that none had, times seconds"),
    ]  # fmt: skip
    if told.runs > 1:
        rows.insert(1, ("runs", str(told.runs), "times the job was started with this journal"))
    if told.takeovers:
        rows.append(("takeovers", str(told.takeovers), "controllers that went on for one that was lost"))
    return Table("Figures", ("figure", "value", "meaning"), rows, frozenset({0, 2}))


def _causes(told: Accounts) -> Table:
    """Every cause that took any time, training first."""
    shown = {Cause.TRAINING: told.parts[Cause.TRAINING], **told.badput}
    largest, wall = max(shown.values()), told.wall_s or 1.0
    rows = [
        (cause.value, _seconds(value), percent(value / wall), bar(value, largest), MEANING[cause])
        for cause, value in shown.items()
    ]
    total = sum(told.parts.values())
    rows.append(("all", _seconds(total), percent(total / wall), "", "adds up to the wall time"))
    return Table("Where the time went", ("cause", "seconds", "share", "", "meaning"), rows, frozenset({0, 3, 4}))


def _codes(told: Accounts) -> Table:
    wall = told.wall_s or 1.0
    rows = [
        (code, f"{count:,}", _seconds(cost), percent(cost / wall), _seconds(cost / count))
        for code, (count, cost) in told.by_code.items()
    ]
    return Table("What faults cost", ("fault", "times", "seconds", "share", "each"), rows, frozenset({0}))


def _incidents(told: Accounts, most: int) -> Table:
    shown = sorted(sorted(told.incidents, key=lambda one: -one.total_s)[:most], key=lambda one: one.number)
    head = ("#", "when", "fault", "done", "lost", "handle", *(SHORT[cause] for cause in PHASES), "total")
    rows = [_row(one) for one in shown]
    left = len(told.incidents) - len(shown)
    note = (
        "Seconds; detect is from the fault to its first sign, handle from there to the first step afterwards, the rest what is on "
        "the critical path, counted once."
    )
    note += f" The {most} most costly of {len(told.incidents):,}; --format json has all." if left else ""
    return Table("Incidents", head, rows, frozenset({1, 2, 3}), note)


def _row(one: Incident) -> tuple[str, ...]:
    words = one.rung.replace("_", " ") or "taken over"
    done = "not over" if not one.over else words if one.ok else f"{words}, failed"
    figures = (one.handle_s, *(one.parts[cause] for cause in PHASES), one.total_s)
    when = time.strftime("%m-%d %H:%M:%S", time.localtime(one.at))
    lost, told = str(one.lost_steps), [f"{value:,.2f}" for value in figures]
    return (str(one.number), when, one.code or "?", "stopped" if one.rung == "stop" else done, lost, *told)


def _of_faults(told: Accounts, value: float | None) -> str:
    return duration(value) if told.faults else "no faults"


def _seconds(value: float | None) -> str:
    return NOT_KNOWN if value is None else f"{value:,.3f} s" if value < 1 else f"{value:,.2f} s"


def _aligned(table: Table) -> list[str]:
    return [f"  {line}" for line in aligned([table.head, *table.rows], table.left)]


def _escaped(cell: str) -> str:
    return cell.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
