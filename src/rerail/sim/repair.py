"""Carries a decision out on the simulated cluster: takes the time it takes, finds out whether it helps, and from which version all go on.

Called by `sim.job` with one incident; what `recover` does with processes, this does with numbers.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from rerail.config import EXIT_DO_NOT_REQUEUE
from rerail.flow import Cost, Decision, Event, Place, Rung
from rerail.planner.model import Tier
from rerail.runtime.incident import NEWCOMERS
from rerail.sim.cluster import Cluster
from rerail.sim.desk import Desk
from rerail.sim.faults import Fault
from rerail.sim.policies import Plan
from rerail.sim.scenario import Scenario
from rerail.sim.signals import Scene, not_parked
from rerail.sim.stopwatch import Stopwatch, Waits
from rerail.sim.training import Training

DETECT, T1, T2, T3, T4 = "detect", "reschedule (T1)", "communication (T2)", "load (T3)", "compile (T4)"
WAITING, STOPPED, PLANNED = "waiting for nodes", "stopped", "planned restarts"
KEEPS = (Rung.RETRY_STEP, Rung.ROLL_BACK, Rung.SHRINK)
"""Rungs that start no process."""


@dataclass
class Incident:
    """One fault, and whatever comes into its repair."""

    cause: str
    began: float
    faults: list[Fault] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    hit: set[int] = field(default_factory=set)
    """All ranks that its faults hit, lost or not."""
    fresh: list[Event] = field(default_factory=list)
    tried: dict[Rung, str] = field(default_factory=dict)
    nodes_lost: bool = False
    trusted: int = -1
    newcomers_lost: int = 0
    attempts: int = 0
    rung: Rung | None = None


class Repair:
    """What becomes of decisions."""

    def __init__(self, scenario: Scenario, plan: Plan, cluster: Cluster, desk: Desk, training: Training) -> None:
        self._scenario, self._plan, self._cluster = scenario, plan, cluster
        self._desk, self._training = desk, training
        self.stops = 0

    def carry_out(self, decision: Decision, incident: Incident, watch: Stopwatch, scene: Scene) -> Waits:
        """True: the job trains again. False: it has come to nothing, or something else has happened meanwhile."""
        incident.rung = decision.rung
        if decision.rung is Rung.STOP:
            self.stops += 1
            human = decision.exit_code == EXIT_DO_NOT_REQUEUE
            wait_s = self._scenario.person_s if human else self._scenario.requeue_s
            yield from watch.spend(STOPPED, incident.cause, wait_s, deaf=True)
            self._desk.begun_anew()
            return (yield from self._restart(incident, watch))
        if decision.rung is Rung.RESTART_ALL:
            return (yield from self._restart(incident, watch))
        times = self._plan.times(self._scenario, decision.rung)
        if decision.rung in KEEPS and (stuck := self._stuck(incident)):
            park_s = self._plan.settings.park_timeout_s
            yield from watch.spend(T1, incident.cause, park_s)
            incident.lost |= stuck
            incident.fresh = self._desk.heard(not_parked(rank, scene) for rank in sorted(stuck))
            return False
        if not (yield from self._places(decision, incident, watch, times)):
            return False
        return (yield from self._form(decision, incident, watch, times))

    def _stuck(self, incident: Incident) -> set[int]:
        """Ranks that are broken and do not say so: they will not leave their step."""
        silent = any(fault.silent_root for fault in incident.faults)
        return incident.hit - incident.lost if silent else set()

    def _places(self, decision: Decision, incident: Incident, watch: Stopwatch, times: Cost) -> Waits:
        """Ranks take their places; a place that is broken, though nobody knew, costs a newcomer."""
        if decision.rung in (Rung.GROW, Rung.HOT_SWITCH):
            wanted = {rank: decision.moves.get(rank, self._cluster.places[rank]) for rank in decision.ranks}
            if useless := [place for place in wanted.values() if not self._cluster.works(place)]:
                return (yield from self._in_vain(useless, decision.ranks, incident, watch, times))
        self._uproot(decision.moves, incident)
        self._cluster.move(decision.moves)
        if decision.rung is Rung.SHRINK:
            self._cluster.empty(decision.ranks)
            return True
        self._cluster.fill(decision.ranks)
        bad = [rank for rank in decision.ranks if not self._cluster.works(self._cluster.places[rank])]
        if not bad:
            return True
        yield from watch.spend(T1, incident.cause, times.t1)
        incident.newcomers_lost += 1
        if incident.newcomers_lost >= NEWCOMERS:
            incident.tried[decision.rung] = f"{incident.newcomers_lost} replacements died while they were built"
            for rank in bad:
                self._desk.suspect(self._cluster.places[rank], "replacements died there")
        return False

    def _in_vain(
        self, bad: Iterable[Place], ranks: Iterable[int], incident: Incident, watch: Stopwatch, times: Cost
    ) -> Waits:
        """Nobody had to leave for it: all stay as they were."""
        yield from watch.spend(T1, incident.cause, times.t1)
        incident.newcomers_lost += 1
        self._cluster.doubted |= set(bad)
        self._cluster.empty(self._cluster.vacant & set(ranks))  # not to be tried again before something is repaired
        return False

    def _uproot(self, moves: dict[int, Place], incident: Incident) -> None:
        """What a rank kept in the memory of its node does not come along."""
        places = self._cluster.places
        incident.nodes_lost |= any(places[rank].node != place.node for rank, place in moves.items())

    def _form(self, decision: Decision, incident: Incident, watch: Stopwatch, times: Cost) -> Waits:
        version, load_s = self._source(decision.rung, incident)
        for stage, seconds in ((T1, times.t1), (T2, times.t2)):
            if not (yield from watch.spend(stage, incident.cause, seconds)):
                return False
        if self._unlucky(incident):
            return False
        for stage, seconds in ((T3, times.t3 + load_s), (T4, times.t4)):
            if not (yield from watch.spend(stage, incident.cause, seconds)):
                return False
        self._resume(version, decision.rung, incident)
        return True

    def _unlucky(self, incident: Incident) -> bool:
        first = incident.faults[0] if incident.faults else None
        drawn = (first.number, first.luck) if first is not None else incident.cause
        return random.Random(f"{drawn}:{incident.attempts}").random() < self._scenario.attempt_fails

    # --- a restart of all ---

    def _restart(self, incident: Incident, watch: Stopwatch) -> Waits:
        wanting = incident.lost | incident.hit | self._cluster.vacant
        while not self._settle(wanting, incident):
            watch.rearm()
            yield from watch.until(WAITING, incident.cause, watch.bell | watch.returned)
        watch.rearm()
        times = self._plan.times(self._scenario, Rung.RESTART_ALL)
        for stage, seconds in ((T1, times.t1), (T2, times.t2)):
            if not (yield from watch.spend(stage, incident.cause, seconds)):
                return False
        bad = [rank for rank in wanting if not self._cluster.works(self._cluster.places[rank])]
        if bad:  # the second time somebody looks
            for rank in bad:
                self._desk.suspect(self._cluster.places[rank], "the job did not start there")
            return False
        version, load_s = self._source(Rung.RESTART_ALL, incident)
        for stage, seconds in ((T3, times.t3 + load_s), (T4, times.t4)):
            if not (yield from watch.spend(stage, incident.cause, seconds)):
                return False
        self._resume(version, Rung.RESTART_ALL, incident)
        return True

    def _settle(self, ranks: Iterable[int], incident: Incident) -> bool:
        """Give every rank a place that is not known to be bad; False: there are not enough."""
        homeless = [rank for rank in sorted(ranks) if self._cluster.bar(rank)]
        free = self._cluster.free(len(homeless))
        moves = dict(zip(homeless, free, strict=False))
        self._uproot(moves, incident)
        self._cluster.move(moves)
        self._cluster.fill(sorted(ranks))
        return len(moves) == len(homeless)

    # --- from where all go on ---

    def _source(self, rung: Rung, incident: Incident) -> tuple[int, float]:
        """The version to go on from, and what it takes to load it."""
        training, scenario = self._training, self._scenario
        whole = rung is not Rung.RESTART_ALL and incident.trusted < 0
        if whole and rung in KEEPS and not incident.lost:
            return training.version, 0.0
        copied = self._plan.replicas and scenario.replicas > 1 and not self._copies_gone(incident)
        if whole and copied:
            return training.version, scenario.transfer_s
        version, tier = training.newest(self._scope(incident), incident.trusted)
        return version, _restore(tier, scenario)

    def _scope(self, incident: Incident) -> str:
        if incident.nodes_lost and self._copies_gone(incident):
            return "job"
        return "node" if incident.nodes_lost else "process"

    def _copies_gone(self, incident: Incident) -> bool:
        """Whether some rank and all that hold the same are lost together; copies are as far apart as can be."""
        world, copies = self._scenario.gpus, max(2, self._scenario.replicas)
        apart = max(1, world // copies)
        return any(all((rank + n * apart) % world in incident.lost for n in range(1, copies)) for rank in incident.lost)

    def _resume(self, version: int, rung: Rung, incident: Incident) -> None:
        share = 1.0
        if self._plan.shadow and rung is not Rung.RESTART_ALL and incident.trusted < 0:
            share = self._scenario.shadow_share
        self._training.go_back(version, incident.cause, share)
        self._training.forget(self._scope(incident))


def _restore(tier: Tier | None, scenario: Scenario) -> float:
    return tier.restore_s if tier is not None else scenario.load_s
