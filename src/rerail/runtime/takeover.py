"""A new controller takes over: turns the journal and the agents' greetings into the fleet as it is now.

Called by `runtime.controller` when the journal tells of a job that has not ended. Ranks train on meanwhile. Once every
agent is back, or given up, either nothing has to be done, or what the former controller had begun is begun anew in the
next generation: generations fence off whatever of its orders are still under way.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rerail.decide.budget import Budget
from rerail.flow import Place, Report, Signal
from rerail.runtime.experience import Experience
from rerail.runtime.fleet import Agent, Fleet, RankState
from rerail.runtime.incident import Incident
from rerail.runtime.intake import Intake, Sighting
from rerail.runtime.journal import Journal
from rerail.runtime.orders import RankStatus
from rerail.runtime.rollbacks import Rollbacks
from rerail.runtime.samples import MarkKind

QUIET_S = 0.1
"""After the last greeting: what agents saw meanwhile follows right behind it and is heard first."""

_BUILDING = (RankState.STARTING, RankState.BUILDING, RankState.PARKED)
_OVER = (RankState.LOST, RankState.EXITED)
_BETWEEN = (RankState.PARKED, RankState.INTERRUPTED, RankState.FORMING, RankState.RAISED)


class Driver(Protocol):
    """What is needed of `recover.execute.Execution`."""

    master: tuple[str, int]

    def restart(self, now: float, wall: float, *, restarts: tuple[int, int], cause: str) -> None: ...

    def take_over(self, now: float, wall: float) -> None: ...


class Desk(Protocol):
    """What is needed of `runtime.controller.Controller`; the controller knows this module, not the other way round."""

    fleet: Fleet
    intake: Intake
    incident: Incident | None
    incidents: int
    budget: Budget
    rollbacks: Rollbacks
    experience: Experience
    exit_code: int | None

    @property
    def execution(self) -> Driver: ...

    def note_takeover(self, signal: Signal, down_s: float) -> None: ...


class Takeover:
    """The time from the first look at the journal until the fleet is known again."""

    def __init__(self, controller: Desk, state: dict[str, Any], now: float) -> None:
        self._controller = controller
        self._down_s = _down_for(state.get("alive"), now)
        self._last_greeting = now
        self._statuses: dict[int, RankStatus] = {}
        fleet = controller.fleet
        fleet.generation = self._written = int(state["generation"])
        fleet.recall(state)
        host, port = state["master"]
        controller.execution.master = (str(host), int(port))
        incarnations = state["incarnations"]
        for node, slots in fleet.placed().items():
            fleet.agents[node] = Agent(
                node=node,
                address="",
                slots=slots,
                node_rank=-1,
                incarnation=str(incarnations.get(node, "")),
                heard=now,
                gone_since=now,
            )

    @classmethod
    def of(cls, controller: Desk, journal: Journal, now: float) -> Takeover | None:
        """Restore the counters; if the job was under way, prepare to take over."""
        state = journal.state()
        controller.incidents = int(state.get("incidents", 0))
        if not state.get("placement") or state.get("exit_code") is not None:
            return None
        controller.budget = msgspec.convert(state.get("budget", {}), Budget)
        controller.fleet.high_version = controller.budget.high_version
        controller.rollbacks.restore(state)
        controller.experience.began = _began(journal)
        for report in journal.records(kind="report"):
            if isinstance(report, Report):
                controller.experience.note(report)
        return cls(controller, state, now)

    def greeted(self, node: str, told: Iterable[RankStatus], now: float) -> None:
        """An agent is back; its word for its ranks counts."""
        self._last_greeting = now
        for status in told:
            before, rank = self._statuses.get(status.rank), self._controller.fleet.ranks.get(status.rank)
            if rank is None or (before is not None and before.generation > status.generation):
                continue
            if rank.node != node:
                if status.generation <= self._written or status.state in _OVER:
                    continue  # what is left of it where it was before
                rank.move_to(Place(node, status.local_rank))  # the journal, on a full disk, did not hear of it
            self._statuses[status.rank] = status
            self._controller.fleet.adopt(status)

    def settled(self, now: float) -> bool:
        """Every agent is back or given up, and what they had to say has been heard."""
        return not self._controller.fleet.away and now >= self._last_greeting + QUIET_S

    def deadline(self) -> float | None:
        """When it may be settled; None while an agent is awaited, whose own deadline counts then."""
        return None if self._controller.fleet.away else self._last_greeting + QUIET_S

    def finish(self, now: float, wall: float) -> list[Sighting]:
        """What is to be done now, as signals; none when all is well."""
        controller, fleet = self._controller, self._controller.fleet
        self._tidy_up()
        if not self._statuses and all(rank.state is RankState.STARTING for rank in fleet.ranks.values()):
            controller.execution.restart(now, wall, restarts=(0, 0), cause="")
            return []
        found = self._vanished(wall)
        if found or controller.incident is not None or fleet.in_state(RankState.LOST):
            return found
        states = {rank.state for rank in fleet.members()}
        untrained = not any(rank.trained for rank in fleet.ranks.values())
        if untrained and states <= set(_BUILDING):
            controller.execution.take_over(now, wall)
        elif states & set(_BETWEEN):
            return [Sighting(self._signal(wall), self._down_s)]
        controller.note_takeover(self._signal(wall), self._down_s)
        return []

    def _tidy_up(self) -> None:
        """End what the former controller was making ready for a hot switch, and what nodes have of ranks that are elsewhere."""
        fleet = self._controller.fleet
        for agent in fleet.connected():
            fleet.tidy_up(agent, beside=True)

    def _vanished(self, wall: float) -> list[Sighting]:
        """Ranks that died and whose end was told to the former controller only."""
        found = []
        for rank in self._controller.fleet.ranks.values():
            status = self._statuses.get(rank.rank)
            if rank.state is RankState.LOST or not self._controller.fleet.agents[rank.node].connected:
                continue  # its agent has told of it already, or is lost itself
            if (status is None or status.state == RankState.LOST) and rank.move(RankState.LOST):
                signal = self._controller.intake.signal(
                    "process.exit",
                    rank.node,
                    rank.rank,
                    wall,
                    step=rank.version,
                    evidence="ended between two controllers",
                )
                found.append(Sighting(signal))
        return found

    def _signal(self, wall: float) -> Signal:
        return self._controller.intake.signal("controller.lost", "", -1, wall, stalled_s=self._down_s)


def left_to_the_next(controller: Desk, now: float) -> dict[str, Any]:
    """What a controller writes down in every turn, for the one that may have to take over."""
    return {
        "generation": controller.fleet.generation,
        "incidents": controller.incidents,
        "open": controller.incident.number if controller.incident is not None else 0,
        "budget": msgspec.to_builtins(controller.budget),
        **controller.rollbacks.state(),
        **controller.fleet.remembered(),
        "incarnations": {agent.node: agent.incarnation for agent in controller.fleet.agents.values()},
        "master": list(controller.execution.master),
        "exit_code": controller.exit_code,
        # a sign of life, in whole seconds: a new controller sees how long there was none
        "alive": [int(now), _boot_id()],
    }


def _began(journal: Journal) -> float:
    """When this job was started, wall clock; by its first record where an older rerail wrote the journal."""
    begins = [mark.at for mark in journal.history()[1] if mark.kind is MarkKind.BEGIN]
    return begins[-1] if begins else (journal.ends() or (0.0, 0.0))[0]


def _down_for(mark: Any, now: float) -> float:
    """Seconds since the mark, 0 when it is of another boot: the monotonic clock began anew then."""
    if not isinstance(mark, list) or len(mark) != 2 or mark[1] != _boot_id():
        return 0.0
    return max(0.0, now - float(mark[0]))


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
