"""The simulator's own figures: goodput of every policy over several seeds, how fast it runs, and what its result hangs on.

    python bench/simulate.py [--seeds 10] [--quick] [--html FILE]

Prints tables for docs/benchmarks.md. Everything runs in one process on one core. The exit code is 1 if a bar was missed: goodput of
rerail's defaults >= 99 % (median, Llama 3 preset), 20 s for 16,384 devices and 180 s for 100,000, each for 54 days and one policy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

from rerail.sim.page import results_page
from rerail.sim.policies import POLICIES, policy
from rerail.sim.run import compare
from rerail.sim.scenario import assumptions, preset, scenario
from rerail.sim.sweep import resized
from rerail.sim.text import heading, table

PRESET = "llama3-405b"
GOODPUT, SECONDS, LARGE, LARGE_S = 0.99, 20.0, 100_000, 180.0
CHANGES = (
    ("as it is", {}),
    ("repairs three times as long as measured (T1 to T4)", {"repair_factor": 3}),
    ("repairs ten times as long", {"repair_factor": 10}),
    ("forming groups in 10 s instead of 30", {"groups_s": 10}),
    ("forming groups in 120 s", {"groups_s": 120}),
    ("restart of all processes in 600 s instead of 150", {"process_restart_s": 600}),
    ("state of every rank only once (no replicas)", {"replicas": 1}),
    ("no planned restarts", {"planned_per_day": 0}),
    ("32 spare nodes instead of 102", {"spare_nodes": 32}),
    ("no spare nodes", {"spare_nodes": 0}),
    ("no spare nodes, and the script can do without some ranks", {"spare_nodes": 0, "elastic": "yes"}),
    ("twice as many faults of hardware", {"faults": 0.8206}),
    ("a third of the faults without a word of their rank", {"silent_root": 0.33}),
    ("one repair in ten fails and is begun anew", {"attempt_fails": 0.1}),
    ("one start in five fails within minutes", {"start_faults": 0.2}),
)


def goodputs(changes: dict[str, object], name: str, seeds: range) -> list[float]:
    """Of one policy, for every seed."""
    made = scenario(resized(preset(PRESET), changes))
    return [result.goodput for result in compare(made, [policy(name)], list(seeds))]


def span(values: list[float]) -> str:
    return f"{statistics.median(values):.2%} | {min(values):.2%} to {max(values):.2%}"


def policies(seeds: range, html: str) -> float:
    """All policies side by side; the median of rerail's defaults."""
    base = preset(PRESET)
    made = scenario(base.values)
    results = compare(made, POLICIES, list(seeds))
    title = heading(made, len(seeds), PRESET)
    print(f"{title}\n")
    print("\n".join(table(results)))
    if html:
        Path(html).write_text(results_page(title, results, None, assumptions(made, base, {})), encoding="utf-8")
    return statistics.median(result.goodput for result in results if result.policy == "rerail")


def speed(gpus: int) -> float:
    """Seconds of one core for the slowest of the policies, making the faults included."""
    made = scenario(resized(preset(PRESET), {"gpus": gpus}))
    worst = 0.0
    for plan in (policy("hourly"), policy("rerail")):
        began = time.process_time()
        (result,) = compare(made, [plan], [0])
        took = time.process_time() - began
        worst = max(worst, took)
        print(
            f"| {gpus:,} devices, 54 days, {plan.name} | {result.interruptions} | {result.goodput:.2%} | {took:.1f} s |"
        )
    return worst


def sensitivities(seeds: range) -> None:
    print("\n| rerail's defaults, Llama 3 preset | goodput, median | range |\n|---|---|---|")
    for words, changes in CHANGES:
        print(f"| {words} | {span(goodputs(dict(changes), 'rerail', seeds))} |", flush=True)
    print("\n| hourly checkpoints and job restart | goodput, median | range |\n|---|---|---|")
    for words, changes in (("as it is", {}), ("a job restart in 300 s instead of 600", {"job_restart_s": 300})):
        print(f"| {words} | {span(goodputs(dict(changes), 'hourly', seeds))} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="two seeds; not to be quoted")
    parser.add_argument("--html", default="", help="the policies as a page with drawings")
    args = parser.parse_args()
    seeds = range(2 if args.quick else args.seeds)
    found = policies(seeds, args.html)
    print("\n| speed, one core | interruptions | goodput | processor time |\n|---|---|---|---|")
    small, large = speed(16_384), speed(LARGE)
    sensitivities(seeds)
    met = [found >= GOODPUT, small <= SECONDS, large <= LARGE_S]
    bars = f"goodput >= {GOODPUT:.0%}", f"16,384 devices <= {SECONDS:g} s", f"{LARGE:,} devices <= {LARGE_S:g} s"
    for bar, ok in zip(bars, met, strict=True):
        print(f"{bar}: {'reached' if ok else 'MISSED'}")
    return int(not all(met))


if __name__ == "__main__":
    sys.exit(main())
