"""Learns, from checkpoint to checkpoint, how this rank's parameters move, and what a guess at a lost shard's would be worth.

    a checkpoint is taken -> a sample of the parameters -> in idle moments: the back-test, a net that learns, its back-test
    the step behind it    -> all ranks share what their nets have learnt since the last one: each has done a part of the work
    a rank is lost        -> the survivors tell what each predictor would cost; one of them teaches the net to the newcomer

A lost rank's own past lies on the disk, checkpoint by checkpoint; its process is gone, and what it had learnt with it. But a net that is
shown movements scaled to what is usual holds for any shard. Only where repairs need not be exact. Kept by `session.snapshotting`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rerail.config import Settings
from rerail.errors import StateError
from rerail.rehab.choosing import choose, tried
from rerail.rehab.fitter import fit
from rerail.rehab.predictors import Predictor, Window
from rerail.rehab.teaching import PLAIN, lesson_of
from rerail.rehab.vitp import STEPS, Vitp
from rerail.runtime.wire import LEARNT
from rerail.session.coordinator import Coordinator
from rerail.session.drifting import Drifting
from rerail.session.fabric import Mode, fabric, hearing
from rerail.session.starting import device_of

if TYPE_CHECKING:
    from rerail.session.job import Job
    from rerail.session.shadowing import Shadower

PART = 512
"""Elements that the net is trained on in one bit: half a millisecond."""
LEAST_STEPS = 20
"""Of its training, on each rank."""

Costs = dict[str, tuple[float, int]]
"""By predictor: what it would cost, and how many checkpoints it needs."""


class Foreteller:
    """Of one rank."""

    def __init__(self, job: Job, settings: Settings, shadow: Shadower) -> None:
        self._job, self._shadow = job, shadow
        self._on = settings.fast and settings.predictor_cost > 0
        self._drifting = Drifting(job._tracked, on=self._on)
        self.coordinator = Coordinator(settings.predictor_cost)
        self._newest: tuple[Sequence[Window], int] = (), -1
        """What is kept of the newest checkpoints, and the version of the last."""
        self._nets: list[Vitp] = []
        self._shared = 0
        """Bits of work that were done when the ranks last shared what they had learnt."""
        self._plain: tuple[int, Costs] = -1, {}
        """Of predictors that need not learn, and the version of the newest checkpoint then."""
        self._learnt: Costs = {}

    # --- learning ---

    def saved(self, version: int) -> None:
        """A checkpoint of this version is being taken."""
        if not self._on or not self._shadow.is_alone():
            return
        self._drifting.note(version)
        windows = self._drifting.windows()
        if windows:
            self._newest = windows, version
            if not self.coordinator.busy:
                self.coordinator.give(self._keep_learning())

    def _keep_learning(self) -> Iterator[None]:
        """What is begun is ended, even if checkpoints come faster than that."""
        learnt = -1
        while self._newest[1] != learnt:
            windows, learnt = self._newest
            yield from self._learn(windows, learnt)

    def _learn(self, windows: Sequence[Window], version: int) -> Iterator[None]:
        costs = yield from tried(windows, PLAIN)
        self._plain = version, _told(costs, PLAIN)
        net = self._net()
        if windows[0].rows.shape[0] < net.needs:
            return
        steps = max(LEAST_STEPS, math.ceil(STEPS / self._job.world_size))
        yield from net.learning(windows, steps=steps, part=PART)
        onward = net.towards("drift")
        yield from onward.tuning(windows)
        nets = [net, onward]
        costs = yield from tried(windows, nets)
        self._nets = nets
        self._learnt = _told(costs, nets)
        self._tell(net, version)

    def _net(self) -> Vitp:
        if not self._nets:
            self._nets = [Vitp()]
        return self._nets[0]

    def _tell(self, net: Vitp, version: int) -> None:
        job = self._job
        if job._rejoin is None or job.rank != job.seats[0]:
            return
        figures = {name: cost for name, (cost, _) in (self._plain[1] | self._learnt).items()}
        listed = ", ".join(f"{name} {cost:.2f}" for name, cost in sorted(figures.items(), key=lambda one: one[1]))
        text = f"what guesses at lost parameters would cost, against those of the newest checkpoint: {listed}"
        curves = {"tau": fit(range(len(net.losses)), net.losses), "alpha": job._soundness.fitter.curve}
        fitted: dict[str, float] = {}
        for name, curve in curves.items():
            if curve is not None:
                fitted |= {name: curve.slope, f"{name}_error": curve.error}
        job._rejoin.note(LEARNT, version, text, figures | fitted | {"predictor_loss": net.loss})

    # --- sharing the work ---

    def agree(self) -> None:
        """Inside the step behind a checkpoint, on all ranks: the mean of what the nets have learnt, by how much each has done."""
        job = self._job
        due = job._small.saves[1] if job._small is not None else -1
        if not self._on or not job._checkpoints.on or job.world_size == 1 or job.rehearsing or due != job._version:
            return
        with self.coordinator.paused():
            net = self._net()
            done = self.coordinator.bits - self._shared if net.trained else 0
            mine = torch.cat([net.vector() * done, torch.tensor([float(done)])]).to(device_of(job))
            with hearing.paused():
                dist.all_reduce(mine)
            if fabric.mode is Mode.LIVE:
                found = mine.cpu()
                if found[-1] > 0:
                    net.adopt(found[:-1] / found[-1])
                self._shared = self.coordinator.bits

    # --- when a rank is lost ---

    def guesses(self) -> Costs:
        """What each predictor would cost if a shard like this one were lost; none where nobody knows."""
        if not self._on or not self._shadow.is_alone():
            return {}
        windows, version = self._newest
        if windows and self._plain[0] != version:
            self._plain = version, _told(choose(windows, PLAIN).costs, PLAIN)
        return self._plain[1] | self._learnt

    def lesson(self, name: str) -> bytes:
        """What the net of this name has learnt."""
        with self.coordinator.paused():
            for net in self._nets:
                if net.name == name and net.trained:
                    return lesson_of(net)
        raise StateError(f"rank {self._job.rank} was to teach {name!r}, and has not learnt it")


def _told(costs: Mapping[str, float], predictors: Sequence[Predictor]) -> Costs:
    return {one.name: (costs[one.name], one.needs) for one in predictors if math.isfinite(costs[one.name])}
