"""Turns the figures of a benchmark run into one table and one JSON file.

Called by `recovery.py`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """One line of the table: what was measured in each repeat, and the bar it is held against."""

    name: str
    unit: str
    """`s`, `ratio`, `x`, `%`, or `` for text."""
    values: tuple[float, ...] = ()
    bar: str = ""
    ok: bool | None = None
    """None where there is nothing to reach: a peer's figure, or a number that explains another."""
    note: str = ""
    higher_is_better: bool = False

    @property
    def best(self) -> float:
        return (max if self.higher_is_better else min)(self.values)

    @property
    def median(self) -> float:
        return statistics.median(self.values)


def show(value: float, unit: str) -> str:
    """A number with as many digits as it deserves."""
    texts = {"s": f"{value:.2f} s", "ratio": f"{value:.3f}", "x": f"{value:.1f}x", "%": f"{value:.2f} %"}
    return texts.get(unit, f"{value:g}")


def render(figures: Sequence[Figure]) -> str:
    """The table as plain text."""
    rows = [("figure", "best", "median", "bar", "", "repeats")]
    for figure in figures:
        verdict = "" if figure.ok is None else "reached" if figure.ok else "MISSED"
        best, median = (show(v, figure.unit) for v in (figure.best, figure.median)) if figure.values else ("", "")
        repeats = (
            " ".join(show(value, figure.unit).split()[0] for value in figure.values) if len(figure.values) > 1 else ""
        )
        rows.append((figure.name, best, median, figure.bar, verdict, figure.note or repeats))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def write(path: Path, figures: Sequence[Figure], machine: dict[str, Any]) -> None:
    """The same as JSON, with the machine it was measured on."""
    rows = []
    for figure in figures:
        row: dict[str, Any] = figure._asdict()
        if figure.values:
            row |= {"best": figure.best, "median": figure.median}
        rows.append(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "figures": rows}, indent=2) + "\n")
