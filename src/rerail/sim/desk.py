"""What rerail makes of a simulated fault: drives its own classifier, diagnosis, ledger and choice, as `runtime.controller` does.

Turns faults into a Decision, with a simulated clock instead of the real one and `sim.cluster` instead of a fleet. Nothing is decided
here: what is missing of production is only its processes. Called by `sim.job`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rerail.decide.axes import Admission, Repair, Running
from rerail.decide.budget import EVACUATE, Budget
from rerail.decide.choose import choose
from rerail.decide.escalate import Change, What
from rerail.decide.setbacks import Setbacks, is_setback
from rerail.decide.situation import Situation, broken
from rerail.diagnose.rootcause import Facts, diagnose
from rerail.flow import Decision, Diagnosis, Event, Place, Report, Rung, Signal, new_id
from rerail.runtime.experience import Experience
from rerail.runtime.handling import Handling
from rerail.runtime.isolation import place_of
from rerail.runtime.machines import Machines
from rerail.sim.cluster import Cluster
from rerail.sim.faults import Fault
from rerail.sim.kinds import classifier
from rerail.sim.policies import Plan
from rerail.sim.scenario import Scenario
from rerail.sim.signals import EPOCH, JOB, Scene, machine, nodes_of

RESETS = "no command is known that resets devices (setting reset_command)"


def _quiet(text: str) -> None:
    """Nobody reads along."""


class Desk:
    """Of one job."""

    def __init__(self, scenario: Scenario, plan: Plan, cluster: Cluster) -> None:
        self._scenario, self._plan, self._cluster = scenario, plan, cluster
        self._classifier = classifier()
        self._handling = Handling(plan.settings, self._classifier.catalog, JOB, _quiet)
        devices = (f"device:{name}/{number}" for name in cluster.names for number in range(cluster.per_node))
        self._handling.members = frozenset((*(f"node:{name}" for name in cluster.names), *devices))
        self._machines = Machines(self._classifier, _quiet)
        self._passing: dict[str, str] = {}
        """Subjects that a fault keeps new work away from for as long as it stands."""
        self.budget, self.setbacks = Budget(), Setbacks()
        self._experience = Experience()
        self._history = self._experience.history

    # --- what is told ---

    def running(self, fault: Fault) -> Running:
        """Whether a fault that a log names makes ranks stop, as the policy has it."""
        return self._handling.verdict(fault.code).axes.running if fault.seen == "explicit" else Running.NOW

    def told(self, fault: Fault, scene: Scene) -> None:
        """What monitors tell of machines: counted, and new work kept away where that is due."""
        for node in self._cluster.nodes_of(fault):
            for signal in machine(fault, scene, node):
                event = self._machines.take(signal)
                seen = self._handling.seen(event, str(signal.payload["subject"]))
                self._take(self._handling.note(seen, event.at))
                if seen.axes.admission is Admission.NO:
                    self._take(self._handling.isolate(seen, event.at))
                elif seen.axes.admission is Admission.NOT_NOW:
                    self._passing[seen.subject] = event.message
        self._refresh()

    def heard(self, signals: Iterable[Signal]) -> list[Event]:
        """Signals by their names."""
        return [self._classifier.classify(signal) for signal in signals]

    def repaired(self, fault: Fault) -> None:
        """What a fault had broken is whole, and somebody has checked it."""
        names = self._cluster.nodes_of(fault)
        subjects = [f"device:{names[0]}/{fault.device}"] if fault.scope == "device" and names else []
        for subject in (*subjects, *(f"node:{name}" for name in names)):
            self._passing.pop(subject, None)
            if subject in self._handling.ledger.quarantine:
                self._handling.release(subject)
        self._refresh()

    def suspect(self, place: Place, why: str) -> None:
        """A place where ranks have failed without anybody saying why."""
        self._passing[f"device:{place}"] = why
        self._refresh()

    # --- what is decided ---

    def diagnose(self, fresh: Sequence[Event], gone: Iterable[int], at: float, *, waited: bool) -> Diagnosis | None:
        """The root cause, or None while only echoes have been heard."""
        events = [*fresh, *self._machines.causes_of(fresh)]
        return diagnose(events, Facts(gone=frozenset(gone)), at=EPOCH + at, waited=waited)

    def evacuation(self, fault: Fault, ranks: Sequence[int], at: float) -> Diagnosis | None:
        """Ranks that still work where nobody should be, and have somewhere to go."""
        leaving = [rank for rank in ranks if self._cluster.bar(rank)]
        free = len(self._cluster.free(len(leaving)))
        if not (leaving and free and self._plan.aware):
            return None
        return Diagnosis(
            id=new_id("diagnosis"),
            job=JOB,
            at=EPOCH + at,
            code=fault.code,
            root="",
            node=self._cluster.places[leaving[0]].node,
            ranks=tuple(leaving[:free]),
            hardware=True,
            transient=False,
            rule=EVACUATE,
            summary=self._cluster.bar(leaving[0]),
        )

    def begin(self, diagnosis: Diagnosis, fresh: Sequence[Event], version: int) -> None:
        """A new incident is counted, and whoever is to blame for it."""
        self.budget = self.budget.note(diagnosis, version, aware=self._plan.aware)
        if is_setback(diagnosis):
            self.setbacks = self.setbacks.note(diagnosis)
        for event in fresh:
            self._blamed(event)

    def decide(self, diagnosis: Diagnosis, tried: dict[Rung, str], at: float) -> Decision:
        """The rung to take, with what it costs counted."""
        self._tick(at)
        decision = choose(diagnosis, self._situation(diagnosis, tried, at), at=EPOCH + at)
        if decision.rung is Rung.RESTART_ALL:
            self.budget = self.budget.spend_restart()
        elif decision.ranks and decision.rung not in (Rung.HOT_SWITCH, Rung.SHRINK):
            places = self._cluster.places
            self._handling.restarted({rank: places[rank].node for rank in decision.ranks}, EPOCH + at)
        return decision

    def over(self, report: Report, failed: Iterable[Rung]) -> None:
        """An incident is over, and its cost known."""
        self._experience.note(report, failed)
        self._history = self._experience.history

    def begun_anew(self) -> None:
        """The job was ended and started again: another job, as far as counters go."""
        self.budget, self.setbacks = Budget(), Setbacks()

    def _situation(self, diagnosis: Diagnosis, tried: dict[Rung, str], at: float) -> Situation:
        cluster, plan = self._cluster, self._plan
        fault = self._classifier.catalog.get(diagnosis.code)
        verdict = self._handling.verdict(diagnosis.code, node=diagnosis.node)
        hit = broken(diagnosis)
        fillable = cluster.fillable() if cluster.vacant else ()
        acts = bool(diagnosis.lost) or diagnosis.rule == EVACUATE
        return Situation(
            aware=plan.aware,
            in_training=True,
            settled=True,
            survivors=self._scenario.gpus - len(cluster.vacant) - len(diagnosis.lost),
            elastic=self._scenario.elastic and plan.aware,
            fillable=fillable,
            places=cluster.places,
            barred={rank: why for rank in (*hit, *fillable) if (why := cluster.bar(rank))},
            free=cluster.free(len(hit) + len(fillable), nodes_of(hit, cluster.places)),
            homeless=cluster.homeless(),
            rungs=verdict.rungs,
            unfit=verdict.unfit if fault is not None and fault.hardware and fault.scope == "device" and acts else {},
            wants_reset=verdict.axes.repair is Repair.RESET_DEVICE,
            no_reset=dict.fromkeys(hit, RESETS),
            worn=self._handling.may_restart({rank: cluster.places[rank].node for rank in hit}, EPOCH + at),
            tried=tried,
            budget=self.budget,
            restarts_allowed=plan.restarts,
            no_progress_limit=max(1, plan.settings.no_progress_limit),
            setbacks=self.setbacks,
            roll_back_limit=plan.settings.roll_back_limit,
            history=self._history,
            tallies=self._experience.tallies,
        )

    # --- what is out of use ---

    def _blamed(self, event: Event) -> None:
        """How often ranks break of their hardware is counted, as `runtime.isolation` does."""
        fault = self._classifier.catalog.get(event.code)
        if fault is None or not fault.hardware:
            return
        seen = self._handling.seen(event)
        place = self._cluster.places.get(event.rank)
        subject = f"node:{event.node}" if place is None or seen.scope == "node" else f"device:{place}"
        self._take(self._handling.heard(event, subject))
        self._refresh()

    def _tick(self, at: float) -> None:
        deadline = self._handling.next_deadline()
        if deadline is None or deadline > EPOCH + at:
            return
        self._take(self._handling.tick(EPOCH + at))
        for entry in list(self._handling.ledger.quarantine.values()):
            if entry.probation:  # its check passes
                self._handling.release(entry.subject)
        self._refresh()

    def _take(self, changes: Iterable[Change]) -> None:
        for change in changes:
            if change.what is What.STRONGER and change.axes.admission is not Admission.YES:
                self._passing[change.subject] = change.text

    def _refresh(self) -> None:
        """Where no rank is to be put; what passes keeps nobody from going on where there is nothing better."""
        found = {
            place: entry.reason
            for entry in self._handling.ledger.quarantine.values()
            if (place := place_of(entry.subject))
        }
        passing = {place: why for subject, why in self._passing.items() if (place := place_of(subject))}
        self._cluster.isolated = {**passing, **found}
        if passing and self._cluster.homeless():
            self._cluster.isolated = found
