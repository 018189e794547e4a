"""Draws what `bench/rehab.py` has measured: its JSON lines become one page, with the figures that the founding system was shown by."""

from __future__ import annotations

import html
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rerail.report import charts

FAULT_HOURS = (1.0, 3.0, 10.0, 30.0)
"""Mean time between faults, for the cost of a whole run."""
SAVE_S = 30.0
"""What a checkpoint costs in the job that this is reckoned for."""
Record = Mapping[str, Any]


def drawings(lines: Iterable[str]) -> str:
    """One page for all that was run."""
    found = [json.loads(line) for line in lines if line.startswith("{")]
    body = ["<h1>A lost shard that is not computed again</h1>"]
    for name in dict.fromkeys(_name(one) for one in found):
        runs = [one for one in found if _name(one) == name]
        priced = [one for one in runs if "lag" in one]
        body.append(f"<h2>{html.escape(name)}</h2>")
        if priced:
            body += [_by_moment(priced), _whole_cost(priced), _overhead(priced)]
        body += _curves(runs)
    return charts.page("rerail: a lost shard", [part for part in body if part])


def _name(one: Record) -> str:
    return f"{one['shape']}, {one['lost']} lost, beta2 {one['beta2']}"


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _methods(priced: Sequence[Record]) -> list[str]:
    return [name for name in dict.fromkeys(one["method"] for one in priced) if name != "replica"]


def _by_moment(priced: Sequence[Record]) -> str:
    """What each way costs, by when the fault came."""
    faults = sorted({one["fault"] for one in priced})
    series: dict[str, list[tuple[float, float]]] = {"computing again": [(float(at), 1.0) for at in faults]}
    for name in _methods(priced):
        for at in faults:
            lags = [one["lag"] / one["behind"] for one in priced if (one["method"], one["fault"]) == (name, at)]
            if lags:
                series.setdefault(name, []).append((float(at), _mean(lags)))
    return charts.lines(
        series,
        title="Cost of a recovery, by the step of the fault",
        x="step",
        y="share of the steps since the checkpoint",
        zero=True,
    )


def _whole_cost(priced: Sequence[Record]) -> str:
    """Checkpoints and faults together, each at its own best interval: sqrt(2 rho Ts / MTBF)."""
    series: dict[str, list[tuple[float, float]]] = {}
    for name in ("computing again", *_methods(priced)):
        lags = [one["lag"] / one["behind"] for one in priced if one["method"] == name]
        rho = 1.0 if name == "computing again" else max(0.0, _mean(lags))
        series[name] = [(hours, 100 * math.sqrt(2 * rho * SAVE_S / (3600 * hours))) for hours in FAULT_HOURS]
    title = f"What checkpoints and faults cost together at the best interval (a checkpoint of {SAVE_S:.0f} s)"
    return charts.lines(series, title=title, x="hours between faults", y="percent of the time", zero=True)


def _overhead(priced: Sequence[Record]) -> str:
    seconds: dict[str, list[float]] = defaultdict(list)
    for one in priced:
        if "seconds" in one:
            seconds[one["method"]].append(one["seconds"])
    rows = [(name, _mean(times)) for name, times in seconds.items()]
    return charts.bars(rows, title="Time to make a guess, training of the predictor included", y="s") if rows else ""


def _curves(runs: Sequence[Record]) -> list[str]:
    """Validation losses to the end of a run, against the one without a fault: as differences, since the lines lie on each other."""
    body = []
    for seed in sorted({one["seed"] for one in runs if "undisturbed" in one}):
        quiet = next(
            {int(s): x for s, x in one["undisturbed"].items()}
            for one in runs
            if one["seed"] == seed and "undisturbed" in one
        )
        to_end = [one for one in runs if one["seed"] == seed and "valid" in one]
        if not to_end:
            continue
        series = {
            one["method"]: _smoothed([(int(s), x - quiet[int(s)]) for s, x in one["valid"].items() if int(s) in quiet])
            for one in to_end
        }
        fault = to_end[0]["fault"]
        title = f"Validation loss beyond that of the run without a fault, seed {seed}"
        body.append(charts.lines(series, title=title, x="step", y="loss", marks=[(float(fault), "fault")]))
        if seed == min(one["seed"] for one in runs):
            whole = {"without a fault": sorted((float(s), x) for s, x in quiet.items())}
            body.append(charts.lines(whole, title="Validation loss of that run", x="step", y="loss"))
    return body


def _smoothed(points: Sequence[tuple[int, float]], window: int = 8) -> list[tuple[float, float]]:
    ordered = sorted(points)
    return [
        (float(step), _mean([x for _, x in ordered[max(0, at - window + 1) : at + 1]]))
        for at, (step, _) in enumerate(ordered)
    ]
