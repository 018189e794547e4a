"""Measures every figure rerail promises, side by side with torchrun in one run, and prints a table.

    python bench/recovery.py [--quick] [--json FILE] [--only NAME]

Model for timings: GPT of 10.5 M parameters, 4 ranks, gloo, one thread each. Clock: from the signal to the first completed step
of a new process, seen from outside. Cold start: from the launcher's start to the first completed step of all ranks, same run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from scenarios import (
    LARGE,
    USUAL,
    Recovery,
    disturbed_weights,
    freeze,
    many_kills,
    overhead,
    rerail_kill,
    second_fault,
    torchrun_kill,
)
from table import Figure, render, write

Scenario = Callable[[Path, "Scale"], list[Figure]]


class Scale:
    """How often each thing is done: as the figures demand, or quickly to see that all works."""

    def __init__(self, quick: bool) -> None:
        self.repeats = 1 if quick else 3
        self.kills = 5 if quick else 50
        self.weight_kills = 2 if quick else 10
        self.pairs = 2 if quick else 20
        self.blocks = 30 if quick else 70
        self.overheads = 3 if quick else 20


def recovery(folder: Path, scale: Scale) -> list[Figure]:
    """SIGKILL to first step: rerail, and torchrun with and without the shared store, taking turns."""
    mine, unshared = _turns(folder, scale.repeats, USUAL)
    shared: list[Recovery] = []
    for repeat in range(scale.repeats):
        with contextlib.suppress(RuntimeError):  # torchrun's restart race: it did not come back within a minute
            shared.append(torchrun_kill(folder / f"shared-{repeat}", repeat + 1, USUAL, share_store=True))
    restarts = " ".join(str(one.attempts) for one in shared)
    lost = scale.repeats - len(shared)
    note = f"restarts used: {restarts}" + (f"; {lost} of {scale.repeats} never came back" if lost else "")
    return [
        *_compare("", mine, unshared),
        Figure("torchrun: recovery, default", "s", tuple(one.recovery_s for one in shared), note=note),
    ]


def large(folder: Path, scale: Scale) -> list[Figure]:
    """The same with the 10.5 M parameter model, whose one replayed step is most of the recovery on two cores."""
    return _compare("10.5 M: ", *_turns(folder, scale.repeats, LARGE))


def _turns(folder: Path, repeats: int, shape: list[str]) -> tuple[list[Recovery], list[Recovery]]:
    mine, theirs = [], []
    for repeat in range(repeats):
        victim = (repeat + 1) % 4
        mine.append(rerail_kill(folder / f"rerail-{repeat}", victim, shape))
        theirs.append(torchrun_kill(folder / f"unshared-{repeat}", victim, shape, share_store=False))
    return mine, theirs


def _compare(name: str, mine: list[Recovery], theirs: list[Recovery]) -> list[Figure]:
    times = [other.recovery_s / own.recovery_s for own, other in zip(mine, theirs, strict=True)]
    ratios = tuple(one.ratio for one in mine)
    best = statistics.median(times)
    return [
        Figure(f"{name}rerail: SIGKILL to first step", "s", tuple(one.recovery_s for one in mine)),
        Figure(f"{name}rerail: cold start", "s", tuple(one.cold_s for one in mine)),
        Figure(f"{name}rerail: recovery / cold start", "ratio", ratios, "<= 0.05", statistics.median(ratios) <= 0.05),
        Figure(f"{name}torchrun: recovery, store not shared", "s", tuple(one.recovery_s for one in theirs)),
        Figure(f"{name}torchrun: cold start", "s", tuple(one.cold_s for one in theirs)),
        Figure(f"{name}torchrun: recovery / cold start", "ratio", tuple(one.ratio for one in theirs)),
        Figure(f"{name}rerail against torchrun", "x", tuple(times), ">= 15x", best >= 15, "", True),
    ]


def kills(folder: Path, scale: Scale) -> list[Figure]:
    """Attempts per fault and survivors' process ids over many kills of random ranks."""
    attempts, kept, seconds = many_kills(folder / "kills", scale.kills, seed=2)
    single = sum(1 for count in attempts if count == 1)
    return [
        Figure(
            "one attempt per fault", "", (), "all", single == scale.kills == len(attempts), f"{single} of {scale.kills}"
        ),
        Figure("survivors kept their process", "", (), "all", kept == scale.kills, f"{kept} of {scale.kills} kills"),
        Figure("small model: SIGKILL to first step", "s", tuple(seconds), note=f"worst {max(seconds):.2f} s"),
    ]


def stop(folder: Path, scale: Scale) -> list[Figure]:
    """SIGSTOP without any setting."""
    found = [freeze(folder / f"freeze-{repeat}", victim=(repeat + 1) % 4) for repeat in range(scale.repeats)]
    limit = max(2.0, 3 * statistics.median(step for _, step, _ in found))
    in_time = all(seconds <= max(2.0, 3 * step) for seconds, step, _ in found)
    named = sum(1 for _, _, culprit in found if culprit)
    return [
        Figure(
            "SIGSTOP: found and ended after",
            "s",
            tuple(seconds for seconds, _, _ in found),
            f"<= {limit:.2f} s",
            in_time,
        ),
        Figure("SIGSTOP: culprit named", "", (), "all", named == len(found), f"{named} of {len(found)}"),
    ]


def weights(folder: Path, scale: Scale) -> list[Figure]:
    """Final weights after random kills against those of the undisturbed run."""
    figures = []
    count = scale.weight_kills
    steps = 50 + 45 * count  # a standby takes up to about 45 stretched steps to warm up
    for parallel in ("ddp", "fsdp"):
        wanted = disturbed_weights(folder / f"{parallel}-calm", parallel, steps, 0, seed=3)
        found = disturbed_weights(folder / f"{parallel}-killed", parallel, steps, count, seed=3)
        name = f"{parallel.upper()}: weights after {count} kills"
        figures.append(Figure(name, "", (), "identical", found == wanted, f"{found[:12]} / {wanted[:12]}"))
    return figures


def cost(folder: Path, scale: Scale) -> list[Figure]:
    """What rerail costs while nothing fails."""
    runs = [overhead(folder / f"overhead-{number}", scale.blocks) for number in range(scale.overheads)]
    values = [statistics.median(_more(ours, (one + other) / 2) for ours, one, other in run) for run in runs]
    control = [statistics.median(_more(one, other) for _, one, other in run) for run in runs]
    whole = [_more(sum(row[0] for row in run), sum(row[1] + row[2] for row in run) / 2) for run in runs]
    steps = statistics.median(1000 * one for run in runs for _, one, _ in run)
    spread = f"{_mean(values)} by {len(runs)} runs, {_mean(whole)} by all their seconds, snapshots included; "
    spread += f"the same step twice without rerail: {_mean(control)}; step {steps:.1f} ms"
    mean = statistics.mean(values)
    return [Figure("cost when nothing fails, 20 ms step, mean", "%", (mean,), "<= 1 %", mean <= 1.0, spread)]


def _mean(values: list[float]) -> str:
    """With its standard error."""
    return f"{statistics.mean(values):.2f} +- {statistics.stdev(values) / len(values) ** 0.5:.2f} %"


def _more(with_rerail: float, without: float) -> float:
    """In percent."""
    return 100 * (with_rerail / without - 1)


def pairs(folder: Path, scale: Scale) -> list[Figure]:
    """A second fault during a recovery."""
    recovered = second_fault(folder / "pairs", scale.pairs, seed=4)
    return [
        Figure(
            "second fault during a recovery", "", (), "all", recovered == scale.pairs, f"{recovered} of {scale.pairs}"
        )
    ]


SCENARIOS: dict[str, Scenario] = {
    "recovery": recovery,
    "large": large,
    "kills": kills,
    "stop": stop,
    "weights": weights,
    "cost": cost,
    "pairs": pairs,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="few repeats: to see that everything works, not to quote")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--only", choices=tuple(SCENARIOS), action="append", help="this scenario only; may be repeated")
    parser.add_argument("--keep", action="store_true", help="keep journals and logs, and say where")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the jobs under way are ended, too
    folder = Path(tempfile.mkdtemp(prefix="rerail-bench-"))
    figures: list[Figure] = []
    for name in args.only or SCENARIOS:
        print(f"{name}: {SCENARIOS[name].__doc__}", file=sys.stderr, flush=True)
        try:
            found = SCENARIOS[name](folder / name, Scale(args.quick))
            figures += found
            print(f"{render(found)}\n", file=sys.stderr, flush=True)  # a long run that is broken off has told something
        except Exception as error:  # one broken scenario must not hide the others' figures; it counts as missed
            traceback.print_exc()
            figures.append(Figure(name, "", (), "", False, f"failed: {str(error).splitlines()[0]}"))
    print(f"\n{render(figures)}\n\n{' · '.join(f'{key} {value}' for key, value in machine().items())}")
    if args.json:
        write(args.json, figures, machine())
    if args.keep:
        print(f"kept: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if all(figure.ok is not False for figure in figures) else 1


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    memory = f"{psutil.virtual_memory().total / 2**30:.0f} GiB"
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"cores": len(os.sched_getaffinity(0)), "memory": memory, "load at the end": load, **versions}


if __name__ == "__main__":
    sys.exit(main())
