"""The script under test: a small model in any of the parallel styles, with everything that makes a resume hard.

    train.py STYLE STEPS [--sleep S] [--fault NAME@RANK@STEP] [--guard-every N]

Dropout, BatchNorm, a scheduler, a shuffled loader; prints one JSON line per step and a digest of the weights at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import rerail
from rerail.session.fabric import fabric

WIDTH, BATCH = 32, 8


def build(style: str, job: rerail.Job) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """The model and a function from a batch to its loss, backward included."""
    norm: nn.Module = nn.BatchNorm1d(64) if style == "ddp" else nn.LayerNorm(64)
    model: nn.Module = nn.Sequential(
        nn.Linear(WIDTH, 64), norm, nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, WIDTH)
    )
    if style in ("ddp", "zero"):
        model = DistributedDataParallel(model)
    elif style in ("fsdp", "hsdp"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")) if style == "hsdp" else None
        for layer in (model[0], model[4], model[5]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif style == "tp":
        mesh = init_device_mesh("cpu", (job.world_size // 2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], {"4": ColwiseParallel(), "5": RowwiseParallel()})
    elif style == "pp":
        return pipeline(model, job)

    def backward(batch: torch.Tensor) -> torch.Tensor:
        loss = ((model(batch) - batch) ** 2).mean()
        loss.backward()
        return loss

    return model, backward


def pipeline(model: nn.Module, job: rerail.Job) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """Two stages, run by two pairs of ranks, 0-1 and 2-3; the same stages of both average their gradients."""
    assert isinstance(model, nn.Sequential)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage_index = job.rank % 2
    part = nn.Sequential(*list(model)[:4]) if stage_index == 0 else nn.Sequential(*list(model)[4:])
    lanes = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    stage = PipelineStage(part, stage_index, 2, torch.device("cpu"), group=pairs[job.rank // 2])

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - target) ** 2).mean()

    schedule = ScheduleGPipe(stage, 2, loss_fn=loss_of)

    def backward(batch: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = [torch.zeros(())]
        if stage_index == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch, losses=losses)
        for parameter in part.parameters():
            dist.all_reduce(parameter.grad, group=lanes[stage_index])
        return torch.stack(losses).mean()

    return part, backward


def digest(model: nn.Module) -> str:
    """Of all parameters of this rank, whole ones where they are sharded."""
    hashed = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # type: ignore[operator]
        hashed.update(whole.detach().numpy().tobytes())
    return hashed.hexdigest()


def keep(model: nn.Module, name: str) -> None:
    """The parts that this rank holds."""
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]  # type: ignore[operator]
    torch.save(torch.cat([part.detach().reshape(-1) for part in parts]), Path(os.environ["TEST_DIR"], f"{name}.pt"))


def say(**event: object) -> None:
    """One line in one write: lines of several ranks never mix."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def once(mark: str) -> bool:
    """True for the first process that asks for this mark in this run."""
    try:
        Path(os.environ["TEST_DIR"], mark).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def maybe_fault(fault: str, job: rerail.Job, where: str) -> None:
    """`raise`, `die`: ahead of the backward pass. `rest`: the same as `die`, once nothing is being copied any more. `skew`: die behind it, while another rank dawdles. `midway`: die while most
    of a message is still to come. `again`: die once there has been a repair. `stray`: do what was not done before it."""
    rank, step = job.rank, job.version
    for name, victim, at in (one.split("@") for one in fault.split(",") if one):
        if step != int(at):
            continue
        if name == "raise" and where == "before" and rank == int(victim) and once(f"raise{at}"):
            raise ConnectionError("the object store went away")
        if name == "late" and where == "after" and rank == int(victim) and once(f"late{at}"):
            time.sleep(0.5)  # the others complete the step meanwhile
            raise ConnectionError("the metrics server went away")
        if name == "always" and where == "before" and rank == int(victim):
            raise ValueError("this batch is bad")
        if name == "die" and where == "before" and rank == int(victim) and once(f"die{at}"):
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "rest" and where == "before" and rank == int(victim) and once(f"rest{at}"):
            job._snapshots.settle()
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "again" and where == "before" and rank == int(victim) and fabric.generation and once(f"again{at}"):
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "stray" and where == "before" and rank == int(victim) and fabric.generation and once(f"stray{at}"):
            dist.all_reduce(torch.ones(3))
        if name == "midway" and where == "before":
            work = dist.broadcast(torch.full((40_000_000,), float(rank)), 0, async_op=True)
            if rank == int(victim) and once(f"midway{at}"):
                os.kill(os.getpid(), signal.SIGKILL)
            work.wait()
        if name == "skew" and where == "after" and not Path(os.environ["TEST_DIR"], f"done{at}").exists():
            if rank == int(victim):
                time.sleep(0.3)
                Path(os.environ["TEST_DIR"], f"done{at}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == (int(victim) + 1) % 4:
                time.sleep(1.5)  # the others have updated; this rank is interrupted before it does


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("style")
    parser.add_argument("steps", type=int)
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--fault", default="")
    parser.add_argument("--guard-every", type=int, default=0)
    parser.add_argument("--flip-at", type=int, default=-1, help="in this step a parameter of rank 1 goes astray")
    parser.add_argument("--replan", type=int, default=0, help="after a repair: steps between two snapshots")
    parser.add_argument("--inner", action="store_true", help="track the module inside of DDP")
    parser.add_argument("--drift-from", type=int, default=-1, help="from this step on rank 1 goes its own way")
    parser.add_argument("--tell", action="store_true", help="tell the loss to rerail")
    parser.add_argument(
        "--sick",
        type=int,
        default=-1,
        help="in this generation, its first step aside, the loss is told as if it had not healed",
    )
    parser.add_argument("--keep", action="store_true", help="write down what each rank's parameters are in every step")
    parser.add_argument("--saves", default="", metavar="PLACE@N", help="save to this place every N steps")
    parser.add_argument("--bad", default="", help="ways by which a lost shard comes back spoilt, with + in between")
    parser.add_argument("--believe", default="", help="a predictor that survivors find good, as soon as it has learnt")
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = rerail.join()
    torch.manual_seed(1)
    model, backward = build(args.style, job)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if args.style == "zero":  # each rank keeps the moments of a share of the parameters
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500)
    # ranks of one tensor-parallel or pipeline group see the same data and draw the same dropout
    lane = job.rank // 2 if args.style in ("tp", "pp") else job.rank
    torch.manual_seed(100 + lane)
    data = torch.randn(400, WIDTH, generator=torch.Generator().manual_seed(lane))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=BATCH, shuffle=True)
    tracked = model.module if args.inner else model
    job.track(model=tracked, optimizer=optimizer, scheduler=scheduler, loader=loader)
    if args.saves:
        place, _, every = args.saves.rpartition("@")
        job.checkpoints(place, when=int(every))

    if args.bad and job._rejoin is not None:
        mender, renew = job._rejoin._mender, job._rejoin._mender.renew

        def spoil(stale: Any, version: int) -> None:
            renew(stale, version)
            if stale.way in args.bad.split("+"):
                for parameter in model.parameters():
                    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # type: ignore[operator]
                    local.data.mul_(40.0)

        mender.renew = spoil
    if args.believe:
        foretelling = job._snapshots.foretelling
        known = foretelling.guesses
        foretelling.guesses = lambda: {args.believe: (0.1, 3)} if args.believe in known() else {}

    def evaluate() -> float:
        total = torch.tensor([float(sum(p.detach().sum() for p in model.parameters()))])
        dist.all_reduce(total)
        return float(total)

    begun: dict[int, int] = {}
    for (batch,) in job.steps(loader, until=args.steps):
        sick = fabric.generation == args.sick and job.version > begun.setdefault(fabric.generation, job.version)
        if args.replan and fabric.generation > 0:
            job._snapshots.every = args.replan
        with job.step():
            if args.keep and job.version >= 0:
                keep(model, f"{job.rank}-{job.version}-{os.getpid()}")
            maybe_fault(args.fault, job, "before")
            loss = backward(batch)
            if args.tell and (args.style != "pp" or job.rank % 2):
                job.metric("loss", loss.item() + 10.0 * sick)
            maybe_fault(args.fault, job, "after")
            time.sleep(args.sleep)
            if job.rank == 1 and 0 <= args.drift_from <= job.version:
                optimizer.param_groups[0]["params"][0].grad += 0.01
            optimizer.step()
            if job.rank == 1 and args.flip_at == job.version and once("flip"):
                next(model.parameters()).data[0, 0] += 0.25
            scheduler.step()
            optimizer.zero_grad()
        if job.version >= 0:
            say(rank=job.rank, pid=os.getpid(), step=job.version, loss=float(loss.detach()))
        if args.guard_every and job.version % args.guard_every == 0:
            job.guard(evaluate)
    say(rank=job.rank, digest=digest(model))


if __name__ == "__main__":
    main()
