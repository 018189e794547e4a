"""How surely the wrong one of two replicas is named: flips one random bit of parameters or optimizer state in one of them.

    python bench/flips.py [--flips N]

Two replicas train with averaged gradients in one process. Some steps after the flip they are held against a run without it, as rerail
does when both have computed the same again (`session.traces`, `diagnose.vote`).
"""

from __future__ import annotations

import argparse
import random
from collections import Counter

import torch
from torch import Tensor, nn

from rerail.diagnose.vote import compare
from rerail.session.traces import far_from

STEPS = 60
OPTIMIZERS = {
    "AdamW, lr 0.01": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "AdamW, lr 0.001": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 32))


def flip(part: nn.Module, optimizer: torch.optim.Optimizer, dice: random.Random) -> None:
    """One bit of one element, of optimizer state three times in ten."""
    chosen = dice.choice(list(part.parameters()))
    states = [value for value in optimizer.state[chosen].values() if isinstance(value, Tensor) and value.numel() > 1]
    where = dice.choice(states) if states and dice.random() < 0.3 else chosen.detach()
    at, bit = dice.randrange(where.numel()), dice.randrange(32)
    where.view(-1)[at : at + 1].view(torch.uint8)[bit // 8] ^= 1 << bit % 8


def trained(name: str, bad: int = -1, flip_at: int = -1, seed: int = 0) -> list[list[Tensor]]:
    """The state of both replicas after all steps."""
    parts = [model(), model()]
    optimizers = [OPTIMIZERS[name](part.parameters()) for part in parts]
    data = torch.Generator().manual_seed(3)
    for step in range(STEPS):
        for part in parts:
            batch = torch.randn(8, 32, generator=data)
            part.zero_grad()
            ((part(batch) - batch) ** 2).mean().backward()
        for pair in zip(*(part.parameters() for part in parts), strict=True):
            mean = (pair[0].grad + pair[1].grad) / 2
            for parameter in pair:
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        if step == flip_at:
            flip(parts[bad], optimizers[bad], random.Random(seed))
    return [_state(part, optimizer) for part, optimizer in zip(parts, optimizers, strict=True)]


def _state(part: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    own = [parameter.detach() for parameter in part.parameters()]
    kept = [value for parameter in part.parameters() for _, value in sorted(optimizer.state[parameter].items())]
    return own + [value for value in kept if isinstance(value, Tensor)]


def outcome(name: str, after: int, seed: int, truth: list[Tensor]) -> str:
    bad = seed % 2
    held = trained(name, bad, STEPS - 1 - after, seed)
    far = [0.0, 0.0]
    for first, second, right in zip(*held, truth, strict=True):
        pair = torch.stack([first.reshape(-1), second.reshape(-1)])
        far = [total + one for total, one in zip(far, far_from(pair, right), strict=True)]
    if all(torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)) for a, b in zip(*held, strict=True)):
        return "gone by itself"
    said = compare({0: (0,), 1: (1,)}, {0: (2,), 1: (2,)}, dict(enumerate(far))).suspects
    return "nobody named" if not said else "right" if said == (bad,) else "wrong"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--flips", type=int, default=100)
    count = parser.parse_args().flips
    torch.set_num_threads(1)
    for name in OPTIMIZERS:
        truth = trained(name)[0]
        for after in (1, 10, 25, 50):
            found = Counter(outcome(name, after, seed, truth) for seed in range(count))
            told = ", ".join(f"{what} {found[what]}" for what in ("right", "wrong", "nobody named", "gone by itself"))
            print(f"{name}, seen {after} steps later: {told} of {count}", flush=True)


if __name__ == "__main__":
    main()
