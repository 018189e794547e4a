"""The training script of the benchmark as a rerail user would write it; writes one line for each completed step.

Started by `bench/recovery.py` through `rerail run`. Model: GPT of 10.5 M parameters unless told otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rerail
from rerail.cli.demo_gpt import GPT, Sources, fingerprint

VOCABULARY = 8192
"""As in the study of the peers: with 8 layers of width 256 it makes 10.5 M parameters."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds each step is stretched by")
    return parser.parse_args()


def build(args: argparse.Namespace, device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    model = GPT(layers=args.layers, width=args.width, vocabulary=args.vocabulary).to(device)
    if args.parallel == "ddp":
        return DistributedDataParallel(model)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    job = rerail.join()
    data = Sources()
    model = build(args, job.device)
    torch.manual_seed(100 + job.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.track(model=model, optimizer=optimizer)
    with open(args.folder / f"rank-{job.rank}.jsonl", "a", buffering=1) as events:
        for step in job.steps(until=args.steps):
            with job.step():
                model(*data.batch(step, job.rank, job.device)).backward()
                if not job.rehearsing:
                    time.sleep(args.pace)
                optimizer.step()
                optimizer.zero_grad()
            if job.version == step + 1 and not job.rehearsing:
                events.write(json.dumps({"at": time.monotonic(), "pid": os.getpid(), "step": step + 1}) + "\n")
    whole = model.module if isinstance(model, DistributedDataParallel) else model
    result = job.guard(fingerprint, whole)
    if job.rank == 0:
        (args.folder / "sha256").write_text(result)


if __name__ == "__main__":
    main()
