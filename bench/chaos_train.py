"""The job of the chaos soak: a tiny DDP model with dropout and shuffled data, which ends when a file says at which step.

Every completed step is told to a witness (`bench/witness.py`) with a digest of the weights, so that a difference to the
undisturbed run is known to the step. Started by `bench/chaos.py` through `rerail run`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rerail
from rerail.session.fabric import fabric
from witness import Witness

WIDTH, BATCH, SAMPLES = 16, 4, 64


class Shuffled:
    """Batches in an order that each epoch shuffles anew, without end until the file `end` names a step."""

    def __init__(self, rank: int, end: Path) -> None:
        self._data = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(rank))
        self._rank, self._end, self._index = rank, end, 0
        self._order: tuple[int, torch.Tensor] = (-1, torch.empty(0))

    def __iter__(self) -> Iterator[torch.Tensor]:
        while not self._over():
            epoch, place = divmod(self._index, SAMPLES // BATCH)
            if self._order[0] != epoch:
                shuffle = torch.Generator().manual_seed(1_000_003 * self._rank + epoch)
                self._order = (epoch, torch.randperm(SAMPLES, generator=shuffle))
            self._index += 1
            yield self._data[self._order[1][place * BATCH : (place + 1) * BATCH]]

    def _over(self) -> bool:
        """The file is there long before its step comes, so all ranks see it in time."""
        with contextlib.suppress(OSError, ValueError):
            return self._index >= int(self._end.read_text())
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"index": self._index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._index = int(state["index"])


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--witness", required=True)
    parser.add_argument("--end", type=Path, required=True, help="a file with the number of steps, once it is known")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that each step is stretched by")
    parser.add_argument("--save", default="", help="where to keep checkpoints")
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = rerail.join()
    witness = Witness(args.witness)
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(WIDTH, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, WIDTH))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + job.rank)
    job.track(model=model, optimizer=optimizer)
    if args.save:
        job.checkpoints(args.save, when=20, keep=4)
    for batch in job.steps(Shuffled(job.rank, args.end)):
        with job.step():
            loss = ((model(batch) - batch) ** 2).mean()
            job.metric("loss", loss.item())
            loss.backward()
            if not job.rehearsing:
                time.sleep(args.delay)
            optimizer.step()
            optimizer.zero_grad()
        if job.version >= 0:
            witness.completed(
                rank=job.rank,
                step=job.version,
                generation=fabric.generation,
                world=job.world_size,
                digest=digest(model),
            )
    print(f"rank {job.rank} done {digest(model)} world {job.world_size}", flush=True)


if __name__ == "__main__":
    main()
