"""One of four ranks: meets the others in full, then without those whose seats are left empty, then in full again.

    seats_peer.py RANK PORT SEATS        SEATS as in 1,3

Prints what each collective gave among those who are there, as one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rerail.errors import StateError
from rerail.session import groups
from rerail.session.dealing import deal, share
from rerail.session.fabric import fabric

WORLD, BATCH = 4, 10
rank, port, seats = int(sys.argv[1]), int(sys.argv[2]), tuple(map(int, sys.argv[3].split(",")))
torch.set_num_threads(1)
groups.register()
fabric.form(0, lambda: fabric.dial("127.0.0.1", port))
dist.init_process_group(groups.BACKEND, store=fabric.store, rank=rank, world_size=WORLD)
half = dist.new_group([0, 1]), dist.new_group([2, 3])
torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).double()
plain.eval()  # BatchNorm over parts of a batch is another function; its buffers are still told by DDP
model = DistributedDataParallel(plain)
data = torch.randn(BATCH, 3, dtype=torch.float64)
dealer = deal(data, BATCH, 0, False, rank=rank, world_size=WORLD, seats=lambda: fabric.seats or range(WORLD))


def gradients() -> list[torch.Tensor]:
    start, count = share(BATCH, fabric.seats or range(WORLD), rank)
    model.zero_grad()
    ((model(data[start : start + count]) ** 2).mean() * dealer.weight).backward()
    return [parameter.grad.clone() for parameter in plain.parameters() if parameter.grad is not None]


def whole() -> list[torch.Tensor]:
    found = torch.autograd.grad((plain(data) ** 2).mean(), list(plain.parameters()))
    return [one.detach() for one in found]


def alike() -> bool:
    return all(torch.allclose(*pair, rtol=1e-9, atol=1e-12) for pair in zip(gradients(), whole(), strict=True))


def gave(function: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> list[float]:
    function(tensor, *args, **kwargs)
    return [float(one) for one in tensor.flatten()]


def refused(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except StateError as error:
        return str(error)
    return ""


def one(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


gradients()  # DDP rebuilds its buckets behind the first pass
first = alike()
if rank not in seats:
    dist.barrier()
    fabric.interrupt(1)
    sys.stdout.write(json.dumps({"full": first}))
    sys.exit(0)
dist.barrier()
fabric.form(1, lambda: fabric.dial("127.0.0.1", port), seats)
gathered, listed = torch.full((WORLD,), 9.0, dtype=torch.float64), [one(9.0) for _ in range(WORLD)]
dist.all_gather_into_tensor(gathered, one(rank))
dist.all_gather(listed, one(rank))
mine = half[rank // 2]
received = one(-1.0)
if rank == seats[0] and len(seats) > 1:
    dist.send(one(42.0), seats[-1])
elif rank == seats[-1] and len(seats) > 1:
    dist.recv(received, seats[0])
gone = next(seat for seat in range(WORLD) if seat not in seats)
said = {
    "full": first,
    "world": dist.get_world_size(),
    "rank": dist.get_rank(),
    "sum": gave(dist.all_reduce, one(rank)),
    "max": gave(dist.all_reduce, one(rank), dist.ReduceOp.MAX),
    "from_root": gave(dist.broadcast, one(rank), seats[-1]),
    "from_gone": gave(dist.broadcast, one(rank), gone),
    "single": gathered.tolist(),
    "listed": [float(part) for part in listed],
    "half": gave(dist.all_reduce, one(rank), group=mine),
    "received": float(received),
    "alike": alike(),
    "send": refused(dist.send, one(0.0), gone),
    "scatter": refused(dist.reduce_scatter_tensor, torch.zeros(1), torch.zeros(WORLD)),
    "swap": refused(dist.all_to_all_single, torch.zeros(WORLD), torch.zeros(WORLD)),
    "objects": refused(dist.broadcast_object_list, [None], src=gone),
    "all_objects": refused(dist.all_gather_object, [None] * WORLD, rank),
    "group": refused(dist.new_group, [0, 1, 2, 3]),
}
told = [{"from": rank}]
dist.broadcast_object_list(told, src=seats[0])
said["told"] = told[0]["from"]
dist.barrier()
fabric.interrupt(2)
sys.stdout.write(json.dumps(said))
sys.stdout.flush()
