"""How the ranks of a save agree on a place when one place is broken: by what lies in the others.

Ranks try the places in the same order, and whoever cannot use one goes on to the next. So a rank that has begun at a later
place has given up all places before it, and the others, who may be able to use them, follow it there. A place that hangs
need not be asked for this, nor written to. Only the coordinator commits: a step is committed where all ranks have met.
Called by `checkpoint.saving` and `checkpoint.copying`. Needs no torch.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rerail.checkpoint import names
from rerail.checkpoint.places import Places
from rerail.checkpoint.tiers import Tier
from rerail.errors import CheckpointError

if TYPE_CHECKING:
    from rerail.checkpoint.saving import Order
    from rerail.checkpoint.shards import Part

LOOK_S = (0.25, 2.0)
"""Seconds between two looks at the later places: the first, and the longest."""
LONGEST = 1 << 16
"""Bytes of a URL."""
_DECIDED = {names.COMMIT, names.COPYING, names.ELSEWHERE}


class GoneOn(CheckpointError):
    """Another rank saves to a later place."""


class CommittedElsewhere(CheckpointError):
    """The step is whole on another tier than the one that was to be written to."""

    def __init__(self, url: str) -> None:
        super().__init__(f"the step is committed in {url}")
        self.url = url


class Others:
    """Where the other ranks of one save are, seen by a rank that is at one place."""

    def __init__(self, order: Order, url: str, places: Places) -> None:
        at = order.tiers.index(url)
        self._order, self._places = order, places
        self._before, self._behind = order.tiers[:at], order.tiers[at + 1 :]
        self._lock = threading.Lock()
        self._pause, self._next = LOOK_S[0], 0.0

    def heed(self) -> None:
        """GoneOn if another rank saves to a later place, CommittedElsewhere if the step is whole at an earlier one.

        Looks now and then only, however often it is called.
        """
        if len(self._order.group) == 1 or not self._its_time():
            return
        for url in self._behind:
            rank = self._rank_at(url)
            if rank is not None:
                raise GoneOn(f"rank {rank} has gone on to {url}")
        for url in self._before:
            if names.COMMIT in self._names(url):
                raise CommittedElsewhere(url)

    def _its_time(self) -> bool:
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                return False
            self._next, self._pause = now + self._pause, min(2 * self._pause, LOOK_S[1])
            return True

    def _rank_at(self, url: str) -> int | None:
        """A rank that saves there."""
        found = None
        for _ in range(2):  # a copy begins by saying so; a listing of that very moment may miss it
            there = self._names(url)
            if names.COPYING in there or names.ELSEWHERE in there:
                return None
            ranks = (names.rank_of(name) for name in there)
            found = next((rank for rank in ranks if rank is not None and rank != self._order.rank), None)
            if found is None:
                return None
        return found

    def _names(self, url: str) -> list[str]:
        if not self._places.out(url):
            with contextlib.suppress(OSError, CheckpointError):
                return self._places.at(url).names(self._order.id.folder)
        return []


def insist_on_open(tier: Tier, order: Order, there: Iterable[str]) -> None:
    """CommittedElsewhere, if the folder of a save has these names in it because the step lies on another tier already."""
    for name in {names.COPYING, names.ELSEWHERE} & set(there):
        url = tier.get(f"{order.id.folder}/{name}", LONGEST).decode(errors="replace")
        if url in order.tiers and url != tier.url:
            raise CommittedElsewhere(url)
        raise CheckpointError(f"{tier.url}/{order.id.folder} is a copy of {url}")


def has_left(part: Part, there: Iterable[str]) -> bool:
    """Whether the coordinator, of which nothing is `there`, will not come: it has seen another place, or a newer step."""
    tier, order, first = part.tier, part.order, min(part.order.group)
    if any(names.rank_of(name) == first for name in there):
        return False
    newer = (step for name in tier.names() if (step := names.step_of(name)) is not None and step > order.id)
    return part.later or any(names.rank_of(name) == first for step in newer for name in tier.names(step.folder))


def let_go(tier: Tier, order: Order, committed: str) -> None:
    """Tell ranks that have gone to this tier that the step was committed to another."""
    there = set(tier.names(order.id.folder))
    if there and not there & _DECIDED:
        tier.put(f"{order.id.folder}/{names.ELSEWHERE}", committed.encode())
