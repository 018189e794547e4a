"""Devices that are being reset while the other ranks wait: the first half of that rung. Kept by `recover.execute`."""

from __future__ import annotations

from dataclasses import dataclass, field

from rerail.flow import Place, new_id
from rerail.runtime.fleet import Fleet, Rank
from rerail.runtime.orders import RESET, Chore, ChoreDone, Vacate

LIMIT_S = 200.0
"""Seconds a reset may take; the agent itself gives up somewhat earlier."""


@dataclass
class Reset:
    """One device."""

    rank: int
    place: Place
    since: float
    answer: ChoreDone | None = None


@dataclass
class Resets:
    """All of one repair."""

    fleet: Fleet
    waiting: dict[str, Reset] = field(default_factory=dict)
    ended: dict[Place, str] = field(default_factory=dict)
    """Devices that were to be reset, and why that has failed, or nothing: for whoever counts them, and empties it."""

    def begin(self, rank: Rank, now: float) -> None:
        """End what is left of the rank there, and have its device reset."""
        order = Chore(id=new_id("chore"), kind=RESET, device=rank.local_rank)
        agent = self.fleet.agent_of(rank.rank)
        agent.send(Vacate(generation=self.fleet.generation, ranks=(rank.rank,)))
        agent.send(order)
        self.waiting[order.id] = Reset(rank.rank, rank.place, now)

    def heard(self, answer: ChoreDone) -> bool:
        """False: it is about something else."""
        if answer.id not in self.waiting:
            return False
        self.waiting[answer.id].answer = answer
        return True

    def done(self) -> list[Rank]:
        """Ranks whose device is as good as new; each is named once."""
        ready = [key for key, one in self.waiting.items() if one.answer is not None and one.answer.ok]
        resets = [self.waiting.pop(key) for key in ready]
        self.ended |= dict.fromkeys((one.place for one in resets), "")
        return [self.fleet.ranks[one.rank] for one in resets]

    def failed(self, now: float) -> dict[Place, str]:
        """Why devices were not reset; nothing as long as one is still at it: nobody is to be put there meanwhile."""
        if any(one.answer is None and now < one.since + LIMIT_S for one in self.waiting.values()):
            return {}
        failed = {one.place: _why(one) for one in self.waiting.values()}
        self.waiting.clear()
        self.ended |= failed
        return failed

    def deadline(self) -> float | None:
        return min((one.since + LIMIT_S for one in self.waiting.values()), default=None)


def _why(one: Reset) -> str:
    if one.answer is None:
        return f"device {one.place} was not reset within {LIMIT_S:.0f} s"
    return f"device {one.place} could not be reset: {one.answer.last_line}"
