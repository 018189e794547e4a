"""Says that the training has gone wrong on this rank, and waits to be sent back to before that. Called by `session.job`.

    job.metric() not finite, or the state (looked at while a fault is computed again), or job.bad_batch()
        -> Unsound -> controller -> Interrupt(trusted) -> the step runs out -> park -> plan

The rank waits where it is: its peers come to a halt in their next collective, and nobody takes a snapshot of what is wrong.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

import torch

from rerail.config import settings_of_rank
from rerail.errors import JobStopped, StateError, StepInterrupted
from rerail.rehab.fitter import Fitter
from rerail.runtime.clock import METRICS, Phase
from rerail.runtime.plans import Healing
from rerail.runtime.wire import HEALED, Message, Unsound
from rerail.session import first_look
from rerail.session.fabric import fabric
from rerail.session.healing import Healer, level
from rerail.texts import listed

if TYPE_CHECKING:
    from rerail.session.job import Job
    from rerail.session.link import AgentLink

REMIND_S = 5.0
"""The controller may have been lost together with what it was told."""
LOOK_S = 0.01
LEAP, RECENT, FEWEST = 10.0, 64, 8
"""A loss that is so many times the median of the recent ones belongs to what is coming; from so many on they say something."""
LISTED = 8
"""Places in the data that are told one by one."""


def wait_to_go_back(job: Job, link: AgentLink, word: Message | None) -> None:
    """Say it, again from time to time, until all are interrupted."""
    job._enter(Phase.PARKED)
    while not fabric.interrupted:
        if word is not None:
            link.send(word)
        until = time.monotonic() + REMIND_S
        while not fabric.interrupted and time.monotonic() < until:
            if link.stop is not None:
                raise JobStopped(link.stop.reason)
            time.sleep(LOOK_S)
    job._enter(Phase.RUN_OUT)


class Soundness:
    """The word of one rank on its own training."""

    def __init__(self, job: Job, link: AgentLink | None) -> None:
        self._job, self._link = job, link
        self._on = link is not None and "nan" in listed(settings_of_rank().roll_back)
        self.watch = -1
        """Up to this version the state is looked at before every step."""
        self.healing, self.fitter = Healer(), Fitter()
        self._losses: deque[tuple[int, float]] = deque(maxlen=RECENT)
        """The version from which each step began, and its loss."""

    def metric(self, name: str, value: float) -> None:
        """A number of the user's. Of an attempt that is void it means nothing."""
        job = self._job
        if name not in METRICS or not self._on or job.rehearsing or fabric.interrupted:
            return
        began = job._version if job._attempt.active else max(0, job._version - 1)
        if name == "loss" and self._trial(began):
            self._losses.append((began, value if math.isfinite(value) else math.inf))
            return  # nothing has been changed yet: it is looked at before that
        if math.isfinite(value):
            if name == "loss":
                self._losses.append((began, value))
                self.fitter.add(time.monotonic(), value)
                self.healing.told(began, self._losses)
                self._judge(began)
            return
        if name == "grad_norm" and job._tracked.has_scaler():
            return  # steps that overflow are left out by the scaler, as a matter of course
        text = f"{name} is {value} in step {began + 1} on rank {job.rank}"
        leapt = self._leapt(began)
        if leapt < began:
            text += f", after it had leapt in step {leapt + 1}"
        # the step before it may have spoilt the state it began from
        self._tell(name, began, max(0, leapt - 1), text)

    def _judge(self, version: int) -> None:
        """Whether a shard that was not restored exactly has healed by now."""
        found = self.healing.judged(self._job.rank, version, self._losses)
        if found is None or self._job._rejoin is None:
            return
        if not found.healed:
            self._tell("healing", version, found.target, found.text)
            return
        print(f"rerail: the training has healed: {found.text}", file=sys.stderr, flush=True)
        self._job._rejoin.note(HEALED, version, found.text, found.figures)

    def begin_healing(self, healing: Healing | None) -> None:
        """A generation is formed: with a guard behind a repair that is not exact, or without."""
        self.healing.begin(healing, self._losses)

    def _trial(self, began: int) -> bool:
        """Whether this is the step behind a repair that is not exact, and its update is still to come."""
        job = self._job
        return job._attempt.active and not job._attempt.update_begun and self.healing.on_trial(began)

    def first_look(self) -> None:
        """Before the update behind a repair that is not exact: StepInterrupted if any rank's loss is no good. Nothing is changed then."""
        job = self._job
        healing = self.healing.first_look(job._version)
        if healing is None or job.rehearsing or fabric.interrupted or self._link is None:
            return
        why = self.healing.no_good(healing, self._losses) if job.rank in healing.tellers else ""
        job._enter(Phase.PARKED)
        refused = first_look.all_said(job.rank, healing.tellers, why)
        if refused:
            word = Unsound(
                generation=fabric.generation, version=job._version, what="source", trusted=job._version, text=refused
            )
            wait_to_go_back(job, self._link, word)
            raise StepInterrupted("the shard that was restored looks no good; the next way is tried")
        job._enter(Phase.COMPUTE)

    def level(self) -> tuple[float, float] | None:
        """Where the loss is."""
        return level([loss for _, loss in self._losses])

    def went_back(self, version: int) -> None:
        """What was told of later steps never was."""
        while self._losses and self._losses[-1][0] >= version:
            self._losses.pop()

    def _leapt(self, began: int) -> int:
        """Where the loss rose out of all proportion, and has not come down since; `began` if it did not."""
        if len(self._losses) < FEWEST:
            return began
        far = LEAP * statistics.median(loss for _, loss in self._losses)
        for version, loss in reversed(self._losses):
            if not 0.0 < far < loss:
                break
            began = version
        return began

    def look(self) -> None:
        """At the beginning of a step that is computed again: is the state still sound?"""
        job = self._job
        if not self._on or not 0 < job._version <= self.watch or job.rehearsing or fabric.interrupted:
            return
        if any_nan(job._tracked.trained_tensors()):
            began = job._version - 1
            self._tell(
                "state", began, began, f"parameters or optimizer state of rank {job.rank} behind step {began + 1}"
            )

    def bad_batch(self, reason: str) -> None:
        """The script does not want the batch at hand."""
        job = self._job
        if not job._attempt.active:
            raise StateError("job.bad_batch() belongs inside of job.step(), ahead of optimizer.step()")
        if job.rehearsing or fabric.interrupted:
            return
        if job._attempt.update_begun:
            raise StateError("job.bad_batch() comes too late: optimizer.step() has begun with this batch")
        if self._link is None:
            print(
                f"rerail: WARNING: a bad batch cannot be left out without rerail run, and is used: {reason}",
                file=sys.stderr,
                flush=True,
            )
            return
        text = f"rank {job.rank}, step {job._version + 1}: {reason}"[:2000]
        word = Unsound(
            generation=fabric.generation, version=job._version, what="batch", trusted=job._version, text=text
        )
        wait_to_go_back(job, self._link, word)

    def skipped(self, version: int, places: list[tuple[int, int]]) -> None:
        """Batches were passed over before that of step `version`: on all ranks alike, so one of them tells."""
        job = self._job
        if job.rank != 0 or job.rehearsing or job._rejoin is None:
            return
        shown = ", ".join(f"batch {index} of epoch {epoch}" for epoch, index in places[:LISTED])
        more = f" and {len(places) - LISTED} more" if len(places) > LISTED else ""
        text = f"left out of the training before step {version + 1}, on every rank: {shown}{more}"
        print(f"rerail: {text}", file=sys.stderr, flush=True)
        job._rejoin.note("data.skipped", version, text)

    def _tell(self, what: str, version: int, trusted: int, text: str) -> None:
        job = self._job
        if self._link is None or job._rejoin is None:
            return
        job._rejoin.distrust(trusted)
        word = Unsound(generation=fabric.generation, version=version, what=what, trusted=trusted, text=text)
        wait_to_go_back(job, self._link, word)


@torch.no_grad()
def any_nan(tensors: list[torch.Tensor]) -> bool:
    """Whether any number in them is none. Infinities may be meant: masks are made of them."""
    floats = (one for one in tensors if one.is_floating_point() and one.numel())
    return any(bool((one if one.element_size() > 1 else one.float()).isnan().any()) for one in floats)
