"""How far a job is, and what of it is saved where: turns stretches of time into completed steps, saves and lost work.

No step is simulated by itself: between two interruptions all are alike, so their number follows from the time. Every second ends
up as productive or in `Losses`, which is what makes a result add up. Called by `sim.job`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from rerail.planner.model import SCOPES, Tier

SAVING = "saving"
LOST = "lost work (T0)"
FEWER = "fewer ranks"
NOBODY = "-"
"""Cause of what no fault is to blame for."""
UNSAVED = -1


class Losses:
    """Seconds of the whole job that were not productive, by what they went into and by what caused them."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], float] = {}

    def add(self, stage: str, cause: str, seconds: float) -> None:
        """Count some."""
        if seconds:
            self.seconds[stage, cause] = self.seconds.get((stage, cause), 0.0) + seconds

    def by(self, part: int) -> dict[str, float]:
        """Sums by stage (0) or by cause (1), largest first."""
        found: dict[str, float] = {}
        for key, seconds in self.seconds.items():
            found[key[part]] = found.get(key[part], 0.0) + seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))


class Training:
    """The step clock of the whole job, and its saves."""

    def __init__(self, step_s: float, tiers: Iterable[Tier], steps: Mapping[str, float]) -> None:
        self.step_s = step_s
        self.tiers = tuple(tiers)
        self.losses = Losses()
        self.productive = 0.0
        self.version = 0
        self._every: dict[str, float] = {}
        self._saved = {tier.name: 0 for tier in self.tiers}
        self._share = 1.0
        self._began: float | None = None
        self.plan(steps)

    def plan(self, steps: Mapping[str, float]) -> None:
        """Steps between two saves, by tier; infinite: none. Holds from the next `begin` on."""
        self._every = {
            name: max(1.0, float(round(every))) if math.isfinite(every) else every for name, every in steps.items()
        }

    @property
    def every(self) -> dict[str, float]:
        return dict(self._every)

    @property
    def stall_s(self) -> float:
        """What saving costs each step."""
        return sum(tier.stall_s / self._every[tier.name] for tier in self.tiers)

    @property
    def wall_step_s(self) -> float:
        """A step as the clock on the wall sees it."""
        return self.step_s / self._share + self.stall_s

    def begin(self, now: float, share: float = 1.0) -> None:
        """Training goes on, with this share of the ranks."""
        self._began, self._share = now, share

    def halt(self, now: float, cause: str) -> None:
        """It ends in the middle of a step, which is lost."""
        whole, rest = self._close(now)
        self._count(whole)
        self.losses.add(LOST, cause, rest)

    def finish(self, now: float) -> None:
        """The run is over; the step under way counts as far as it is."""
        if self._began is None:
            return
        whole, rest = self._close(now)
        self._count(whole + rest / self.wall_step_s)

    def version_at(self, now: float) -> int:
        """Completed steps by then."""
        if self._began is None:
            return self.version
        return self.version + math.floor((now - self._began) / self.wall_step_s + 1e-9)

    def _close(self, now: float) -> tuple[float, float]:
        assert self._began is not None, "nothing was under way"
        took, self._began = now - self._began, None
        whole = math.floor(took / self.wall_step_s + 1e-9)
        for tier in self.tiers:
            every, done = self._every[tier.name], (took - tier.save_s) / self.wall_step_s
            if math.isfinite(every) and done >= 0:
                newest = math.floor((self.version + done) / every + 1e-9) * every
                if newest > self.version:
                    self._saved[tier.name] = int(newest)
        self.version += whole
        return float(whole), max(0.0, took - whole * self.wall_step_s)

    def _count(self, steps: float) -> None:
        self.productive += steps * self.step_s
        self.losses.add(SAVING, NOBODY, steps * self.stall_s)
        self.losses.add(FEWER, NOBODY, steps * self.step_s * (1 / self._share - 1))

    # --- going back ---

    def newest(self, scope: str, trusted: int = -1) -> tuple[int, Tier | None]:
        """The newest version that outlives a fault of this scope, and where it is; 0 is where the job began."""
        best: tuple[int, Tier | None] = (0, None)
        for tier in self.tiers:
            kept = self._kept(tier, trusted)
            if SCOPES.index(tier.survives) < SCOPES.index(scope) or kept == UNSAVED:
                continue
            if best[1] is None or (kept, -tier.restore_s) > (best[0], -best[1].restore_s):
                best = kept, tier
        return best

    def _kept(self, tier: Tier, trusted: int) -> int:
        saved, every = self._saved[tier.name], self._every[tier.name]
        if saved == UNSAVED or trusted < 0 or saved <= trusted:
            return saved
        return int(trusted // every * every) if math.isfinite(every) else 0

    def forget(self, scope: str) -> None:
        """A fault of this scope has taken what smaller tiers kept."""
        for tier in self.tiers:
            if SCOPES.index(tier.survives) < SCOPES.index(scope):
                self._saved[tier.name] = UNSAVED

    def go_back(self, version: int, cause: str, share: float = 1.0) -> None:
        """All that came after this version is lost, or this share of it where a lost shard is all that went back."""
        # what a shadow has cost before is not lost a second time
        lost = min(max(0, self.version - version) * self.step_s * share, self.productive)
        self.productive -= lost
        self.losses.add(LOST, cause, lost)
        if share == 1.0:
            self.version = min(self.version, version)
            self._saved = {name: min(saved, self.version) for name, saved in self._saved.items()}

    def saved_all(self) -> None:
        """A planned end: everything is saved before."""
        self._saved = dict.fromkeys(self._saved, self.version)
