"""Turns results into one page with drawings that needs nothing else. Pure. Called by `cli.simulate --html`."""

from __future__ import annotations

import html
from collections.abc import Sequence

from rerail.report.charts import lines, page, stacked
from rerail.sim.run import Result
from rerail.sim.scenario import Assumption, book
from rerail.sim.sweep import Sweep
from rerail.sim.text import STAGES, grouped, middle, sweep_table, table, value_of


def results_page(
    title: str,
    results: Sequence[Result],
    found: Sweep | None,
    assumed: Sequence[Assumption],
    notes: Sequence[str] = (),
) -> str:
    """Drawings, the table, and what was assumed."""
    body = [f"<h1>{html.escape(title)}</h1>"]
    shown = sweep_table(found, book().keys[found.key].unit) if found is not None else table(results)
    body += [_curves(found) if found is not None else _stack(results)]
    body += [f'<pre class="scroll">{html.escape(chr(10).join(shown))}</pre>']
    body += [f'<p class="note">{html.escape(one)}</p>' for one in notes]
    rows = "".join(
        f'<tr><td class="l">{html.escape(one.key)}</td><td>{html.escape(value_of(one))}</td>'
        f'<td class="l">{html.escape(one.about)}</td><td class="l">{html.escape(one.source)}</td></tr>'
        for one in assumed
    )
    head = '<tr><th class="l">key</th><th>value</th><th class="l">what</th><th class="l">source</th></tr>'
    body.append(f'<h2>Assumptions</h2><div class="scroll"><table>{head}{rows}</table></div>')
    return page(title, body)


def _stack(results: Sequence[Result]) -> str:
    order = [stage for stage, _ in STAGES]
    bars = []
    for name, group in grouped(results).items():
        one = middle(group)
        bars.append((name, {stage: one.by_stage.get(stage, 0.0) / one.wall_s * 100 for stage in order}))
    used = [stage for stage in order if any(parts[stage] > 0 for _, parts in bars)]
    return stacked(bars, title="where the time goes that is lost", y="% of the time", order=used)


def _curves(found: Sweep) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for point in found.points:
        for name, group in grouped(point.results).items():
            series.setdefault(name, []).append((point.value, middle(group).goodput * 100))
    return lines(series, title=f"goodput by {found.key}", x=found.key, y="goodput, %")
