"""What a rank tells about its own steps: where their time went, the loss, and now and then a checksum of its state.

Written to the step clock page, where the agent reads it, so that slow ranks, sick training and corrupted replicas can be
seen from outside. Called by `session.job`; costs a microsecond a step, and one pass over the state every `vote_every` steps.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from rerail.config import settings_of_rank
from rerail.runtime.clock import GROUPS, METRICS, Ballot, StepClock
from rerail.session.fabric import fabric
from rerail.session.waiting import idle

if TYPE_CHECKING:
    from rerail.session.tracked import Tracked

WORD = 8
"""Bytes that are added up at a time. Narrower words are ten times as slow."""


class Telemetry:
    """The measurements of one rank."""

    def __init__(self, clock: StepClock | None, tracked: Tracked, rank: int, world_size: int) -> None:
        self._clock, self._tracked = clock, tracked
        self._rank, self._world_size = rank, world_size
        self._every = settings_of_rank().vote_every if clock is not None else 0
        self._data = self._saving = self._waited = 0.0
        self._begun = 0.0
        self._pending: tuple[int, torch.Tensor] | None = None
        self._replicas: tuple[int, ...] | None = None

    def fetched(self, began: float, got: float) -> None:
        """The batch took from `began` to `got`; what came after it until now went into a snapshot or checkpoint."""
        self._data, self._saving = got - began, time.monotonic() - got

    def began(self, now: float) -> None:
        """An attempt at a step begins."""
        self._waited, self._begun = idle.seconds, now
        fabric.exposed_s = 0.0

    def metric(self, name: str, value: float) -> None:
        """A number the user tells; those that say something about the health of training are kept."""
        if self._clock is not None and name in METRICS:
            self._clock.set_metric(METRICS.index(name), value)

    def committed(self, version: int, took: float, stalled: float) -> None:
        """A step is complete."""
        clock = self._clock
        if clock is None:
            return
        waited = idle.seconds - self._waited + fabric.exposed_s
        if idle.promised >= self._begun and idle.kept > idle.promised:
            # DDP waits inside of torch. It has nothing left to compute when its last collective begins
            waited += idle.kept - idle.promised
        waited = min(waited, max(0.0, took - stalled))
        clock.step_took(took, version, self._data, took - waited - stalled, waited, self._saving + stalled)
        if self._pending is not None:
            self._hand_in()
        if self._every and version % self._every == 0:
            self._vote(version)

    def _vote(self, version: int) -> None:
        """Add up the bits of every tensor. On a GPU the sum is read at the next step, so nothing waits for it."""
        if self._replicas is None:
            self._replicas = self._tracked.replicas(self._rank, self._world_size)
        if len(self._replicas) > 1:
            self._pending = version, sums(self._tracked.trained_tensors())
            if not self._pending[1].is_cuda:
                self._hand_in()

    def _hand_in(self) -> None:
        if self._pending is None or self._clock is None or self._replicas is None:
            return
        version, found = self._pending
        self._pending = None
        totals = tuple(int(value) & 0xFFFF_FFFF_FFFF_FFFF for value in found.tolist())
        self._clock.write_ballot(Ballot(version, totals, self._replicas))


def sums(tensors: list[torch.Tensor]) -> torch.Tensor:
    """GROUPS sums over the bits of all tensors, in order. One flipped bit anywhere changes its group's sum for certain."""
    device = tensors[0].device if tensors else torch.device("cpu")
    total = torch.zeros(GROUPS, dtype=torch.int64, device=device)
    with torch.no_grad():
        for index, tensor in enumerate(tensors):
            total[index * GROUPS // len(tensors)] += _sum(tensor).to(device)
    return total


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sums wrap around, and one flipped bit still changes them by a power of two."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % WORD:
        flat = flat.clone()
    whole = flat.numel() // WORD * WORD
    head = flat[:whole].view(torch.int64).sum()
    return head + flat[whole:].sum(dtype=torch.int64) if whole < flat.numel() else head
