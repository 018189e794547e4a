"""Looks whether the training heals after a shard was restored that is not exact, and has all go back if it does not.

The plan of the generation says who looks and for how long (`runtime.plans.Healing`). All ranks keep the snapshot that they would
go back to until then. Kept by `session.soundness`, which is told every loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rerail.runtime.plans import WINDOW, Healing

SOON = 3
"""Losses after which a leap is taken for one."""
FAR = 3.0
"""Times their scatter: what losses differ by without any reason."""
LATE = 8
"""Steps for which the snapshot is kept beyond the end: no rank is that far ahead of the judge."""


def level(losses: Sequence[float]) -> tuple[float, float] | None:
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

    def begin(self, healing: Healing | None) -> None:
        """A generation is formed: with a guard, or without."""
        self._healing = healing

    def pinned(self, version: int) -> frozenset[int]:
        """Versions whose snapshots have to stay for now."""
        healing = self._healing
        if healing is not None and version > healing.until + LATE:
            healing = self._healing = None
        return frozenset() if healing is None else frozenset({healing.target})

    def needs_checkpoints(self, version: int) -> bool:
        """Whether a checkpoint is what all would go back to, so that none may be deleted."""
        return bool(self.pinned(version)) and self._healing is not None and self._healing.saved

    def judged(self, rank: int, version: int, losses: Sequence[tuple[int, float]]) -> tuple[bool, str, int] | None:
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
        return healed, text, healing.target

    def _leapt(
        self, healing: Healing, version: int, losses: Sequence[tuple[int, float]]
    ) -> tuple[bool, str, int] | None:
        """Whether the training is worse now than where all would go back to: then there is nothing to wait for."""
        newest = [loss for at, loss in losses if at >= healing.since >= 0]
        there = [loss for at, loss in losses if abs(at - healing.target) <= WINDOW and at < healing.since]
        if len(newest) < SOON or len(there) < WINDOW // 2:
            return None
        middle = median(there)
        scatter = max(healing.spread, 1.5 * median(abs(loss - middle) for loss in there))
        now = median(newest[-SOON:])
        if now <= max(middle, healing.loss) + FAR * scatter:
            return None
        self._healing = None
        return (
            False,
            f"loss {now:.4g} at step {version}, worse than the {middle:.4g} at step {healing.target}",
            healing.target,
        )
