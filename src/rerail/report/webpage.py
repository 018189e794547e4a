"""Turns a job's accounts into one HTML file that needs nothing else: the figures, four drawings and the tables. Pure.

Called by `cli.report`. The drawings are made by `report.charts`, the tables by `report.sheet`.
"""

from __future__ import annotations

import html
import statistics
from collections.abc import Iterable, Sequence

from rerail.report import charts
from rerail.report.accounts import Accounts
from rerail.report.partition import PHASES, Cause, Piece
from rerail.report.sheet import Table, heading, tables

BINS = 150
"""Points of the goodput over time."""
ROWS = 2000
UNITS = ((172_800.0, 86_400.0, "days"), (7200.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
SHOWN = {
    Cause.STARTUP: "start-up, shut-down",
    Cause.SHUTDOWN: "start-up, shut-down",
    Cause.DATA: Cause.TRAINING.value,
    Cause.CHECKPOINT: Cause.TRAINING.value,
    Cause.OFF: "not running, not known",
    Cause.UNKNOWN: "not running, not known",
}
"""Causes that share a colour in the timeline: more than ten cannot be told apart. Of waits within steps shares are known and no
moments, so that drawing them apart from the training would be stripes that mean nothing."""
ORDER = tuple(dict.fromkeys((Cause.TRAINING.value, *(cause.value for cause in PHASES), *SHOWN.values())))


def as_html(told: Accounts) -> str:
    """The whole page."""
    unit, name = next((size, word) for least, size, word in UNITS if told.wall_s >= least)
    since = f"{name} since the job began"
    body = [
        f"<h1>{html.escape(f'Job {told.job}')}</h1>",
        f'<p class="note">{html.escape(heading(told))}</p>',
        *(_table(one) for one in tables(told, ROWS)[:2]),
        _timeline(told, unit, since),
        '<p class="note">Waits for data and checkpoints within steps are part of training in this drawing.</p>',
        _stacks(told),
        _goodput(told, unit, since),
        _loss(told, unit, since),
        *(_table(one) for one in tables(told, ROWS)[2:]),
    ]
    return charts.page(f"rerail: job {told.job}", body)


def goodput(pieces: Sequence[Piece], bins: int = BINS) -> list[tuple[float, float]]:
    """The share of training in each of so many equal stretches, by the middle of the stretch, in seconds since the first."""
    if not pieces:
        return []
    begin, end = pieces[0].begin, pieces[-1].end
    width = (end - begin) / bins
    filled = [0.0] * bins
    for piece in pieces:
        if piece.cause is not Cause.TRAINING:
            continue
        first, last = (min(bins - 1, max(0, int((at - begin) / width))) for at in (piece.begin, piece.end))
        for place in range(first, last + 1):
            low = begin + place * width
            filled[place] += max(0.0, min(piece.end, low + width) - max(piece.begin, low))
    return [((place + 0.5) * width, min(1.0, value / width)) for place, value in enumerate(filled)]


def _timeline(told: Accounts, unit: float, since: str) -> str:
    def row(pieces: Iterable[Piece]) -> list[tuple[float, float, str]]:
        begin = told.begin
        return [((p.begin - begin) / unit, (p.end - begin) / unit, SHOWN.get(p.cause, p.cause.value)) for p in pieces]

    rows = [("job", row(told.pieces)), ("incidents", row(piece for piece in told.pieces if piece.incident))]
    present = {kind for _, _, kind in rows[0][1]}
    order = [kind for kind in ORDER if kind in present or kind in (Cause.TRAINING, *PHASES)]
    return charts.spans(
        rows if told.incidents else rows[:1],
        title="Timeline",
        x=since,
        order=order,
        quiet=(Cause.TRAINING.value,),
        within=_within(told, unit),
    )


def _within(told: Accounts, unit: float) -> tuple[float, float]:
    """The whole job, on every axis of time."""
    return 0.0, told.wall_s / unit


def _stacks(told: Accounts) -> str:
    costly = [
        (str(one.number), {c.value: s for c, s in one.parts.items()}) for one in told.incidents if one.total_s > 0
    ]
    order = (Cause.TRAINING.value, *(cause.value for cause in PHASES))
    title = "What each incident cost, T0 to T4"
    return charts.stacked(costly, title=title, y="seconds", x="incident", order=order, hidden=order[:1])


def _goodput(told: Accounts, unit: float, since: str) -> str:
    points = (
        [(at / unit, 100 * share) for at, share in goodput(told.pieces, _bins(told))] if told.ettr is not None else []
    )
    return charts.lines(
        {"goodput": points},
        title="Goodput over time",
        x=since,
        y="% of the time",
        marks=_marks(told, unit),
        zero=True,
        within=_within(told, unit),
    )


def _bins(told: Accounts) -> int:
    """No finer than the samples: within one, shares are known and no moments."""
    usual = statistics.median([one.span_s for one in told.samples] or [0.0])
    return max(8, min(BINS, int(told.wall_s / usual) if usual > 0 else BINS))


def _loss(told: Accounts, unit: float, since: str) -> str:
    points = [((one.at - told.begin) / unit, one.loss) for one in told.samples if one.loss is not None]
    if not points:
        return '<p class="note">No loss curve: the script told no loss (job.metric("loss", value)).</p>'
    return charts.lines(
        {"loss": points},
        title="Loss, with incidents marked",
        x=since,
        y="loss",
        marks=_marks(told, unit),
        within=_within(told, unit),
    )


def _marks(told: Accounts, unit: float) -> list[tuple[float, str]]:
    return [((one.at - told.begin) / unit, f"incident {one.number}: {one.summary}") for one in told.incidents]


def _table(table: Table) -> str:
    def row(cells: Sequence[str], kind: str) -> str:
        told = "".join(
            f'<{kind} class="l">{html.escape(cells[c])}</{kind}>'
            if c in table.left
            else f"<{kind}>{html.escape(cells[c])}</{kind}>"
            for c in table.named
        )
        return f"<tr>{told}</tr>"

    note = f'<p class="note">{html.escape(table.note)}</p>' if table.note else ""
    rows = "".join(row(cells, "td") for cells in table.rows)
    return f'<h2>{html.escape(table.title)}</h2><div class="scroll"><table>{row(table.head, "th")}{rows}</table></div>{note}'
