"""A tiny job for several nodes that bears witness of every step it completes (see `bench/witness.py`).

With --local the ranks average their weights only now and then, so a rank that is cut off could train on by itself.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time

import torch
import torch.distributed as dist

import rerail
from rerail.session.fabric import fabric
from witness import Witness

parser = argparse.ArgumentParser()
parser.add_argument("--until", type=int, default=300)
parser.add_argument("--delay", type=float, default=0.2, help="seconds per step, until there is a file --go")
parser.add_argument("--go", default="")
parser.add_argument("--witness", required=True)
parser.add_argument(
    "--local", type=int, default=0, help="steps between two averages of the weights; 0: of the gradients, each"
)
parser.add_argument("--save", default="", help="where to keep checkpoints")
args = parser.parse_args()

torch.set_num_threads(1)
job = rerail.join()
witness = Witness(args.witness)
torch.manual_seed(0)
model: torch.nn.Module = torch.nn.Linear(8, 8)
if not args.local:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.track(model=model, optimizer=optimizer)
if args.save:
    job.checkpoints(args.save, when=10)
print(f"rank {job.rank} of {job.world_size} is process {os.getpid()}", flush=True)

for number in job.steps(until=args.until):
    with job.step():
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * number + job.rank))
        loss = ((model(batch) - batch) ** 2).mean()
        loss.backward()
        if args.local and number % args.local == 0:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        if not args.go or not os.path.exists(args.go):
            time.sleep(args.delay)
        optimizer.step()
        optimizer.zero_grad()
    if not job.rehearsing:
        witness.completed(rank=job.rank, step=job.version, generation=fabric.generation, world=job.world_size)

digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]
print(f"rank {job.rank} done {digest} world {job.world_size}", flush=True)
