"""What the controller knows of agents and ranks: turns agents' messages into states that decisions are made from.

Called by `runtime.intake` (updates it), `recover.execute` (drives it) and `runtime.server` (shows it). The state of a
rank moves only along TRANSITIONS; a message that would break them is late or stale and is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from rerail.runtime.wire import Formed, Parked, RankStatus, Resumed, ToAgent


class RankState(StrEnum):
    """Where a rank stands, as far as the controller knows."""

    STARTING = "starting"
    """Assigned; its script runs and has not called join(). A script that never does stays here."""
    BUILDING = "building"
    """Joined; builds its model, and if it is a newcomer rehearses it alone."""
    PARKED = "parked"
    FORMING = "forming"
    """Has got its plan: connects and loads."""
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    """Told to leave its step, not parked yet."""
    RAISED = "raised"
    """Its step raised; it waits for a verdict."""
    FINISHED = "finished"
    """Past its last step, still running."""
    EXITED = "exited"
    """Ended with exit code 0."""
    LOST = "lost"
    """Ended otherwise, or hung and to be ended."""


_S = RankState
_ENDS = frozenset({_S.EXITED, _S.LOST, _S.STARTING})
TRANSITIONS: dict[RankState, frozenset[RankState]] = {
    _S.STARTING: _ENDS | {_S.BUILDING, _S.PARKED},
    _S.BUILDING: _ENDS | {_S.PARKED, _S.RAISED, _S.INTERRUPTED},
    _S.PARKED: _ENDS | {_S.PARKED, _S.FORMING, _S.INTERRUPTED},
    _S.FORMING: _ENDS | {_S.RUNNING, _S.INTERRUPTED, _S.PARKED, _S.RAISED},
    _S.RUNNING: _ENDS | {_S.RUNNING, _S.INTERRUPTED, _S.PARKED, _S.RAISED, _S.FINISHED},
    _S.INTERRUPTED: _ENDS | {_S.INTERRUPTED, _S.PARKED, _S.RAISED, _S.FINISHED},
    _S.RAISED: _ENDS | {_S.INTERRUPTED, _S.PARKED},
    _S.FINISHED: _ENDS | {_S.INTERRUPTED, _S.PARKED},
    _S.EXITED: frozenset({_S.STARTING, _S.LOST}),
    _S.LOST: frozenset({_S.LOST, _S.STARTING}),
}


class Link(Protocol):
    """The controller's end of one agent's connection."""

    def send(self, message: ToAgent) -> None: ...

    def close(self) -> None: ...


@dataclass
class Rank:
    """One rank of the job; its process may change, its place does not."""

    rank: int
    node: str
    local_rank: int
    state: RankState = RankState.STARTING
    assigned: int = 0
    """Generation in which its current process became this rank; what older processes say is ignored."""
    joined: bool = False
    replaceable: bool = False
    newcomer: bool = False
    trained: bool = False
    """Its current process has completed a step."""
    version: int = -1
    usual_step_s: float = 0.0
    parked: Parked | None = None
    formed: Formed | None = None
    resumed: Resumed | None = None

    def move(self, state: RankState) -> bool:
        """Take the new state if that is possible from here."""
        if state not in TRANSITIONS[self.state]:
            return False
        self.state = state
        return True

    def begin(self, generation: int, *, newcomer: bool) -> None:
        """A new process takes this place."""
        self.state, self.assigned, self.newcomer = RankState.STARTING, generation, newcomer
        self.joined = self.replaceable = self.trained = False
        self.parked = self.formed = self.resumed = None

    def can_be_interrupted(self) -> bool:
        """It has something to keep and reads its messages: it trains, or was promoted and builds for this repair."""
        return self.trained or self.newcomer


@dataclass(frozen=True)
class Waits:
    """All ranks of a node wait in a collective."""

    generation: int
    collectives: dict[int, int]
    """Begun so far in this generation, by rank."""


@dataclass
class Agent:
    """One node. Its connection may come and go; a new incarnation means that its processes are new, too."""

    node: str
    address: str
    slots: int
    node_rank: int
    incarnation: str
    heard: float
    link: Link | None = None
    gone_since: float | None = None
    """Monotonic seconds when the connection broke; None while it stands."""
    arrival: int = 0
    depot_port: int = 0
    ready: int = 0
    warming: int = 0
    pids: dict[int, int] = field(default_factory=dict)
    """The process of each rank here, for people."""
    waits: Waits | None = None
    """Set by the node's own word, until one of its ranks moves again."""

    @property
    def connected(self) -> bool:
        return self.link is not None

    def send(self, message: ToAgent) -> None:
        """Queue a message; to an agent that is away nothing is sent, its return is an event of its own."""
        if self.link is not None:
            self.link.send(message)


@dataclass
class Fleet:
    """All nodes and ranks of the job."""

    agents: dict[str, Agent] = field(default_factory=dict)
    ranks: dict[int, Rank] = field(default_factory=dict)
    generation: int = 0
    """The newest generation that was asked for."""
    formed_generation: int = -1
    """The newest generation whose plan was sent."""
    high_version: int = -1
    """The highest version any rank has completed, ever."""

    dismissed: bool = False
    """All ranks were told that the loop is over; what they do now is their own."""

    # --- who is there ---

    def connected(self) -> list[Agent]:
        return [agent for agent in self.agents.values() if agent.connected]

    def placed(self) -> dict[str, int]:
        """Ranks per node, in the order of ranks."""
        counts: dict[str, int] = {}
        for rank in self.ranks.values():
            counts[rank.node] = counts.get(rank.node, 0) + 1
        return counts

    def on_node(self, node: str) -> list[Rank]:
        return [rank for rank in self.ranks.values() if rank.node == node]

    def agent_of(self, rank: int) -> Agent:
        return self.agents[self.ranks[rank].node]

    def pid_of(self, rank: int) -> int:
        """The process of a rank as its node told last; 0 if that is not known, or may be its predecessor's."""
        one = self.ranks.get(rank)
        return self.agents[one.node].pids.get(rank, 0) if one is not None and not one.newcomer else 0

    def in_state(self, *states: RankState) -> list[Rank]:
        return [rank for rank in self.ranks.values() if rank.state in states]

    def members(self) -> list[Rank]:
        """Ranks that take part in the next generation."""
        return [rank for rank in self.ranks.values() if rank.state is not RankState.EXITED]

    @property
    def away(self) -> bool:
        """A node's connection has broken and it may still come back: what its ranks do is unknown."""
        return any(agent.gone_since is not None for agent in self.agents.values())

    @property
    def aware(self) -> bool:
        """Every rank has joined and can be rebuilt under the others. A newcomer on its way counts as one that can."""
        return bool(self.ranks) and all(r.newcomer or (r.joined and r.replaceable) for r in self.ranks.values())

    @property
    def finished(self) -> bool:
        """Every rank is past its last step."""
        return bool(self.ranks) and all(rank.state is RankState.FINISHED for rank in self.ranks.values())

    @property
    def done(self) -> bool:
        return bool(self.ranks) and all(rank.state is RankState.EXITED for rank in self.ranks.values())

    # --- changes ---

    def place(self, agents: Iterable[Agent]) -> None:
        """Give every slot of these nodes a rank: by --node-rank where given, then by arrival."""
        asked = sorted(agents, key=lambda a: (a.node_rank if a.node_rank >= 0 else 1 << 30, a.arrival))
        self.ranks = {}
        for agent in asked:
            for local_rank in range(agent.slots):
                rank = len(self.ranks)
                self.ranks[rank] = Rank(rank=rank, node=agent.node, local_rank=local_rank)

    def restore_placement(self, placement: Iterable[tuple[str, int]]) -> None:
        """The ranks a former controller had placed, states unknown until the agents speak."""
        self.ranks = {}
        for node, slots in placement:
            for local_rank in range(slots):
                rank = len(self.ranks)
                self.ranks[rank] = Rank(rank=rank, node=node, local_rank=local_rank)

    def adopt(self, status: RankStatus) -> None:
        """Take an agent's word for a rank the controller has no memory of."""
        rank = self.ranks.get(status.rank)
        if rank is None:
            return
        rank.state = _reported(status)
        rank.joined, rank.replaceable, rank.parked = status.joined, status.replaceable, status.parked
        rank.trained = status.joined and status.version >= 1
        self.saw_version(status.rank, status.version)
        self.generation = max(self.generation, status.generation, status.parked.generation if status.parked else 0)

    def saw_version(self, rank: int, version: int) -> None:
        if rank in self.ranks:
            self.ranks[rank].version = version
            self.high_version = max(self.high_version, version)

    def usual_step_s(self) -> float:
        return max((rank.usual_step_s for rank in self.ranks.values()), default=0.0)


def _reported(status: RankStatus) -> RankState:
    """The state behind an agent's word for it; a rank that died speaks through a signal, which is on its way."""
    if status.parked is not None:
        return RankState.PARKED
    if not status.joined and status.state != RankState.EXITED:
        return RankState.STARTING
    known = {state.value for state in RankState} - {RankState.LOST}
    return RankState(status.state) if status.state in known else RankState.RUNNING
