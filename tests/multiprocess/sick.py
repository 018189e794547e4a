"""The script under test for faults of the training itself: a small DDP model that tells its loss, and data that can be spoilt.

    sick.py STEPS [--nan E:I] [--without E:I] [--poison E:I [--by X]] [--refuse E:I] [--save DIR] ...

E:I is batch I of epoch E; what is spoilt is spoilt on rank 1 alone. Prints one JSON line per step and a digest at the end.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from train import digest, say

import rerail

WIDTH, BATCH = 32, 8


class Tampered:
    """A shuffled loader some of whose batches are bad, or missing from the start."""

    def __init__(self, rank: int, args: argparse.Namespace) -> None:
        data = torch.randn(args.samples, WIDTH, generator=torch.Generator().manual_seed(rank))
        self._loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=BATCH, shuffle=True)
        self._rank, self._args, self._epoch = rank, args, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, (batch,) in enumerate(self._loader):
            place = f"{self._epoch}:{index}"
            if place in self._args.without:
                continue
            if self._rank == 1 and place in self._args.nan:
                batch = batch * float("nan")
            if self._rank == 1 and place == self._args.poison:
                batch = batch * self._args.by
            yield place, batch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--nan", nargs="*", default=[])
    parser.add_argument("--without", nargs="*", default=[])
    parser.add_argument("--poison", default="")
    parser.add_argument("--by", type=float, default=300.0, help="how much too large the numbers of --poison are")
    parser.add_argument("--refuse", nargs="*", default=[])
    parser.add_argument("--save", default="")
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--tell-every", type=int, default=1, help="tell the loss only at every so many steps")
    parser.add_argument("--behind", action="store_true", help="tell it behind the step, not inside")
    parser.add_argument("--numbers", action="store_true", help="no loader: step numbers")
    parser.add_argument(
        "--gradient", action="store_true", help="what is bad spoils the gradient, and not the loss of the step"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = rerail.join()
    torch.manual_seed(1)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(WIDTH, 64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, WIDTH))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    torch.manual_seed(100 + job.rank)
    loader = None if args.numbers else Tampered(job.rank, args)
    job.track(model=model, optimizer=optimizer)
    if args.save:
        job.checkpoints(args.save, when=args.every)
    taken = []
    for item in job.steps(loader, until=args.steps):
        place, batch = item if loader is not None else (f"0:{item}", torch.full((2, WIDTH), float(item % 7)))
        with job.step():
            if job.rank == 1 and place in args.refuse:
                job.bad_batch(f"{place} is not wanted")
            spoilt = bool(batch.isnan().any()) and args.gradient
            loss = ((model(batch.nan_to_num() if spoilt else batch) - batch.nan_to_num()) ** 2).mean()
            if not args.gradient:
                loss = loss + batch.sum() * 0.0
            told = job._version % args.tell_every == 0
            if told and not args.behind:
                job.metric("loss", loss.item())
            loss.backward()
            if spoilt:
                next(model.parameters()).grad.mul_(float("nan"))
            time.sleep(args.sleep)
            optimizer.step()
            optimizer.zero_grad()
        if job.version >= 0:
            if told and args.behind:
                job.metric("loss", loss.item())
            taken.append(place)
            say(rank=job.rank, pid=os.getpid(), step=job.version, loss=loss.item())
    say(rank=job.rank, digest=digest(model))
    print(f"taken {job.rank}: {' '.join(taken[-12:])}", file=sys.stderr)


if __name__ == "__main__":
    main()
