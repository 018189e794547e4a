"""One attempt at a step: has the update begun, has it ended, is what this rank holds still whole?

Hooks on the tracked optimizers set the brackets. They are also where an interrupted attempt ends: `optimizer.step()`
raises before it touches anything. Called by `session.job`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from rerail.errors import StepInterrupted
from rerail.runtime.clock import Phase, StepClock
from rerail.session.c10d import cuda_in_use
from rerail.session.fabric import fabric

if TYPE_CHECKING:
    from rerail.session.injected import Injections

EXIT_FENCED = 75
"""EX_TEMPFAIL."""


class Attempt:
    """The brackets of the attempt under way."""

    def __init__(self, clock: StepClock | None) -> None:
        self._clock = clock
        self.first_look: Callable[[], None] = lambda: None
        """Called first of all; it may raise StepInterrupted."""
        self.before_update: Callable[[], None] = lambda: None
        """Called once the update is certain to happen, before it changes anything."""
        self.injected: Injections | None = None
        self.active = False
        self.update_begun = False
        self.updates_open = 0
        self._solo_before_update = 0
        self.watched = 0
        """Optimizers with brackets. Without any, nobody can tell whether an interrupted step changed the state."""

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        self.watched += 1

    def begin(self) -> None:
        self.active, self.update_begun, self.updates_open = True, False, 0

    def end(self, error: BaseException | None) -> bool:
        """The attempt is over. True when it is complete: the version it leads to is whole."""
        self.active = False
        self._insist_on_lease()
        if error is not None or self.updates_open:
            return False
        if not fabric.interrupted:
            return True
        # A fault is known, but it came after the update and nothing was missed: the step stands.
        return self.update_begun and fabric.solo_used == self._solo_before_update

    @property
    def untouched(self) -> bool:
        """Whether the state is still that of the step's start."""
        return self.watched > 0 and not self.update_begun

    def _insist_on_lease(self) -> None:
        """A rank whose place another may have by now must not go on (see `runtime.lease`), and its agent could not end it."""
        if self._clock is not None and self._clock.lease_over:
            os.write(2, b"rerail: this rank was cut off from the job and ends before it changes anything\n")
            os._exit(EXIT_FENCED)

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if fabric.interrupted and self.update_begun is False:
            raise StepInterrupted("this attempt of the step is void; job.step() repeats it")
        if fabric.inner_backend != "gloo" and cuda_in_use():
            # The update must not be queued behind a collective that may yet be aborted.
            fabric.synchronize()
            if fabric.interrupted:
                raise StepInterrupted("this attempt of the step is void; job.step() repeats it")
        if not self.update_begun:
            self._insist_on_lease()
            self.first_look()
            if self.injected is not None:
                self.injected.before_update()
            self.before_update()
            self._solo_before_update = fabric.solo_used
        self.update_begun = True
        self.updates_open += 1
        if self._clock is not None:
            self._clock.enter(Phase.UPDATE)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.updates_open -= 1
        if self.injected is not None:
            self.injected.after_update()
