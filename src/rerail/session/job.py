"""The user's view: join a job, track state, take steps. Turns a plain training loop into one that can be repaired.

    job = rerail.join()
    job.track(model=model, optimizer=optimizer)
    for batch in job.steps(loader, until=10_000):
        with job.step():
            ...

A fault inside `step()` voids the attempt: `optimizer.step()` raises before it changes anything, the block ends, the
job is repaired, and the same batch is handed out again. Made by `session.join`.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from rerail.checkpoint.retention import Keep
from rerail.checkpoint.schedule import When
from rerail.errors import StateError, StepInterrupted
from rerail.runtime.clock import Phase, StepClock
from rerail.session import restore, rng
from rerail.session.attempt import Attempt
from rerail.session.buffers import BufferGuard
from rerail.session.checkpoints import Checkpoints
from rerail.session.cursor import Cursor
from rerail.session.dealing import Dealer, deal, dealer_of
from rerail.session.ending import Ending
from rerail.session.fabric import fabric, hearing, messages
from rerail.session.injected import injections_of
from rerail.session.link import AgentLink
from rerail.session.rejoin import WARM_ATTEMPTS, Rejoiner, can_retry
from rerail.session.small import Small, to_journal
from rerail.session.snapshotting import Snapshotter
from rerail.session.soundness import Soundness
from rerail.session.step import Step
from rerail.session.telemetry import Telemetry
from rerail.session.tracked import Tracked
from rerail.session.votes import Votes

P = ParamSpec("P")
T = TypeVar("T")


class Place(NamedTuple):
    """Where a process stands in its job."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device


class Job:
    """What `rerail.join()` gives.

    rank, world_size, local_rank, device: this process's place.
    version: completed updates; -1 while `rehearsing`, so that "every 100 steps" does not fire on a void attempt.
    rehearsing: the loop's body runs for nothing: a newcomer warming up, or the rest of the body after a void attempt.
    seats: the ranks that are there. Their number is below world_size while a job goes on with fewer ranks.
    """

    def __init__(self, link: AgentLink | None, place: Place) -> None:
        self.rank, self.world_size, self.local_rank, self.device = place
        self.rehearsing = False
        self._version = 0
        self._clock: StepClock | None = link.clock if link is not None else None
        self._tracked = Tracked()
        self._attempt = Attempt(self._clock)
        self._attempts = 0
        self._buffers = BufferGuard({})
        self._cursor = Cursor(None, endless=False)
        self._dealer: Dealer | None = None
        self._small: Small | None = None
        self._batch: Any = None
        self._has_batch = False
        self._random_after = self._random_end = rng.capture()
        self._ran_out = -1
        """The version whose step was last run to its end without peers; `_random_end` belongs to it."""
        self._broke_off = -1
        """The version whose step was last voided."""
        self._started = 0.0
        self._durations: deque[float] = deque(maxlen=64)
        self._announce = -1
        self._in_steps = False
        self._guards = 0
        self._step = Step(self)
        self._rejoin = Rejoiner(self, link) if link is not None else None
        self._ending = Ending(self.rank, self.world_size, self._durations)
        self._checkpoints = Checkpoints(self)
        self._snapshots = Snapshotter(self, link)
        self._attempt.before_update = self._snapshots.before_update
        self._telemetry = Telemetry(self._clock)
        self._votes = Votes(self, link)
        self._soundness = Soundness(self, link)
        self._attempt.first_look = self._soundness.first_look
        self._injected = self._attempt.injected = injections_of(self, link)

    @property
    def version(self) -> int:
        return -1 if self.rehearsing else self._version

    @property
    def seats(self) -> tuple[int, ...]:
        return fabric.seats or tuple(range(self.world_size))

    @property
    def weight(self) -> float:
        """What to multiply the mean loss of this rank's batch by, so that DDP's mean over the seats is that of the whole
        global batch. 1.0 in a job whose ranks all have the same share."""
        if self._dealer is None:
            return 1.0
        self._dealer.weighed = True
        return self._dealer.weight

    @property
    def _elastic(self) -> bool:
        """Whether the script can go on with fewer ranks: its data are dealt, and its loss is weighed."""
        return self._dealer is not None and self._dealer.weighed

    def deal(self, dataset: Any, *, batch: int, seed: int = 0, shuffle: bool = True) -> Dealer:
        """Share the samples of every update among the ranks: DataLoader(dataset, batch_sampler=job.deal(dataset, batch=32)).

        `batch` is that of all ranks together. With `loss * job.weight`, the job can go on with fewer ranks when a node is
        lost: the same samples make up each update.
        """
        if self._in_steps:
            raise StateError("job.deal() comes before the first job.steps()")
        if self._dealer is not None:
            raise StateError("job.deal() was called already: one dealer serves the whole job")
        place = {"rank": self.rank, "world_size": self.world_size}
        self._dealer = deal(dataset, batch, seed, shuffle, seats=lambda: self.seats, **place)
        return self._dealer

    def track(self, *, replicated: bool = False, **objects: Any) -> None:
        """Name the state that makes up this job: modules, optimizers, anything with state_dict() and load_state_dict().

        `replicated=True` says that plain modules, not wrapped by DDP or FSDP2, are the same on every rank.
        """
        if self._in_steps:
            raise StateError("job.track() comes before the first job.steps(): track everything at once")
        self._tracked.replicated = self._tracked.replicated or replicated
        for name, value in objects.items():
            if name == "loader":
                continue  # its place is kept by job.steps(loader)
            self._tracked.add(name, value)
            if isinstance(value, torch.optim.Optimizer):
                self._attempt.watch(value)

    def checkpoints(
        self,
        *where: str | Path,
        when: When | int | None = None,
        keep: Keep | int | None = None,
        compile_cache: bool = False,
    ) -> None:
        """Save to these places, and start from the newest step that is there.

        The first that works is saved to; those behind it get copies, beside the training.
        `when`: every so many steps, or a rule of `rerail.checkpoint.schedule`; by default rerail plans it. `keep`: the newest
        so many, or a `Keep`; by default all. The last step of the loop is always saved.
        `compile_cache`: keep what torch.compile makes there as well. It is code that a later start runs: only for places
        that nobody else can write to.
        """
        if self._in_steps:
            raise StateError("job.checkpoints() comes before the first job.steps()")
        self._checkpoints.configure(where, when, keep, compile_cache)

    def metric(self, name: str, value: float) -> None:
        """A number to be kept with the next checkpoint: `keep=Keep(best=3, metric="-loss")` goes by it.

        `loss` and `grad_norm` are also watched: not a number, spikes, divergence (setting `roll_back`).
        """
        self._soundness.metric(name, float(value))
        if self.rehearsing or fabric.interrupted:
            return  # of an attempt that is void
        self._checkpoints.metric(name, value)
        self._telemetry.metric(name, float(value))

    def bad_batch(self, reason: str) -> None:
        """Inside `step()`, ahead of optimizer.step(): leave this batch out on all ranks and take the next one.

        The rest of the block still runs, for nothing.
        """
        self._soundness.bad_batch(reason)

    def steps(self, loader: Iterable[Any] | None = None, *, until: int | None = None) -> Iterator[Any]:
        """Hand out batches (or step numbers, without a loader) until `until` updates are complete.

        With `until` the loader is walked again and again; without it, once. The same batch comes again after a fault.
        """
        if loader is None and until is None:
            raise StateError("job.steps() needs a loader, until=, or both")
        if self._dealer is not None and dealer_of(loader) is not self._dealer:
            raise StateError(
                "job.steps() was given a loader that takes no batches from job.deal(): DataLoader(dataset, batch_sampler=dealer)"
            )
        self._in_steps = True
        self._cursor = Cursor(loader, endless=until is not None)
        self._cursor.on_skip = self._soundness.skipped
        if self._checkpoints.on and self.rank == self.seats[0]:
            self._cursor.warn_if_stateless()
        self._buffers = BufferGuard(self._tracked.buffers())
        self._snapshots.begin()
        if self._rejoin is not None:
            yield from self._rejoin.begin()
        elif self._checkpoints.on:
            self._checkpoints.claim()
            self._checkpoints.restore()
            self._ending.watch(self._checkpoints.epoch)
        while True:
            self.rehearsing = False
            if fabric.interrupted and self._rejoin is not None:
                yield from self._run_out()
                self._rejoin.repair()
            self._drop_batch_behind(until)
            if not self._has_batch and not self._fetch(until):
                if not self._votes.agree_at_the_end():
                    continue
                self._save_last()
                if self._rejoin is None or self._rejoin.finish():
                    return
                continue
            self._attempts += 1
            if self._attempts > WARM_ATTEMPTS:
                hearing.stop()
            yield self._batch
            self._enter(Phase.OUTSIDE)

    def step(self) -> Step:
        """One whole update: forward, backward, optimizer.step(). Code after the block also runs after a void one."""
        return self._step

    def guard(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run something with collectives outside a step (evaluation, metrics); repeat it when a fault voids it.

        The function may run to its end on meaningless values before it is repeated: keep lasting effects out of it.
        """
        before = rng.capture()
        while True:
            fabric.shield(True)
            error: Exception | None = None
            try:
                result = function(*args, **kwargs)
            except Exception as raised:
                error = raised
            finally:
                fabric.shield(False)
            if self._rejoin is None or self.rehearsing or not fabric.interrupted:
                if error is not None:
                    raise error
                self._guards += 1
                return result
            self._rejoin.repair(in_guard=True)
            rng.restore(before)

    # --- inside ---

    def _run_out(self) -> Iterator[Any]:
        """After an attempt that broke off in the middle: once more, alone and to its end.

        The others may have completed this step; then this rank takes their result, but its own random state and
        buffers must be those behind the step.
        """
        if self._has_batch and self._ran_out != self._version and self._broke_off == self._version:
            rng.restore(self._random_after)
            self.rehearsing = True
            yield self._batch
            self.rehearsing = False

    def _drop_batch_behind(self, until: int | None) -> None:
        """A batch fetched to rehearse with, by a process that came when all was done already."""
        if until is not None and self._version >= until and self._has_batch and self._small is not None:
            restore.small(self, self._small, fresh=False)

    def _fetch(self, until: int | None) -> bool:
        """Take down the small state of this version, then get its batch. False at the end."""
        if self._ending.due(self._version):
            self._save_last()
            self._ending.end()
        if until is not None and self._version >= until:
            return False
        small, began = self._small_now(), time.monotonic()
        try:
            self._batch, self._random_after = self._cursor.take(self._version, small.random, small.position)
        except StopIteration:
            return False
        self._has_batch, self._small, got = True, small, time.monotonic()
        if not self.rehearsing:
            if self._clock is not None:
                self._clock.write_small(self._version, *to_journal(small))
                self._clock.set_step(self._version)
            self._snapshots.take_if_due(small)
        self._telemetry.fetched(began, got)
        return True

    def _small_now(self) -> Small:
        return Small(
            self._version,
            rng.capture(),
            self._cursor.position(),
            self._tracked.small_objects(scalars=False),
            self._buffers.to_journal(),
            self._snapshots.every,
            self._checkpoints.saves,
        )

    def _save_last(self) -> None:
        """The loop is at its end: save what it came to, and wait until it is safe."""
        if self._checkpoints.on and not fabric.interrupted:
            self._checkpoints.wait()
            if self._checkpoints.newest != self._version:
                self._snapshots.take_if_due(self._small_now(), last=True)
            self._snapshots.settle()
            self._checkpoints.finish()
        self._ending.unwatch()

    def _enter(self, phase: Phase) -> None:
        if self._clock is not None:
            self._clock.enter(phase)

    def _begin_attempt(self) -> None:
        if not self._has_batch:
            raise StateError("job.step() belongs inside `for batch in job.steps(...)`, once per batch")
        self._started = time.monotonic()
        self._telemetry.began(self._started)
        self._attempt.begin()
        if self._rejoin is None:
            if self._buffers.learning:
                self._buffers.before_step()
            self._checkpoints.agree()
            return
        self._enter(Phase.RUN_OUT if fabric.interrupted else Phase.COMPUTE)
        fabric.shield(True)
        self._buffers.before_step()
        messages.attempt(self._version)
        if not messages.doing_again:  # of steps that are done again all this is agreed
            self._soundness.look()
            self._votes.agree()
            self._snapshots.agree()
            self._checkpoints.agree()
            self._snapshots.foretelling.agree()
        if self._injected is not None:
            self._injected.step_begins()

    def _end_attempt(self, error: BaseException | None) -> bool:
        """True when the error, if any, is dealt with: the `with` block swallows it."""
        if self._rejoin is None:
            if error is None:
                self._commit()
            return False
        fabric.shield(False)
        if error is not None and not isinstance(error, Exception):
            return False
        if self._attempt.end(error) and not self.rehearsing:
            self._commit()
            return False
        if fabric.interrupted:
            self._random_end = rng.capture()
            if error is None or isinstance(error, StepInterrupted):
                self._ran_out = self._version
        elif error is not None and not (can_retry(error, self._tracked) and self._rejoin.may_repeat(error)):
            return False
        messages.void()
        if self._broke_off != self._version:
            self._rejoin.void(self._attempt.untouched)
        else:
            self._buffers.restore()
        self._broke_off = self._version
        self.rehearsing = True
        return True

    def _commit(self) -> None:
        """The step is complete: the next version stands. What the script does now is its own affair."""
        took = time.monotonic() - self._started
        self._buffers.after_step()
        self._version += 1
        self._guards = 0
        messages.committed(self._version)
        self._has_batch, self._batch, self._broke_off = False, None, -1
        if self._clock is not None:
            self._clock.set_step(self._version)
            self._telemetry.committed(self._version, took, self._snapshots.stalled_s)
            self._clock.enter(Phase.OUTSIDE)
        if self._announce >= 0 and self._rejoin is not None:
            usual = statistics.median(self._durations) if self._durations else self._telemetry.before_s
            self._rejoin.resumed(self._announce, took, usual)
            self._announce = -1
        else:
            self._durations.append(took)
            if self._rejoin is not None:
                self._rejoin.came_to(self._version)
