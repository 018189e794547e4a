"""Turns agents' messages and passing deadlines into fleet updates and, where something went wrong, Signals.

The controller's `detect`: called by `runtime.controller` for every message and every turn. Judges nothing: what a signal
means is for `diagnose.classify` and `diagnose`.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from rerail.config import Settings
from rerail.diagnose.stall import behind, counts_of
from rerail.flow import Signal, new_id
from rerail.runtime.fleet import Agent, Fleet, Link, Rank, RankState, Waits
from rerail.runtime.orders import Beat, Heard, Kept, Observed, RankExited, Relayed, Standbys, ToController
from rerail.runtime.training import Finding, TrainingWatch
from rerail.runtime.wire import (
    CommFailed,
    Finished,
    Formed,
    FromRank,
    Joined,
    Noted,
    Parked,
    Raised,
    Resumed,
    Unsound,
    Voted,
)
from rerail.texts import listed

_ENDS_RANK = ("process.exit", "step.hang", "park.timeout", "build.timeout", "agent.fenced")


@dataclass(frozen=True)
class Sighting:
    """A signal with what only the controller's own clock knows about it."""

    signal: Signal
    age_s: float = 0.0


@dataclass(frozen=True)
class Inbound:
    """One thing an agent's connection has to say; None is its end."""

    link: Link
    message: ToController | None


class Intake:
    """Reads messages into the fleet; `wall` gives the time for people, durations come from the caller's `now`."""

    def __init__(self, fleet: Fleet, job: str, settings: Settings, *, several: bool = False) -> None:
        self._fleet = fleet
        self._several = several
        """Nodes: each has a lease then (see `runtime.lease`), and nobody gets its places before that is over."""
        self._job = job
        self._settings = settings
        self.training = TrainingWatch(listed(settings.roll_back))

    def take(self, agent: Agent, message: ToController, *, wall: float) -> list[Sighting]:
        """Apply one message; the faults it speaks of come back."""
        match message:
            case Relayed(rank=number, message=inner):
                return self._from_rank(number, inner, wall)
            case Observed(signal=signal, age_s=age):
                return self._observed(agent, signal, age)
            case RankExited(rank=number, generation=generation):
                rank = self._fleet.ranks.get(number)
                if rank is not None and generation >= rank.assigned:
                    rank.move(RankState.EXITED)
            case Kept(rank=number) if number in self._fleet.ranks and self._fleet.ranks[number].node == agent.node:
                self._fleet.pages.take(message)
            case Standbys(ready=ready, warming=warming):
                agent.ready, agent.warming = ready, warming
            case Beat(versions=versions, pids=pids, number=beat):
                agent.pids = pids
                if beat:
                    agent.send(Heard(number=beat))
                for number, version in versions.items():
                    if number in self._fleet.ranks and version > self._fleet.ranks[number].version:
                        agent.waits = None
                    self._fleet.saw_version(number, version)
                return [self._noticed(finding, agent, wall) for finding in self.training.take(message)]
            case _:
                pass
        return []

    def _noticed(self, finding: Finding, agent: Agent, wall: float) -> Sighting:
        rank = self._fleet.ranks.get(finding.rank)
        node = rank.node if rank is not None else agent.node
        return Sighting(self.signal(finding.source, node, finding.rank, wall, step=finding.step, **finding.payload))

    def lost_agents(self, now: float, wall: float) -> list[Sighting]:
        """Nodes whose time to come back, or to say anything, is over."""
        found = []
        for agent in self._fleet.agents.values():
            silent = now - agent.heard
            at = self._lost_at(agent)
            if at is None or now < at:
                continue
            if agent.gone_since is not None:
                found.extend(self.agent_lost(agent, "connection closed", now - agent.gone_since, wall))
            else:
                found.extend(self.agent_lost(agent, f"no word for {silent:.1f} s", silent, wall))
        return found

    def agent_lost(self, agent: Agent, how: str, age: float, wall: float) -> list[Sighting]:
        """All ranks of this node are gone, or out of reach, which comes to the same. Said once."""
        ranks = [rank for rank in self._fleet.on_node(agent.node) if rank.state is not RankState.EXITED]
        alive = [rank for rank in ranks if rank.move(RankState.LOST)]
        self._fleet.uprooted.update(rank.rank for rank in alive)
        if agent.link is not None:
            agent.link.close()
        agent.link, agent.gone_since = None, None
        if not alive:
            return []
        step = max(rank.version for rank in alive)
        signal = self.signal("agent.lost", agent.node, -1, wall, step=step, message=how)
        return [Sighting(signal, age)]

    def seats_back(self, wall: float) -> list[Sighting]:
        """Empty seats can be filled again: their node is back. No fault, but something to be acted on."""
        back = self._fleet.fillable() if not self._fleet.dismissed else []
        if not back or self._fleet.in_state(RankState.FINISHED):
            return []
        step = max(rank.version for rank in self._fleet.members())
        return [Sighting(self.signal("node.back", back[0].node, -1, wall, step=step))]

    def late(self, source: str, number: int, seconds: float, wall: float) -> Sighting:
        """A rank did not do what it was told in time: it is lost."""
        rank = self._fleet.ranks[number]
        rank.move(RankState.LOST)
        signal = self.signal(source, rank.node, number, wall, step=rank.version, stalled_s=seconds)
        return Sighting(signal, seconds)

    def next_deadline(self) -> float | None:
        """When `lost_agents` may have something to say, in monotonic seconds."""
        times = [self._lost_at(agent) for agent in self._fleet.agents.values()]
        return min((at for at in times if at is not None), default=None)

    def _lost_at(self, agent: Agent) -> float | None:
        """When it is given up if nothing is heard of it; None if it has been already."""
        silent = agent.heard + self._settings.agent_lost_s
        if agent.gone_since is None:
            return silent if agent.connected else None
        closed = agent.gone_since + self._settings.agent_back_s
        return max(closed, silent) if self._several else closed

    def signal(
        self, source: str, node: str, rank: int, wall: float, *, step: int = -1, **payload: str | int | float | bool
    ) -> Signal:
        """A signal of the controller's own."""
        return Signal(
            id=new_id("signal"),
            job=self._job,
            at=wall,
            source=source,
            node=node,
            rank=rank,
            generation=self._fleet.generation,
            step=step,
            payload=payload,
        )

    def _observed(self, agent: Agent, signal: Signal, age: float) -> list[Sighting]:
        signal = msgspec.structs.replace(signal, job=self._job, node=agent.node)
        if signal.source == "collective.stalled":
            return self._stalled(agent, signal, age)
        rank = self._fleet.ranks.get(signal.rank)
        if rank is None:
            return [Sighting(signal, age)] if signal.rank < 0 else []
        if signal.generation < rank.assigned or rank.node != agent.node:
            return []
        if signal.source in _ENDS_RANK and (rank.state is RankState.LOST or not rank.move(RankState.LOST)):
            return []
        if signal.step < 0:
            signal = msgspec.structs.replace(signal, step=rank.version)
        return [Sighting(signal, age)]

    def _stalled(self, agent: Agent, signal: Signal, age: float) -> list[Sighting]:
        """All ranks of this node wait in a collective. A fault only when all nodes say so: otherwise they wait for one
        that is busy elsewhere (a checkpoint, an evaluation), and its own agent judges that one."""
        generation = self._fleet.generation
        if signal.generation < generation:
            return []
        agent.waits = Waits(generation=generation, collectives=counts_of(str(signal.payload.get("collectives", ""))))
        agents = [self._fleet.agents[node] for node in {rank.node: None for rank in self._fleet.members()}]
        waits = [one.waits for one in agents if one.waits is not None and one.waits.generation >= generation]
        if len(waits) < len(agents):
            return []
        counts = {rank: count for one in waits for rank, count in one.collectives.items()}
        for one in agents:
            one.waits = None  # told: a node that repeats itself does not make it a second stall
        return [Sighting(msgspec.structs.replace(signal, rank=behind(counts)), age)]

    def _is_awaited(self, parked: Parked) -> bool:
        """Not of an older generation, nor of one that has its plan already: then it is heard for the second time."""
        return parked.generation >= self._fleet.generation and parked.generation > self._fleet.formed_generation

    def _from_rank(self, number: int, message: FromRank, wall: float) -> list[Sighting]:
        rank = self._fleet.ranks.get(number)
        if rank is None or rank.state is RankState.LOST:
            return []
        match message:
            case Joined() if message.generation >= rank.assigned:
                rank.joined, rank.replaceable = True, message.replaceable
                rank.move(RankState.BUILDING)
            case Parked() if self._is_awaited(message):
                if rank.move(RankState.PARKED):
                    rank.parked = message
                    rank.elastic = rank.elastic or message.elastic
                    rank.joined = rank.replaceable = True
                    rank.trained = rank.trained or (message.in_training and not rank.newcomer)
                    if message.in_training and message.intact:
                        self._fleet.saw_version(number, message.version)
            case Formed() if message.generation == self._fleet.generation:
                if rank.move(RankState.RUNNING):
                    rank.formed = message
            case Resumed() if message.generation == self._fleet.generation:
                rank.resumed, rank.trained, rank.newcomer = message, True, False
                rank.elastic = message.elastic
                rank.usual_step_s = message.usual_step_s or message.step_s
                self._fleet.saw_version(number, message.version)
            case Finished():
                self._fleet.saw_version(number, message.version)
                rank.move(RankState.FINISHED)
            case Raised() if message.generation >= rank.assigned:
                rank.move(RankState.RAISED)
                return [self._raised(rank, message, wall)]
            case Noted():
                note = self.signal(message.source, rank.node, number, wall, step=message.version, message=message.text)
                note.payload.update(message.figures)
                return [Sighting(note)]
            case Voted() if message.generation == self._fleet.generation:
                agent = self._fleet.agent_of(number)
                return [self._noticed(finding, agent, wall) for finding in self.training.voted(message)]
            case Unsound() if message.generation == self._fleet.generation:
                return [self._noticed(self.training.unsound(number, message), self._fleet.agent_of(number), wall)]
            case CommFailed() if message.generation >= rank.assigned:
                signal = self.signal("collective.failed", rank.node, number, wall, step=message.version)
                payload: dict[str, str | int | float | bool] = {"message": message.text}
                return [
                    Sighting(msgspec.structs.replace(signal, generation=message.generation, payload=payload)),
                ]
            case _:
                pass
        return []

    def _raised(self, rank: Rank, message: Raised, wall: float) -> Sighting:
        signal = self.signal(
            "step.raised",
            rank.node,
            rank.rank,
            wall,
            step=message.version,
            exception=message.exception,
            message=message.text,
            traceback=message.traceback,
        )
        return Sighting(msgspec.structs.replace(signal, generation=message.generation))
