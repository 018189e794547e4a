"""A data-parallel job that can go on with fewer ranks; writes down which samples each rank has trained on."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import rerail

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--until", type=int, default=200)
parser.add_argument("--length", type=int, default=100)
parser.add_argument("--batch", type=int, default=14)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--save", default="")
parser.add_argument("--delay", type=float, default=0.25, help="seconds per step, until the file `go` is there")
args = parser.parse_args()


class Numbered(Dataset[tuple[int, torch.Tensor]]):
    """Every sample with its number."""

    def __len__(self) -> int:
        return args.length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.sin(torch.arange(8, dtype=torch.float64) * (index + 1))


torch.set_num_threads(1)
job = rerail.join()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = Numbered()
loader = DataLoader(data, batch_sampler=job.deal(data, batch=args.batch, seed=5), num_workers=args.workers)
job.track(model=model, optimizer=optimizer)
if args.save:
    job.checkpoints(args.save, when=5)

for numbers, batch in job.steps(loader, until=args.until):
    with job.step():
        if job.version >= 0:
            attempt = {
                "step": job.version, "seats": job.seats, "samples": numbers.tolist(), "at": time.monotonic()
            }  # fmt: skip
            with (args.folder / f"rank{job.rank}").open("a") as log:
                log.write(json.dumps(attempt) + "\n")
        loss = ((model(batch).squeeze(1) - numbers / args.length) ** 2).mean() * job.weight
        loss.backward()
        if not (args.folder / "go").exists():
            time.sleep(args.delay)
        optimizer.step()
        optimizer.zero_grad()
    if job.version >= 0:
        print(f"rank {job.rank} pid {os.getpid()} step {job.version}", flush=True)

torch.save([p.detach() for p in model.parameters()], args.folder / f"weights{job.rank}")
print(f"rank {job.rank} done world {job.world_size} seats {len(job.seats)}", flush=True)
