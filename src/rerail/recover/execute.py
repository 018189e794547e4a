"""Carries a Decision out: drives the fleet through interrupt, promote, park, form and replay.

    RESTART_ALL   waiting for nodes -> picking a port -> Start ----+
    RETRY_STEP    InterruptAll to all, also ROLL_BACK -------------+--> parking -> forming -> replaying -> idle
    REPLACE_RANK  InterruptAll to survivors, Promote for the lost -+
    SWAP_...      the same, in other places; Vacate for the old ones
    HOT_SWITCH    Promote beside the rank -> warming, while all train on; then as RETRY_STEP, with the newcomer in its place
    GROW          the same for empty seats                         |
    SHRINK        InterruptAll to survivors, no more of the lost --+

Called by `runtime.controller`: `restart` or `repair` begin, `advance` goes on after every message, `overdue` names who
is late. Nothing here waits or sleeps, so a new fault at any point simply begins the next generation: re-entrant by
construction. The first start of a job is a restart that nobody had to ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from rerail.config import JobSpec, Settings
from rerail.flow import Decision, OutcomeKind, Place, Rung
from rerail.planner.outlook import Outlook
from rerail.recover.actions import ActionLog
from rerail.recover.assign import assignment, environment, plan_of
from rerail.recover.catch_up import longer_s, without_going_back
from rerail.recover.placing import Homeless, Waiting, settle
from rerail.recover.plan import Infeasible, choose_sources
from rerail.recover.rehabilitate import as_they_are, given_up, resumed
from rerail.recover.resets import LIMIT_S, Resets
from rerail.recover.stages import Marks, Stage
from rerail.recover.switch import Switch
from rerail.runtime import orders
from rerail.runtime.fleet import Agent, Fleet, Rank, RankState
from rerail.runtime.plans import Plan
from rerail.runtime.wire import Interrupt

STEPS_TO_PARK = 10
"""A survivor may take this many usual steps to run out an interrupted one."""
RESTART_GRACE_S = 1.0
"""Seconds between SIGTERM and SIGKILL for ranks that are started again; most end at once."""


class Execution:
    """One generation after the other."""

    def __init__(self, fleet: Fleet, spec: JobSpec, settings: Settings) -> None:
        self.fleet = fleet
        self.stage = Stage.IDLE
        self.rung: Rung | None = None
        self.problem = ""
        """Why the newest generation cannot be formed; the controller then decides anew."""
        self.leaving = False
        """The job is about to end: what the ranks hold is to be kept at one version."""
        self.dropped = ""
        """Why nothing came of what was begun, and nothing need be done instead."""
        self.outlook: Callable[[Rung | None, bool, float], Outlook] = lambda rung, back, wall: Outlook()
        """What ranks have to expect from here on, given the rung that is being taken and whether all go back by it."""
        self.marks = Marks()
        self.actions = ActionLog(spec.job, fleet)
        self.master: tuple[str, int] = ("127.0.0.1", 0)
        self.switch = Switch(fleet)
        self.resets = Resets(fleet)
        self._spec, self._settings = spec, settings
        self._began = 0.0
        self._building: dict[int, float] = {}
        self._fresh = True
        self._store_rank = 0
        self._restarts = (0, 0)
        self._plan: Plan | None = None

    # --- beginnings ---

    def restart(self, now: float, wall: float, *, restarts: tuple[int, int], cause: str, first: bool = False) -> None:
        """End all ranks and start them anew in a new generation; at the beginning of a job, just start them."""
        if not first:
            self.fleet.generation += 1
        self._begin(Rung.RESTART_ALL, now, wall, cause)
        self._fresh, self._restarts = True, restarts
        given_up(self.fleet)
        self.stage = Stage.WAITING_FOR_NODES
        self.advance(now, wall)

    def warm(self, decision: Decision, now: float, wall: float) -> None:
        """Make newcomers ready in other places, while all train on."""
        self._begin(decision.rung, now, wall, decision.id)
        self.switch.begin(decision.moves, now)
        fleet, settled = self.fleet, [n for n in self.fleet.ranks if n not in decision.moves]
        self._store_rank = min(settled)
        later = fleet.after(decision.moves)
        for number, place in sorted(decision.moves.items()):
            there = later.ranks[number]
            env = environment(later, there, self._spec, self.master, self._restarts)
            order = assignment(later, there, env, store_rank=self._store_rank, newcomer=True, restored=True)
            order = msgspec.structs.replace(order, generation=fleet.generation + 1)
            fleet.agents[place.node].send(orders.Promote(assignment=order, kept=fleet.pages.of(number), beside=True))
            self.actions.note("prepare", f"rank {number}", self._settings.build_timeout_s, detail=f"on {place}")
        self.stage = Stage.WARMING

    def _switch(self, now: float) -> None:
        """The newcomers are ready: interrupt all, those that are to leave included."""
        self.fleet.generation += 1
        self._began = self.marks.paused_at = now
        members = self.fleet.members()
        self._interrupt_anew(members)
        self.stage = Stage.PARKING

    def repair(self, decision: Decision, now: float, wall: float) -> None:
        """Interrupt the survivors and promote standbys for the others, or leave their seats empty, all in this very turn."""
        fleet = self.fleet
        fleet.generation += 1
        self._begin(decision.rung, now, wall, decision.id)
        lost = set(decision.ranks)
        self._move(decision.moves)
        survivors = [rank for rank in fleet.members() if rank.rank not in lost]
        # a newcomer that is still building could not open the store until it is done
        settled = [rank for rank in survivors if not rank.newcomer] or survivors
        self._store_rank = min(rank.rank for rank in settled)
        self._interrupt_anew(survivors)
        for number in sorted(lost):
            if decision.rung is Rung.SHRINK:
                fleet.ranks[number].leave(fleet.agent_of(number))
                self.actions.note("leave", f"rank {number}")
            elif decision.rung is Rung.RESET_DEVICE:
                self.resets.begin(fleet.ranks[number], now)
            else:
                self._promote(fleet.ranks[number], now)
        self._building = {n: t for n, t in self._building.items() if fleet.ranks[n].newcomer}
        self.stage = Stage.PARKING

    def _move(self, moves: Mapping[int, Place]) -> None:
        """Give ranks other places. What is left of them where they were is ended, if anybody is there to do it."""
        for number, place in moves.items():
            rank = self.fleet.ranks[number]
            left, there = self.fleet.agents[rank.node], place.node != rank.node
            self.actions.note("move", f"rank {number}", detail=f"from {rank.place} to {place}")
            rank.move_to(place)
            self.fleet.uprooted.add(number)
            if there:
                left.send(orders.Vacate(generation=self.fleet.generation, ranks=(number,)))

    def take_over(self, now: float, wall: float) -> None:
        """A former controller had started the ranks and they have not trained yet: wait for them to park."""
        self._begin(Rung.RESTART_ALL, now, wall, "")
        self._fresh = True
        self._store_rank = 0
        self.stage = Stage.PARKING

    def _begin(self, rung: Rung, now: float, wall: float, cause: str) -> None:
        self.switch.abandon()
        self.resets.waiting.clear()
        self.rung, self.problem, self.dropped, self.marks = rung, "", "", Marks()
        self.actions.cause, self.actions.wall = cause, wall
        self._began, self._fresh = now, False

    # --- going on ---

    def advance(self, now: float, wall: float) -> None:
        """Take every step that has become possible."""
        self.actions.wall = wall
        if self.stage is Stage.WAITING_FOR_NODES:
            self._gather(now)
        if self.stage is Stage.WARMING:
            self._go_on_warming(now)
        if self.stage is Stage.PARKING:
            self._go_on_resetting(now)
            self._form_when_parked(now)
        if self.stage is Stage.FORMING and all(rank.has_formed(self.fleet.generation) for rank in self.fleet.members()):
            self.stage, self.marks.formed_at = Stage.REPLAYING, now
        if self.stage is Stage.REPLAYING and all(rank.has_resumed for rank in self.fleet.members()):
            self.stage, self.marks.resumed_at = Stage.IDLE, now
            self.fleet.uprooted.clear()
            if self._fresh:  # what the ranks found in their arenas is theirs to tell
                found = [rank.resumed.version - 1 for rank in self.fleet.ranks.values() if rank.resumed is not None]
                self.marks.version = min(found, default=self.marks.version)
        if self.stage is Stage.IDLE and self.fleet.finished and not self.fleet.dismissed:
            self._dismiss()

    def _go_on_warming(self, now: float) -> None:
        self.switch.overdue(now, self._settings.build_timeout_s)
        if self.fleet.in_state(RankState.FINISHED, RankState.EXITED):
            self.dropped, self.stage = "the training was over before a spare was ready", Stage.IDLE
            self.switch.abandon()
        elif self.switch.problem:
            self.problem, self.stage = self.switch.problem, Stage.IDLE
            self.switch.abandon()
        elif self.switch.ready:
            self._switch(now)

    def _go_on_resetting(self, now: float) -> None:
        for rank in self.resets.done():
            self.actions.note("reset", f"device {rank.place}", LIMIT_S)
            self._promote(rank, now)
        failed = self.resets.failed(now)
        for place, why in failed.items():
            self.actions.note("reset", f"device {place}", LIMIT_S, outcome=OutcomeKind.PERMANENT, detail=why)
        if failed:
            self.problem, self.stage = "; ".join(failed.values()), Stage.IDLE

    def hear(self, message: orders.ToController) -> bool:
        """What only this has to know: a free port for MASTER_PORT, a newcomer beside a rank, the end of a reset."""
        match message:
            case orders.PortPicked(port=port, generation=generation):
                if self.stage is Stage.PICKING_PORT and generation == self.fleet.generation:
                    self._start_ranks(port)
            case orders.Relayed(beside=True, rank=rank, message=inner):
                self.switch.heard(rank, inner)
            case orders.RankExited(beside=True, rank=rank):
                self.switch.heard(rank, message)
            case orders.ChoreDone():
                return self.resets.heard(message)
            case _:
                return False
        return True

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
            return self._began + self._settings.node_wait_s
        if self.stage is Stage.WARMING:
            return self.switch.deadline(self._settings.build_timeout_s)
        if self._fresh or self.stage not in (Stage.PARKING, Stage.FORMING):
            return None
        times = [self._began_of(rank) + self._allowed(rank) for rank in self._awaited()]
        return min((time for time in (*times, self.resets.deadline()) if time is not None), default=None)

    def _dismiss(self) -> None:
        """Every rank is past its last step: none is needed to repair another any more."""
        self.fleet.dismissed = True
        for node in self.fleet.placed():
            self.fleet.agents[node].send(orders.DismissAll())
        self.actions.note("dismiss", "all")

    def resend(self, agent: Agent, told: Iterable[orders.RankStatus], now: float) -> None:
        """An agent is back after its connection broke: say again whatever its ranks, by its own word, have not heard."""
        fleet, heard = self.fleet, {status.rank: status for status in told}
        fleet.tidy_up(agent, beside=not self.switch.waiting)  # others may have got the places of its ranks
        if self.stage is Stage.PICKING_PORT and fleet.agent_of(0) is agent:
            agent.send(orders.PickPort(generation=fleet.generation))
        elif self.stage is Stage.PARKING:
            ranks = [r for r in fleet.on_node(agent.node) if r.state is not RankState.LOST and r in fleet.members()]
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
                agent.send(orders.FormAll(plan=self._plan))
        elif fleet.dismissed:
            agent.send(orders.DismissAll())

    # --- restart ---

    def _gather(self, now: float) -> None:
        """Go on when all ranks have a place, or when time is up and enough nodes are there."""
        fleet = self.fleet
        try:
            self._move(settle(fleet, self._spec, now - self._began, self._settings.node_wait_s))
        except Waiting:
            return
        except Homeless as reason:
            self.problem, self.stage = str(reason), Stage.IDLE
            return
        self._building = {}
        self._store_rank = 0
        if self._spec.master_port:
            self._start_ranks(self._spec.master_port)
        else:
            self.stage = Stage.PICKING_PORT
            fleet.agent_of(0).send(orders.PickPort(generation=fleet.generation))

    def _start_ranks(self, port: int) -> None:
        fleet = self.fleet
        self.master = (self._spec.master_addr or fleet.agent_of(0).address, port)
        fleet.dismissed = False
        for rank in fleet.ranks.values():
            rank.begin(fleet.generation, newcomer=False)
        for node in fleet.placed():
            self._start_node(node)
        for agent in fleet.connected():
            if agent.node not in fleet.placed():
                agent.send(orders.Vacate(generation=fleet.generation, keep=()))
        self.stage = Stage.PARKING

    def _start_node(self, node: str) -> None:
        fleet = self.fleet
        assigned = tuple(
            assignment(fleet, rank, self._env(rank), store_rank=0, newcomer=False, restored=fleet.generation > 0)
            for rank in fleet.on_node(node)
        )
        grace = RESTART_GRACE_S if fleet.generation > 0 else 0.0
        fleet.agents[node].send(orders.Start(generation=fleet.generation, assignments=assigned, grace_s=grace))
        self.actions.note("start", f"node {node}")

    # --- repair ---

    def _interrupt_anew(self, survivors: list[Rank]) -> None:
        for rank in survivors:
            rank.parked = rank.formed = rank.resumed = None
            if rank.state not in (RankState.STARTING, RankState.BUILDING):
                rank.move(RankState.INTERRUPTED)
        self._interrupt(survivors)

    def _interrupt(self, survivors: list[Rank]) -> None:
        fleet = self.fleet
        order = Interrupt(generation=fleet.generation, store_rank=self._store_rank, trusted=fleet.back.trusted)
        for node in fleet.placed():
            ranks = tuple(rank.rank for rank in survivors if rank.node == node)
            if ranks:
                fleet.agents[node].send(orders.InterruptAll(interrupt=order, ranks=ranks))
                self.actions.note("interrupt", f"ranks {', '.join(map(str, ranks))}", self._settings.park_timeout_s)

    def _promote(self, rank: Rank, now: float) -> None:
        rank.begin(self.fleet.generation, newcomer=True)
        self._building[rank.rank] = now
        order = assignment(self.fleet, rank, self._env(rank), store_rank=self._store_rank, newcomer=True, restored=True)
        kept = self.fleet.pages.of(rank.rank) if rank.rank in self.fleet.uprooted else []
        self.fleet.agent_of(rank.rank).send(orders.Promote(assignment=order, kept=kept))
        self.actions.note("promote", f"rank {rank.rank}", self._settings.build_timeout_s)

    # --- forming ---

    def _form_when_parked(self, now: float) -> None:
        fleet, members = self.fleet, self.fleet.members()
        if not members or not all(rank.has_parked(self.fleet.generation) for rank in members):
            return
        self.marks.parked_at = now
        offered = {r.rank: r.parked for r in members if r.parked is not None}
        self.marks.parked = as_they_are(self.switch.offered(offered), fleet.healing)
        newcomers = frozenset(rank.rank for rank in members if rank.newcomer) | set(self.switch.waiting)
        vacant = frozenset(rank.rank for rank in fleet.vacant())
        exact = choose_sources(self.marks.parked, newcomers, vacant)
        choice = exact if self.leaving else resumed(self.marks.parked, exact, fleet, self._settings)
        if not self.leaving:
            choice = without_going_back(self.marks.parked, choice, fleet)
        self.marks.stateless = isinstance(choice, Infeasible)
        port = self.marks.parked[self._store_rank].store_port if self._store_rank in self.marks.parked else 0
        if len(members) + len(vacant) < len(fleet.ranks):
            choice = Infeasible(reason="some ranks have ended already")
        elif not port:
            choice = Infeasible(reason=f"rank {self._store_rank} opened no store")
        if isinstance(choice, Infeasible):
            self.problem, self.stage = choice.reason, Stage.IDLE
            self.actions.note("form", "all", outcome=OutcomeKind.PERMANENT, detail=choice.reason)
            return
        kept = [one for rank in self.switch.waiting for one in fleet.pages.of(rank)]
        self.switch.take_over()
        held = max((parked.version for parked in self.marks.parked.values()), default=-1)
        outlook = self.outlook(self.rung if fleet.generation else None, choice.version < held, self.actions.wall)
        plan = plan_of(fleet, choice, (self._store_rank, port), leaving=self.leaving, outlook=outlook)
        self._plan = plan
        self.marks.version, self.marks.sources, fleet.healing = choice.version, choice.sources, choice.healing
        for node in fleet.placed():
            here = [rank.rank for rank in fleet.on_node(node)]
            fleet.agents[node].send(orders.FormAll(plan=plan, kept=[one for one in kept if one.rank in here]))
        for rank in members:
            rank.move(RankState.FORMING)
        fleet.formed_generation, self.stage = fleet.generation, Stage.FORMING
        where = "what the ranks find" if self._fresh and fleet.generation else f"step {choice.version}"
        self.actions.note("form", "all", self._settings.build_timeout_s, detail=f"{where}{choice.note}")

    # --- deadlines ---

    def _awaited(self) -> list[Rank]:
        newest, parking = self.fleet.generation, self.stage is Stage.PARKING
        here = [rank for rank in self.fleet.members() if rank.state is not RankState.LOST]
        return [rank for rank in here if not (rank.has_parked(newest) if parking else rank.has_formed(newest))]

    def _allowed(self, rank: Rank) -> float:
        if self.stage is Stage.FORMING and self._plan is not None:
            longer = longer_s(self._plan.sources, self._plan.version, self.fleet.usual_step_s())
            return self._settings.build_timeout_s + longer
        if rank.newcomer:
            return self._settings.build_timeout_s
        return max(self._settings.park_timeout_s, STEPS_TO_PARK * self.fleet.usual_step_s())

    def _began_of(self, rank: Rank) -> float:
        if self.stage is Stage.FORMING:
            return self.marks.parked_at
        return self._building.get(rank.rank, self._began) if rank.newcomer else self._began

    def _env(self, rank: Rank) -> dict[str, str]:
        return environment(self.fleet, rank, self._spec, self.master, self._restarts)
