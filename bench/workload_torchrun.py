"""The same training for torchrun: plain DDP over gloo, a checkpoint every ten steps, resume on start.

Started by `bench/recovery.py`. Same model, data and events as `workload.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rerail.cli.demo_gpt import GPT, Sources

CHECKPOINT_EVERY = 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=8192)
    args = parser.parse_args()
    torch.set_num_threads(1)
    (args.folder / "restarts").write_text(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = Sources()
    torch.manual_seed(1)
    model = DistributedDataParallel(GPT(layers=args.layers, width=args.width, vocabulary=args.vocabulary))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoint = args.folder / "checkpoint.pt"
    start = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    with open(args.folder / f"rank-{rank}.jsonl", "a", buffering=1) as events:
        for step in range(start, args.steps):
            model(*data.batch(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            events.write(json.dumps({"at": time.monotonic(), "pid": os.getpid(), "step": step + 1}) + "\n")
            if rank == 0 and (step + 1) % CHECKPOINT_EVERY == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, checkpoint.with_suffix(".tmp"))
                os.replace(checkpoint.with_suffix(".tmp"), checkpoint)


if __name__ == "__main__":
    main()
