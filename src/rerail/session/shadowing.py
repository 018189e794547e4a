"""Decides when this rank casts its parameters into its shadow, does so, and puts them back where the rank was lost.

Only where repairs need not be exact (`fidelity = "fast"`), and only on ranks with parameters that nobody else holds. A shadow is
newer than the last snapshot and a sixth of its size, so it may be taken more often; what it lacks, the optimizer's moments above all,
comes from the snapshot. Another node has a copy (`session.buddies`). Ranks need not agree on it: each plans by its own costs. Kept by
`session.snapshotting`.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from rerail.checkpoint.arena import Arena
from rerail.checkpoint.casting import Caster
from rerail.checkpoint.dtypes import view_of
from rerail.checkpoint.shadow import HALVES, Shadow
from rerail.config import Settings
from rerail.errors import StateError
from rerail.runtime.plans import Stale
from rerail.session.buddies import Buddies
from rerail.session.tracked import Named, Tracked, local_part, parameters_of

if TYPE_CHECKING:
    from rerail.session.job import Job

UNTIL_MEASURED, MEASURED = 2, 3
"""Steps between two shadows until so many have shown what they cost."""
LONGEST = 1000


class Shadower:
    """Takes shadows of one job on one rank."""

    def __init__(self, job: Job, arena: Arena | None, settings: Settings) -> None:
        self._job = job
        self._caster = Caster(Shadow(arena)) if arena is not None and settings.shadows else None
        self._trained = Trained(job._tracked)
        self._alone: bool | None = None
        """Whether this rank holds parameters that no other does; None: nobody has looked yet."""
        self._fixed, self.share, self._from = settings.shadow_every, settings.shadow_cost, settings.rehab_from
        self.buddies = Buddies(job)
        self._fetched: dict[int, Named] = {}
        """What another node had of this rank's parameters, by version."""
        self._last = -1
        """The newest version that was copied, here or in full."""
        self._took_s = -1.0
        """What the newest shadow has cost so far; below zero: that is counted."""
        self._costs: deque[float] = deque(maxlen=8)
        self._told = False
        self._sound: set[int] = set()
        """Versions that were looked at and hold numbers only."""

    # --- taking ---

    def room(self) -> int:
        """Bytes wanted behind the slots of the arena."""
        tensors = self._trained.tensors() if self._caster is not None and self.is_alone() else {}
        return self._caster.mold(tensors).room if self._caster is not None and tensors else 0

    def copied(self, version: int) -> None:
        """All of this version is in a snapshot: a shadow of it would be no newer."""
        self._last = version

    def take_if_due(self, version: int) -> None:
        """Copy this version if it is its turn."""
        if self._caster is None or version < self._from or 0 <= version - self._last < self.every:
            return
        if self._caster.busy or self._caster.shadow.empty or not self.is_alone():
            return
        kept = self._caster.shadow.versions()
        if len(kept) == HALVES and self.buddies.sending == kept[0]:
            return  # its half would be filled next, and is still on its way to another node
        started = time.monotonic()
        self._sound.clear()
        try:
            tensors = self._trained.tensors()
            self._count()
            if tensors and not self._caster.take(version, tensors, self.buddies.offer):
                self._say("there is no memory for a shadow of its parameters")
            elif tensors:
                self._took_s = time.monotonic() - started
        except StateError as error:
            self.end()
            self._say(str(error))
        self._last = version

    @property
    def every(self) -> int:
        """Steps between two: as often as the share of the time allows that they may take."""
        durations = self._job._durations
        if self._fixed:
            return self._fixed
        if len(self._costs) < MEASURED or not durations:
            return UNTIL_MEASURED
        return steps_between(statistics.median(self._costs), statistics.median(durations), self.share)

    def before_update(self) -> float:
        """What is being copied is about to be changed. Seconds that were waited."""
        if self._caster is None or self._took_s < 0:
            return 0.0
        started = time.monotonic()
        self._caster.before_update()
        waited = time.monotonic() - started
        self._took_s += waited
        return waited

    def settle(self) -> None:
        """Nothing is being copied any more."""
        try:
            if self._caster is not None:
                self._caster.settle()
        except StateError as error:
            self.end()
            self._say(str(error))

    def end(self) -> None:
        """No more of them."""
        self._caster = None

    def _count(self) -> None:
        """A shadow is known to have been cheap or not when it is whole: when the next one begins."""
        if self._caster is not None and self._took_s >= 0:
            self._costs.append(self._took_s + self._caster.cpu_s)
            self._took_s = -1.0

    def is_alone(self) -> bool:
        """Whether this rank holds parameters that no other does."""
        job = self._job
        if self._alone is None:
            covered, world = job._tracked.ddp_members(), job.world_size
            every = (one for module in job._tracked.modules.values() for one in module.parameters())
            self._alone = world > 1 and any(
                job._tracked.holders(one, job.rank, world, covered) == {job.rank} for one in every
            )
        return self._alone

    def _say(self, why: str) -> None:
        if not self._told:
            self._told = True
            text = f"{why}; were it lost, its parameters would come from its last snapshot"
            print(f"rerail: rank {self._job.rank}: {text}", file=sys.stderr, flush=True)

    # --- what is kept ---

    def usable(self) -> tuple[int, ...]:
        """Versions that fit the parameters of this process and hold numbers only, oldest first. Where all is gone, other nodes are asked."""
        if self._caster is None or not self.is_alone():
            return ()
        if self._caster.shadow.empty:
            found = self.buddies.fetch(self._caster.mold(self._trained.tensors()))
            self._fetched = {} if found is None else dict([found])
            return tuple(one for one in self._fetched if self._kept(one) is not None)
        return tuple(one for one in self._caster.shadow.versions() if self._kept(one) is not None)

    def drop_behind(self, version: int) -> None:
        """Nothing later than this is to be gone on from."""
        self.settle()
        if self._caster is not None:
            self._caster.shadow.drop_behind(version)

    def drop_unsound(self) -> None:
        """Nor what holds numbers that are none."""
        for version in self._caster.shadow.versions() if self._caster is not None else ():
            if self._caster is not None and self._kept(version) is None:
                self._caster.shadow.drop(version)

    def _kept(self, version: int) -> Named | None:
        """The parameters of a version by name; None where they are not those of this process, or not finite."""
        if self._caster is None:
            return None
        found = self._fetched.get(version) or self._in_arena(self._caster.shadow, version)
        shapes = {name: tensor.shape for name, tensor in self._trained.tensors().items()}
        if {name: view.shape for name, view in found.items()} != shapes:
            return None
        if version not in self._sound and not all(map(_finite, found.values())):
            return None
        self._sound.add(version)
        return found

    def _in_arena(self, shadow: Shadow, version: int) -> Named:
        try:
            entries, image = shadow.entries(version), shadow.image(version)
        except StateError:
            return {}
        return {entry.name: view_of(image, entry) for entry in entries}

    # --- putting back ---

    @torch.no_grad()
    def load(self, stale: Stale, version: int) -> None:
        """Parameters that were just loaded from what was kept last: as the shadow has them, or on from there on a straight line.

        Where both are the same but for the digits that a shadow does not have, those of the former are kept.
        """
        kept = self._kept(stale.version)
        if kept is None:
            raise StateError(f"the shadow of version {stale.version} is gone, or holds what is no number")
        before = self._kept(stale.before) if stale.before >= 0 else None
        ahead = (version - stale.version) / (stale.version - stale.before) if before is not None else 0.0
        for name, tensor in self._trained.tensors().items():
            seen = kept[name].to(tensor.device)
            wide = torch.promote_types(tensor.dtype, torch.float32)
            now = torch.where(tensor.to(seen.dtype) == seen, tensor.to(wide), seen.to(wide))
            if before is not None:
                now += (seen.to(wide) - before[name].to(tensor.device, wide)) * ahead
            tensor.copy_(now)
        self._fetched = {}


class Trained:
    """Parameters that an optimizer changes, local parts only. By optimizer and number: under FSDP2 modules may hold others."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._known: list[tuple[torch.Tensor, int]] = []
        self._found: Named = {}

    def tensors(self) -> Named:
        """The very same as before, if every parameter is where it was. What is frozen is in a snapshot, exactly."""
        now = [
            (f"{name}:{index}", one)
            for name, optimizer in self._tracked.optimizers.items()
            for index, one in enumerate(parameters_of(optimizer))
            if one.requires_grad and one.is_floating_point()
        ]
        known = [(one, _address(one)) for _, one in now]
        same = len(known) == len(self._known) and all(
            one is other and at == there for (one, at), (other, there) in zip(known, self._known, strict=True)
        )
        if not same:
            self._known = known
            self._found = {name: part for name, one in now if (part := local_part(one)).numel()}
        return self._found


def _finite(view: torch.Tensor) -> bool:
    """Whether all of it is; by its sum, which takes one pass and no room."""
    return bool(torch.isfinite((view if view.element_size() > 1 else view.float()).sum(dtype=torch.float32)))


def _address(tensor: torch.Tensor) -> int:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr()


def steps_between(cost_s: float, step_s: float, share: float) -> int:
    """Steps between two shadows that take no more than a share of the time."""
    return min(LONGEST, max(1, math.ceil(cost_s / max(share * step_s, 1e-9))))
