"""Faults on purpose inside a rank's steps: turns an `Inject` that came over the link into what goes wrong, and tells of it.

    step_begins      hang, exit, oom, slow
    before_update    exception, nan
    after_update     bitflip

There only where the job was started with --allow-inject: `session.job` and `session.attempt` call it at these places, and
otherwise look at a None. Every choice is made by the order's seed.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from rerail.config import INJECT
from rerail.runtime.injections import DONE, OVER, REFUSED, dice
from rerail.runtime.wire import Inject, Injected
from rerail.session.fabric import fabric
from rerail.session.tracked import local_part

if TYPE_CHECKING:
    from rerail.session.job import Job
    from rerail.session.link import AgentLink

EXIT_CODE = 3
KNOWN_STEPS = 3
"""Steps whose time must be known before a rank can be made slower by a factor."""
BITE = 16 << 20
"""Bytes taken at a time by a rank that runs out of memory."""


def injections_of(job: Job, link: AgentLink | None) -> Injections | None:
    """None where nothing may be injected."""
    return Injections(job, link) if link is not None and os.environ.get(INJECT, "") == "1" else None


class Injections:
    """What is to go wrong on this rank."""

    def __init__(self, job: Job, link: AgentLink) -> None:
        self._job, self._link = job, link
        self._slow: Inject | None = None
        self._slow_until = math.inf
        self._delay = 0.0

    def step_begins(self) -> None:
        """Inside the step, before the user's code runs. Attempts that come to nothing do not count."""
        if self._job.rehearsing or fabric.interrupted:
            return
        for order in self._due("hang", "exit", "oom"):
            {"hang": self._hang, "exit": self._exit, "oom": self._run_out_of_memory}[order.kind](order)
        if len(self._job._durations) >= KNOWN_STEPS:
            for order in self._due("slow"):
                self._slow_down(order)
        if self._slow is not None:
            self._dawdle(self._slow)

    def before_update(self) -> None:
        """The gradients are there, and the update is certain."""
        for order in self._due("nan"):
            self._not_a_number(order)
        for order in self._due("exception"):
            self._raise(order)

    def after_update(self) -> None:
        """An optimizer has changed the parameters."""
        for order in self._due("bitflip"):
            self._flip_a_bit(order)

    def _due(self, *kinds: str) -> Iterator[Inject]:
        orders = self._link.injections
        for order in [one for one in tuple(orders) if one.kind in kinds]:
            orders.remove(order)
            yield order

    def _tell(self, order: Inject, text: str, source: str = DONE) -> None:
        self._link.send(Injected(order=order.id, source=source, text=text))

    @property
    def _here(self) -> str:
        return f"in step {self._job._version + 1}"

    # --- at the start of a step ---

    def _hang(self, order: Inject) -> None:
        self._tell(
            order, f"rank {self._job.rank} sleeps {f'{order.for_s:g} s' if order.for_s else 'for good'} {self._here}"
        )
        end = time.monotonic() + (order.for_s or math.inf)
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 3600.0))
        self._tell(order, f"over after {order.for_s:g} s", OVER)

    def _exit(self, order: Inject) -> NoReturn:
        self._tell(order, f"rank {self._job.rank} ends by os._exit({EXIT_CODE}) {self._here}")
        os._exit(EXIT_CODE)

    def _run_out_of_memory(self, order: Inject) -> None:
        self._tell(order, f"rank {self._job.rank} takes memory until it is killed {self._here}")
        Path("/proc/self/oom_score_adj").write_text("1000")  # if anyone is killed, then this process
        taken: list[bytes] = []
        while len(taken) * BITE < order.max_size:
            taken.append(b"\1" * BITE)
        taken.clear()
        self._tell(order, f"{order.max_size >> 20} MiB were taken and nobody was killed; they are given back", OVER)

    def _slow_down(self, order: Inject) -> None:
        usual = statistics.median(self._job._durations)
        self._slow, self._delay = order, usual * (order.factor - 1.0)
        self._slow_until = time.monotonic() + (order.for_s or math.inf)
        self._tell(
            order,
            f"every step of rank {self._job.rank} takes {self._delay:.4f} s longer (factor {order.factor:g} of "
            f"{usual:.4f} s) from step {self._job._version + 1} on",
        )

    def _dawdle(self, order: Inject) -> None:
        if time.monotonic() < self._slow_until:
            time.sleep(self._delay)
            return
        self._slow = None
        self._tell(order, f"over after {order.for_s:g} s", OVER)

    # --- around the update ---

    def _raise(self, order: Inject) -> NoReturn:
        text = order.line or f"rerail inject: an exception on purpose (seed {order.seed})"
        self._tell(order, f"rank {self._job.rank} raises RuntimeError({text!r}) {self._here}")
        raise RuntimeError(text)

    @torch.no_grad()
    def _not_a_number(self, order: Inject) -> None:
        gradients = {name: one.grad for name, one in self._parameters().items() if one.grad is not None}
        found = {name: part for name, one in gradients.items() if _usable(part := local_part(one))}
        if not found:
            self._tell(order, "no parameter has a gradient at the update", REFUSED)
            return
        name, at = _pick(found, order.seed)
        found[name][at] = math.nan
        self._tell(order, f"the gradient of {name}{list(at)} is NaN {self._here}")

    @torch.no_grad()
    def _flip_a_bit(self, order: Inject) -> None:
        found = {name: part for name, one in self._parameters().items() if _usable(part := local_part(one))}
        if not found:
            self._tell(order, "there is no parameter to flip a bit in", REFUSED)
            return
        name, at = _pick(found, order.seed)
        part = found[name]
        size, before = part.element_size(), float(part[at])
        bit = dice(order.seed, "bit").randrange(8 * size)
        part[at].reshape(1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8  # in place: all of these are views
        self._tell(order, f"bit {bit} of {name}{list(at)} flipped {self._here}: {before:g} is {float(part[at]):g} now")

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        modules = self._job._tracked.modules
        return {f"{name}.{key}": one for name, module in modules.items() for key, one in module.named_parameters()}


def _usable(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_floating_point() and tensor.numel() > 0


def _pick(tensors: dict[str, torch.Tensor], seed: int) -> tuple[str, tuple[int, ...]]:
    """One element of one tensor."""
    name = dice(seed, "parameter").choice(list(tensors))
    chance = dice(seed, "element")
    return name, tuple(chance.randrange(size) for size in tensors[name].shape)
