"""Decides when this rank copies its state into its arena, and does so. Called by `session.job` at step boundaries.

All ranks must hold snapshots of the same versions, so the interval is agreed by one small collective at a few fixed
early steps: often enough to lose little, rarely enough to cost no more than the share of time that is allowed.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist

from rerail.config import settings_of_rank
from rerail.errors import StateError
from rerail.session.fabric import Mode, fabric, hearing
from rerail.session.link import AgentLink
from rerail.session.small import Small, encode
from rerail.session.snapshots import Arena

if TYPE_CHECKING:
    from rerail.session.job import Job

AGREE_AT = (4, 32, 256)
"""Versions at whose start the interval is agreed: soon, and again when the step time has settled."""
UNTIL_AGREED = 2
LONGEST = 1000


class Snapshotter:
    """Takes snapshots of one job on one rank."""

    def __init__(self, job: Job, link: AgentLink | None) -> None:
        self._job = job
        self.arena = Arena(link.arena_fd) if link is not None and link.arena_fd >= 0 else None
        settings = settings_of_rank()
        self._fixed = settings.snapshot_every > 0
        self.every = settings.snapshot_every or UNTIL_AGREED
        self._share = max(settings.snapshot_cost, 1e-6)
        self._took_s = 0.0

    def take_if_due(self, small: Small) -> None:
        """Copy this version if it is its turn. Only one of several replicas copies tensors."""
        job = self._job
        if self.arena is None or job._version % self.every or job._version in self.arena.small_versions():
            return
        replicas = job._tracked.replicas(job.rank, job.world_size)
        keeper = job._buffers.too_large or min(replicas) == job.rank
        started = time.monotonic()
        try:
            full = msgspec.structs.replace(small, objects=job._tracked.small_objects(scalars=True))
            self.arena.write(job._version, job._tracked.tensors() if keeper else {}, encode(full))
        except StateError as error:
            print(f"rerail: rank {job.rank}: {error}; training goes on without memory snapshots", file=sys.stderr)
            self.arena = None
            return
        self._took_s = time.monotonic() - started
        held = self.arena.small_versions()
        job._cursor.drop_before(held[0])

    def agree(self) -> None:
        """At a few fixed versions: one all-reduce of everyone's wish. Inside the step, so a fault repeats it."""
        job = self._job
        if self._fixed or job._version not in AGREE_AT or job.rehearsing or job.world_size == 1:
            return
        step_s = statistics.median(job._durations) if job._durations else 0.0
        wish = math.ceil(self._took_s / (self._share * step_s)) if step_s else UNTIL_AGREED
        agreed = torch.tensor([min(max(wish, 1), LONGEST)], dtype=torch.int64)
        with hearing.paused():
            dist.all_reduce(agreed, dist.ReduceOp.MAX)
        if fabric.mode is Mode.LIVE:
            self.every = int(agreed.item())
