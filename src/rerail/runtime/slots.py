"""One local rank's place on the node: its step clock, its arena and whichever process fills it at the moment.

The memory belongs to the slot (and behind it to the launcher, see `runtime.memory`), so it outlives the process and is
handed to the successor. Called by `runtime.agent` and `runtime.watch`.
"""

from __future__ import annotations

import time
from pathlib import Path

from rerail.runtime.children import Child
from rerail.runtime.clock import StepClock
from rerail.runtime.memory import SlotMemory, make, wipe
from rerail.runtime.wire import Assign, Finished, Formed, FromRank, Joined, Message, Parked, Raised, RankStatus, Resumed


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
        self.said: list[Message] = []
        """What its process has said since the last order; said again when the connection was lost meanwhile."""
        self.unsettled: Message | None = None
        """News of its end that no order has answered yet; said again to a new controller."""

    def fill(self, child: Child, assignment: Assign, error_file: Path) -> None:
        """`child` is this rank from now on."""
        if self.clock.owner not in (-1, assignment.rank):
            # Another rank's state must not pass for this one's.
            self.clock.close()
            wipe(self.memory)
            self.clock = StepClock(self.memory.clock)
        self.clock.owner = assignment.rank
        self.rank, self.generation = assignment.rank, assignment.generation
        self.child, self.error_file = child, error_file
        self._filled = time.monotonic()
        self.joined = self.replaceable = self.formed = self.resumed = False
        self.state = "starting"
        self.newcomer = assignment.newcomer
        self.parked = None
        self.unsettled = None
        self.said = []
        self.clock.reset(assignment.generation)

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

    def forming(self) -> None:
        """All ranks are parked and this one has got its plan."""
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
