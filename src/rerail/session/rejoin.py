"""Takes a rank out of a broken generation and into the next: park, form, load, go on.

    run out  ->  Parked  ->  Form  ->  wires  ->  state  ->  Formed  ->  the step again  ->  Resumed

The same path serves survivors, newcomers and ranks whose step raised. Every part can be broken off by a newer
generation and starts over. Called by `session.job` on the training thread.
"""

from __future__ import annotations

import faulthandler
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rerail.errors import JobStopped, StateError
from rerail.runtime.clock import Phase
from rerail.runtime.plans import Plan
from rerail.runtime.wire import Assign, Dismiss, Finished, Formed, Interrupt, Noted, Parked, Raised, Resumed
from rerail.session import hearing_again, restore
from rerail.session.c10d import Store
from rerail.session.fabric import fabric, hearing, messages
from rerail.session.foresight import foresight
from rerail.session.link import AgentLink
from rerail.session.mending import Mender
from rerail.session.small import Small, from_journal
from rerail.session.tracked import Tracked

if TYPE_CHECKING:
    from rerail.session.job import Job

WARM_ATTEMPTS = 2
"""Steps after which nothing is set up any more: pipelines meet in the first, DDP rebuilds its buckets in the second."""


class Rejoiner:
    """The repairs of one rank."""

    def __init__(self, job: Job, link: AgentLink) -> None:
        if link.assignment is None:
            raise StateError("this process has not been given a rank yet")
        self._job, self._link = job, link
        self._assignment: Assign = link.assignment
        self._joined = not self._assignment.newcomer
        self._inherited: dict[int, Small] = {}
        """A newcomer's: the small states its predecessor left, by version."""
        self._mender = Mender(job)
        self._served: Store | None = None
        self._intact = False
        """Whether the state in memory is that of `job._version`, whole."""
        self._training = False
        self._mended = -1
        """The version at which the state was put together, not exactly, and that it is still of."""
        self._agreed = -1
        self._behind: Plan | None = None
        """The plan whose version this rank has yet to come to, by doing its steps again."""
        self._behind_since = 0.0
        self._phases: dict[str, float] = {}

    # --- before the first step ---

    def begin(self) -> Iterator[Any]:
        """Newcomer: rehearse alone, then join. Everyone else: restore what an earlier process of this rank left."""
        self._job._soundness.watch = self._assignment.back.watch
        self._job._cursor.leave_out(self._assignment.back.skips)
        if self._joined:
            if self._start_from_memory_or_disk():
                yield from self._warm_up()
            self._intact = self._training = True
            self._job._announce = fabric.generation
            messages.go_on(self._job._version)
            return
        self._phases["build"] = time.monotonic() - self._link.assigned_at
        clock = self._link.clock
        left = clock.read_small() if clock is not None else {}
        self._inherited = {version: from_journal(parts) for version, parts in left.items()}
        started = time.monotonic()
        yield from self._rehearse()
        self._phases["rehearse"] = time.monotonic() - started
        self._training = True
        self.repair()

    def _start_from_memory_or_disk(self) -> bool:
        """What earlier processes of these ranks left in memory is newer than what they saved."""
        job = self._job
        job._checkpoints.claim()
        limit = self._assignment.back.trusted
        if limit >= 0:
            job._snapshots.drop_behind(limit)
            job._snapshots.drop_unsound()
        if self._assignment.restored and restore.from_arenas(job):
            job._checkpoints.started_anew()
            return True
        return job._checkpoints.on and job._checkpoints.restore(limit)

    def _warm_up(self) -> Iterator[Any]:
        """After a restart: as many bodies as the run before had seen, since DDP's first steps sum in another order.

        They run alone and are thrown away; only then does the next step give the bits it would have given.
        """
        job = self._job
        times = min(job._version, WARM_ATTEMPTS) if job._tracked.has_ddp() else 0
        if times and job._fetch(None):
            with hearing.paused(), fabric.alone():
                job.rehearsing = True
                for _ in range(times):
                    restore.replay(job)
                    job._attempts += 1
                    yield job._batch
                    job._buffers.restore()
                job.rehearsing = False
            restore.replay(job)
            job._tracked.clear_gradients()
            job._ran_out = job._broke_off = -1

    def _rehearse(self) -> Iterator[Any]:
        """Run the loop's body alone on the predecessor's batch, as often as it takes to be like the survivors.

        In a seat that was empty, whose last rank left nothing, on the first batch there is.
        """
        job = self._job
        if self._inherited:
            restore.small(job, self._inherited[max(self._inherited)], fresh=True)
        elif job._dealer is None:
            hearing.stop()
            return
        job.rehearsing = True
        fabric.interrupted = True  # so that optimizer.step() ends every attempt
        if job._fetch(None):
            for _ in range(WARM_ATTEMPTS if job._tracked.has_ddp() else 1):
                restore.replay(job)
                job._attempts += 1
                yield job._batch
        job.rehearsing = False
        job._attempts = max(job._attempts, WARM_ATTEMPTS)
        hearing.stop()

    # --- faults ---

    def may_repeat(self, error: Exception) -> bool:
        """The user's code raised: ask for a verdict. True when the step is to be repeated, False to go down with it."""
        self._job._enter(Phase.PARKED)
        self._link.send(
            Raised(
                rank=self._job.rank,
                generation=fabric.generation,
                version=self._job._version,
                exception=_type_name(error),
                text=str(error)[:4000],
                traceback="".join(traceback.format_exception(error))[-20000:],
            )
        )
        try:
            self._link.wait_for_verdict(fabric.generation)
        except JobStopped:
            if self._link.stop is not None and self._link.stop.culprit:
                return False
            raise
        return True

    def void(self, untouched: bool) -> None:
        """An attempt came to nothing. `untouched`: the state is still that of its start."""
        self._intact = self._intact and untouched and self._job._buffers.restore()

    def distrust(self, agreed: int) -> None:
        """The state in memory may be wrong: nothing later than `agreed` is to be gone on from, nor given to others."""
        self._intact, self._agreed = False, agreed if self._agreed < 0 else min(agreed, self._agreed)
        self._job._snapshots.drop_behind(agreed)

    def repair(self, *, in_guard: bool = False) -> None:
        """Park and take part in new generations until one stands."""
        self._job._tracked.settle()
        self._job._snapshots.settle()
        messages.pause()
        if self._behind is not None:
            self._behind, self._phases = None, {}
        if in_guard:
            messages.forget()  # part of it is done twice
        while True:
            self._job._enter(Phase.PARKED)
            wanted = self._wanted_generation()
            self._park(wanted, in_guard)
            answer = self._link.wait_for_form(wanted.generation)
            if isinstance(answer, Interrupt):
                continue
            try:
                self._form(answer.plan)
                return
            except (StateError, JobStopped):
                raise
            except RuntimeError as error:  # a peer was lost while wires were laid or state was moved
                fabric.failed(error)

    def note(self, source: str, version: int, text: str, figures: dict[str, float] | None = None) -> None:
        """Have something written to the journal."""
        told = Noted(rank=self._job.rank, source=source, version=version, text=text[:2000], figures=figures or {})
        self._link.send(told)

    def finish(self) -> bool:
        """Wait until all ranks are done. False when a fault elsewhere needs this rank once more."""
        self._job._enter(Phase.DONE)
        self._link.send(Finished(rank=self._job.rank, version=self._job._version))
        while not fabric.interrupted:
            if isinstance(self._link.next_message(), Dismiss):
                return True
        return False

    def resumed(self, generation: int, step_s: float, usual_step_s: float) -> None:
        """The first step of a generation is complete."""
        message = Resumed(
            rank=self._job.rank,
            generation=generation,
            version=self._job._version,
            step_s=step_s,
            usual_step_s=usual_step_s,
            elastic=self._job._elastic,
        )
        self._link.send(message)

    def came_to(self, version: int) -> None:
        """A step is complete. Where it was done again: tell those who wait, and join them at the end."""
        plan, again = self._behind, messages.again
        if plan is None or again is None:
            return
        try:
            if version in plan.starts().values():
                hearing_again.reached(version, self._job.rank)
        except RuntimeError as error:
            fabric.failed(error)
        if version == plan.version and not fabric.interrupted:
            if again.schedule is not None:
                self._job._snapshots.adopt(again.schedule.snapshot_every)
                self._job._checkpoints.next_save = again.schedule.next_save
                self._job._votes.agreed = max(self._job._votes.agreed, again.schedule.agreed)
            self._phases["again"] = time.monotonic() - self._behind_since
            self._formed(plan)

    # --- one generation ---

    def _wanted_generation(self) -> Interrupt:
        """The newest generation asked for; if a collective broke before anyone told us, wait until someone does."""
        newest = self._link.newest_interrupt
        if newest is not None and newest.generation > fabric.generation:
            return newest
        asked = self._assignment
        if asked.generation > fabric.generation:
            return Interrupt(generation=asked.generation, store_rank=asked.store_rank, trusted=asked.back.trusted)
        return self._link.wait_for_verdict(fabric.generation)

    def _park(self, wanted: Interrupt, in_guard: bool) -> None:
        job, port = self._job, 0
        if wanted.trusted >= 0:
            self.distrust(wanted.trusted)
            job._snapshots.drop_unsound()
            job._checkpoints.distrust(wanted.trusted)
        if wanted.store_rank == job.rank:
            self._served, port = fabric.serve()
        faulthandler.cancel_dump_traceback_later()
        if fabric.cuts:
            self._phases["run_out"] = time.monotonic() - fabric.cut_at
        smalls = set(self._inherited) | set(job._snapshots.small_versions())
        if job._small is not None:
            smalls.add(job._small.version)
        if not job._has_batch and self._joined:
            smalls.add(job._version)  # between two steps: all of it is in memory
        if job._has_batch and job._ran_out == job._version and (self._joined or not _changing(job)):
            smalls.add(job._version + 1)
        lost = not self._intact or self._mended == job._version  # which may be tried in another way
        self._link.send(
            Parked(
                rank=job.rank,
                generation=wanted.generation,
                version=job._version,
                intact=self._intact,
                in_training=self._training and job._attempts >= WARM_ATTEMPTS,
                small_versions=tuple(sorted(smalls)),
                snapshots=job._snapshots.versions(),
                logged=messages.since,
                astray=messages.astray,
                shadows=job._snapshots.shadow.usable() if lost else (),
                saved=self._mender.saved() if lost else (),
                replicas=self._replicas(),
                weights=job._tracked.alike(job.rank, job.world_size) if job._tracked.shares_optimizer() else (),
                agreed=self._agreed,
                in_guard=in_guard,
                guards=job._guards,
                store_port=port,
                elastic=job._elastic,
                loss=job._soundness.level(),
                straight=job._snapshots.drifting.straight(),
                guesses=job._snapshots.foretelling.guesses() if self._intact else {},
                phases=self._phases,
            )
        )

    def _replicas(self) -> tuple[int, ...]:
        """Who holds the same; nobody, if buffers that change here alone are too large for the step journal."""
        job = self._job
        return (job.rank,) if job._buffers.too_large else job._tracked.replicas(job.rank, job.world_size)

    def _form(self, plan: Plan) -> None:
        job, started, before = self._job, time.monotonic(), self._job.seats
        fabric.nodes = plan.nodes
        foresight.take(plan.outlook, plan.version)
        if plan.members and job.rank not in plan.members:
            raise JobStopped(f"the seat of rank {job.rank} is given up: the job goes on without it")
        served = self._served if plan.store_rank == job.rank else None
        fabric.form(plan.generation, lambda: served or fabric.dial(plan.store_host, plan.store_port), plan.members)
        job._votes.meet()
        connected = time.monotonic()
        # From here until all is loaded this rank is not whole, and a fault must not find it called so.
        self._intact = self._intact and plan.sources[job.rank].kind == "own"
        if not self._joined and job._clock is not None:
            # what a predecessor has left that trained on while this process was made ready
            self._inherited |= {version: from_journal(parts) for version, parts in job._clock.read_small().items()}
        job._checkpoints.moved(plan.depots)
        job._soundness.watch = plan.back.watch
        job._soundness.went_back(plan.version)
        job._soundness.begin_healing(plan.healing)
        job._cursor.leave_out(plan.back.skips)
        restore.by_plan(job, plan, self._inherited, self._mender)
        messages.go_on(job._version, hearing_again.exchange(plan, job))
        if plan.leaving:
            job._snapshots.take_now(restore.at_hand(job))
        job._checkpoints.left_by(sorted(set(before) - set(job.seats)), min(before))
        self._intact = self._joined = True
        self._mended = plan.version if plan.sources[job.rank].stale is not None else -1
        self._agreed = -1
        job._broke_off = -1
        loaded = time.monotonic()
        if job._clock is not None:
            job._clock.set_generation(plan.generation)
        self._inherited = {}
        self._phases = {"communication": connected - started, "load": loaded - connected}
        hearing_again.wait_for_those_behind(plan, job.rank)
        if job._version < plan.version:
            self._behind, self._behind_since = plan, time.monotonic()
            return
        self._formed(plan)
        if plan.leaving:
            self._link.wait_for_verdict(plan.generation)  # which is to end

    def _formed(self, plan: Plan) -> None:
        """All is as the plan wants it on this rank."""
        job = self._job
        fabric.collectives = 0  # counted from here on every rank alike, a newcomer included: who is behind can be seen
        job._announce, self._behind = plan.generation, None
        told = Formed(rank=job.rank, generation=plan.generation, version=job._version, phases=self._phases)
        self._phases = {}
        self._link.send(told)


def _changing(job: Job) -> bool:
    """Whether there are buffers that a step changes: what comes of it depends on weights that a newcomer does not have.

    Where DDP hands rank 0's to all before each pass, it does not matter what the others have.
    """
    wrappers = list(job._tracked.ddp_wrappers())
    handed_out = job.rank != 0 and bool(wrappers) and all(one.broadcast_buffers for one in wrappers)
    return job._small is not None and bool(job._small.buffers) and not handed_out


def can_retry(error: BaseException, tracked: Tracked) -> bool:
    """Whether the step can be repeated in this process after the user's code raised.

    Not in the middle of a backward pass under DDP, nor anywhere inside a step under FSDP2: both keep state of a pass
    that only its end clears. Such a rank goes down with its exception and is replaced.
    """
    if tracked.has_fsdp():
        return False
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "_engine_run_backward":
            return not tracked.has_ddp()
        trace = trace.tb_next
    return True


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
