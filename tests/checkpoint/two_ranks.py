"""Two ranks' worth of state, saved and loaded as a job would: what the tests of damage and of crashes share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from rerail.checkpoint import catalog, reshard
from rerail.checkpoint.arena import Arena
from rerail.checkpoint.catalog import Step
from rerail.checkpoint.layout import Piece
from rerail.checkpoint.reshard import Wanted
from rerail.checkpoint.saving import Order, Outcome, carry_out
from rerail.checkpoint.staging import Stager
from rerail.checkpoint.tiers import Tier
from rerail.errors import CheckpointError

ROWS, COLUMNS = 8, 96


def state(version: int, columns: int = COLUMNS) -> dict[str, torch.Tensor]:
    """Everything the job has at a version; no two versions share a value."""
    made = torch.Generator().manual_seed(version)
    return {
        "w": torch.randn((ROWS, columns), generator=made),
        "half": torch.full((5, 7), float(version), dtype=torch.bfloat16),
        "count": torch.arange(version, version + 11),
        "none": torch.empty((0, 3)),
        "step": torch.tensor(float(version)),
    }


def pieces(version: int, rank: int, world_size: int, columns: int = COLUMNS) -> list[Piece]:
    """`w` is cut by rows, the rest is saved by the last rank."""
    whole, found = state(version, columns), []
    height = ROWS // world_size
    for name, tensor in whole.items():
        start = (0,) * tensor.dim()
        if name == "w":
            tensor, start = tensor[rank * height : (rank + 1) * height].contiguous(), (rank * height, 0)
        saved = name == "w" or rank == world_size - 1
        found.append(Piece(name, tensor, tuple(whole[name].shape), start, saved))
    return found


class Job:
    """The arenas of all ranks, in one process."""

    def __init__(self, world_size: int = 2, columns: int = COLUMNS) -> None:
        self.world_size, self.columns = world_size, columns
        self.fds = [os.memfd_create(f"rank-{rank}") for rank in range(world_size)]
        self.arenas = [Arena(fd) for fd in self.fds]
        self._stagers = [Stager(arena, overlap=False) for arena in self.arenas]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)

    def stage(self, version: int) -> None:
        for rank, stager in enumerate(self._stagers):
            mine = pieces(version, rank, self.world_size, self.columns)
            assert stager.stage(version, mine, f"small {version} of {rank}".encode())

    def order(self, version: int, tiers: Sequence[object], rank: int = 0, **more: object) -> Order:
        told = {"epoch": 1, "generation": 0, "deadline_s": 30.0, **more}
        group, urls = tuple(range(self.world_size)), tuple(str(tier) for tier in tiers)
        return Order(version=version, rank=rank, group=group, world_size=self.world_size, tiers=urls, **told)  # type: ignore[arg-type]

    def save(
        self, version: int, tiers: Sequence[object], ranks: Sequence[int] | None = None, **more: object
    ) -> list[Outcome]:
        """Stage and save; the outcome of every rank in `ranks`."""
        self.stage(version)
        ranks = range(self.world_size) if ranks is None else ranks
        with ThreadPoolExecutor(self.world_size) as pool:
            jobs = [pool.submit(self.carry_out, self.order(version, tiers, rank, **more)) for rank in ranks]
            return [job.result() for job in jobs]

    def carry_out(self, order: Order) -> Outcome:
        return list(carry_out(order, self.arenas[order.rank], lambda: {order.id}))[-1]


class Loaded(NamedTuple):
    """What a start of the job would get, and why not something newer."""

    version: int
    reasons: list[str]


def load(step: Step, columns: int = COLUMNS) -> dict[str, torch.Tensor]:
    """All tensors of a step, filled from nothing."""
    found = {name: torch.full_like(tensor, 77) for name, tensor in state(0, columns).items()}
    reshard.load(step, [Wanted(name, t, tuple(t.shape), (0,) * t.dim()) for name, t in found.items()])
    return found


def start(tiers: Sequence[Tier], columns: int = COLUMNS) -> Loaded:
    """Load the newest step that can be loaded, and insist that it is exact. Version 0: there is none."""
    reasons: list[str] = []
    for found in _openable(tiers, reasons.append):
        try:
            tensors = load(found, columns)
        except CheckpointError as error:
            reasons.append(f"{found.id.folder}: {error}")
            continue
        insist(found, tensors, columns)
        return Loaded(found.id.step, reasons)
    return Loaded(0, reasons)


def insist(step: Step, tensors: dict[str, torch.Tensor], columns: int = COLUMNS) -> None:
    """The loaded state is, bit for bit, the one of its version."""
    for name, right in state(step.id.step, columns).items():
        assert torch.equal(tensors[name], right), f"WRONG STATE: {name} of {step.id.folder} differs from what was saved"
    for rank, manifest in step.manifests.items():
        assert manifest.small == f"small {step.id.step} of {rank}".encode(), f"WRONG STATE: small state of rank {rank}"


def _openable(tiers: Sequence[Tier], passed_over: Callable[[str], None]) -> Iterator[Step]:
    for found in catalog.candidates(tiers):
        try:
            yield catalog.open_step(found.tier, found.id)
        except (OSError, CheckpointError) as error:
            passed_over(f"{found.id.folder}: {error}")
