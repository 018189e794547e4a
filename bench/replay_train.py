"""The job of `bench/replay.py`: a pipeline of one stage for each rank, which loses a rank at a step and writes down what each step came to."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import rerail
from rerail.session.fabric import messages

BLOCK = 5
"""Steps with the log, and then as many without."""


def stage_of(rank: int, width: int, layers: int) -> nn.Sequential:
    torch.manual_seed(rank)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.LayerNorm(width), nn.Dropout(0.1), nn.GELU()]
    return nn.Sequential(*parts)


def digest(model: nn.Module) -> str:
    hashed = hashlib.sha256()
    for parameter in model.parameters():
        hashed.update(parameter.detach().numpy().tobytes())
    return hashed.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--die", type=int, nargs=2, default=(-1, -1), metavar=("RANK", "STEP"))
    parser.add_argument("--blocks", action="store_true", help="keep messages in every other block of steps only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = rerail.join()
    model = stage_of(job.rank, args.width, args.layers)
    last = job.rank == job.world_size - 1
    stage = PipelineStage(model, job.rank, job.world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, args.micro, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + job.rank)
    data = torch.randn(64 * args.batch, args.width, generator=torch.Generator().manual_seed(7))
    loader = torch.utils.data.DataLoader(data, batch_size=args.batch, shuffle=True, generator=None)
    job.track(model=model, optimizer=optimizer)
    out = args.folder / f"rank{job.rank}"
    for batch in job.steps(loader, until=args.steps):
        if args.blocks:
            messages.recording = (job.version // BLOCK) % 2 == 0
        began = time.monotonic()
        with job.step():
            if (job.rank, job.version) == tuple(args.die) and not (args.folder / "died").exists():
                (args.folder / "died").write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            if job.rank == 0:
                schedule.step(batch)
            elif last:
                schedule.step(target=batch)
            else:
                schedule.step()
            optimizer.step()
            optimizer.zero_grad()
        if job.version >= 0:
            now = time.monotonic()
            line = json.dumps([job.version, now, now - began, digest(model) if not args.blocks else ""])
            with out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
