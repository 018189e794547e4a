"""The rank's part in durable checkpoints: when the next one is due, what becomes of it, and which one to start from.

    snapshot of version v sealed -> Order -> persister -> Outcome -> told once, by the coordinator's rank

All ranks save the same versions: the next one is agreed by one small collective after each save, inside a step, so that a
fault repeats it. Made by `session.job`; the snapshots themselves are `session.snapshotting`'s.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rerail.checkpoint import saving
from rerail.checkpoint.declining import decline
from rerail.checkpoint.names import StepId
from rerail.checkpoint.retention import Keep
from rerail.checkpoint.saving import Order, Outcome
from rerail.checkpoint.schedule import Concurrent, EverySteps, Planned, When
from rerail.checkpoint.stream import Stream
from rerail.checkpoint.tiers import Tier, tier_at
from rerail.checkpoint.writer import Writer
from rerail.config import DEPOTS
from rerail.errors import CheckpointError, StateError
from rerail.session import compiled, owed, reaching
from rerail.session.fabric import Mode, fabric, hearing
from rerail.session.foresight import RECENT, foresight
from rerail.session.starting import Starter, device_of, told_by_rank_0

if TYPE_CHECKING:
    from rerail.session.job import Job

PATIENCE_S = 5.0
"""Seconds after which somebody who waits deserves a word."""
LOOK_S = 0.2
"""Seconds between two looks for a fault while this rank waits at the end."""
HUNG_S = 60.0
"""Seconds beyond the deadline of a save after which a persister that says nothing is ended."""
SAVES_WITH_CODE = 2
"""The first saves, with which the compile cache is written: by then everything is compiled that ever will be."""
FIRST_AFTER = 20
"""Steps before the first save of a rule that goes by measured times."""


class Checkpoints:
    """Saving and loading for one job on one rank."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.tiers: list[Tier] = []
        self._when: When = Planned()
        self._keep = Keep()
        self._writer: Writer | None = None
        self._layout: dict[str, str] = {}
        self.epoch = 0
        self.next_save = -1
        """The version to save next; -1: none is."""
        self.newest = -1
        """The version last ordered to be saved, or started from."""
        self._compiled_saves = 0
        """Saves to come with which the compile cache is written as well."""
        self._metrics: dict[str, float] = {}
        self._saved_s: list[float] = []
        self._since = 0.0  # when the save that is under way was ordered; 0: none is
        self._generation = 0
        """Of the saves: the last that went back to snapshots. Ranks before and behind a repair count to the same save."""
        self._begun = -1
        """The version whose save was begun last."""
        self._new_here = False
        """This process took the place of another, and has not yet looked at what that one owed."""
        self._took_over = False

    # --- set up ---

    def configure(
        self, where: Sequence[str | Path], when: When | int | None, keep: Keep | int | None, compile_cache: bool
    ) -> None:
        if not where:
            raise StateError("job.checkpoints() needs at least one place: a directory or a URL")
        if not all(map(os.fspath, where)):
            raise StateError("job.checkpoints() was given an empty place: a directory or a URL is needed")
        if isinstance(when, int) and when < 1:
            raise StateError(f"job.checkpoints(when={when}): the number of steps between two saves is at least 1")
        self.tiers = list({tier.url: tier for tier in (tier_at(os.fspath(place)) for place in where)}.values())
        self._when = EverySteps(when) if isinstance(when, int) else (when or Planned())
        self._keep = Keep.of(keep)
        self._compiled_saves = SAVES_WITH_CODE if compile_cache and self._job.rank == 0 else 0
        if compile_cache:
            compiled.load(reaching.answering(self.tiers, write=False), partial(self._tell, "failed", -1))

    @property
    def in_flight(self) -> int:
        """How many saves may be under way at the same time."""
        return self._when.in_flight if isinstance(self._when, Concurrent) else 1

    @property
    def on(self) -> bool:
        return bool(self.tiers)

    @property
    def pinned(self) -> frozenset[int]:
        """Versions that are being written; their slots are taken."""
        return self._writer.pinned if self._writer is not None else frozenset()

    def begin(self, arena_fd: int) -> None:
        """Before the first step of this process: take the right to write here, and start from the newest step."""
        if not self.on:
            return
        if arena_fd < 0:
            raise StateError("checkpoints need shared memory, and this process could not get any")
        self._writer = Writer(arena_fd, self._on_outcome)
        self._layout = self._job._tracked.layout(self._job.world_size)

    def claim(self) -> None:
        """All ranks together: a new epoch for this start of the job."""
        if not self.on:
            return
        claimed, problem = 0, CheckpointError("job.checkpoints(): rank 0 can write to none of the places; it says why")
        try:
            claimed = self._claimed() if self._job.rank == 0 else 0
        except CheckpointError as error:
            problem = error
        self.epoch = told_by_rank_0(self._job, [claimed])[0]
        if not self.epoch:
            raise problem
        if self._job.rank == 0:
            owed.in_background(lambda: owed.give_up_older(self.tiers, self.epoch))
        self._plan_next()

    def _claimed(self) -> int:
        """A new epoch, from the first place that can be written to."""
        tiers = reaching.some_answering(self.tiers, partial(self._tell, "failed", -1), write=True)
        why = "no place answers"
        for tier in tiers:
            try:
                return saving.claim_epoch(tier, _job_name(), [other for other in tiers if other is not tier])
            except (OSError, CheckpointError) as error:
                why = f"nothing can be written to {tier.url} ({getattr(error, 'strerror', None) or error})"
                if tier is not tiers[-1]:
                    self._tell("failed", -1, why)
        raise CheckpointError(f"job.checkpoints(): {why}. Give it a directory or URL that all ranks can write to")

    @property
    def saves(self) -> tuple[int, int, int]:
        """What the small state of a version says about saving."""
        return self.epoch, self.next_save, self._generation

    def started_anew(self) -> None:
        """All processes are new and go on from snapshots: soon there will be times to plan with, so the next save is not far."""
        if self.on and self.next_save >= 0 and not isinstance(self._when, EverySteps):
            self.next_save = min(self.next_save, self._job._version + FIRST_AFTER)

    def went_back(self, generation: int) -> None:
        """The job goes on from snapshots: what is saved again from here may differ in its bits from what was saved."""
        self._generation = generation

    def distrust(self, trusted: int) -> None:
        """What this job has saved of later versions is not to be started from, nor what it is still writing."""
        if self.on and self._job.rank == 0:
            owed.in_background(partial(owed.distrust_later, self.tiers, self.saves, trusted, self._writer))

    def adopt(self, epoch: int, next_save: int, generation: int) -> None:
        """What the small state of a version says about saving; a process that has claimed an epoch keeps its own."""
        if epoch:
            self._new_here, self._took_over = self._new_here or not self.epoch, self._took_over or not self.epoch
            self.epoch, self.next_save, self._generation = self.epoch or epoch, next_save, generation

    def moved(self, depots: str) -> None:
        """The nodes of the job keep their checkpoints here from now on."""
        if depots and depots != os.environ.get(DEPOTS):
            os.environ[DEPOTS] = depots
            self.tiers = [tier_at(tier.url) for tier in self.tiers]

    # --- saving ---

    def due(self, version: int) -> bool:
        if not self.on or version != self.next_save:
            return False
        self._begun = version
        return True

    def order(self, version: int) -> Order:
        """How to save a version of this rank."""
        job = self._job
        return Order(
            version=version,
            epoch=self.epoch,
            generation=self._generation,
            rank=job.rank,
            group=job.seats,
            world_size=job.world_size,
            tiers=tuple(tier.url for tier in self.tiers),
            depots=os.environ.get(DEPOTS, ""),
            keep=Keep() if self._job._soundness.healing.needs_checkpoints(version) else self._keep,
            job=_job_name(),
            metrics=dict(self._metrics),
            layout=self._layout,
            versions=compiled.versions(),
        )

    def sealed(self, order: Order) -> None:
        """The snapshot to be saved is whole. From the staging thread."""
        if self._writer is not None:
            self.newest, self._since = order.version, time.monotonic()
            self._writer.save(order)

    def from_tensors(self, order: Order, stream: Stream) -> None:
        """Save without a snapshot: the training waits, unless a fault elsewhere needs this rank."""
        if self._writer is None:
            return
        self.newest = order.version
        self._writer.save(order, stream)
        hangs = False
        try:
            while not hangs and not self._writer.wait(LOOK_S) and not fabric.interrupted:
                hangs = time.monotonic() - stream.heard_at > order.deadline_s + HUNG_S
        finally:
            stream.close()
        if hangs:
            self._writer.kill()

    def missed(self, version: int, why: str = "the one before is still being written") -> None:
        """The save is left out, not waited for, and the other ranks hear of it."""
        tiers, step, rank, first = self.tiers, self.order(version).id, self._job.rank, self._job.seats[0]
        owed.in_background(lambda: decline(reaching.answering(tiers, write=True), step, rank, why, first))
        if self._speaks:
            self._tell("failed", version, f"checkpoint of step {version} left out: {why}")

    def left_by(self, ranks: Sequence[int], coordinator: int) -> None:
        """The seats of these ranks are empty from now on: nobody is to wait for their part in what was being saved."""
        if self.on and ranks and self._speaks:
            tiers, epoch, version = self.tiers, self.epoch, self._job._version
            owed.in_background(lambda: owed.give_up_for(tiers, epoch, version, ranks, coordinator))

    def agree(self) -> None:
        """Inside the step behind a save: when the next one is. Behind a repair: whether it should be sooner."""
        job = self._job
        if not self.on or job.rehearsing:
            return
        self._settle()
        # By the small state of this version, not by what a void attempt has agreed: a newcomer knows only the former.
        due = job._small.saves[1] if job._small is not None else -1
        again = due > job._version == foresight.resumed > 0 and not isinstance(self._when, EverySteps)
        if due != job._version and not again:
            return
        if isinstance(self._when, EverySteps):
            self._plan_next()
            return
        # A save that was under way when a fault came waits for ranks that are gone: how long says nothing about the store.
        costs = foresight.costs(job._durations, self._saved_s, 0.0 if again else self._since)
        mine = foresight.wish(self._when, costs, len(job._durations), new_here=self._took_over)
        wish = torch.tensor([mine], dtype=torch.int64, device=device_of(job))
        if job.world_size > 1:
            with hearing.paused():
                dist.all_reduce(wish, dist.ReduceOp.MAX)
        if job._rejoin is None or fabric.mode is Mode.LIVE:
            steps = int(wish.item())
            planned = job._version + (steps or FIRST_AFTER)
            self.next_save = planned if not again else min(due, planned) if steps else due
            foresight.agreed = steps or foresight.agreed
            if self._speaks and steps and (text := foresight.worth_telling(self._when, steps, costs, mine)):
                self._note("planned", job._version, text, {**costs._asdict(), "steps": steps})

    def _settle(self) -> threading.Thread | None:
        """The first time in a process that took the place of another: see to what that one owed."""
        if not self._new_here or self._writer is None:
            return None
        self._new_here = False
        tiers, arena, save, job = self.tiers, self._job._snapshots.arena, self._writer.save, self._job
        now = StepId(self.epoch, job._version, self._generation)
        who = owed.Newcomer(job.rank, job.seats[0], now, self._begun)
        return owed.in_background(lambda: owed.settle(tiers, who, arena, save))

    def metric(self, name: str, value: float) -> None:
        """A number that goes with the next save; `Keep(best=..., metric=...)` looks at it."""
        self._metrics[name] = float(value)

    def wait(self) -> None:
        """Wait for what is being written."""
        if self._writer is not None:
            self._writer.wait()

    def finish(self) -> None:
        """At the end: wait for what is being written and for copies of it, unless a fault elsewhere needs this rank."""
        writer = self._writer
        if writer is None:
            return
        began, told = time.monotonic(), False
        settling = self._settle()

        def settled(limit_s: float) -> bool:
            if settling is not None:
                settling.join(limit_s)
            return settling is None or not settling.is_alive()

        for done in (settled, writer.wait, writer.close):
            while not done(LOOK_S):
                if fabric.interrupted:
                    return
                if time.monotonic() - began > PATIENCE_S and not told:
                    told = True
                    _say("waiting until the last checkpoint is written, and copied where it is to be")

    def _plan_next(self) -> None:
        version = self._job._version
        if isinstance(self._when, EverySteps):
            every = max(1, self._when.interval)
            self.next_save = (version // every + 1) * every
        else:
            self.next_save = version + FIRST_AFTER

    def _on_outcome(self, outcome: Outcome) -> None:
        if outcome.copied_to or outcome.place:
            (self._on_copy if outcome.copied_to else self._on_place)(outcome)
            return
        self._since = 0.0
        if outcome.ok:
            self._saved_s.append(outcome.seconds)
            del self._saved_s[:-RECENT]
        what = f"checkpoint of step {outcome.version}"
        if self._speaks or not outcome.ok:
            for note in outcome.notes:
                self._tell("failed", outcome.version, f"rank {self._job.rank}: {what}: {note}")
        if self._speaks:
            if outcome.ok:
                self._save_compiled()
                text = f"{what} saved to {outcome.url} in {outcome.seconds:.2f} s"
                self._tell("saved", outcome.version, text)
            else:
                self._tell("failed", outcome.version, f"{what} was not saved; training goes on")

    def _save_compiled(self) -> None:
        if self._compiled_saves:
            self._compiled_saves -= 1
            tell = partial(self._tell, "failed", -1)
            owed.in_background(lambda: compiled.save(reaching.answering(self.tiers, write=True), tell))

    def _on_copy(self, outcome: Outcome) -> None:
        what = f"checkpoint of step {outcome.version}"
        if outcome.ok:
            text = f"{what} copied to {outcome.copied_to} in {outcome.seconds:.2f} s"
            self._tell("copied", outcome.version, "; ".join([text, *outcome.notes]))
        else:
            text = f"{what} was not copied to {outcome.copied_to}: {'; '.join(outcome.notes)}"
            self._tell(
                "failed", outcome.version, f"{text}. It is safe in {outcome.url}; rerail ckpt copy can copy it later"
            )

    @property
    def _speaks(self) -> bool:
        """Of the ranks that save together, the lowest tells what came of it."""
        return self._job.rank == self._job.seats[0]

    def _on_place(self, outcome: Outcome) -> None:
        """One rank of each node tells: a place is mostly broken for all of them."""
        if self._job.rank and os.environ.get("LOCAL_RANK", "0") != "0":
            return
        if outcome.place == "out":
            others = [tier.url for tier in self.tiers if tier.url != outcome.url]
            then = "; the other places are used meanwhile" if others else "; nothing is saved meanwhile"
            text = f"the place {outcome.url} for checkpoints is out: {' '.join(outcome.notes)}{then}"
        else:
            text = f"the place {outcome.url} for checkpoints works again and is used"
        self._tell(f"tier_{outcome.place}", max(self.newest, 0), text)

    def _tell(self, what: str, version: int, text: str) -> None:
        """To the user and, where there is one, to the journal."""
        _say(text)
        self._note(what, version, text)

    def _note(self, what: str, version: int, text: str, figures: dict[str, float] | None = None) -> None:
        if self._job._rejoin is not None:
            self._job._rejoin.note(f"checkpoint.{what}", version, text, figures)

    # --- loading ---

    def restore(self, limit: int = -1) -> bool:
        """Load the newest step that every rank can read, and not one beyond `limit`. False if there is none. All ranks together."""
        if not Starter(self._job, self.tiers, self._tell, limit).start():
            return False
        self.newest = self._job._version
        self._plan_next()
        return True


def _say(text: str) -> None:
    print(f"rerail: {text}", file=sys.stderr, flush=True)


def _job_name() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "")
