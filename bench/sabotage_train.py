"""The job of `bench/sabotage.py`: a small sharded net whose lost shard comes back spoilt, once."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import rerail
from rerail.session import restore

WIDTH, BATCH, STEPS, DIES_AT, VICTIM = 64, 32, 160, 93, 1


def once(folder: Path, mark: str) -> bool:
    """True for the first process that asks."""
    try:
        (folder / mark).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def spoil(kind: str, model: nn.Module, first: list[torch.Tensor], chance: torch.Generator) -> None:
    """What a wrong prediction would leave in this rank's part of the parameters."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            part = parameter.to_local()  # type: ignore[attr-defined]
            if not part.numel():
                continue
            if kind == "noise":
                part += 3 * part.std().nan_to_num(1.0) * torch.randn(part.shape, generator=chance)
            elif kind == "nan":
                part.view(-1)[int(torch.randint(part.numel(), (1,), generator=chance))] = float("nan")
            elif kind == "wrong shard":
                part.copy_(part.view(-1)[torch.randperm(part.numel(), generator=chance)].view(part.shape))
            elif kind == "old":
                part.copy_(first[number])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kind", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spoil-seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = rerail.join()
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(WIDTH, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, WIDTH))
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer)
    fully_shard(model)
    first = [parameter.to_local().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    job.track(model=model, optimizer=optimizer)
    load, chance = restore.tensors, torch.Generator().manual_seed(args.spoil_seed)

    def spoilt(*given: object) -> None:
        load(*given)  # type: ignore[arg-type]
        if args.kind and once(args.folder, "spoilt"):
            spoil(args.kind, model, first, chance)

    restore.tensors = spoilt  # type: ignore[assignment]
    draw = torch.Generator().manual_seed(args.seed)
    target = torch.randn(WIDTH, WIDTH, generator=draw) / WIDTH**0.5
    data = torch.randn(STEPS + 1, BATCH, WIDTH, generator=torch.Generator().manual_seed(args.seed * 10 + job.rank))
    for step in job.steps(until=STEPS):
        with job.step():
            loss = ((model(data[step]) - data[step] @ target) ** 2).mean()
            job.metric("loss", loss.item())
            if args.kind and job.rank == VICTIM and step == DIES_AT and once(args.folder, "died"):
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    hashed = hashlib.sha256()
    for parameter in model.parameters():
        hashed.update(job.guard(parameter.full_tensor).detach().numpy().tobytes())  # type: ignore[attr-defined]
    if job.rank == 0:
        (args.folder / "end").write_text(json.dumps({"sha256": hashed.hexdigest(), "loss": float(loss.detach())}))


if __name__ == "__main__":
    main()
