"""What shadows cost when nothing fails: the same FSDP2 step without them, with as many as are planned, and with one in every step.

    python bench/shadow.py [--runs 3] [--blocks 12]

Two ranks of one job, again and again; blocks of steps of the three kinds follow one another in random order in the same processes,
so that a busy machine slows all alike. Told is the CPU time of a rank, all its threads together, which other processes hardly
change, and the time that passed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard

import rerail
from rerail.cli.demo_gpt import GPT, Sources

KINDS = ("without", "planned", "every step")
BLOCK, WARM_UP = 5, 10
"""Steps in a row of one kind, and steps before anything is measured."""
SETTINGS = {
    "RERAIL_FIDELITY": "fast",
    "RERAIL_REHAB_FROM": "0",
    "RERAIL_SNAPSHOT_EVERY": "100000",
    "RERAIL_DETECTORS": "0",
    "OMP_NUM_THREADS": "1",
}


def train(out: Path, blocks: int, seed: int) -> None:
    """One rank."""
    torch.set_num_threads(1)
    job, data = rerail.join(), Sources()
    torch.manual_seed(1)
    model = GPT(layers=4, width=192, vocabulary=4096)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.track(model=model, optimizer=optimizer)
    turns = job.steps(until=WARM_UP + 3 * blocks * BLOCK)
    shadow, chance = job._snapshots.shadow, random.Random(seed)
    caster = shadow._caster
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    took(WARM_UP, turns, job, model, data, optimizer)
    for _ in range(blocks):
        for kind in chance.sample(KINDS, len(KINDS)):
            shadow._caster = None if kind == KINDS[0] else caster
            shadow._fixed = 1 if kind == KINDS[2] else 0
            found[kind].append(took(BLOCK, turns, job, model, data, optimizer))
    shadow._fixed, shadow._caster = 0, caster
    if job.rank == 0 and caster is not None:
        size = sum(one.numel() * one.element_size() for one in job._tracked.trained_tensors())
        facts = {
            "every": shadow.every,
            "state": size,
            "shadow": shadow.room(),
            "cost_s": statistics.median(shadow._costs),
        }
        out.write_text(json.dumps({"seconds": found, **facts}))
    for _ in turns:
        raise RuntimeError("there are steps left")


def took(
    steps: int,
    turns: Iterator[int],
    job: rerail.Job,
    model: torch.nn.Module,
    data: Sources,
    optimizer: torch.optim.Optimizer,
) -> tuple[float, float]:
    """Seconds of a CPU that one step takes on average, and seconds that pass."""
    began, used = time.monotonic(), time.process_time()
    for _ in range(steps):
        step = next(turns)
        with job.step():
            model(*data.batch(step, job.rank, job.device)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return (time.process_time() - used) / steps, (time.monotonic() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="of a rank")
    args = parser.parse_args()
    if args.out is not None:
        train(args.out, args.blocks, args.seed)
        return
    found: dict[tuple[str, int], list[float]] = {}
    for run in range(args.runs):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "found.json")
            command = [sys.executable, "-m", "rerail.cli.main", "run", "--nproc-per-node", "2", __file__]
            command += ["--out", str(out), "--blocks", str(args.blocks), "--seed", str(run)]
            subprocess.run(command, check=True, env={**os.environ, **SETTINGS, "RERAIL_HOME": folder})
            told = json.loads(out.read_text())
        plain = told["seconds"][KINDS[0]]
        for kind in KINDS[1:]:
            for which in (0, 1):
                pairs = zip(told["seconds"][kind], plain, strict=True)
                found.setdefault((kind, which), []).extend(one[which] / other[which] - 1 for one, other in pairs)
        print(
            f"run {run}: a step takes {1000 * statistics.median(one[0] for one in plain):.0f} ms of a CPU; a shadow costs "
            f"{1000 * told['cost_s']:.1f} ms by its own account and is planned every {told['every']} steps; "
            f"{told['shadow'] / 1e6:.1f} MB for both halves, {told['state'] / 1e6:.1f} MB of state",
            flush=True,
        )
        show(found)


def show(found: dict[tuple[str, int], list[float]]) -> None:
    """How much slower than without, of all runs so far."""
    for (kind, which), rises in found.items():
        error = 200 * statistics.stdev(rises) / len(rises) ** 0.5 if len(rises) > 1 else 0.0
        print(
            f"{kind}, {('CPU time', 'time')[which]}: {100 * statistics.mean(rises):+.2f} % +- {error:.2f} (95 %), "
            f"median {100 * statistics.median(rises):+.2f} %, {len(rises)} blocks",
            flush=True,
        )


if __name__ == "__main__":
    main()
