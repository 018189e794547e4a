"""Decides when this rank copies its state into its arena, and does so. Called by `session.job` at step boundaries.

The copy serves two ends: a lost rank goes on from it, and a checkpoint is written from it. It runs beside forward and
backward; `before_update` is where the step waits for it.

All ranks must hold snapshots of the same versions, so the interval is agreed by one small collective at a few fixed
early steps: often enough to lose little, rarely enough to cost no more than the share of time that is allowed.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist

from rerail.checkpoint.arena import Arena, NoRoom
from rerail.checkpoint.dtypes import view_of
from rerail.checkpoint.layout import Piece, plan
from rerail.checkpoint.staging import Stager
from rerail.checkpoint.stream import Stream
from rerail.config import settings_of_rank
from rerail.errors import StateError
from rerail.session.c10d import cuda_in_use
from rerail.session.drifting import Drifting
from rerail.session.fabric import Mode, fabric, hearing, messages
from rerail.session.foresight import foresight
from rerail.session.foretelling import Foreteller
from rerail.session.link import AgentLink
from rerail.session.pieces import Pieces
from rerail.session.shadowing import Shadower
from rerail.session.small import Small, encode
from rerail.session.soundness import any_nan
from rerail.texts import bytes_of

if TYPE_CHECKING:
    from rerail.session.job import Job

AGREE_AT = (4, *(32 * 8**n for n in range(8)))
"""Versions at whose start the interval is agreed: soon, when the step time has settled, and now and then; and after each repair."""
UNTIL_AGREED = 2
LONGEST = 1000


def _near(rank: int, other: int) -> bool:
    """On the same node: what is kept on one node goes with it, so each keeps its own."""
    return not fabric.nodes or fabric.nodes[rank] == fabric.nodes[other]


class Snapshotter:
    """Takes snapshots of one job on one rank."""

    def __init__(self, job: Job, link: AgentLink | None) -> None:
        self._job = job
        self.arena = Arena(link.arena_fd) if link is not None and link.arena_fd >= 0 else None
        self._stager: Stager | None = None
        self._pieces = Pieces(job._tracked, job.rank, job.world_size)
        settings = settings_of_rank()
        self.drifting = Drifting(job._tracked, on=settings.fast)
        self.shadow = Shadower(job, self.arena, settings)
        self.foretelling = Foreteller(job, settings, self.shadow)
        self._most = bytes_of(settings.snapshot_memory) if settings.snapshot_memory else None
        self._replay_log = bytes_of(settings.replay_log, "setting replay_log")
        self._fixed = settings.snapshot_every > 0
        self.every = settings.snapshot_every or UNTIL_AGREED
        self._share = max(settings.snapshot_cost, 1e-6)
        self._took_s = 0.0
        self.stalled_s = 0.0
        """What the newest update waited for its copy."""
        self._costs: deque[float] = deque(maxlen=8)
        """Of the newest snapshots: seconds they held the step up, and seconds of a CPU beside it."""
        self._copying = False
        """A copy was begun that the next update has to wait for."""
        self._only_for_saves = False
        self._cannot_save = ""
        """Why this rank's state cannot be saved at all."""
        self._replicas: tuple[int, ...] = (job.rank,)

    def begin(self) -> None:
        """Before the first step: memory of our own, where there is no agent to lend some and checkpoints need it."""
        if self.arena is None and self._job._checkpoints.on:
            self.arena = Arena(os.memfd_create("rerail-arena", os.MFD_CLOEXEC))
            self._only_for_saves = True
        if self.arena is not None:
            self._replicas = self._job._tracked.replicas(self._job.rank, self._job.world_size)
            messages.allow(self._replay_log if self._job.world_size > 1 and not self._only_for_saves else 0)
            slots, watched = self._job._checkpoints.in_flight + 1, self._job._attempt.watched > 0
            if self._only_for_saves or not watched:
                self.shadow.end()
            self._stager = Stager(self.arena, slots=slots, overlap=watched, most=self._most, behind=self.shadow.room)
            self._job._checkpoints.begin(self.arena.fd)

    def adopt(self, every: int) -> None:
        """The interval that the others have agreed on, unless the user has set one."""
        if not self._fixed:
            self.every = every

    def versions(self) -> tuple[int, ...]:
        """Versions whose tensors are kept here, oldest first."""
        if self.arena is None:
            return ()
        return tuple(seal.version for seal in self.arena.seals() if self.arena.meta(seal.version).entries)

    def small_versions(self) -> tuple[int, ...]:
        """Versions of which at least the small state is kept here."""
        return tuple(seal.version for seal in self.arena.seals()) if self.arena is not None else ()

    def take_now(self, small: Small) -> None:
        """Copy this version, and wait until that is done: the process is about to end."""
        if not self._only_for_saves:
            self.settle()
            self.take_if_due(small, now=True)
            self.settle()

    def take_if_due(self, small: Small, *, last: bool = False, tries: int = 2, now: bool = False) -> None:
        """Copy this version if it is its turn. Of several replicas on a node only one copies tensors."""
        job, version = self._job, self._job._version
        # what is done again was saved the first time, or given up
        save = not messages.doing_again and (job._checkpoints.due(version) or (last and job._checkpoints.on))
        due = (now or version % self.every == 0) and not self._only_for_saves and self._stager is not None
        if not (save or due) or (version in self.small_versions() and not save):
            if self._stager is not None and not self._stager.making_room:
                self.shadow.take_if_due(version)
            return
        self.shadow.settle()
        started = time.monotonic()
        try:
            full = msgspec.structs.replace(small, objects=job._tracked.small_objects(scalars=True))
            first = min(rank for rank in self._replicas if rank in job.seats and _near(rank, job.rank))
            keeper = job._buffers.too_large or first == job.rank
            pieces = self._pieces.all(own_buffers=job._buffers.too_large, seats=job.seats) if keeper else []
            if save:
                self.foretelling.saved(version)
            if self._stager is None:
                self._save_from_tensors(pieces, encode(full))
                return
            order = job._checkpoints.order(version) if job._checkpoints.on else None
            ordered, kept = job._checkpoints.pinned, self.small_versions()
            # one that is saved would hold its slot, too; and one that is left out once is still there on all ranks alike
            late = not save and bool(kept) and version - kept[-1] >= 2 * self.every
            # after going back, a save of this very version may still be under way: it is not made twice at a time
            taken = not (save and version in ordered) and self._stager.stage(
                version,
                pieces,
                encode(full),
                order=msgspec.json.encode(order) if order is not None else b"",
                pinned=ordered | job._soundness.healing.pinned(version),
                renew=late or last or now,
                sealed=lambda _: job._checkpoints.sealed(order) if save and order is not None else None,
            )
        except StateError as error:
            again = self._stager is not None
            self._without_snapshots(error)
            if save and again:
                self.take_if_due(small, last=last)
            elif save:
                job._checkpoints.missed(version, str(error))
            return
        if save and not taken:
            if last and tries:
                self.settle()
                job._checkpoints.wait()
                self.take_if_due(small, last=True, tries=tries - 1)
            else:
                job._checkpoints.missed(version)
        if taken:
            self.drifting.note(version)
            self.shadow.copied(version)
        self._took_s, self._copying = time.monotonic() - started, True
        held = self.small_versions()
        if held:
            job._cursor.drop_before(held[0])
            messages.drop_before(held[0])

    def _without_snapshots(self, error: StateError) -> None:
        """Go on without; a host that has no room for them can still save."""
        job, self.arena, self._stager = self._job, None, None
        self.shadow.end()
        self._cannot_save = "" if isinstance(error, NoRoom) else str(error)
        then = "training goes on without memory snapshots"
        if job._checkpoints.on and not self._cannot_save:
            then += "; checkpoints are written straight from the tensors, and each holds the training up meanwhile"
        print(f"rerail: rank {job.rank}: {error}; {then}", file=sys.stderr, flush=True)

    def _save_from_tensors(self, pieces: Sequence[Piece], small: bytes) -> None:
        checkpoints, version = self._job._checkpoints, self._job._version
        if self._cannot_save:
            checkpoints.missed(version, self._cannot_save)
            return
        layout = plan(pieces)
        if cuda_in_use():
            torch.cuda.synchronize()  # another thread reads what the training's own streams still write
        checkpoints.from_tensors(
            checkpoints.order(version), Stream(layout.of_file(small), partial(layout.fill, pieces))
        )

    def before_update(self) -> None:
        """What is being copied is about to be changed."""
        self.stalled_s = 0.0
        if self._stager is not None and self._copying:
            self._copying = False
            waited = time.monotonic()
            self._stager.before_update()
            self.stalled_s = time.monotonic() - waited
            self._took_s += self.stalled_s
            self._costs.append(self._took_s + self._stager.cpu_s)
            foresight.stalled(self._took_s)
        self.stalled_s += self.shadow.before_update()

    def drop_behind(self, version: int) -> None:
        """Nothing later than this is to be gone back to."""
        self.settle()
        self.shadow.drop_behind(version)
        if self.arena is not None:
            self.arena.drop_behind(version)

    def drop_later(self, version: int) -> None:
        """The training goes on from this one, and makes later ones anew; those that are being saved stay until then."""
        self.shadow.drop_behind(version)
        if self.arena is not None:
            self.arena.drop_later(version, self._job._checkpoints.pinned)

    def drop_unsound(self) -> None:
        """Nor what holds numbers that are none."""
        self.shadow.drop_unsound()
        for version in self.versions():
            entries = self.arena.meta(version).entries if self.arena is not None else ()
            if self.arena is not None and any_nan([view_of(self.arena.image(version), one) for one in entries]):
                self.arena.drop(version)

    def settle(self) -> None:
        """Nothing is being copied any more: the state may be replaced."""
        self.shadow.settle()
        try:
            if self._stager is not None:
                self._stager.settle()
        except StateError as error:
            self._without_snapshots(error)

    def agree(self) -> None:
        """At a few fixed versions: one all-reduce of everyone's wish. Inside the step, so a fault repeats it."""
        job = self._job
        due = job._version in AGREE_AT or job._version == foresight.resumed > 0
        if self._fixed or not due or job.rehearsing or job.world_size == 1:
            return
        step_s = statistics.median(job._durations) if job._durations else 0.0
        cost_s = (statistics.median(self._costs) if self._costs else 0.0) + job._votes.cost_s
        wish = foresight.snapshot_steps(cost_s, step_s, self._share) if step_s else UNTIL_AGREED
        agreed = torch.tensor([min(max(wish, 1), LONGEST)], dtype=torch.int64)
        with hearing.paused():
            dist.all_reduce(agreed, dist.ReduceOp.MAX)
        if fabric.mode is Mode.LIVE:
            self.every = int(agreed.item())
