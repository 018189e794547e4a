"""A small GPT on the GPU under DDP or FSDP2, for `bench/gpu.py`; prints one JSON line per step and a digest at the end."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rerail


def say(**event: object) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--style", default="ddp")
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--steps", type=int, default=700)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    backend = "cpu:gloo,cuda:nccl" if args.backend == "nccl" else "gloo"
    job = rerail.join(backend=backend)
    if job.world_size > torch.cuda.device_count():
        os.environ["NCCL_HOSTID"] = f"host-of-rank-{job.rank}"  # several ranks on one GPU: see bench/gpu.py
    torch.manual_seed(1)
    width = 512
    model: nn.Module = nn.Sequential(
        nn.Linear(width, 4 * width),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(4 * width, 4 * width),
        nn.GELU(),
        nn.Linear(4 * width, width),
    ).to(job.device)
    if args.style == "ddp":
        model = DistributedDataParallel(model)
    else:
        for index in (0, 3, 5):
            fully_shard(model[index])
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    job.track(model=model, optimizer=optimizer)
    torch.manual_seed(100 + job.rank)
    last = time.monotonic()
    for step in job.steps(until=args.steps):
        with job.step():
            generator = torch.Generator().manual_seed(step * 1000 + job.rank)
            batch = torch.randn(64, width, generator=generator).to(job.device)
            loss = ((model(batch) - batch) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)  # long enough a run for the standby to be warm
        if job.version >= 0:
            now = time.monotonic()
            say(rank=job.rank, pid=os.getpid(), step=job.version, step_s=now - last)
            last = now
    hashed = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # type: ignore[operator]
        hashed.update(whole.detach().cpu().numpy().tobytes())
    say(rank=job.rank, digest=hashed.hexdigest()[:16])


if __name__ == "__main__":
    main()
