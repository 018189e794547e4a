"""A small GPT, trained with DDP or FSDP2, that survives the loss of any rank.

    rerail run --nproc-per-node 4 examples/gpt.py --steps 200
    rerail run --nproc-per-node 4 examples/gpt.py --steps 200 --parallel fsdp

While it trains, kill a rank (`kill -9 PID`; the pids are printed), then see `rerail report last`. The lines that have to do
with rerail are marked; alone (`python examples/gpt.py`) the script runs as a job of one rank. Text: the sources of Python's
standard library.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rerail
from rerail.cli.demo_gpt import GPT, Sources, fingerprint


class Batches:
    """A data loader that knows where it is: anything with state_dict and load_state_dict can be tracked."""

    def __init__(self, data: Sources, rank: int, device: torch.device) -> None:
        self.data, self.rank, self.device, self.next = data, rank, device, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            index, self.next = self.next, self.next + 1
            yield self.data.batch(index, self.rank, self.device)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def build(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """The model, wrapped by plain torch: no special wrapper is needed."""
    torch.manual_seed(args.seed)
    model = GPT(layers=args.layers, width=args.width, length=args.length, dropout=args.dropout).to(device)
    if args.parallel == "ddp":
        return DistributedDataParallel(model)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--every", type=int, default=10, help="steps between two lines of output")
    parser.add_argument("--out", type=Path, help="rank 0 writes the sha256 of the final weights here")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    job = rerail.join()  # rerail: who am I; makes the process group
    model = build(args, job.device)
    torch.manual_seed(args.seed + job.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = Batches(Sources(args.length, args.batch), job.rank, job.device)
    job.track(model=model, optimizer=optimizer, loader=loader)  # rerail: what has to survive
    print(f"rank {job.rank} is pid {os.getpid()}", flush=True)
    for tokens, targets in job.steps(loader, until=args.steps):  # rerail: hands a batch out again if its step fails
        with job.step():  # rerail: one whole update
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if job.version % args.every == 0 and not job.rehearsing:
            told = loss.item()  # waits for the device, so not in every step
            job.metric(
                "loss", told
            )  # rerail: watched for sick training, and drawn by `rerail report job --format html`
            if job.rank == 0:
                print(f"step {job.version:5d}  loss {told:.4f}", flush=True)
    whole = model.module if isinstance(model, DistributedDataParallel) else model
    result = job.guard(fingerprint, whole)  # rerail: collectives outside a step, repeated if a fault hits them
    if job.rank == 0:
        print(f"sha256 {result}")
        if args.out:
            args.out.write_text(result)


if __name__ == "__main__":
    main()
