"""One local rank's place on the node: its step clock, its arena and whichever process fills it at the moment.

The memory belongs to the slot (and behind it to the launcher, see `runtime.memory`), so it outlives the process and is
handed to the successor. Called by `runtime.agent` and `runtime.watch`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from rerail.runtime.children import Child
from rerail.runtime.clock import StepClock
from rerail.runtime.memory import SlotMemory, make, wipe
from rerail.runtime.orders import FormAll, InterruptAll, Kept, RankStatus, Vacate
from rerail.runtime.wire import Assign, Finished, Form, Formed, FromRank, Joined, Message, Parked, Raised, Resumed


class Slot:
    """What the agent knows of one of its ranks."""

    def __init__(self, local_rank: int, memory: SlotMemory | None = None) -> None:
        self.local_rank = local_rank
        self.memory = memory or make(1)[0]
        self.clock = StepClock(self.memory.clock)
        self.rank = -1
        self.generation = 0
        self.child: Child | None = None
        self._filled = time.monotonic()
        self.error_file = Path()
        self.joined = False
        self.replaceable = False
        self.parked: Parked | None = None
        self.formed = False
        self.resumed = False
        self.state = "starting"
        """While its process lives: one of `runtime.fleet.RankState`."""
        self.newcomer = False
        self.beside = False
        """Not the rank itself, but its successor, made ready beside it."""
        self.said: list[Message] = []
        """What its process has said since the last order; said again when the connection was lost meanwhile."""
        self.unsettled: Message | None = None
        """News of its end that no order has answered yet; said again to a new controller."""

    def fill(self, child: Child, assignment: Assign, error_file: Path, kept: Iterable[Kept] = ()) -> None:
        """`child` is this rank from now on."""
        if self.clock.owner not in (-1, assignment.rank):
            # Another rank's state must not pass for this one's.
            self.clock.close()
            wipe(self.memory)
            self.clock = StepClock(self.memory.clock)
        self.clock.owner = assignment.rank
        self.inherit(kept)
        self.rank, self.generation = assignment.rank, assignment.generation
        self.child, self.error_file = child, error_file
        self._filled = time.monotonic()
        self.joined = self.replaceable = self.formed = self.resumed = False
        self.state = "starting"
        self.newcomer, self.beside = assignment.newcomer, False
        self.parked = None
        self.unsettled = None
        self.said = []
        self.clock.reset(assignment.generation)

    def inherit(self, kept: Iterable[Kept]) -> None:
        """Put what this rank left elsewhere where its process will look for it."""
        for one in kept:
            if one.heard is not None:
                self.clock.forget_heard()
                for record in one.heard:
                    self.clock.hear(record)
            if one.version >= 0 and one.version > self.clock.newest_small():
                self.clock.write_small(one.version, one.body, one.rest or b"")

    @property
    def owner(self) -> int:
        """The rank whose state lies here, or -1."""
        return self.clock.owner

    def end_child(self) -> None:
        """Whatever is left of its process goes, and nothing that it says counts any more."""
        if self.child is not None:
            self.child.disown()
            self.child.kill()

    def empty(self) -> None:
        """No process is this rank here any more. The memory stays as it is, in case the rank comes back."""
        self.child, self.rank, self.parked, self.unsettled, self.said = None, -1, None, None, []
        self.joined = self.replaceable = self.formed = self.resumed = False

    @property
    def running(self) -> bool:
        return self.child is not None and self.child.alive

    @property
    def age_s(self) -> float:
        """Seconds since its process was made this rank."""
        return time.monotonic() - self._filled

    @property
    def version(self) -> int:
        return self.clock.read().step

    def interrupted(self, generation: int) -> None:
        """A newer generation is being formed."""
        self.generation = generation
        self.formed = False
        self.parked = None
        self.unsettled = None
        self.said = []
        self.state = "interrupted"

    def forming(self, kept: Iterable[Kept] = ()) -> None:
        """All ranks are parked and this one has got its plan."""
        if self.beside:
            self.inherit(kept)
            self.beside = False
        self.state = "forming"

    def heard(self, message: FromRank) -> None:
        """Note what the rank says of itself."""
        match message:
            case Joined():
                self.joined, self.replaceable, self.state = True, message.replaceable, "building"
            case Parked():
                self.parked, self.state = message, "parked"
            case Formed() if message.generation >= self.generation:
                self.parked, self.state, self.formed = None, "running", True
            case Resumed():
                self.resumed = True
            case Raised():
                self.state = "raised"
            case Finished():
                self.state = "finished"

    @property
    def settled(self) -> bool:
        """Whether its newest generation stands and, for a newcomer, has done its first step."""
        return self.formed and (self.resumed or not self.newcomer)

    def status(self) -> RankStatus:
        return RankStatus(
            rank=self.rank,
            local_rank=self.local_rank,
            pid=self.child.pid if self.child is not None else 0,
            generation=self.generation,
            state=self._state(),
            joined=self.joined,
            replaceable=self.replaceable,
            version=self.version,
            parked=self.parked if self.running else None,
        )

    def _state(self) -> str:
        if not self.running:
            return "exited" if self.child is not None and self.child.exit_status == 0 else "lost"
        return self.state


def slot_for(slots: list[Slot], rank: int, *, beside: bool = False) -> Slot:
    """Where this rank is or was, so that it finds what it left; else one that is free, of a rank that is not here, or new.

    `beside`: for a second process of the rank, apart from the first.
    """
    by_need: tuple[Callable[[Slot], bool], ...] = (
        lambda slot: slot.rank == rank and slot.child is not None and slot.beside is beside,
        lambda slot: slot.child is None and slot.owner == rank and not beside,
        lambda slot: slot.child is None and slot.owner < 0,
        lambda slot: slot.child is None,
    )
    for fits in by_need:
        found = next((slot for slot in slots if fits(slot)), None)
        if found is not None:
            return found
    slots.append(Slot(len(slots)))
    return slots[-1]


def vacate(slots: Iterable[Slot], order: Vacate) -> None:
    """Some ranks have moved away, or have been given to others while this node was out of reach."""
    for slot in slots:
        leaves = slot.rank in order.ranks if order.keep is None else slot.rank not in order.keep
        meant = slot.beside is order.beside and slot.generation <= order.generation
        if slot.child is not None and leaves and meant:
            slot.end_child()
            slot.empty()


def interrupt(slots: Iterable[Slot], order: InterruptAll) -> None:
    """Pass it on to those that it is for and that have not heard of it."""
    for slot in slots:
        meant = slot.rank in order.ranks and not slot.beside
        if slot.child is not None and meant and order.interrupt.generation > slot.generation:
            slot.interrupted(order.interrupt.generation)
            slot.child.send(order.interrupt)


def form(slots: Iterable[Slot], order: FormAll) -> None:
    """Hand the plan to every rank; newcomers get what their predecessors have left meanwhile."""
    for slot in slots:
        if slot.running and slot.child is not None:
            slot.forming([one for one in order.kept if one.rank == slot.rank])
            slot.child.send(Form(plan=order.plan))
