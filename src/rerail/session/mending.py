"""Puts a lost shard together that is not exact: all of it from what was kept last, its parameters from something newer.

    the rank's arena, or a checkpoint  ->  all tensors, some steps old
    its shadow, a replica, a guess     ->  parameters, as near to now as can be had

The plan says what from (`runtime.plans.Stale`), having heard from `Parked` what there is. Kept by `session.rejoin`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from rerail.checkpoint import catalog
from rerail.checkpoint.catalog import Step
from rerail.checkpoint.dtypes import view_of
from rerail.config import settings_of_rank
from rerail.errors import CheckpointError, StateError
from rerail.rehab.predictors import Linear, Predictor, Times
from rerail.rehab.teaching import NETS, plain, taught
from rerail.runtime.plans import KEPT, LINE, REPLICA, SHADOW, Stale
from rerail.session import loading, past, reaching, restore
from rerail.session.pieces import Pieces

if TYPE_CHECKING:
    from rerail.session.job import Job

KNOWN = 6
"""Checkpoints that are looked at, the newest ones: no predictor asks for more."""


class Mender:
    """Of one rank."""

    def __init__(self, job: Job) -> None:
        self._job, self._on = job, settings_of_rank().fast
        self._steps: dict[int, Step] = {}
        """Checkpoints by version, oldest first."""
        self._taught: Predictor | None = None

    def saved(self) -> tuple[int, ...]:
        """Versions of checkpoints that this rank could be put together from, where it has nothing else. Oldest first."""
        job = self._job
        if not self._on or not job._checkpoints.on or job._snapshots.versions():
            return ()
        if job._tracked.replicas(job.rank, job.world_size) != (job.rank,):
            return ()
        try:
            tiers = reaching.answering(job._checkpoints.tiers, write=False)
            newest = catalog.whole(tiers, lambda found, error: None)
            steps = list(itertools.islice(_falling(newest), KNOWN))
        except (OSError, CheckpointError) as error:
            print(f"rerail: rank {job.rank}: checkpoints cannot be looked at: {error}", file=sys.stderr, flush=True)
            return ()
        self._steps = {step.id.step: step for step in reversed(steps)}
        return tuple(self._steps)

    def lay_base(self, stale: Stale) -> None:
        """All tensors, as they were kept last."""
        if stale.saved:
            loading.tensors(self._job, self._step(stale.at))
        else:
            restore.tensors(self._job, stale.at)

    def learn(self, lesson: bytes) -> None:
        """What a survivor has learnt of how parameters move."""
        self._taught = taught(lesson)

    def renew(self, stale: Stale, version: int) -> None:
        """Parameters, by what is newer than that. Those of replicas have come over the wires by now (`session.transfer`)."""
        if stale.way == SHADOW:
            self._job._snapshots.shadow.load(stale, version)
        elif stale.way == LINE and not stale.saved:
            self._straight_on(stale, version)
        elif stale.way not in (KEPT, REPLICA):
            self._guess(stale, version)

    @torch.no_grad()
    def _guess(self, stale: Stale, version: int) -> None:
        """A part at a time, from what the newest checkpoints hold of it. What comes out as no number is left as it was kept."""
        predictor, self._taught = self._taught if stale.way in NETS else plain(stale.way), None
        steps = [step for number, step in self._steps.items() if number <= stale.at]
        if predictor is None or len(steps) < predictor.needs:
            raise StateError(f"parameters were to be guessed by {stale.way!r}, and what that needs is not here")
        for tensor, window in past.windows(self._job, steps, version):
            guess = predictor.predict(*window)
            if bool(torch.isfinite(guess).all()):
                tensor.copy_(guess.view(tensor.shape))

    def _step(self, version: int) -> Step:
        if version not in self._steps:
            raise StateError(f"the checkpoint of step {version} was not looked at before")
        return self._steps[version]

    @torch.no_grad()
    def _straight_on(self, stale: Stale, version: int) -> None:
        """Parameters that were just loaded from one snapshot: on, as they moved from another one to it."""
        job, arena = self._job, self._job._snapshots.arena
        assert arena is not None, "they were loaded from it"
        image, line = arena.image(stale.before), Linear()
        kept = {entry.name: entry for entry in arena.meta(stale.before).entries}
        times = Times((float(stale.before), float(stale.at)), float(version))
        parameters = job._tracked.parameters().values()
        trained = {one.data_ptr() for one in parameters if one.is_floating_point() and one.numel()}
        for piece in Pieces(job._tracked, job.rank, job.world_size).all():
            found, now = restore.entry_of(piece, kept, job.rank), piece.tensor
            if found is None or found.shape != tuple(now.shape) or now.data_ptr() not in trained:
                continue
            then = view_of(image, found).to(now.device, torch.float32).reshape(-1)
            guess = line.predict(torch.stack([then, now.float().reshape(-1)]), times)
            if bool(torch.isfinite(guess).all()):
                now.copy_(guess.view(now.shape))


def _falling(steps: Iterable[Step]) -> Iterator[Step]:
    """Each of an earlier version than the one before: what was saved again, or by an earlier job, counts once."""
    last = -1
    for step in steps:
        if last < 0 or step.id.step < last:
            last = step.id.step
            yield step
