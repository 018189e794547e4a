"""Keeps a node that has lost touch from training on: turns answers of the controller into the time its ranks may still run.

    Beat n --> controller        the controller gives the node up `agent_lost_s` after it has heard its last word
    Heard n <-- controller       the node's lease runs from the SENDING of beat n, and is shorter than that

So the ranks of a node are ended before anybody else can get their places, whatever is slow in between, and no clock of one
machine is ever compared with that of another. The end of the lease also stands in the step clock of every rank, which looks
at it before each update: an agent that cannot act, because it is suspended, does not matter.

A refused connection renews the lease, too: nobody listens there, so no controller can give anything away, and a new one
waits for `agent_lost_s` before it gives up a node it has not heard. Called by `runtime.agent`; a job of one node has no lease.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from typing import Protocol

from rerail.config import JobSpec, Settings
from rerail.runtime.clock import is_over, now_ns
from rerail.runtime.slots import Slot
from rerail.runtime.standbys import StandbyPool

SHARE = 0.75
"""Of `agent_lost_s`: the rest is for ending processes, and for clocks that do not run equally fast."""
BEATS = 8
"""Beats within one lease, so that a few of them may be lost or late."""
LONGEST_BEAT_S = 1.0
LOOK_S = 0.1
FENCED = "agent.fenced"
"""Source of the signal that tells of it."""
OFF = "RERAIL_TEST_NO_LEASE"
"""In the environment of an agent: set to 1 by the tests that show what a lease is good for."""
_KEPT = 64


class Page(Protocol):
    """Where a rank reads how long it may run: its step clock."""

    def lease(self, until_ns: int) -> None: ...


class Lease:
    """How long the ranks of this node may run on without another word from the controller."""

    def __init__(self, length_s: float, pages: Callable[[], Iterable[Page]], fence: Callable[[float], None]) -> None:
        self.length_s = length_s
        """0: there is no lease, and nothing here has any effect."""
        self._pages, self._fence = pages, fence
        self._number = 0
        self._sent: dict[int, int] = {}
        self._until = 0
        """CLOCK_BOOTTIME in nanoseconds; 0 before the first contact, when there are no ranks either."""

    @classmethod
    def of(
        cls, spec: JobSpec, settings: Settings, pages: Callable[[], Iterable[Page]], fence: Callable[[float], None]
    ) -> Lease:
        """The lease of a node of this job; only a job of several nodes has one."""
        wanted = spec.several_nodes and os.environ.get(OFF) != "1"
        return cls(SHARE * settings.agent_lost_s if wanted else 0.0, pages, fence)

    @property
    def beat_s(self) -> float:
        """Seconds between two beats."""
        return min(LONGEST_BEAT_S, self.length_s / BEATS) if self.length_s else LONGEST_BEAT_S

    def next_beat(self) -> int:
        """The number of a message that is about to be sent."""
        self._number += 1
        self._sent[self._number] = now_ns()
        if len(self._sent) > _KEPT:
            del self._sent[next(iter(self._sent))]
        return self._number

    def heard(self, number: int) -> None:
        """The controller has answered that message."""
        if (sent := self._sent.pop(number, None)) is not None:
            self.renew(sent)

    def renew(self, from_ns: int) -> None:
        """At this time the controller had not given this node up."""
        until = from_ns + int(self.length_s * 1e9)
        if not self.length_s or until <= self._until:
            return
        if self.over:
            self._end()  # what was not ended in time must not profit
        self._until = until
        self.show()

    def show(self) -> None:
        """Tell the ranks."""
        for page in self._pages():
            page.lease(self._until)

    @property
    def over(self) -> bool:
        return is_over(self._until)

    async def run(self) -> None:
        """Fence the node whenever its lease is over, and again for whatever is started then."""
        while self.length_s:
            if self.over:
                self._end()
            else:
                self.show()
            await asyncio.sleep(LOOK_S)

    def _end(self) -> None:
        self._fence((now_ns() - self._until) / 1e9 + self.length_s)


def fence(slots: Iterable[Slot], pool: StandbyPool) -> list[Slot]:
    """End every process that is a rank here, or may become one. Those places in which a rank was ended."""
    found = []
    for slot in slots:
        if slot.child is not None and slot.child.alive:
            if not slot.child.disowned:
                found.append(slot)
            slot.child.disown()
            slot.child.kill()
    for child in pool.members:
        child.kill()
    return found


def get_ready(slots: list[Slot], pool: StandbyPool) -> None:
    """A node is back without ranks: let it warm up for those it may be given."""
    if not pool.members and not any(slot.running for slot in slots):
        pool.prepare(len(slots))
