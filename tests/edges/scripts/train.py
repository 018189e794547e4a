"""A small DDP job that prints every step, and misbehaves as its flags say."""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import time

import torch

import rerail

parser = argparse.ArgumentParser()
parser.add_argument("--until", type=int, default=30)
parser.add_argument("--delay", type=float, default=0.02)
parser.add_argument("--raise-at", type=int, default=-1, help="the step that always raises")
parser.add_argument("--raisers", default="", help="ranks that raise there, as in 0,1")
parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
parser.add_argument("--parent", action="store_true", help="start a process that hides in a session of its own")
parser.add_argument("--hold", default="", help="stay at the last step until this file exists")
args = parser.parse_args()

torch.set_num_threads(1)
if args.deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
job = rerail.join()
if args.parent:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(f"rank {job.rank} has child {sleeper.pid}", flush=True)

torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(1 + job.rank)
job.track(model=model, optimizer=optimizer)
raisers = [int(number) for number in args.raisers.split(",") if number]

for number in job.steps(until=args.until):
    with job.step():
        batch = torch.randn(4, 8)
        loss = ((model(batch) - batch) ** 2).mean()
        if number == args.raise_at and job.rank in raisers:
            raise ValueError("a bad batch")
        loss.backward()
        time.sleep(args.delay)
        optimizer.step()
        optimizer.zero_grad()
    if not job.rehearsing:
        print(f"rank {job.rank} pid {os.getpid()} step {job.version}", flush=True)
    while args.hold and job.version == args.until - 2 and not os.path.exists(args.hold):
        time.sleep(0.05)

digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]
print(f"rank {job.rank} done {digest} world {job.world_size}", flush=True)
