"""What does it cost to lose a stage of a pipeline? Turns kills into seconds until all are where they were, with and without logged replay.

    python bench/replay.py [--repeats 5] [--behind 40]

Four ranks, one stage each (1F1B, gloo), a snapshot at step 60, one stage killed `--behind` steps later. Seconds are from the kill until every rank
has completed the step in which it came. *All go back* is the same job with `replay_log = 0`. Both take turns; every step of every rank must hold the
weights of an undisturbed run. The last rows are what the log costs when nothing fails: blocks of five steps with and without, in one job.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORLD, SNAPSHOT = 4, 60
BLOCK = 5
Steps = dict[tuple[int, int], tuple[float, float, str]]


def run(folder: Path, steps: int, *arguments: str, log: bool = True) -> Steps:
    """One job to its end: when each rank completed each step (the last time), how long it took, and what it held."""
    folder.mkdir()
    env = {
        "RERAIL_SNAPSHOT_EVERY": str(SNAPSHOT),
        "OMP_NUM_THREADS": "1",
        "RERAIL_REPLAY_LOG": "512MiB" if log else "0",
    }
    command = [sys.executable, "-m", "rerail.cli.main", "run", "--nproc-per-node", str(WORLD)]
    command += ["--run-dir", str(folder / "run"), str(HERE / "replay_train.py")]
    told = subprocess.run(
        [*command, "--folder", str(folder), "--steps", str(steps), *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if told.returncode:
        raise SystemExit(told.stdout + told.stderr)
    found: Steps = {}
    for rank in range(WORLD):
        for line in (folder / f"rank{rank}").read_text().splitlines():
            step, at, took, held = json.loads(line)
            found[rank, step] = (at, took, held)
    return found


def lost(folder: Path, behind: int, victim: int, quiet: Steps, *, log: bool) -> tuple[float, bool]:
    """Seconds until all had done the step in which the victim died, and whether every step came to the same."""
    at = SNAPSHOT + behind
    steps = run(folder, at + 5, "--die", str(victim), str(at), log=log)
    died = float((folder / "died").read_text())
    same = all(steps[key][2] == quiet[key][2] for key in steps)
    return max(steps[rank, at + 1][0] for rank in range(WORLD)) - died, same


def slowdown(folder: Path, steps: int) -> list[float]:
    """Of the log, in percent, for each pair of blocks."""
    found = run(folder, steps, "--blocks")
    blocks: dict[int, list[float]] = {}
    for (rank, step), (_, took, _) in found.items():
        if rank == 0 and step > 20:
            blocks.setdefault((step - 1) // BLOCK, []).append(took)
    medians = {block: statistics.median(times) for block, times in blocks.items() if len(times) == BLOCK}
    pairs = [(medians[n], medians[n + 1]) for n in medians if n % 2 == 0 and n + 1 in medians]
    return [100 * (kept / plain - 1) for kept, plain in pairs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--behind", type=int, default=40, help="steps from the snapshot to the fault")
    parser.add_argument("--cost-steps", type=int, default=600)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        quiet = run(root / "quiet", SNAPSHOT + args.behind + 5)
        step = statistics.median(took for (rank, n), (_, took, _) in quiet.items() if rank == 0 and n > 10)
        print(f"step {1e3 * step:.0f} ms; {args.behind} steps behind the snapshot; {os.cpu_count()} cores", flush=True)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        exact = True
        for n in range(args.repeats):
            victim = n % WORLD
            for log in (True, False):
                took, same = lost(root / f"{'alone' if log else 'all'}{n}", args.behind, victim, quiet, log=log)
                seconds[log].append(took)
                exact = exact and same
                how = "it does its steps again" if log else "all go back"
                print(
                    f"  rank {victim} lost, {how:<24} {took:6.2f} s  {'exact' if same else 'NOT THE SAME'}", flush=True
                )
        ratio = statistics.median(seconds[True]) / statistics.median(seconds[False])
        print(
            f"median {statistics.median(seconds[True]):.2f} s against {statistics.median(seconds[False]):.2f} s: {ratio:.2f}"
        )
        costs = slowdown(root / "cost", args.cost_steps)
        error = statistics.stdev(costs) / len(costs) ** 0.5
        print(
            f"cost of the log when nothing fails: {statistics.median(costs):+.2f} % (mean {statistics.mean(costs):+.2f} +- {error:.2f} %)"
        )
    return int(not exact or ratio > 0.4)


if __name__ == "__main__":
    sys.exit(main())
