"""A script that knows nothing of rerail: process group from the environment, a checkpoint every ten steps, resume on start.

torchrun --nproc-per-node 2 examples/plain_torchrun.py
rerail run --nproc-per-node 2 examples/plain_torchrun.py      # the same, with detection, reports and warm restarts
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", type=Path, default=Path("plain_torchrun.pt"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(256, 256)
    start = 0
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        start = saved["step"]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    print(f"rank {rank} is pid {os.getpid()}, attempt {attempt}, from step {start}", flush=True)
    for step in range(start, args.steps):
        data = torch.randn(64, 256, generator=torch.Generator().manual_seed(step * world + rank))
        loss = (model(data) - data).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                gradient = parameter.grad
                if gradient is not None:
                    dist.all_reduce(gradient)
                    parameter -= 0.1 / world * gradient
                parameter.grad = None
        if (step + 1) % 10 == 0 and rank == 0:
            print(f"step {step + 1:5d}  loss {loss.item():.4f}", flush=True)
            unfinished = args.checkpoint.with_suffix(".tmp")
            torch.save({"model": model.state_dict(), "step": step + 1}, unfinished)
            os.replace(unfinished, args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
