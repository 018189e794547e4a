"""One rank of two with a shard that is its own, its arena and its shadow. Used by test_shadowing and test_buddies."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from rerail.checkpoint.arena import Arena
from rerail.checkpoint.staging import Stager
from rerail.config import Settings
from rerail.session.pieces import Pieces
from rerail.session.shadowing import Shadower
from rerail.session.tracked import Tracked

FAST = Settings(fidelity="fast", rehab_from=10, shadow_every=3)


class Rank:
    """One rank of two, with a shard that is its own, its arena and its shadow."""

    def __init__(self, fd: int, settings: Settings = FAST, *, replicated: bool = False) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50), nn.Linear(50, 10))
        self.model[2].bias.requires_grad_(False)
        self.tracked = Tracked()
        self.tracked.replicated = replicated
        self.tracked.add("model", self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.tracked.add("optimizer", self.optimizer)
        checkpoints = SimpleNamespace(on=True, saves=(1, -1, 0))
        job: Any = SimpleNamespace(
            _tracked=self.tracked,
            rank=0,
            world_size=2,
            device=torch.device("cpu"),
            _durations=deque([0.01], maxlen=64),
            _checkpoints=checkpoints,
        )
        self.job, arena = job, Arena(fd)
        self.shadow = Shadower(job, arena, settings)
        job._snapshots = SimpleNamespace(shadow=self.shadow)
        self.stager = Stager(arena, overlap=False, behind=self.shadow.room)

    def snapshot(self, version: int) -> None:
        self.shadow.settle()
        assert self.stager.stage(version, Pieces(self.tracked, 0, 2).all(), b"")
        self.shadow.copied(version)

    def step(self, version: int) -> None:
        """From this version on: its shadow if due, then the update."""
        self.shadow.take_if_due(version)
        self.shadow.before_update()
        with torch.no_grad():
            for index, one in enumerate(self.model.parameters()):
                if one.requires_grad:
                    one += 0.01 * torch.randn(one.shape, generator=torch.Generator().manual_seed(index))

    def parameters(self) -> list[torch.Tensor]:
        return [one.detach().clone() for one in self.model.parameters()]


def off(found: list[torch.Tensor], true: list[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(found, true, strict=True))


def train(rank: Rank, until: int) -> dict[int, list[torch.Tensor]]:
    """With a snapshot at step 10. The parameters of each version."""
    seen = {}
    for version in range(8, until):
        if version == 10:
            rank.snapshot(version)
        seen[version] = rank.parameters()
        rank.step(version)
    seen[until] = rank.parameters()
    return seen
