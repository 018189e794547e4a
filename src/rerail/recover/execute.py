"""Carries a Decision out: drives the fleet through interrupt, promote, park, form and replay.

    RESTART_ALL   waiting for nodes -> picking a port -> Start ----+
    RETRY_STEP    InterruptAll to all -----------------------------+--> parking -> forming -> replaying -> idle
    REPLACE_RANK  InterruptAll to survivors, Promote for the lost -+

Called by `runtime.controller`: `restart` or `repair` begin, `advance` goes on after every message, `overdue` names who
is late. Nothing here waits or sleeps, so a new fault at any point simply begins the next generation: re-entrant by
construction. The first start of a job is a restart that nobody had to ask for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from rerail.config import JobSpec, Settings
from rerail.flow import Action, Decision, OutcomeKind, Rung, new_id
from rerail.recover.assign import assignment, depots, environment
from rerail.recover.plan import Infeasible, choose_sources
from rerail.runtime.fleet import Agent, Fleet, Rank, RankState
from rerail.runtime.plans import Plan, Source
from rerail.runtime.wire import (
    DismissAll,
    FormAll,
    Interrupt,
    InterruptAll,
    Parked,
    PickPort,
    PortPicked,
    Promote,
    RankStatus,
    Start,
)

NODE_WAIT_S = 30.0
"""How long a restart waits for lost nodes to come back before it makes do with the others."""
STEPS_TO_PARK = 10
"""A survivor may take this many usual steps to run out an interrupted one."""
RESTART_GRACE_S = 1.0
"""Seconds between SIGTERM and SIGKILL for ranks that are started again; most end at once."""


class Stage(StrEnum):
    """Where the newest generation stands."""

    IDLE = "idle"
    WAITING_FOR_NODES = "waiting for nodes"
    PICKING_PORT = "picking a port"
    PARKING = "parking"
    FORMING = "forming"
    REPLAYING = "replaying"


@dataclass
class Marks:
    """When each stage of the newest generation ended (monotonic), and what the ranks told: the timeline's raw data."""

    parked_at: float = 0.0
    formed_at: float = 0.0
    resumed_at: float = 0.0
    version: int = -1
    sources: dict[int, Source] = field(default_factory=dict)
    parked: dict[int, Parked] = field(default_factory=dict)


class Execution:
    """One generation after the other."""

    def __init__(self, fleet: Fleet, spec: JobSpec, settings: Settings) -> None:
        self.fleet = fleet
        self.stage = Stage.IDLE
        self.rung: Rung | None = None
        self.problem = ""
        """Why the newest generation cannot be formed; the controller then decides anew."""
        self.marks = Marks()
        self.actions: list[Action] = []
        """Taken but not yet journaled; the controller empties it."""
        self.master: tuple[str, int] = ("127.0.0.1", 0)
        self._spec, self._settings = spec, settings
        self._cause = ""
        self._began = 0.0
        self._building: dict[int, float] = {}
        self._fresh = True
        self._store_rank = 0
        self._restarts = (0, 0)
        self._plan: Plan | None = None
        self._wall = 0.0

    # --- beginnings ---

    def restart(self, now: float, wall: float, *, restarts: tuple[int, int], cause: str, first: bool = False) -> None:
        """End all ranks and start them anew in a new generation; at the beginning of a job, just start them."""
        if not first:
            self.fleet.generation += 1
        self._begin(Rung.RESTART_ALL, now, wall, cause)
        self._fresh, self._restarts = True, restarts
        self.stage = Stage.WAITING_FOR_NODES
        self.advance(now, wall)

    def repair(self, decision: Decision, now: float, wall: float) -> None:
        """Interrupt the survivors and promote standbys for the others, all in this very turn."""
        fleet = self.fleet
        fleet.generation += 1
        self._begin(decision.rung, now, wall, decision.id)
        lost = set(decision.ranks)
        survivors = [rank for rank in fleet.members() if rank.rank not in lost]
        # a newcomer that is still building could not open the store until it is done
        settled = [rank for rank in survivors if not rank.newcomer] or survivors
        self._store_rank = min(rank.rank for rank in settled)
        for rank in survivors:
            rank.parked = rank.formed = rank.resumed = None
            if rank.state not in (RankState.STARTING, RankState.BUILDING):
                rank.move(RankState.INTERRUPTED)
        self._interrupt(survivors)
        for number in sorted(lost):
            self._promote(fleet.ranks[number], now)
        self._building = {n: t for n, t in self._building.items() if fleet.ranks[n].newcomer}
        self.stage = Stage.PARKING

    def take_over(self, now: float, wall: float) -> None:
        """A former controller had started the ranks and they have not trained yet: wait for them to park."""
        self._begin(Rung.RESTART_ALL, now, wall, "")
        self._fresh = True
        self._store_rank = 0
        self.stage = Stage.PARKING

    def _begin(self, rung: Rung, now: float, wall: float, cause: str) -> None:
        self.rung, self.problem, self.marks = rung, "", Marks()
        self._cause, self._began, self._wall, self._fresh = cause, now, wall, False

    # --- going on ---

    def advance(self, now: float, wall: float) -> None:
        """Take every step that has become possible."""
        self._wall = wall
        if self.stage is Stage.WAITING_FOR_NODES:
            self._gather(now)
        if self.stage is Stage.PARKING:
            self._form_when_parked(now)
        if self.stage is Stage.FORMING and all(self._has_formed(rank) for rank in self.fleet.members()):
            self.stage, self.marks.formed_at = Stage.REPLAYING, now
        if self.stage is Stage.REPLAYING and all(self._has_resumed(rank) for rank in self.fleet.members()):
            self.stage, self.marks.resumed_at = Stage.IDLE, now
            if self._fresh:  # what the ranks found in their arenas is theirs to tell
                found = [rank.resumed.version - 1 for rank in self.fleet.ranks.values() if rank.resumed is not None]
                self.marks.version = min(found, default=self.marks.version)
        if self.stage is Stage.IDLE and self.fleet.finished and not self.fleet.dismissed:
            self._dismiss()

    def port_picked(self, message: PortPicked) -> None:
        """The node of rank 0 has a free port for MASTER_PORT."""
        if self.stage is Stage.PICKING_PORT and message.generation == self.fleet.generation:
            self._start_ranks(message.port)

    def overdue(self, now: float) -> list[tuple[str, int, float]]:
        """Ranks that are late, as (signal source, rank, seconds)."""
        late: list[tuple[str, int, float]] = []
        if self._fresh or self.stage not in (Stage.PARKING, Stage.FORMING):
            return late
        for rank in self._awaited():
            allowed = self._allowed(rank)
            if now >= self._began_of(rank) + allowed:
                source = "build.timeout" if rank.newcomer else "park.timeout"
                late.append((source, rank.rank, allowed))
        return late

    def next_deadline(self) -> float | None:
        """When `advance` or `overdue` would have something new, in monotonic seconds."""
        if self.stage is Stage.WAITING_FOR_NODES:
            return self._began + NODE_WAIT_S
        if self._fresh or self.stage not in (Stage.PARKING, Stage.FORMING):
            return None
        return min((self._began_of(rank) + self._allowed(rank) for rank in self._awaited()), default=None)

    def _dismiss(self) -> None:
        """Every rank is past its last step: none is needed to repair another any more."""
        self.fleet.dismissed = True
        for node in self.fleet.placed():
            self.fleet.agents[node].send(DismissAll())
        self._note("dismiss", "all")

    def resend(self, agent: Agent, told: Iterable[RankStatus], now: float) -> None:
        """An agent is back after its connection broke: say again whatever its ranks, by its own word, have not heard."""
        fleet, heard = self.fleet, {status.rank: status for status in told}
        if self.stage is Stage.PICKING_PORT and fleet.agent_of(0) is agent:
            agent.send(PickPort(generation=fleet.generation))
        elif self.stage is Stage.PARKING:
            ranks = [rank for rank in fleet.on_node(agent.node) if rank.state not in (RankState.LOST, RankState.EXITED)]
            at = {rank.rank: heard[rank.rank].generation if rank.rank in heard else -1 for rank in ranks}
            unborn = [rank for rank in ranks if at[rank.rank] < rank.assigned]
            if self._fresh and unborn:
                self._start_node(agent.node)
            elif not self._fresh:
                for rank in unborn:
                    self._promote(rank, now)
                self._interrupt([rank for rank in ranks if rank not in unborn and at[rank.rank] < fleet.generation])
        elif self.stage is Stage.FORMING and self._plan is not None:
            if any(status.state == RankState.PARKED for status in heard.values()):
                agent.send(FormAll(plan=self._plan))
        elif fleet.dismissed:
            agent.send(DismissAll())

    # --- restart ---

    def _gather(self, now: float) -> None:
        """Go on when all nodes are there, or their replacements, or when time is up and enough of them are."""
        fleet, here = self.fleet, self.fleet.connected()
        wanted = fleet.placed()
        complete = bool(wanted) and all(fleet.agents[node].connected for node in wanted if node in fleet.agents)
        if not complete:
            if len(here) < len(wanted) and now < self._began + NODE_WAIT_S:
                return
            if len(here) < self._spec.min_nodes:
                gone = [node for node in wanted if not fleet.agents[node].connected]
                self.problem = f"node {', '.join(gone)} did not come back within {NODE_WAIT_S:.0f} s"
                self.stage = Stage.IDLE
                return
            fleet.place(here)
        self._building = {}
        self._store_rank = 0
        if self._spec.master_port:
            self._start_ranks(self._spec.master_port)
        else:
            self.stage = Stage.PICKING_PORT
            fleet.agent_of(0).send(PickPort(generation=fleet.generation))

    def _start_ranks(self, port: int) -> None:
        fleet = self.fleet
        self.master = (self._spec.master_addr or fleet.agent_of(0).address, port)
        fleet.dismissed = False
        for rank in fleet.ranks.values():
            rank.begin(fleet.generation, newcomer=False)
        for node in fleet.placed():
            self._start_node(node)
        self.stage = Stage.PARKING

    def _start_node(self, node: str) -> None:
        fleet = self.fleet
        orders = tuple(
            assignment(fleet, rank, self._env(rank), store_rank=0, newcomer=False, restored=fleet.generation > 0)
            for rank in fleet.on_node(node)
        )
        grace = RESTART_GRACE_S if fleet.generation > 0 else 0.0
        fleet.agents[node].send(Start(generation=fleet.generation, assignments=orders, grace_s=grace))
        self._note("start", f"node {node}")

    # --- repair ---

    def _interrupt(self, survivors: list[Rank]) -> None:
        fleet = self.fleet
        order = Interrupt(
            generation=fleet.generation,
            store_rank=self._store_rank,
        )
        for node in fleet.placed():
            ranks = tuple(rank.rank for rank in survivors if rank.node == node)
            if ranks:
                fleet.agents[node].send(InterruptAll(interrupt=order, ranks=ranks))
                self._note("interrupt", f"ranks {', '.join(map(str, ranks))}", self._settings.park_timeout_s)

    def _promote(self, rank: Rank, now: float) -> None:
        rank.begin(self.fleet.generation, newcomer=True)
        self._building[rank.rank] = now
        order = assignment(self.fleet, rank, self._env(rank), store_rank=self._store_rank, newcomer=True, restored=True)
        self.fleet.agent_of(rank.rank).send(Promote(assignment=order))
        self._note("promote", f"rank {rank.rank}", self._settings.build_timeout_s)

    # --- forming ---

    def _form_when_parked(self, now: float) -> None:
        fleet = self.fleet
        members = fleet.members()
        if not members or not all(self._has_parked(rank) for rank in members):
            return
        self.marks.parked_at = now
        self.marks.parked = {rank.rank: rank.parked for rank in members if rank.parked is not None}
        newcomers = frozenset(rank.rank for rank in members if rank.newcomer)
        choice = choose_sources(self.marks.parked, newcomers)
        port = self.marks.parked[self._store_rank].store_port if self._store_rank in self.marks.parked else 0
        if len(members) < len(fleet.ranks):
            choice = Infeasible(reason="some ranks have ended already")
        elif not port:
            choice = Infeasible(reason=f"rank {self._store_rank} opened no store")
        if isinstance(choice, Infeasible):
            self.problem, self.stage = choice.reason, Stage.IDLE
            self._note("form", "all", outcome=OutcomeKind.PERMANENT, detail=choice.reason)
            return
        plan = self._plan = Plan(
            generation=fleet.generation,
            world_size=len(fleet.ranks),
            store_host=fleet.agent_of(self._store_rank).address,
            store_port=port,
            store_rank=self._store_rank,
            version=choice.version,
            depots=depots(fleet),
            sources=choice.sources,
        )
        self.marks.version, self.marks.sources = choice.version, choice.sources
        for node in fleet.placed():
            fleet.agents[node].send(FormAll(plan=plan))
        for rank in members:
            rank.move(RankState.FORMING)
        fleet.formed_generation = fleet.generation
        self.stage = Stage.FORMING
        self._note("form", "all", self._settings.build_timeout_s, detail=f"step {choice.version}")

    def _has_parked(self, rank: Rank) -> bool:
        return (
            rank.state is RankState.PARKED
            and rank.parked is not None
            and rank.parked.generation == self.fleet.generation
        )

    def _has_formed(self, rank: Rank) -> bool:
        return rank.formed is not None and rank.formed.generation == self.fleet.generation

    def _has_resumed(self, rank: Rank) -> bool:
        return rank.resumed is not None or rank.state is RankState.FINISHED

    # --- deadlines ---

    def _awaited(self) -> list[Rank]:
        done = self._has_parked if self.stage is Stage.PARKING else self._has_formed
        return [rank for rank in self.fleet.members() if rank.state is not RankState.LOST and not done(rank)]

    def _allowed(self, rank: Rank) -> float:
        if rank.newcomer or self.stage is Stage.FORMING:
            return self._settings.build_timeout_s
        return max(self._settings.park_timeout_s, STEPS_TO_PARK * self.fleet.usual_step_s())

    def _began_of(self, rank: Rank) -> float:
        if self.stage is Stage.FORMING:
            return self.marks.parked_at
        return self._building.get(rank.rank, self._began) if rank.newcomer else self._began

    def _env(self, rank: Rank) -> dict[str, str]:
        return environment(self.fleet, rank, self._spec, self.master, self._restarts)

    def _note(
        self,
        verb: str,
        target: str,
        deadline_s: float = 0.0,
        *,
        outcome: OutcomeKind = OutcomeKind.OK,
        detail: str = "",
    ) -> None:
        self.actions.append(
            Action(
                id=new_id("action"),
                job=self._spec.job,
                at=self._wall,
                cause_id=self._cause,
                verb=verb,
                target=target,
                generation=self.fleet.generation,
                deadline_s=deadline_s,
                outcome=outcome,
                detail=detail,
            )
        )
