"""The script of the checkpoint tests: one small model in any layout, saved as it goes, with a digest of all its tensors.

    saved.py LAYOUT STEPS ROOT,... [--every N] [--sleep S] [--planned] [--bare] [--loaded] [--die WHEN@RANK@STEP,...]

Dropout, BatchNorm, a scheduler, a shuffled loader, a parameter too short for every rank to have a part of it, and an
object with a tensor of its own. Prints one JSON line per step, and at the end a digest of the whole tensors by name:
two layouts of the same state print the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import rerail
from rerail.checkpoint.schedule import Planned

WIDTH, BATCH = 16, 4


class Net(nn.Module):
    """Odd sizes where a layout allows them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 37)
        self.norm = nn.BatchNorm1d(37)
        self.drop = nn.Dropout(0.2)
        self.up = nn.Linear(37, 64)
        self.down = nn.Linear(64, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.drop(self.norm(self.first(x)))))) * self.scale


class Totals:
    """An object with a tensor that is too large for the small state, and a way to die before a version is kept."""

    def __init__(self, die_at: int) -> None:
        self.sums = torch.zeros(5000)
        self.count = 0
        self.die_at = die_at

    def add(self) -> None:
        self.count += 1
        self.sums += self.count

    def state_dict(self) -> dict[str, Any]:
        if self.count == self.die_at:
            die_once("before")
        return {"sums": self.sums, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums.copy_(state["sums"])
        self.count = state["count"]


def build(layout: str) -> nn.Module:
    net = Net()
    if layout in ("ddp", "zero"):
        return DistributedDataParallel(net)
    if layout in ("fsdp", "hsdp"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")) if layout == "hsdp" else None
        for layer in (net.first, net.up, net.down):
            fully_shard(layer, mesh=mesh)
        return fully_shard(net, mesh=mesh)
    if layout in ("tp", "fsdp+tp"):
        grid = init_device_mesh("cpu", (1 if layout == "tp" else 2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(net, grid["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if layout == "fsdp+tp":
            for layer in (net.up, net.down):
                fully_shard(layer, mesh=grid["data"])
            fully_shard(net, mesh=grid["data"])
    return net


def die_once(when: str) -> None:
    """The first process that comes here is lost."""
    mark = Path(os.environ["TEST_DIR"], f"died-{when}")
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()  # type: ignore[operator]


def digest(model: nn.Module, optimizer: torch.optim.Optimizer, totals: Totals) -> str:
    """Of everything that is a tensor, put together from all ranks; names without wrappers. Buffers are each rank's own."""
    found = {"totals": totals.sums}
    found.update({name.removeprefix("module."): buffer for name, buffer in model.named_buffers()})
    shared = isinstance(optimizer, ZeroRedundancyOptimizer)
    state = optimizer.optim.state if shared else optimizer.state
    moments = {}
    for name, parameter in model.named_parameters():
        plain = name.removeprefix("module.")
        found[plain] = whole(parameter)
        for key, value in state.get(parameter, {}).items():
            moments[f"{plain}/{key}"] = whole(value)
    everywhere: list[dict[str, torch.Tensor]] = [moments] * (dist.get_world_size() if shared else 1)
    if shared:
        dist.all_gather_object(everywhere, moments)
    for share in everywhere:
        found.update(share)
    hashed = hashlib.sha256(str(optimizer.param_groups[0]["lr"]).encode())
    for name, tensor in sorted(found.items()):
        hashed.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        hashed.update(tensor.contiguous().numpy().tobytes())
    return hashed.hexdigest()


def say(before: str = "", **event: object) -> None:
    """One line in one write: lines of several ranks never mix."""
    sys.stdout.write(before + json.dumps(event) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("layout")
    parser.add_argument("steps", type=int)
    parser.add_argument("root")
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--planned", action="store_true")
    parser.add_argument("--bare", action="store_true", help="track nothing but the model and its optimizer")
    parser.add_argument("--loaded", action="store_true", help="print a digest before the first step, too")
    parser.add_argument("--die", default="", metavar="before@RANK@STEP, inside@RANK@STEP or again@RANK@STEP")
    args = parser.parse_args()
    deaths = {when: (int(rank), int(at)) for when, rank, at in (one.split("@") for one in args.die.split(",") if one)}
    torch.set_num_threads(1)
    job = rerail.join()
    torch.manual_seed(1)
    model = build(args.layout)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if args.layout == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    victim, at = deaths.get("before", (-1, -1))
    totals = Totals(at if job.rank == victim else -1)
    lane = 0 if args.layout == "tp" else job.rank // 2 if args.layout == "fsdp+tp" else job.rank
    torch.manual_seed(100 + lane)
    data = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(lane))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=BATCH, shuffle=True)
    job.track(model=model, optimizer=optimizer)
    if not args.bare:
        job.track(scheduler=scheduler, totals=totals)
    job.checkpoints(*args.root.split(","), when=Planned() if args.planned else args.every)
    first, attempts = True, 0
    for (batch,) in job.steps(loader, until=args.steps):
        if first and args.loaded and job.version >= 0:
            say("loaded ", rank=job.rank, loaded=digest(model, optimizer, totals))
            first = False
        with job.step():
            if (job.rank, job.version) == deaths.get("inside"):
                die_once("inside")
            if (job.rank, job.version) == deaths.get("again"):
                attempts += 1
                if attempts == 2:
                    die_once("again")
            loss = ((model(batch) - batch) ** 2).mean()
            loss.backward()
            time.sleep(args.sleep)
            optimizer.step()
            optimizer.zero_grad()
            if not args.bare:
                scheduler.step()
                totals.add()
        if job.version >= 0:
            say(rank=job.rank, pid=os.getpid(), step=job.version, loss=float(loss.detach()))
    say(rank=job.rank, digest=digest(model, optimizer, totals))


if __name__ == "__main__":
    main()
