"""Looks whether the training heals after a shard was restored that is not exact, and has all go back if it does not.

    before the first update    every rank that tells its loss looks at it: far beyond where all would go back to, and nothing is
                               changed, but the next way of restoring the shard is tried (`session.soundness`)
    three steps later          the same by the median of three: all go back
    after as many steps as     the loss is what it was, or all go back
    going back would cost

The plan of the generation says who looks and for how long (`runtime.plans.Healing`). All ranks keep the snapshot that they would
go back to until then. Kept by `session.soundness`, which is told every loss.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

from rerail.rehab.fitter import Curve, fit
from rerail.runtime.plans import WINDOW, Healing

SOON = 3
"""Losses after which a leap is taken for one."""
FAR, AT_ONCE = 3.0, 6.0
"""Times their scatter: what losses differ by without any reason; and beyond which a single one is no chance."""
LATE = 8
"""Steps for which the snapshot is kept beyond the end: no rank is that far ahead of the judge."""
EVERY, MARKS = 32, 256
"""Steps between two marks of where the loss was, and how many are kept: a checkpoint may lie far back."""

Level = tuple[float, float]
Losses = Sequence[tuple[int, float]]
"""The version from which each step began, and its loss."""


class Verdict(NamedTuple):
    """What has become of it."""

    healed: bool
    text: str
    target: int
    """Where all would go back to."""
    figures: dict[str, float] = {}
    """What it has cost, in steps, if the losses tell: `lag`, `lag_error`; and `behind`, which going back would have cost."""


def level(losses: Sequence[float]) -> Level | None:
    """Where the loss is, and how much it scatters; None: too few are known."""
    if len(losses) < WINDOW:
        return None
    newest = list(losses)[-WINDOW:]
    middle = median(newest)
    return middle, 1.5 * median(abs(one - middle) for one in newest)


class Healer:
    """The guard, on one rank."""

    def __init__(self) -> None:
        self._healing: Healing | None = None
        self._looked = True
        self._marks: deque[tuple[int, Level]] = deque(maxlen=MARKS)
        self._course: tuple[Curve, float, float] | None = None
        """How the loss fell before the repair: its curve over the steps, their middle, and what is left over of its logarithm."""

    def begin(self, healing: Healing | None, losses: Losses) -> None:
        """A generation is formed: with a guard, or without."""
        if healing is not None and (self._healing is None or healing.since != self._healing.since):
            self._course = _course([(at, loss) for at, loss in losses if at < healing.since])
        self._healing, self._looked = healing, False

    def told(self, version: int, losses: Losses) -> None:
        """A loss was told, the newest of these."""
        while self._marks and self._marks[-1][0] > version:
            self._marks.pop()  # of a past that never was
        if not self._marks or version >= self._marks[-1][0] + EVERY:
            found = level([loss for _, loss in losses])
            if found is not None:
                self._marks.append((version, found))

    def pinned(self, version: int) -> frozenset[int]:
        """Versions whose snapshots have to stay for now."""
        healing = self._healing
        if healing is not None and version > healing.until + LATE:
            healing = self._healing = None
        return frozenset() if healing is None else frozenset({healing.target})

    def needs_checkpoints(self, version: int) -> bool:
        """Whether a checkpoint is what all would go back to, so that none may be deleted."""
        return bool(self.pinned(version)) and self._healing is not None and self._healing.saved

    # --- before anything is changed ---

    def on_trial(self, version: int) -> bool:
        """Whether the first update behind the repair is still to come."""
        return not self._looked and self._healing is not None and self._healing.since == version

    def first_look(self, version: int) -> Healing | None:
        """The guard, if this is the first update behind the repair; only once."""
        healing, self._looked = None if self._looked else self._healing, True
        return healing if healing is not None and healing.since == version else None

    def no_good(self, healing: Healing, losses: Losses) -> str:
        """Why the loss of the step under way is no good, or nothing. No loss was told: nobody knows."""
        now = [loss for at, loss in losses if at == healing.since]
        before = level([loss for at, loss in losses if at < healing.since])
        if not now or before is None:
            return ""
        there, scatter = self._there(healing, losses) or before
        scatter = max(scatter, before[1])
        if now[-1] <= max(there, before[0]) + AT_ONCE * scatter:
            return ""
        return f"loss {now[-1]:.4g} in step {healing.since + 1}, {before[0]:.4g} before"

    def _there(self, healing: Healing, losses: Losses) -> Level | None:
        """Where the loss was at the version that all would go back to."""
        near = [loss for at, loss in losses if abs(at - healing.target) <= WINDOW and at < healing.since]
        if len(near) >= WINDOW // 2:
            middle = median(near)
            return middle, 1.5 * median(abs(loss - middle) for loss in near)
        marks = [found for at, found in self._marks if at <= healing.target + EVERY]
        return marks[-1] if marks else None

    # --- afterwards ---

    def judged(self, rank: int, version: int, losses: Losses) -> Verdict | None:
        """Whether it has healed, in words, and where all would go back to. None: it is too early, or another rank's affair."""
        healing = self._healing
        if healing is None or healing.judge != rank:
            return None
        if version < healing.until:
            return self._leapt(healing, version, losses)
        found = level([loss for _, loss in losses])
        if found is None:
            return None
        self._healing = None
        healed = found[0] <= healing.loss + max(healing.spread, found[1])
        text = f"loss {found[0]:.4g} at step {version}, {healing.loss:.4g} before"
        behind = float(healing.since - healing.target)
        figures = {"behind": behind, "expected": healing.expected, "saved": float(healing.saved)}
        if healed and (cost := self._cost(healing, losses)) is not None:
            figures |= {"lag": cost[0], "lag_error": cost[1]}
            text += (
                f"; {max(0.0, cost[0]):.0f} ± {cost[1]:.0f} steps behind where it was heading, {healing.expected:.0f} were expected, "
                f"going back would have cost {behind:.0f}"
            )
        return Verdict(healed, text, healing.target, figures)

    def _cost(self, healing: Healing, losses: Losses) -> Level | None:
        """How many steps the loss is behind its old course by now, and how sure that is; None: the course says nothing."""
        now = [(at, math.log(loss)) for at, loss in losses if at >= healing.since and loss > 0][-2 * WINDOW :]
        if self._course is None or len(now) < WINDOW:
            return None
        curve, middle, rest = self._course
        gap = fmean(height - (curve.offset - curve.slope * at) for at, height in now)
        ahead = fmean(at for at, _ in now) - middle
        unsure = math.sqrt(rest**2 / len(now) + (curve.error * ahead) ** 2)
        return gap / curve.slope, unsure / curve.slope

    def _leapt(self, healing: Healing, version: int, losses: Losses) -> Verdict | None:
        """Whether the training is worse now than where all would go back to: then there is nothing to wait for."""
        newest = [loss for at, loss in losses if at >= healing.since >= 0]
        there = self._there(healing, losses)
        if len(newest) < SOON or there is None:
            return None
        now = median(newest[-SOON:])
        if now <= max(there[0], healing.loss) + FAR * max(healing.spread, there[1]):
            return None
        self._healing = None
        text = f"loss {now:.4g} at step {version}, worse than the {there[0]:.4g} at step {healing.target}"
        return Verdict(False, text, healing.target)


def _course(losses: Losses) -> tuple[Curve, float, float] | None:
    """None: the loss does not fall for sure, so nobody can say how far behind anything is."""
    curve = fit([at for at, _ in losses], [loss for _, loss in losses])
    if curve is None or not curve.falls:
        return None
    rest = [math.log(loss) - (curve.offset - curve.slope * at) for at, loss in losses if 0 < loss < math.inf]
    return curve, fmean(at for at, _ in losses), math.sqrt(fmean(one**2 for one in rest))
