"""Turns results into one page with drawings that needs nothing else. Pure. Called by `cli.simulate --html`."""

from __future__ import annotations

import html
from collections.abc import Sequence

from rerail.report.charts import lines, page, stacked
from rerail.sim.run import Result
from rerail.sim.scenario import Assumption
from rerail.sim.sweep import Sweep
from rerail.sim.text import STAGES, grouped, middle, table


def results_page(title: str, results: Sequence[Result], found: Sweep | None, assumed: Sequence[Assumption]) -> str:
    """Drawings, the table, and what was assumed."""
    body = [f"<h1>{html.escape(title)}</h1>"]
    if found is not None:
        body.append(_curves(found))
    else:
        body += [_stack(results), f'<pre class="scroll">{html.escape(chr(10).join(table(results)))}</pre>']
    rows = "".join(
        f'<tr><td class="l">{html.escape(one.key)}</td><td>{one.value:,g} {html.escape(one.unit)}</td>'
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
