"""A small model on the GPU under DDP, FSDP2 or as a pipeline, for `bench/gpu.py`; prints one JSON line per step and a digest at the end."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import rerail

WIDTH = 512
Backward = Callable[[torch.Tensor], torch.Tensor | None]


def of_all(model: nn.Module) -> Backward:
    """Every rank has the whole model, or a part of every layer."""

    def run(batch: torch.Tensor) -> torch.Tensor:
        loss = ((model(batch) - batch) ** 2).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return run


def of_pipeline(job: rerail.Job, model: nn.Module) -> Backward:
    """Every rank has a stage; the last one knows the loss."""
    stage = PipelineStage(model, job.rank, job.world_size, job.device)
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    first, last = job.rank == 0, job.rank == job.world_size - 1

    def run(batch: torch.Tensor) -> torch.Tensor | None:
        losses: list[torch.Tensor] = []
        schedule.step(*[batch] if first else [], **{"target": batch, "losses": losses} if last else {})
        return torch.stack(losses).mean().detach() if last else None

    return run


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
    torch.manual_seed(1 + (job.rank if args.style == "pp" else 0))
    model: nn.Module = nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(4 * WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Linear(4 * WIDTH, WIDTH),
    ).to(job.device)
    if args.style == "ddp":
        model = DistributedDataParallel(model)
    elif args.style == "fsdp":
        for index in (0, 3, 5):
            fully_shard(model[index])
        fully_shard(model)
    backward = of_pipeline(job, model) if args.style == "pp" else of_all(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    job.track(model=model, optimizer=optimizer)
    torch.manual_seed(100 + job.rank)
    last = time.monotonic()
    for step in job.steps(until=args.steps):
        with job.step():
            chosen = step * 1000 + (job.rank if args.style != "pp" else 0)
            batch = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(chosen)).to(job.device)
            loss = backward(batch)
            optimizer.step()
            optimizer.zero_grad()
            if loss is not None:
                job.metric("loss", loss.item())
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
