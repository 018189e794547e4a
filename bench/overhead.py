"""What rerail costs when nothing fails: the same 20 ms step with and without it, interleaved inside one pair of processes.

Started by `bench/recovery.py` through `rerail run` with two ranks, many times. Blocks of steps under `job.step()` on rerail's
process group alternate, in random order, with blocks of the same step on two plain gloo groups. All use the same memory,
and still any two of them differ by a percent in one process and by another in the next, rerail or not: so each run is
short, there are many of them, and what the two plain ones differ by is told as well.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rerail

BLOCK = 5
"""Steps in a row of one kind."""
WARM_UP = 10
"""Blocks of each kind that are not counted."""
TARGET_S = 0.020
CALIBRATIONS = 4
"""Tries: what is measured right after the start, or with other rounds than those that come out, is not what comes out."""


class Workload(nn.Module):
    """A step of a chosen length: the same layer, used `rounds` times."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds
        self.layer = nn.Linear(384, 384)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            x = torch.tanh(self.layer(x))
        return x.square().mean()


class Trainer:
    """A model, its optimizer and one step of training."""

    def __init__(self, rounds: int, group: dist.ProcessGroup | None, like: Trainer | None = None) -> None:
        """`like`: one whose memory to use, made before."""
        torch.manual_seed(1)
        self.model = DistributedDataParallel(Workload(rounds), process_group=group)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.bare = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.bare.state = self.optimizer.state
        """The same without rerail's hooks, which an optimizer has once it is tracked."""
        self.data = torch.randn(64, 384)
        self.step(self.optimizer)  # from here on there is state
        if like is not None:
            self.data = like.data
            for own, other in zip(self.model.parameters(), like.model.parameters(), strict=True):
                own.data = other.data
                self.optimizer.state[own] = like.optimizer.state[other]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.model(self.data).backward()
        optimizer.step()
        optimizer.zero_grad()


def calibrated(group: dist.ProcessGroup) -> int:
    """Rounds that make a step last about 20 ms here, agreed on by both ranks; tried until that is so."""
    rounds = 8
    for _ in range(CALIBRATIONS):
        trial = Trainer(rounds, group)
        for _ in range(10):
            trial.step(trial.bare)
        seconds = torch.tensor(statistics.median(timed(trial) for _ in range(8)))
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
        rounds = max(1, round(rounds * TARGET_S / seconds.item()))
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = rerail.join()
    rounds = calibrated(dist.new_group(backend="gloo"))
    guarded = Trainer(rounds, None)
    plain = [Trainer(rounds, dist.new_group(backend="gloo"), guarded) for _ in range(2)]
    job.track(model=guarded.model, optimizer=guarded.optimizer)
    shuffled, found = random.Random(1), list[list[float]]()
    turns = job.steps(until=args.blocks * BLOCK)
    kinds = (lambda: timed_steps(job, turns, guarded), lambda: timed(plain[0]), lambda: timed(plain[1]))
    for _ in range(args.blocks):
        # in any order: the first step of a block finds less of itself in the caches than those behind it
        seconds = {kind: kinds[kind]() for kind in shuffled.sample(range(3), 3)}
        found.append([seconds[kind] for kind in range(3)])
    for _ in turns:
        raise RuntimeError("there are steps left")
    if job.rank == 0:
        args.out.write_text(json.dumps(found[WARM_UP:]))


def timed_steps(job: rerail.Job, turns: Iterator[int], trainer: Trainer) -> float:
    """Seconds of a step of one block under rerail, on average."""
    began = time.monotonic()
    for _ in range(BLOCK):
        next(turns)
        with job.step():
            trainer.step(trainer.optimizer)
    return (time.monotonic() - began) / BLOCK


def timed(trainer: Trainer) -> float:
    """The same without rerail."""
    began = time.monotonic()
    for _ in range(BLOCK):
        trainer.step(trainer.bare)
    return (time.monotonic() - began) / BLOCK


if __name__ == "__main__":
    main()
