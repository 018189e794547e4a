"""Turns steps and reports of the demo into a live display on a terminal, or into plain lines elsewhere.

Called by `cli.demo`. rich is imported only where there is a terminal to draw on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from rerail.cli.watch import Step
from rerail.flow import Report, Rung

LABELS = {"undisturbed": "undisturbed run", "disturbed": "the same run, disturbed"}
WIDTH = 44
"""Columns for what happened; the whole text is in `rerail report`."""
_DONE = {
    Rung.RETRY_STEP: "step retried",
    Rung.REPLACE_RANK: "replaced, survivors kept",
    Rung.GROW: "empty seats filled",
    Rung.SHRINK: "went on with fewer ranks",
    Rung.RESTART_ALL: "all ranks restarted",
    Rung.STOP: "job stopped",
}


class View:
    """Plain lines: the beginning of each run, every tenth of it, and each incident."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.total = 0
        self.elapsed = 0.0
        """Seconds of the current run so far."""
        self._shown = 0

    def __enter__(self) -> View:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def begin(self, name: str, total: int) -> None:
        """A run begins; times are counted from here."""
        self.started, self.total, self._shown = time.monotonic(), total, 0
        self._line(f"{LABELS[name]}: GPT 6M, 4 ranks, DDP, text of the Python standard library, {total} steps")

    def steps(self, fresh: Sequence[Step]) -> None:
        """Progress of rank 0, whose loss is shown."""
        self.elapsed = time.monotonic() - self.started
        for step in fresh:
            if step.rank == 0 and step.step >= self._shown + max(1, self.total // 10):
                self._shown = step.step - step.step % max(1, self.total // 10)
                self._line(f"step {step.step}/{self.total}  loss {step.loss:.2f}")

    def incident(self, report: Report) -> None:
        """An incident that is over."""
        self._line(incident_line(report))

    def _line(self, text: str) -> None:
        print(f"{time.monotonic() - self.started:6.1f} s  {text}", flush=True)


class LiveView(View):
    """A progress bar for each run, with the incidents as lines above it."""

    def __init__(self) -> None:
        super().__init__()
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps  loss {task.fields[loss]}"),
            TimeElapsedColumn(),
        )
        self._task: Any = None

    def __enter__(self) -> LiveView:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, name: str, total: int) -> None:
        if self._task is None:
            self._progress.console.print("GPT 6M, 4 ranks, DDP, text: sources of the Python standard library")
        self.started, self.total = time.monotonic(), total
        self._task = self._progress.add_task(LABELS[name], total=total, loss="-")

    def steps(self, fresh: Sequence[Step]) -> None:
        self.elapsed = time.monotonic() - self.started
        for step in fresh:
            if step.rank == 0:
                self._progress.update(self._task, completed=step.step, loss=f"{step.loss:.2f}")

    def _line(self, text: str) -> None:
        self._progress.console.print(f"{time.monotonic() - self.started:6.1f} s  {text}", highlight=False)


def make_view(*, plain: bool) -> View:
    """The view that fits where the output goes."""
    return View() if plain else LiveView()


def _short(text: str) -> str:
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"


def incident_line(report: Report) -> str:
    """What happened and what was done, on one line."""
    what = f"{_short(report.summary):<{WIDTH}}"
    if report.code == "controller.lost" and not report.attempts:
        return f"{what}  new controller took over after {report.cost.detect:.2f} s"
    found = f"found in {report.cost.detect:.2f} s, " if report.cost.detect >= 0.1 else ""
    seconds = report.cost.total - report.cost.detect - report.cost.t0
    return f"{what}  {found}{_DONE[report.rung]} in {seconds:.2f} s, resumed at step {report.resumed_step}"


def incident_table(reports: Iterable[Report]) -> str:
    """All incidents with where their time went, as plain text."""
    head = ("#", "what", "done", "detect", "T0 lost", "T1 resch.", "T2 comm.", "T3 load", "T4 comp.", "total")
    rows: list[tuple[str, ...]] = [head]
    for report in reports:
        cost = report.cost
        done = "taken over" if report.code == "controller.lost" and not report.attempts else report.rung.value
        seconds = (cost.detect, cost.t0, cost.t1, cost.t2, cost.t3, cost.t4, cost.total)
        rows.append((str(report.incident), _short(report.summary), done, *(f"{value:.2f}" for value in seconds)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index < 3 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(
        [*lines, "seconds; T0 lost work, T1 reschedule, T2 communication, T3 load, T4 compile and warm-up"]
    )
