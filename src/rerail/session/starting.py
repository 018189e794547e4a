"""Which checkpoint a job starts from: rank 0 looks, all ranks try, and only what every one of them could load is taken.

    newest whole step of all places -> loaded by all? -> [no: the next older one] -> start

Why something newer is not taken is told and written to the journal. Called by `session.checkpoints`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rerail.checkpoint import catalog, names
from rerail.checkpoint.catalog import Step
from rerail.checkpoint.names import StepId
from rerail.checkpoint.reading import Damaged, mark
from rerail.checkpoint.tiers import Tier
from rerail.errors import CheckpointError, StateError
from rerail.session import loading, reaching
from rerail.session.fabric import hearing
from rerail.session.soundness import any_nan

if TYPE_CHECKING:
    from rerail.session.job import Job

Tell = Callable[[str, int, str], None]
"""tell(what, version, text)"""


class Starter:
    """One start of a job on one rank."""

    def __init__(self, job: Job, tiers: Sequence[Tier], tell: Tell, limit: int = -1) -> None:
        self._job, self._tiers, self._tell = job, list(tiers), tell
        self._limit = limit
        """Nothing later is to be trusted; -1: there is no such limit."""
        self._seen = 0
        """Steps that are there, or may be: with any of them, the job does not begin anew."""

    def start(self) -> bool:
        """Load the newest step that every rank can read. False if there is none. All ranks together."""
        job = self._job
        steps = filter(self._is_early, catalog.whole(self._reachable() if job.rank == 0 else [], self._passed_over))
        while True:
            chosen = told_by_rank_0(job, self._candidate(next(steps, None)) if job.rank == 0 else [0] * 5)
            if not chosen[0]:
                if chosen[1]:
                    # Beginning anew beside damaged steps, or with half of one loaded, would be worse than stopping.
                    places = ", ".join(tier.url for tier in self._tiers)
                    raise CheckpointError(
                        f"no checkpoint in {places} can be read (the reasons are above). rerail ckpt verify tells more; "
                        "to begin anew, give job.checkpoints() another place"
                    )
                return False
            if self._loaded(self._tiers[chosen[4]], StepId(*chosen[1:4])):
                return True

    def _loaded(self, tier: Tier, step: StepId) -> bool:
        """Whether all ranks could load it."""
        job, started, well = self._job, time.monotonic(), True
        try:
            if job.rank and len(self._tiers) > 1 and not reaching.answering([tier], write=False):
                raise CheckpointError(f"{tier.url} does not answer")
            loading.load(job, catalog.open_step(tier, step))
            if self._limit >= 0 and any_nan(job._tracked.trained_tensors()):
                raise CheckpointError("it holds numbers that are none")
        except (OSError, CheckpointError, StateError) as error:
            well = False
            if isinstance(error, Damaged):  # so that nobody counts on this step any more
                with contextlib.suppress(OSError):
                    mark(tier, step.folder, error.rank, str(error))
            self._tell("passed_over", step.step, f"rank {job.rank}: {tier.url}/{step.folder} is passed over: {error}")
        if not _all_well(job, well):
            return False
        if job.rank == 0:
            took = time.monotonic() - started
            text = f"starts from the checkpoint of step {step.step} in {tier.url} ({took:.2f} s)"
            self._tell("loaded", step.step, text)
        return True

    def _reachable(self) -> list[Tier]:
        """Places that can be looked at. The others may hold the newest step, so that beginning anew is out of question."""
        found, say = [], partial(self._tell, "failed", -1)
        answering = reaching.some_answering(self._tiers, say, write=False)
        self._seen += len(self._tiers) - len(answering)
        for tier in answering:
            try:
                for one in catalog.folders(tier):
                    if not one.committed and names.COPYING not in tier.names(one.id.folder):
                        text = f"{tier.url}/{one.id.folder} was never finished and does not count"
                        self._tell("passed_over", one.id.step, text)
                found.append(tier)
            except (OSError, CheckpointError) as error:
                self._seen += 1
                text = f"{tier.url} cannot be reached, and what lies there is not considered: {error}"
                self._tell("failed", -1, text)
        return found

    def _candidate(self, step: Step | None) -> list[int]:
        """[1, epoch, step, generation, tier] of a step; [0, how many there were, ...] when there is none left."""
        if step is None:
            return [0, self._seen, 0, 0, 0]
        self._seen += 1
        return [1, *step.id, self._tiers.index(step.tier)]

    def _is_early(self, step: Step) -> bool:
        """Whether it is from before the training went wrong. Of this very job, nobody is to take it later, either."""
        if self._limit < 0 or step.id.step <= self._limit:
            return True
        why = f"it is later than step {self._limit}, behind which the training had gone wrong"
        if step.commit.job == os.environ.get("TORCHELASTIC_RUN_ID", ""):
            catalog.distrust([step.tier], step.id, why)
        self._seen += 1
        self._tell("passed_over", step.id.step, f"{step.tier.url}/{step.id.folder} is passed over: {why}")
        return False

    def _passed_over(self, found: catalog.Found, error: Exception) -> None:
        self._seen += 1
        self._tell("passed_over", found.id.step, f"{found.tier.url}/{found.id.folder} is passed over: {error}")


# --- small collectives ---


def told_by_rank_0(job: Job, numbers: list[int]) -> list[int]:
    """Rank 0's numbers, on every rank."""
    if job.world_size == 1:
        return numbers
    told = torch.tensor(numbers, dtype=torch.int64, device=device_of(job))
    with hearing.paused():
        dist.broadcast(told, 0)
    return [int(number) for number in told.tolist()]


def _all_well(job: Job, well: bool) -> bool:
    if job.world_size == 1:
        return well
    told = torch.tensor([int(well)], dtype=torch.int64, device=device_of(job))
    with hearing.paused():
        dist.all_reduce(told, dist.ReduceOp.MIN)
    return bool(told.item())


def device_of(job: Job) -> torch.device:
    """Where a small collective can take place; a plain job may have NCCL alone."""
    return job.device if dist.is_initialized() and dist.get_backend() == "nccl" else torch.device("cpu")
