"""One simulated job from its beginning to the end of the run: trains, is hit, and is repaired, with SimPy's clock.

Turns a scenario, a policy and a list of faults into what a run is told by (`sim.run`). The flow is that of `runtime.controller`:
what is seen is named, its root found, a rung chosen, carried out, and its cost remembered for the next choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import simpy

from rerail.decide.axes import Running
from rerail.flow import Cost, Diagnosis, Report, Rung, new_id
from rerail.planner.rates import estimate
from rerail.runtime.incident import NEWCOMERS
from rerail.sim.cluster import LASTING, Cluster
from rerail.sim.desk import Desk
from rerail.sim.faults import PLANNED as PLANNED_FAULT
from rerail.sim.faults import Fault, danger
from rerail.sim.policies import Plan, Rates, plan_of, usual_rates
from rerail.sim.repair import DETECT, PLANNED, T1, T2, T3, T4, Incident, Repair
from rerail.sim.scenario import Scenario
from rerail.sim.signals import JOB, Scene, back, seen
from rerail.sim.stopwatch import Stopwatch
from rerail.sim.training import LOST, NOBODY, Training

PRIOR = 10
"""Faults that the published share of lost nodes counts for."""
MOVED = 1.25
"""How much rates must have changed before saves are planned anew."""
OFTEN = 8
"""After so many interruptions, every so many of them are enough to look at the rates again."""
NOTHING = Cost()
STAGES = {"detect": DETECT, "t0": LOST, "t1": T1, "t2": T2, "t3": T3, "t4": T4}

Flow = Generator[simpy.Event, Any, None]


class Hit(NamedTuple):
    """A fault that concerns the job."""

    fault: Fault
    ranks: tuple[int, ...]
    evacuate: bool = False
    """They still work."""
    onset: int = -1
    """Of wrong results: the version at which they began."""


class Job:
    """One run."""

    def __init__(self, scenario: Scenario, plan: Plan, faults: Sequence[Fault]) -> None:
        self.scenario, self.plan, self._faults = scenario, plan, faults
        self.env = simpy.Environment()
        self.cluster = Cluster(scenario)
        self.desk = Desk(scenario, plan, self.cluster)
        rates = usual_rates(scenario)
        self.training = Training(scenario.step_s, plan.tiers(scenario), plan_of(plan, scenario, rates))
        self.repair = Repair(scenario, plan, self.cluster, self.desk, self.training)
        self.watch = Stopwatch(self.env, self.training.losses)
        self._usual = self._planned_for = rates
        self._inbox: list[Hit] = []
        self._started, self._generation = 0.0, 0
        self._interrupted: list[float] = []
        self._of_nodes = 0
        self.struck: Counter[str] = Counter()
        """Faults by kind, whether or not they hit the job."""
        self.rungs: Counter[Rung] = Counter()
        self.spent: list[float] = []
        """Seconds from each interruption until training went on."""

    def run(self) -> None:
        """To the end."""
        self.env.process(self._strike_all())
        self.env.process(self._live())
        self.env.run(until=self.scenario.wall_s)
        self.watch.stop()
        self.training.finish(self.watch.now)

    # --- what happens ---

    def _strike_all(self) -> Flow:
        for fault in self._faults:
            yield self.env.timeout(max(0.0, fault.at - self.watch.now))
            self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        if fault.hurry > danger(self.scenario, self.watch.now - self._started):
            return  # not every fault of software that could happen does
        self.struck[fault.kind] += 1
        if fault.kind == PLANNED_FAULT:
            self._call(Hit(fault, ()))
            return
        ranks = tuple(self.cluster.hit(fault))
        self.cluster.damage(fault)
        if fault.needs in LASTING and fault.scope != "job":
            self.env.process(self._mend(fault))
        running = self.desk.running(fault)
        if fault.seen == "silent":
            if ranks:
                self.env.process(self._surface(fault, ranks))
        elif ranks and running is Running.NOW:
            self._call(Hit(fault, ranks))
        else:
            self.desk.told(fault, self._scene(ranks))
            if ranks and running is Running.BOUNDARY:
                self._call(Hit(fault, ranks, evacuate=True))

    def _call(self, hit: Hit) -> None:
        self._inbox.append(hit)
        self.watch.ring()

    def _surface(self, fault: Fault, ranks: tuple[int, ...]) -> Flow:
        """Wrong results are found later; everything since is lost."""
        onset = self._version_now()
        yield self.env.timeout(self.plan.detects(self.scenario, fault, self.plan.settings))
        self._call(Hit(fault, ranks, onset=onset))

    def _mend(self, fault: Fault) -> Flow:
        yield self.env.timeout(fault.repair_s)
        self.cluster.mend(fault)
        self.desk.repaired(fault)
        self.watch.came_back()

    # --- the flow ---

    def _live(self) -> Flow:
        while True:
            self.training.begin(self.watch.now, 1 - len(self.cluster.vacant) / self.scenario.gpus)
            while not (self._inbox or (self.cluster.vacant and self.cluster.fillable())):
                self.watch.rearm()
                yield self.watch.bell | self.watch.returned
            self.watch.rearm()
            began = self.watch.now
            if self._inbox and self._inbox[0].fault.kind == PLANNED_FAULT:
                yield from self._restart_as_planned(self._inbox.pop(0))
            elif not self._inbox or self._inbox[0].evacuate:
                yield from self._rearrange()
            else:
                self.training.halt(began, self._inbox[0].fault.kind)
                yield from self._recover(began)
            self._generation += 1

    def _restart_as_planned(self, hit: Hit) -> Flow:
        """Everything is saved before, and what comes meanwhile is seen afterwards."""
        self.training.finish(self.watch.now)
        self.training.saved_all()
        _, tier = self.training.newest("job")
        cost = self.plan.times(self.scenario, Rung.RESTART_ALL)
        load_s = tier.restore_s if tier is not None else self.scenario.load_s
        yield from self.watch.spend(PLANNED, hit.fault.kind, cost.total + load_s, deaf=True)
        self._started = self.watch.now

    def _rearrange(self) -> Flow:
        """Nothing is broken: ranks leave a place in good time, or empty seats are filled. No step is lost."""
        hit = self._inbox.pop(0) if self._inbox else None
        self.training.finish(self.watch.now)
        if hit is not None:
            diagnosis = self.desk.evacuation(hit.fault, hit.ranks, self.watch.now)
        else:
            node = self.cluster.places[self.cluster.fillable()[0]].node
            diagnosis = self._diagnosed(self.desk.heard([back(node, self._scene(()))]), ())
        if diagnosis is None:
            return
        incident = Incident(cause=hit.fault.kind if hit is not None else NOBODY, began=self.watch.now)
        decision = self.desk.decide(diagnosis, {}, self.watch.now)
        before = self._spent(incident.cause)
        for incident.attempts in range(1, NEWCOMERS + 1):
            if (yield from self.repair.carry_out(decision, incident, self.watch, self._scene(()))):
                self.rungs[decision.rung] += 1
                self._report(decision.rung, diagnosis, self._spent(incident.cause, before), incident)
                return
            if self._inbox or incident.newcomers_lost:
                return  # training goes on from where things stand

    def _recover(self, began: float) -> Flow:
        """Until training goes on, whatever else comes meanwhile."""
        first = self._inbox[0].fault
        incident = Incident(cause=first.kind, began=began)
        before = self._spent(first.kind)
        if first.seen != "silent":
            delay = self.plan.detects(self.scenario, first, self.plan.settings)
            yield from self.watch.spend(DETECT, first.kind, delay, deaf=True)
        diagnosis: Diagnosis | None = None
        while True:
            self._join(incident)
            found = self._diagnosed(incident.fresh, incident.lost) if incident.fresh else None
            if found is None and incident.fresh:
                yield from self.watch.spend(DETECT, first.kind, self.plan.settings.echo_window_s, deaf=True)
                found = self._diagnosed(incident.fresh, incident.lost, waited=True)
            if diagnosis is None and found is not None:
                self.desk.begin(found, incident.fresh, self.training.version)
            incident.fresh = []
            diagnosis = found or diagnosis
            assert diagnosis is not None, "an incident begins with something that was seen"
            decision = self.desk.decide(diagnosis, incident.tried, self.watch.now)
            incident.attempts += 1
            self._generation += 1
            if (yield from self.repair.carry_out(decision, incident, self.watch, self._scene(()))):
                break
        self._close(incident, diagnosis, self._spent(first.kind, before))

    def _join(self, incident: Incident) -> None:
        """What has come in belongs to this incident; planned restarts wait."""
        later = [hit for hit in self._inbox if hit.fault.kind == PLANNED_FAULT]
        for hit in self._inbox:
            if hit in later:
                continue
            fault, ranks = hit.fault, tuple(rank for rank in hit.ranks if rank not in self.cluster.vacant)
            trusted = self._trusted(hit)
            scene = self._scene(ranks, trusted)
            self.desk.told(fault, scene)
            incident.faults.append(fault)
            incident.hit |= set(ranks)
            incident.nodes_lost |= fault.scope in ("node", "batch")
            if not (fault.silent_root or fault.seen in ("raised", "silent") or hit.evacuate):
                incident.lost |= set(ranks)
            if trusted >= 0:
                incident.trusted = min(trusted, incident.trusted) if incident.trusted >= 0 else trusted
            if not hit.evacuate:
                incident.fresh += self.desk.heard(seen(fault, scene))
        self._inbox = later
        self.watch.rearm()

    def _trusted(self, hit: Hit) -> int:
        """Where wrong results began, or the last time before that replicas were compared."""
        if hit.onset < 0:
            return -1
        if not self.plan.replicas or self.plan.settings.vote_every <= 0:
            return hit.onset
        return hit.onset // self.plan.settings.vote_every * self.plan.settings.vote_every

    def _diagnosed(self, fresh: list[Any], lost: Any, *, waited: bool = False) -> Diagnosis | None:
        return self.desk.diagnose(fresh, lost, self.watch.now, waited=waited)

    def _close(self, incident: Incident, diagnosis: Diagnosis, cost: Cost) -> None:
        rung = incident.rung or Rung.STOP
        self.rungs[rung] += 1
        self._interrupted.append(incident.began)
        self._of_nodes += incident.nodes_lost
        self.spent.append(self.watch.now - incident.began)
        if rung in (Rung.RESTART_ALL, Rung.STOP):
            self._started = self.watch.now
        self._report(rung, diagnosis, cost, incident)
        self._plan_anew()

    def _spent(self, cause: str, before: Cost = NOTHING) -> Cost:
        """Seconds that have gone into each stage because of this kind of fault, beyond those of before."""
        seconds = self.training.losses.seconds
        return Cost(**{name: seconds.get((s, cause), 0.0) - getattr(before, name) for name, s in STAGES.items()})

    def _report(self, rung: Rung, diagnosis: Diagnosis, cost: Cost, incident: Incident) -> None:
        """What it cost counts for the next choice."""
        report = Report(
            id=new_id("report"),
            job=JOB,
            at=self.watch.now,
            incident=len(self.spent),
            code=diagnosis.code,
            summary=diagnosis.summary,
            rung=rung,
            ok=True,
            cost=cost,
            attempts=incident.attempts,
        )
        self.desk.over(report, [one for one in incident.tried if one is not rung])

    # --- the saves ---

    def _plan_anew(self) -> None:
        """Saves follow what the job has seen of faults, when that is something else than before."""
        times = self._interrupted
        if set(self.plan.when) >= {tier.name for tier in self.training.tiers} or (
            len(times) > OFTEN and len(times) % OFTEN
        ):
            return
        gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
        usual = self._usual.process + self._usual.node
        total = estimate(gaps, self.watch.now - times[-1], usual).per_s
        node = (self._of_nodes + PRIOR * self._usual.node / usual) / (len(times) + PRIOR)
        rates = Rates(process=total * (1 - node), node=total * node)
        before = self._planned_for
        changes = (rates.process / before.process, rates.node / before.node)
        if any(not 1 / MOVED < change < MOVED for change in changes):
            self._planned_for = rates
            self.training.plan(plan_of(self.plan, self.scenario, rates))

    def _version_now(self) -> int:
        return self.training.version_at(self.watch.now)

    def _scene(self, ranks: tuple[int, ...], trusted: int = -1) -> Scene:
        return Scene(
            at=self.watch.now,
            version=self.training.version,
            generation=self._generation,
            ranks=ranks,
            places=self.cluster.places,
            echoes=self.scenario.echoes,
            trusted=trusted,
        )
