"""Turns numbers into drawings: SVG text for lines, bars, stacked bars and timelines, and the page they stand on. Pure.

Called by `report.html` and by whoever else shows figures. Nothing is fetched and nothing runs: a drawing is one `<svg>` that
takes its colours from `STYLE`, which `page` puts on the page once, for light and dark. All text is escaped here.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence

from rerail.report.scales import Scale, ends, number, thinned, ticks

WIDTH, HEIGHT = 900, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 34, 44
"""Room around what is drawn: for the values, the title and the names."""
ROW, SPANS, BARS, MARKS = 26, 2000, 60, 40
"""Height of a row; how many spans and stacked bars are drawn one by one before they are put together, and marks at full length."""

_LIGHT = ("#009e73", "#d55e00", "#56b4e9", "#e69f00", "#0072b2", "#cc79a7", "#f0e442", "#666666", "#332288", "#aaaaaa")
_DARK = ("#1fb98b", "#ee7a2b", "#6fc3f2", "#f2b134", "#4b9fd8", "#e09abf", "#f0e442", "#9a9a9a", "#9d8df1", "#6d6d6d")
"""After Okabe and Ito: to be told apart with any colour vision. Names beyond the last share its colour."""
COLOURS = len(_LIGHT)

Spans = Sequence[tuple[float, float, str]]
"""From, until, and what it was."""


def _palette(colours: Sequence[str], ink: str, faint: str, ground: str) -> str:
    fills = "".join(f".f{n}{{fill:{c}}}.s{n}{{stroke:{c}}}" for n, c in enumerate(colours))
    return (
        f"body{{background:{ground};color:{ink}}}text{{fill:{ink}}}.grid{{stroke:{faint}}}.mark{{stroke:{ink}}}{fills}"
    )


LIGHT = _palette(_LIGHT, "#1b1b1b", "#dddddd", "#ffffff")
DARK = _palette(_DARK, "#e8e8e8", "#3d3d3d", "#16181b")
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:940px;margin:2em auto;padding:0 16px}"
    "svg{width:100%;height:auto;display:block;margin:1.2em 0}svg text{font:12px system-ui,sans-serif}"
    "svg .title{font-size:14px;font-weight:600}.grid{stroke-width:1}.mark{stroke-width:1;stroke-dasharray:3 3;opacity:.45}"
    ".line{fill:none;stroke-width:1.8}"
    "table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}td,th{padding:3px 10px;text-align:right;"
    "border-bottom:1px solid #8884}td.l,th.l{text-align:left}td:not(.l),td:first-child{white-space:nowrap}.note{opacity:.75;font-size:13px}.scroll{overflow-x:auto}"
    f"{LIGHT}@media(prefers-color-scheme:dark){{{DARK}}}"
)


def page(title: str, body: Sequence[str]) -> str:
    """One file with everything in it; `body` is HTML already."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x: str,
    y: str,
    marks: Sequence[tuple[float, str]] = (),
    zero: bool = False,
    within: Sequence[float] = (),
) -> str:
    """One line for each name. `marks` are upright lines with a word each; `zero` has the values begin there.

    `within`: from where to where it goes at least, so that drawings of one page have the same range.
    """
    told = {name: [p for p in points if math.isfinite(p[0])] for name, points in series.items()}
    across = [p[0] for points in told.values() for p in points] + [at for at, _ in marks] + list(within)
    values = [p[1] for points in told.values() for p in points if math.isfinite(p[1])]
    if not values:
        return _nothing(title)
    wide = Scale.over(*ends(across), LEFT, WIDTH - RIGHT)
    high = Scale.rounded(*ends([*values, 0.0] if zero else values), HEIGHT - BOTTOM, TOP)
    parts = [*_across(wide, x), *_upwards(high, y)]
    parts += _marked(marks, wide)
    for place, (_, points) in enumerate(told.items()):
        kind = f"line s{_colour(place)}"
        for run in _unbroken(thinned(points)):
            text = " ".join(f"{wide.at(px):.1f},{high.at(py):.1f}" for px, py in run)
            parts.append(f'<polyline class="{kind}" points="{text}"/>' if len(run) > 1 else _dot(text, place))
    return _drawing(title, parts, {name: place for place, name in enumerate(told)} if len(told) > 1 else {})


def stacked(
    bars: Sequence[tuple[str, Mapping[str, float]]],
    *,
    title: str,
    y: str,
    x: str = "",
    order: Sequence[str] = (),
    hidden: Sequence[str] = (),
) -> str:
    """One upright bar for each name, its parts on top of each other. `order` says which parts there are, and so their colours.

    What is `hidden` keeps its colour for other drawings and is not drawn.
    """
    colours = list(dict.fromkeys([*order, *(part for _, parts in bars for part in parts)]))
    names = [name for name in colours if name not in hidden]
    if not bars or not names:
        return _nothing(title)
    shown, many = _gathered(bars, names)
    if many > 1:
        title = f"{title} (mean of {many} each)"
    high = Scale.rounded(0.0, max(sum(_size(parts, n) for n in names) for _, parts in shown), HEIGHT - BOTTOM, TOP)
    step = (WIDTH - RIGHT - LEFT) / len(shown)
    wide, parts = min(48.0, step * 0.8), [*_upwards(high, y)]
    every = max(1, math.ceil((max(len(name) for name, _ in shown) + 1) * 7 / step))
    for place, (name, amounts) in enumerate(shown):
        left, base = LEFT + step * (place + 0.5) - wide / 2, 0.0
        for part in names:
            size = _size(amounts, part)
            if size > 0:
                top, foot = high.at(base + size), high.at(base)
                tip = f"{name}, {part}: {number(size)}"
                parts.append(_box((left, top), (wide, foot - top), colours.index(part), tip))
                base += size
        if place % every == 0:
            parts.append(_text(left + wide / 2, HEIGHT - BOTTOM + 16, name, "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x, "middle"))
    return _drawing(title, parts, {name: colours.index(name) for name in names})


def bars(values: Sequence[tuple[str, float]], *, title: str, y: str, order: Sequence[str] = ()) -> str:
    """One bar from left to right for each name, with its value at its end; with an `order`, in the colours of its names."""
    if not values:
        return _nothing(title)
    left = 20 + max(len(name) for name, _ in values) * 7
    largest = max((value for _, value in values if math.isfinite(value)), default=0.0)
    wide = Scale.over(0.0, largest or 1.0, left, WIDTH - 110)
    parts = []
    for row, (name, value) in enumerate(values):
        top, told = TOP + row * ROW, f"{number(value)} {y}".strip()
        size = max(0.0, wide.at(value) - left) if math.isfinite(value) else 0.0
        colour = list(order).index(name) if name in order else 4
        parts += [
            _text(left - 8, top + 15, name, "end"),
            _box((left, top + 3), (size, ROW - 8), colour, f"{name}: {told}"),
        ]
        parts.append(_text(left + size + 6, top + 15, told))
    return _drawing(title, parts, {}, TOP + ROW * len(values) + 8)


def spans(
    rows: Sequence[tuple[str, Spans]],
    *,
    title: str,
    x: str,
    order: Sequence[str] = (),
    quiet: Sequence[str] = (),
    within: Sequence[float] = (),
) -> str:
    """A timeline: one row for each name. What is not `quiet` shows however short it is, above the rest."""
    kinds = list(dict.fromkeys([*order, *(kind for _, row in rows for _, _, kind in row)]))
    found = [at for _, row in rows for span in row for at in span[:2] if math.isfinite(at)]
    if not found:
        return _nothing(title)
    left = 20 + max(len(name) for name, _ in rows) * 7
    wide = Scale.over(*ends([*found, *within]), left, WIDTH - RIGHT)
    parts, height = [], TOP + ROW * len(rows) + BOTTOM
    for place, (name, row) in enumerate(rows):
        top = TOP + place * ROW
        parts.append(_text(left - 8, top + 16, name, "end"))
        shown = _joined(row if len(row) <= SPANS else _columns(row, wide))
        for begin, end, kind in sorted(shown, key=lambda one: one[2] not in quiet):
            size = max(0.0 if kind in quiet else 0.8, wide.at(end) - wide.at(begin))
            tip = f"{kind}: {number(begin)} to {number(end)}"
            parts.append(_box((wide.at(begin), top + 3), (size, ROW - 6), kinds.index(kind), tip))
    parts += _across(wide, x, height)
    return _drawing(title, parts, {kind: place for place, kind in enumerate(kinds)}, height)


# --- the parts of it ----------------------------------------------------------------------------------------------


def _gathered(
    bars: Sequence[tuple[str, Mapping[str, float]]], names: Sequence[str]
) -> tuple[list[tuple[str, Mapping[str, float]]], int]:
    """Bars as they can be shown: where there are too many, the mean of so many neighbours."""
    many = math.ceil(len(bars) / BARS)
    if many <= 1:
        return list(bars), 1
    groups = [bars[at : at + many] for at in range(0, len(bars), many)]
    return [
        (group[0][0], {name: sum(_size(parts, name) for _, parts in group) / len(group) for name in names})
        for group in groups
    ], many


def _joined(row: Spans) -> list[tuple[float, float, str]]:
    """Neighbours of one kind as one: between two boxes side by side a screen shows a seam."""
    found: list[tuple[float, float, str]] = []
    for begin, end, kind in row:
        if found and found[-1][2] == kind and begin <= found[-1][1] + 1e-9 * abs(begin):
            found[-1] = (found[-1][0], max(end, found[-1][1]), kind)
        else:
            found.append((begin, end, kind))
    return found


def _columns(row: Spans, wide: Scale) -> list[tuple[float, float, str]]:
    """Of many spans, for each column of the drawing what filled most of it."""
    count = int(wide.until - wide.start)
    width = (wide.high - wide.low) / count
    filled: list[dict[str, float]] = [{} for _ in range(count)]
    for begin, end, kind in row:
        first, last = (min(count - 1, max(0, int((at - wide.low) / width))) for at in (begin, end))
        for column in range(first, last + 1):
            low = wide.low + column * width
            share = min(end, low + width) - max(begin, low)
            if share > 0:
                filled[column][kind] = filled[column].get(kind, 0.0) + share
    found: list[tuple[float, float, str]] = []
    for column, parts in enumerate(filled):
        low = wide.low + column * width
        if not parts:
            continue
        kind = max(parts, key=lambda one: parts[one])
        if found and found[-1][2] == kind and found[-1][1] >= low - width / 2:
            found[-1] = (found[-1][0], low + width, kind)
        else:
            found.append((low, low + width, kind))
    return found


def _size(parts: Mapping[str, float], name: str) -> float:
    value = parts.get(name, 0.0)
    return value if math.isfinite(value) and value > 0 else 0.0


def _marked(marks: Sequence[tuple[float, str]], wide: Scale) -> list[str]:
    """Upright lines; of many, a short stroke each, and one for those that fall together."""
    foot = HEIGHT - BOTTOM
    top = TOP if len(marks) <= MARKS else foot - 7
    places = {round(wide.at(at)): (wide.at(at), word) for at, word in marks if math.isfinite(at)}
    return [f"<g>{_tip(word)}{_line(at, top, at, foot, 'mark')}</g>" for at, word in places.values()]


def _unbroken(points: Sequence[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    """The stretches between values that are no numbers."""
    run: list[tuple[float, float]] = []
    for point in points:
        if math.isfinite(point[1]):
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _across(scale: Scale, name: str, height: float = HEIGHT) -> list[str]:
    foot = height - BOTTOM
    parts = [_line(scale.start, foot, scale.until, foot, "grid")]
    for value in ticks(scale.low, scale.high, 8):
        at = scale.at(value)
        parts += [_line(at, foot, at, foot + 4, "grid"), _text(at, foot + 17, number(value), "middle")]
    return [*parts, _text((scale.start + scale.until) / 2, height - 6, name, "middle")]


def _upwards(scale: Scale, name: str) -> list[str]:
    parts = []
    for value in ticks(scale.low, scale.high, 5):
        at = scale.at(value)
        parts += [_line(LEFT, at, WIDTH - RIGHT, at, "grid"), _text(LEFT - 8, at + 4, number(value), "end")]
    middle = (scale.start + scale.until) / 2
    return [
        *parts,
        f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">{html.escape(name)}</text>',
    ]


def _drawing(title: str, parts: Sequence[str], names: Mapping[str, int], height: float = HEIGHT) -> str:
    """The parts with a title above and, beneath it, which colour is whose."""
    legend, rows, at = [], 0, float(LEFT)
    for name, place in names.items():
        room = 26 + len(name) * 7
        if at + room > WIDTH - RIGHT and at > LEFT:
            rows, at = rows + 1, float(LEFT)
        top = height + 4 + rows * 18
        legend += [_box((at, top), (11, 11), place, name), _text(at + 16, top + 10, name)]
        at += room
    whole = height + (10 + (rows + 1) * 18 if names else 0)
    said = html.escape(title)
    return (
        f'<svg viewBox="0 0 {WIDTH} {whole:.0f}" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{said}">'
        f'<text class="title" x="{LEFT}" y="18">{said}</text>' + "".join([*parts, *legend]) + "</svg>"
    )


def _nothing(title: str) -> str:
    return _drawing(title, [_text(LEFT, TOP + 16, "nothing is known of this")], {}, TOP + 32)


def _colour(place: int) -> int:
    return min(place, COLOURS - 1)


def _text(x: float, y: float, said: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(said)}</text>' if said else ""


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _box(corner: tuple[float, float], size: tuple[float, float], colour: int, tip: str) -> str:
    x, y, wide, high = *corner, *size
    return f'<rect class="f{_colour(colour)}" x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}">{_tip(tip)}</rect>'


def _dot(at: str, place: int) -> str:
    x, y = at.split(",")
    return f'<circle class="f{_colour(place)}" cx="{x}" cy="{y}" r="2.5"/>'


def _tip(said: str) -> str:
    return f"<title>{html.escape(said)}</title>" if said else ""
