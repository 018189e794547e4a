"""Turns a file name and a number of steps into a trained GPT and its sha256: the script that `rerail demo` runs on four ranks.

Started by `rerail run` as every user's script is. Besides training it writes one line for each completed step, so that the
demo can show progress and knows whom to hurt; and it raises a real exception when the demo asks for one.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import rerail
from rerail.cli.demo_gpt import GPT, Sources, fingerprint


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="events, faults and the result are exchanged here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = rerail.join()
    torch.manual_seed(1234)
    data = Sources(batch=1)
    model = DistributedDataParallel(GPT().to(job.device))
    torch.manual_seed(1234 + job.rank)  # every rank drops out other units; this state survives a replacement too
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    job.track(model=model, optimizer=optimizer, scheduler=scheduler)
    with open(args.folder / f"rank-{job.rank}.jsonl", "a", buffering=1) as events:
        for step in job.steps(until=args.steps):
            loss = torch.zeros(())
            with job.step():
                raise_if_asked(args.folder, job.rank, job.rehearsing)
                loss = model(*data.batch(step, job.rank, job.device))
                loss.backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if job.version == step + 1 and not job.rehearsing:  # the attempt succeeded
                line = {"at": time.monotonic(), "pid": os.getpid(), "step": step + 1, "loss": round(loss.item(), 4)}
                events.write(json.dumps(line) + "\n")
    result = fingerprint(model.module)
    if job.rank == 0:
        (args.folder / "sha256").write_text(result)


def raise_if_asked(folder: Path, rank: int, rehearsing: bool) -> None:
    """Raise what a flaky network raises, once, if the demo has put its wish into the folder."""
    if rehearsing:
        return
    try:
        (folder / f"raise-{rank}").unlink()
    except FileNotFoundError:
        return
    raise ConnectionError("connection to the data server was reset")


if __name__ == "__main__":
    main()
