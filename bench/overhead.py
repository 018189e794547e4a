"""What rerail costs when nothing fails: the same 20 ms step with and without it, interleaved inside one pair of processes.

Started by `bench/recovery.py` through `rerail run` with two ranks. Blocks of steps under `job.step()` on rerail's process
group alternate with blocks of the same step on a plain gloo group, so that whatever else the machine does hits both alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
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

    def __init__(self, rounds: int, group: dist.ProcessGroup | None) -> None:
        torch.manual_seed(1)
        self.model = DistributedDataParallel(Workload(rounds), process_group=group)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.data = torch.randn(64, 384)

    def step(self) -> None:
        self.model(self.data).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def calibrated(group: dist.ProcessGroup) -> int:
    """Rounds that make a step last about 20 ms here, agreed on by both ranks; tried until that is so."""
    rounds = 8
    for _ in range(CALIBRATIONS):
        trial = Trainer(rounds, group)
        for _ in range(10):
            trial.step()
        seconds = torch.tensor(statistics.median(x for _ in range(8) for x in timed(trial)))
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
    plain_group = dist.new_group(backend="gloo")
    rounds = calibrated(plain_group)
    plain, guarded = Trainer(rounds, plain_group), Trainer(rounds, None)
    job.track(model=guarded.model, optimizer=guarded.optimizer)
    blocks: list[tuple[float, float]] = []
    with_rerail: list[float] = []
    last = time.monotonic()
    for step in job.steps(until=args.blocks * BLOCK):
        with job.step():
            guarded.step()
        now = time.monotonic()
        with_rerail.append(now - last)
        last = now
        if (step + 1) % BLOCK == 0:
            blocks.append((statistics.mean(with_rerail), statistics.mean(timed(plain))))
            with_rerail = []
            last = time.monotonic()
    if job.rank == 0:
        args.out.write_text(json.dumps(blocks[WARM_UP:]))


def timed(trainer: Trainer) -> list[float]:
    """Seconds of each step of one block without rerail."""
    found = []
    last = time.monotonic()
    for _ in range(BLOCK):
        trainer.step()
        now = time.monotonic()
        found.append(now - last)
        last = now
    return found


if __name__ == "__main__":
    main()
