"""What the controller knows of agents and ranks: turns agents' messages into states that decisions are made from.

Called by `runtime.intake` (updates it), `recover.execute` (drives it) and `runtime.server` (shows it). The state of a
rank moves only along TRANSITIONS; a message that would break them is late or stale and is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

from rerail.flow import Place
from rerail.runtime.orders import RankStatus, ToAgent, Vacate
from rerail.runtime.pages import Pages
from rerail.runtime.plans import Back, Healing
from rerail.runtime.wire import Formed, Parked, Resumed


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
    VACANT = "vacant"
    """Nobody is this rank for now; the others share its work."""


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
    _S.LOST: frozenset({_S.LOST, _S.STARTING, _S.VACANT}),
    _S.VACANT: frozenset({_S.STARTING}),
}


class Link(Protocol):
    """The controller's end of one agent's connection."""

    def send(self, message: ToAgent) -> None: ...

    def close(self) -> None: ...


@dataclass
class Rank:
    """One rank of the job; its process may change, and its place."""

    rank: int
    node: str
    local_rank: int
    """The device of its node that it has, by number."""
    state: RankState = RankState.STARTING
    assigned: int = 0
    """Generation in which its current process became this rank; what older processes say is ignored."""
    joined: bool = False
    replaceable: bool = False
    newcomer: bool = False
    trained: bool = False
    """Its current process has completed a step."""
    elastic: bool = False
    """Its script can go on without some of the ranks."""
    barred: str = ""
    """Incarnation of the agent that was there and could not fill this seat when it was left empty."""
    version: int = -1
    usual_step_s: float = 0.0
    parked: Parked | None = None
    formed: Formed | None = None
    resumed: Resumed | None = None

    @property
    def place(self) -> Place:
        return Place(self.node, self.local_rank)

    def move_to(self, place: Place) -> None:
        """Its next process runs there."""
        self.node, self.local_rank = place.node, place.device

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

    def leave(self, agent: Agent) -> None:
        """The seat stays empty, until it can be filled by another process of its agent."""
        self.state, self.newcomer, self.barred = RankState.VACANT, False, agent.incarnation if agent.connected else ""
        self.parked = self.formed = self.resumed = None

    def has_parked(self, generation: int) -> bool:
        return self.state is RankState.PARKED and self.parked is not None and self.parked.generation == generation

    def has_formed(self, generation: int) -> bool:
        return self.formed is not None and self.formed.generation == generation

    @property
    def has_resumed(self) -> bool:
        return self.resumed is not None or self.state is RankState.FINISHED

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
    devices: int = 0
    """Places for ranks, spare ones included; at least `slots`."""
    resets: bool = False
    accelerators: tuple[str, ...] = ()
    """PCI addresses of its devices, by their number."""
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

    back: Back = field(default_factory=Back)
    """What ranks are told of faults of the training: set with every decision, kept in the journal."""
    dismissed: bool = False
    """All ranks were told that the loop is over; what they do now is their own."""
    pages: Pages = field(default_factory=Pages)
    """What each rank would leave if its node were lost."""
    healing: Healing | None = None
    """What is to be looked at since a shard was restored that is not exact."""
    uprooted: set[int] = field(default_factory=set)
    """Ranks that were lost with their node: what they left there may be gone, also if it is back by the same name."""
    isolated: dict[Place, str] = field(default_factory=dict)
    """Places where no rank is to be put, and why; a device of -1 stands for the whole node."""

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

    def is_isolated(self, place: Place) -> str:
        """Why nothing is to be put there, or nothing."""
        return self.isolated.get(place) or self.isolated.get(Place(place.node, -1), "")

    def healthy(self, agent: Agent) -> list[Place]:
        """Places of this node that are not isolated, whoever is there now."""
        places = (Place(agent.node, device) for device in range(max(agent.devices, agent.slots)))
        return [place for place in places if not self.is_isolated(place)]

    def free(self) -> list[Place]:
        """Places where a rank could be put now: those of nodes that have no rank yet come first."""
        taken = {rank.place for rank in self.ranks.values()}
        used = self.placed()
        here = sorted(self.connected(), key=lambda agent: (agent.node in used, agent.arrival))
        return [place for agent in here for place in self.healthy(agent) if place not in taken]

    def bar(self, rank: int) -> str:
        """Why a rank cannot be put where it was, or nothing. A node that may still come back will be told again."""
        one = self.ranks[rank]
        agent = self.agents.get(one.node)
        if agent is None or (not agent.connected and agent.gone_since is None):
            return f"node {one.node} of rank {rank} is not connected"
        return self.is_isolated(one.place)

    def homeless(self) -> str:
        """Why there are not enough healthy places for all ranks, though every node may come back; or nothing."""
        if not self.isolated:
            return ""
        left = sum(len(self.healthy(agent)) for agent in self.agents.values())
        lacking = len(self.ranks) - left
        return f"{lacking} of {len(self.ranks)} ranks have no healthy place left" if lacking > 0 else ""

    def in_state(self, *states: RankState) -> list[Rank]:
        return [rank for rank in self.ranks.values() if rank.state in states]

    def members(self) -> list[Rank]:
        """Ranks that take part in the next generation."""
        return [rank for rank in self._seated() if rank.state is not RankState.EXITED]

    def vacant(self) -> list[Rank]:
        """Seats that nobody has for now."""
        return self.in_state(RankState.VACANT)

    def fillable(self) -> list[Rank]:
        """Empty seats whose node is there again, or for which there is another place."""
        vacant, free = self.vacant(), self.free()
        own = [rank for rank in vacant if not self.bar(rank.rank) and self._may_return(rank)]
        others = [rank for rank in vacant if rank not in own and self.bar(rank.rank)]
        return sorted([*own, *others[: len(free)]], key=lambda rank: rank.rank)

    def _may_return(self, rank: Rank) -> bool:
        agent = self.agents[rank.node]
        return agent.connected and agent.incarnation != rank.barred

    @property
    def away(self) -> bool:
        """A node's connection has broken and it may still come back: what its ranks do is unknown."""
        return any(agent.gone_since is not None for agent in self.agents.values())

    @property
    def aware(self) -> bool:
        """Every rank has joined and can be rebuilt under the others. A newcomer on its way counts as one that can."""
        here = self._seated()
        return bool(here) and all(r.newcomer or (r.joined and r.replaceable) for r in here)

    @property
    def elastic(self) -> bool:
        """The script deals its data anew when ranks are missing."""
        return any(rank.elastic for rank in self.ranks.values())

    @property
    def finished(self) -> bool:
        """Every rank is past its last step."""
        return self._all(RankState.FINISHED)

    @property
    def done(self) -> bool:
        return self._all(RankState.EXITED)

    def _all(self, state: RankState) -> bool:
        here = self._seated()
        return bool(here) and all(rank.state is state for rank in here)

    def _seated(self) -> list[Rank]:
        return [rank for rank in self.ranks.values() if rank.state is not RankState.VACANT]

    # --- changes ---

    def fit(self, nodes: int) -> list[Agent]:
        """Nodes that are there, first those with a healthy place for each rank: by --node-rank, by arrival, then spares."""

        def order(agent: Agent) -> tuple[bool, int, int]:
            lacks, given = len(self.healthy(agent)) < agent.slots, agent.node_rank
            return lacks, given - nodes if 0 <= given < nodes else given + 1, agent.arrival

        return sorted(self.connected(), key=order)

    def place(self, agents: Iterable[Agent]) -> None:
        """Give every slot of these nodes a rank; where there are not enough healthy places, others have to do."""
        self.seat(place for agent in agents for place in self._places(agent))

    def _places(self, agent: Agent) -> list[Place]:
        healthy = self.healthy(agent)
        others = [place for n in range(agent.slots) if (place := Place(agent.node, n)) not in healthy]
        return sorted([*healthy, *others][: agent.slots])

    def seat(self, places: Iterable[Place]) -> None:
        """One new rank for each of these places."""
        self.ranks = {n: Rank(rank=n, node=p.node, local_rank=p.device) for n, p in enumerate(places)}

    def after(self, moves: Mapping[int, Place]) -> Fleet:
        """The fleet as it will be when these ranks have other places; this one stays as it is."""
        moved = {n: replace(self.ranks[n], node=place.node, local_rank=place.device) for n, place in moves.items()}
        return replace(self, ranks={**self.ranks, **moved})

    def tidy_up(self, agent: Agent, *, beside: bool) -> None:
        """Have it end what it has of ranks that are elsewhere; `beside`: also what was made ready for a hot switch."""
        here = tuple(rank.rank for rank in self.on_node(agent.node))
        agent.send(Vacate(generation=self.generation, keep=here))
        if beside:
            agent.send(Vacate(generation=self.generation + 1, keep=(), beside=True))

    def remembered(self) -> dict[str, Any]:
        """What the next controller must know."""
        places = [[rank.node, rank.local_rank] for rank in self.ranks.values()]
        vacant = {str(rank.rank): rank.barred for rank in self.vacant()}
        devices = {agent.node: max(agent.devices, agent.slots) for agent in self.agents.values()}
        return {"placement": places, "vacant": vacant, "elastic": self.elastic, "devices": devices}

    def recall(self, state: dict[str, Any]) -> None:
        """The ranks a former controller had placed, states unknown until the agents speak."""
        self.seat(Place(str(node), int(device)) for node, device in state["placement"])
        for rank in self.ranks.values():
            rank.elastic = bool(state.get("elastic", False))
        for number, barred in state.get("vacant", {}).items():
            self.ranks[int(number)].state, self.ranks[int(number)].barred = RankState.VACANT, str(barred)

    def adopt(self, status: RankStatus) -> None:
        """Take an agent's word for a rank the controller has no memory of."""
        rank = self.ranks.get(status.rank)
        if rank is None or rank.state is RankState.VACANT:
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

    def newest_version(self) -> int:
        return max((rank.version for rank in self.ranks.values()), default=-1)

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
