"""How this rank's parameters move from one kept version to the next: keeps a sample of them, and says what a straight line would be worth.

Every rank looks at its own shard, since one that is lost cannot; what holds for the others holds for it. Only where the policy allows
repairs that are not exact. Kept by `session.snapshotting` for snapshots and by `session.foretelling` for checkpoints; told to the
controller when a rank parks.
"""

from __future__ import annotations

import itertools
import math

import torch

from rerail.rehab.choosing import choose
from rerail.rehab.predictors import Linear, Times, Window
from rerail.session.tracked import Tracked

ELEMENTS, TENSORS = 1 << 16, 64
"""How many are looked at, and in how many tensors at most: the largest."""
KEPT = 6
"""Snapshots."""


class Drifting:
    """A sample of the parameters of the newest versions that were kept."""

    def __init__(self, tracked: Tracked, *, on: bool) -> None:
        self._tracked, self._on = tracked, on
        self._rows: dict[int, torch.Tensor] = {}
        self._chosen: dict[str, torch.Tensor] = {}
        self._sizes: list[int] = []
        """How many elements of each tensor a row has."""

    def note(self, version: int) -> None:
        """This version is being kept."""
        if not self._on:
            return
        self._rows = {kept: row for kept, row in self._rows.items() if kept < version}
        row = self._sample()
        if any(len(other) != len(row) for other in self._rows.values()):
            self._rows.clear()
        self._rows[version] = row
        while len(self._rows) > KEPT:
            del self._rows[min(self._rows)]

    def straight(self) -> float:
        """What a straight line through the last two would cost, against the last one as it is. 1: nobody knows."""
        found = self._window()
        if found is None:
            return 1.0
        line = Linear()
        cost = choose([found], [line]).costs[line.name]
        return cost if math.isfinite(cost) else 1.0

    def windows(self) -> list[Window]:
        """What is kept of each tensor that is looked at; none with less than two versions."""
        found = self._window()
        if found is None:
            return []
        ends = list(itertools.accumulate(self._sizes))
        parts = zip([0, *ends[:-1]], ends, strict=True)
        return [Window(found.rows[:, start:end], found.times) for start, end in parts]

    def _window(self) -> Window | None:
        kept = sorted(self._rows)
        if len(kept) < 2 or not len(self._rows[kept[-1]]):
            return None
        times = Times(tuple(map(float, kept)), 2.0 * kept[-1] - kept[-2])
        return Window(torch.stack([self._rows[one] for one in kept]), times)

    def _sample(self) -> torch.Tensor:
        """The same elements each time. On their device until the end: one copy to the host."""
        found = {
            name: one for name, one in self._tracked.parameters().items() if one.is_floating_point() and one.numel()
        }
        largest = sorted(found, key=lambda name: (-found[name].numel(), name))[:TENSORS]
        total = sum(found[name].numel() for name in largest)
        parts = []
        with torch.no_grad():
            for name in largest:
                flat = found[name].detach().reshape(-1)
                places = self._chosen.get(name)
                if places is None or len(places) > len(flat):
                    count = min(len(flat), max(1, ELEMENTS * len(flat) // total))
                    chance = torch.Generator().manual_seed(len(flat))
                    places = self._chosen[name] = torch.randint(len(flat), (count,), generator=chance).to(flat.device)
                parts.append(flat[places].float())
        self._sizes = list(map(len, parts))
        return torch.cat(parts).cpu() if parts else torch.empty(0)
