"""The controller: turns what agents say into repairs, one turn of `detect, diagnose, decide, recover, report` at a time.

One per job; started by the launcher as `python -m rerail.runtime.controller` (see `runtime.server` for its port).
Everything it must not forget is in the journal; everything else can be asked of the agents again.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from rerail.config import EXIT_DONE, JobSpec, Settings
from rerail.decide.budget import Budget
from rerail.decide.choose import choose, exit_code_of
from rerail.decide.situation import Situation
from rerail.detect.levels import Levels
from rerail.diagnose.classify import Classifier
from rerail.diagnose.rootcause import Facts, diagnose
from rerail.flow import Decision, Diagnosis, Event, Rung, Signal
from rerail.recover.execute import Execution
from rerail.recover.stages import Stage
from rerail.report.compose import compose, controller_lost, one_line, timeline
from rerail.runtime import orders
from rerail.runtime.admission import Admission
from rerail.runtime.departure import Departure
from rerail.runtime.experience import Experience
from rerail.runtime.fleet import Fleet, Link, RankState
from rerail.runtime.handling import Handling
from rerail.runtime.incident import Incident, last_words
from rerail.runtime.injections import Injections
from rerail.runtime.intake import Inbound, Intake, Sighting
from rerail.runtime.isolation import Isolation
from rerail.runtime.journal import Journal
from rerail.runtime.machines import HEALTH, Machines
from rerail.runtime.notebook import Notebook
from rerail.runtime.processes import say
from rerail.runtime.rollbacks import Rollbacks
from rerail.runtime.sampling import Sampler
from rerail.runtime.situation import situation_of
from rerail.runtime.takeover import Takeover, left_to_the_next
from rerail.runtime.training import ACT

SETTLED_S = 30.0
"""A script that has run this long has started; an error of it is no longer a failure to start."""


class Controller:
    """The loop and the little it remembers between two turns."""

    def __init__(
        self, spec: JobSpec, settings: Settings, journal: Journal, token: str = "", tell: Callable[[str], None] = say
    ) -> None:
        self.spec, self.settings, self.journal, self._tell = spec, settings, journal, tell
        self.inbox: asyncio.Queue[Inbound | Sighting] = asyncio.Queue()
        self.fleet = Fleet()
        self.intake = Intake(self.fleet, spec.job, settings, several=spec.several_nodes)
        self.admission = Admission(self.fleet, spec, token, settings.agent_lost_s, settings.node_wait_s)
        self.execution = Execution(self.fleet, spec, settings)
        self.departure = Departure(self.fleet, self.execution)
        self.classifier = Classifier(Levels.of(settings).catalog())
        self.handling = Handling.of(settings, self.classifier.catalog, spec.job, journal)
        keeper = self.isolation = Isolation(self.fleet, self.handling, tell)
        self.machines = Machines(self.classifier, tell, self.fleet.pid_of, keeper.heard, keeper.is_elsewhere)
        self.injections = Injections(self.fleet, allowed=spec.allow_inject)
        self.rollbacks = Rollbacks(self.fleet, self.intake, settings)
        self.incident: Incident | None = None
        self.incidents = 0
        self.budget = Budget()
        self.experience = Experience(self.rollbacks.healed)
        self.execution.outlook = partial(self.experience.outlook, self.fleet)
        self.exit_code: int | None = None
        self._nodes: dict[Link, str] = {}
        self._notes = Notebook(journal, tell)
        self._started, self._await_resume = 0.0, False
        self.takeover: Takeover | None = Takeover.of(self, journal, time.monotonic())
        self.sampler = Sampler.of(self.fleet, journal, self.takeover is not None)

    # --- the flow -----------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Turn after turn until the job is over; the result is the job's exit code."""
        while self.exit_code is None:
            self.turn(await self._detect())
        return self.exit_code

    def turn(self, sightings: list[Sighting]) -> None:
        """Signal -> Event -> Diagnosis -> Decision -> Actions -> Report. Never waits, so nothing can come in between."""
        self._gather(sightings)
        diagnosis = self._diagnose() or self._evacuate()
        if diagnosis is not None:
            self._recover(self._decide(diagnosis))
        self.execution.advance(time.monotonic(), time.time())
        self._report_if_over()
        self._end_if_done()
        self._write()

    async def _detect(self) -> list[Sighting]:
        """Wait for messages or the next deadline, then read all there is: what happened together is seen together."""
        deadline, now = self._next_deadline(), time.monotonic()
        wait = None if deadline is None else max(0.0, deadline - now)
        batch: list[Inbound | Sighting] = []
        with contextlib.suppress(TimeoutError):
            # not wait_for: on Python 3.11 it loses a cancellation that comes together with a message
            async with asyncio.timeout(wait):
                batch.append(await self.inbox.get())
        while not self.inbox.empty():
            batch.append(self.inbox.get_nowait())
        return self.detect(batch, time.monotonic(), time.time())

    def detect(self, batch: Sequence[Inbound | Sighting], now: float, wall: float) -> list[Sighting]:
        """Messages and passed deadlines become fleet updates; what went wrong comes back."""
        found = [sighting for inbound in batch for sighting in self._take(inbound, now, wall)]
        found += self.intake.lost_agents(now, wall)
        if self._calm:
            found += self.intake.seats_back(wall)
        found += [self.intake.late(*late, wall) for late in self.execution.overdue(now)]
        if self.takeover is not None and self.takeover.settled(now):
            found += self.takeover.finish(now, wall)
            self.takeover = None
        if not self.fleet.ranks and self.takeover is None and self.admission.complete(now):
            self._start_job(now, wall)
        if not self.fleet.ranks and (notice := self.admission.notice(now)):
            self._tell(notice)
        if self.execution.problem and self.incident is None:
            signal = self.intake.signal("form.failed", self.spec.local_addr, -1, wall, message=self.execution.problem)
            found.append(Sighting(signal))
            self.execution.problem = ""
        return found

    def _gather(self, sightings: list[Sighting]) -> None:
        """Each signal becomes an event of the incident it belongs to."""
        for sighting in sightings if not self.departure.asked else ():
            if sighting.signal.source.startswith(("checkpoint.", "data.", "inject", "quarantine", "rehab.")):
                self._notes.note(0, sighting.signal)  # written down, and no fault
                self.injections.heard(sighting.signal)
                self.rollbacks.heard(sighting.signal)
                self.sampler.note(sighting.signal)
                continue
            if sighting.signal.source.startswith(HEALTH) and ACT not in sighting.signal.payload:
                self._notes.add(self.machines.heard(sighting.signal, self.incident))
                continue
            event = self.classifier.classify(sighting.signal)
            rank = self.fleet.ranks.get(event.rank)
            newest = event.generation >= self.fleet.generation
            lost = event.code == "node.lost" or (rank is not None and rank.state is RankState.LOST)
            if self.incident is None and not newest and not lost:
                continue  # an echo of a fault that has long been repaired
            raised = sighting.signal.source == "step.raised"
            if raised and newest and self.execution.stage in (Stage.FORMING, Stage.REPLAYING) and self._repairing():
                self._close("the step failed again when it was replayed")
            incident = self._incident(event)
            if rank is not None and rank.newcomer and lost:
                incident.newcomer_lost()
            incident.add(sighting, event)
            self._notes.note(incident.number, sighting.signal, event)

    def _diagnose(self) -> Diagnosis | None:
        """The root cause, when there is something to act on that is not being acted on already."""
        incident, now = self.incident, time.monotonic()
        if incident is None or self.takeover is not None:
            return None
        if self.execution.problem and self.execution.rung is not None:
            incident.failed(self.execution.marks.in_vain(self.execution.rung), self.execution.problem)
            why, self.execution.problem = self.execution.problem, ""
            if self.isolation.is_pointless(found := incident.newest_diagnosis()):
                self._close(why)
                return None
            return found
        if not incident.fresh:
            return None
        if incident.decision is not None and not self._is_new_work(incident.fresh):
            incident.fold()
            return None
        gone = frozenset(rank.rank for rank in self.fleet.in_state(RankState.LOST))
        waited = now >= incident.echo_deadline and not self.fleet.away
        events = [*incident.fresh, *self.machines.causes_of(incident.fresh)]
        found = diagnose(events, Facts(gone=gone), at=time.time(), waited=waited)
        if found is not None:
            self._notes.note(incident.number, found)
        return found

    def _evacuate(self) -> Diagnosis | None:
        """Nothing is broken, but somebody is where nobody should be."""
        self.isolation.were_reset(self.execution.resets.ended, time.time())
        self.isolation.tick(time.time())
        found = self.isolation.evacuation(self.spec.job, time.time()) if self._calm else None
        if found is not None:
            self._notes.note(self._incident(None).number, found)
        return found

    def _decide(self, diagnosis: Diagnosis) -> Decision:
        """The rung to take, with what it costs counted."""
        incident = self._incident(None)
        aware = self.fleet.aware
        if incident.decision is None and diagnosis.rule != "takeover":
            self.budget = self.budget.note(diagnosis, self.fleet.high_version, aware=aware)
        self.rollbacks.note(diagnosis, incident)
        if incident.decision is None:
            for event in incident.fresh:
                self.isolation.blamed(event)
        decision = choose(diagnosis, self._situation(diagnosis, incident), at=time.time())
        self._count(decision)
        incident.decided(diagnosis, decision)
        self._notes.note(incident.number, decision)
        self._await_resume = aware
        return decision

    def _recover(self, decision: Decision) -> None:
        """Begin what was decided. The rest follows as the ranks answer."""
        now, wall = time.monotonic(), time.time()
        if decision.rung is Rung.STOP:
            self._stop(decision)
        elif decision.rung is Rung.RESTART_ALL:
            self._started = now
            self.execution.restart(now, wall, restarts=self._restarts(), cause=decision.id)
        elif decision.rung is Rung.HOT_SWITCH:
            self.execution.warm(decision, now, wall)
        else:
            self.execution.repair(decision, now, wall)

    def _report_if_over(self) -> None:
        incident = self.incident
        if incident is None or incident.decision is None or incident.fresh or self.execution.problem:
            return
        stage = self.execution.stage
        blind = incident.decision.rung is Rung.RESTART_ALL and not self._await_resume and stage is Stage.PARKING
        if stage is Stage.IDLE or blind:
            self._close(self.execution.dropped)

    def _count(self, decision: Decision) -> None:
        """Restarts and replacements are not without end."""
        if decision.rung is Rung.RESTART_ALL:
            self.budget = self.budget.spend_restart()
        elif decision.ranks and decision.rung not in (Rung.HOT_SWITCH, Rung.SHRINK):
            self.handling.restarted({n: self.fleet.ranks[n].node for n in decision.ranks}, time.time())

    # --- the parts of it ----------------------------------------------------------------------------------------

    def _take(self, inbound: Inbound | Sighting, now: float, wall: float) -> list[Sighting]:
        if isinstance(inbound, Sighting):  # another system told of it (see `runtime.reported`)
            return [inbound]
        link, message = inbound.link, inbound.message
        if isinstance(message, orders.AgentHello):
            return self._greet(link, message, now, wall)
        agent = self.fleet.agents.get(self._nodes.get(link, ""))
        if agent is None or agent.link is not link:
            self._nodes.pop(link, None)
            return []
        if message is None:
            agent.link, agent.gone_since = None, now
            return []
        agent.heard = now
        if self.execution.hear(message):
            return []
        if isinstance(message, orders.ChoreDone):
            self.isolation.checked(message)
        elif isinstance(message, orders.LeaveJob):
            self.departure.ask(message, self._calm, now, wall)
        elif isinstance(message, orders.Beat):
            self.sampler.hear(message, wall)
        return self.intake.take(agent, message, wall=wall)

    def _greet(self, link: Link, hello: orders.AgentHello, now: float, wall: float) -> list[Sighting]:
        greeting = self.admission.greet(link, hello, now)
        if greeting.agent is None:
            greeting.turn_away(link)
            return []
        agent, found = greeting.agent, []
        self._nodes[link] = agent.node
        link.send(orders.Welcome(node_rank=self.admission.node_rank(agent)))
        if greeting.replaced is not None:
            found = self.intake.agent_lost(greeting.replaced, "its agent was started anew", 0.0, wall)
        elif self.takeover is not None and (greeting.returned or hello.ranks):
            self.takeover.greeted(agent.node, hello.ranks, now)
        elif greeting.returned:
            self.execution.resend(agent, hello.ranks, now)
        elif self.fleet.ranks and agent.node not in self.fleet.placed():
            self._tell(f"{agent.node} waits as a spare")
        return found

    def _incident(self, event: Event | None) -> Incident:
        if self.incident is None:
            now = time.monotonic()
            self.incidents += 1
            version = max(self.fleet.newest_version(), event.step if event is not None else -1)
            deadline = now + self.settings.echo_window_s
            self.incident = Incident(number=self.incidents, opened=now, fault_version=version, echo_deadline=deadline)
        elif event is not None and not self.incident.fresh:
            self.incident.echo_deadline = time.monotonic() + self.settings.echo_window_s
        return self.incident

    @property
    def _calm(self) -> bool:
        """Nothing is being repaired, nor about to be."""
        return self.incident is None and self.takeover is None and self.execution.stage is Stage.IDLE

    def _repairing(self) -> bool:
        return self.incident is not None and self.incident.decision is not None

    def _is_new_work(self, fresh: list[Event]) -> bool:
        """Whether these events ask for more than what is under way."""
        if self.execution.stage in (Stage.WAITING_FOR_NODES, Stage.PICKING_PORT):
            return False
        if self.fleet.in_state(RankState.LOST):
            return True
        return any(event.generation >= self.fleet.generation for event in fresh)

    def _situation(self, diagnosis: Diagnosis, incident: Incident) -> Situation:
        settled, allowed = time.monotonic() - self._started > SETTLED_S, self._restarts()[1]
        return situation_of(self, diagnosis, incident.tried, settled=settled, restarts_allowed=allowed, at=time.time())

    def _restarts(self) -> tuple[int, int]:
        allowed = self.spec.max_restarts if self.spec.max_restarts >= 0 else self.settings.max_restarts
        return self.budget.restarts_used, allowed

    def _start_job(self, now: float, wall: float) -> None:
        self.fleet.place(self.fleet.fit(self.spec.max_nodes)[: self.spec.max_nodes])
        self._started = now
        self.isolation.tell_of_the_start()
        self.execution.restart(now, wall, restarts=self._restarts(), cause="", first=True)

    def _close(self, detail: str) -> None:
        """The incident is over: write down what it cost, and say it in one line."""
        incident, marks, fleet = self.incident, self.execution.marks, self.fleet
        if incident is None:
            return
        self._note_actions()
        line = timeline(incident, marks, fleet, time.monotonic())
        recovery, report = compose(incident, line, marks.sources, fleet.generation, time.time(), detail)
        self._notes.note(incident.number, recovery, report)
        self.experience.note(report, incident.attempted)
        self.incident = None
        self._tell(one_line(report, recovery))

    def note_takeover(self, signal: Signal, down_s: float) -> None:
        """Write down that a former controller was lost and nothing had to be repaired."""
        event = self.classifier.classify(signal)
        diagnosis = diagnose([event], Facts(), at=signal.at, waited=True)
        if diagnosis is not None:
            self.incidents += 1
            report = controller_lost(diagnosis, self.incidents, down_s, (signal.id, event.id, diagnosis.id))
            self._notes.note(report.incident, signal, event, diagnosis, report)
            self._tell(report.summary)

    def _stop(self, decision: Decision) -> None:
        incident = self._incident(None)
        words, culprit = last_words(incident, decision, self.classifier.catalog)
        self._close("")
        self._shut_down(exit_code_of(decision), words, culprit)

    def _end_if_done(self) -> None:
        if self.exit_code is None and self.fleet.done:
            if self._repairing():
                self._close("")
            self._shut_down(EXIT_DONE, "done")
        elif self.exit_code is None and (wish := self.departure.over(time.monotonic())) is not None:
            self._shut_down(wish.exit_code, wish.reason)

    def _shut_down(self, code: int, reason: str, culprit: int = -1) -> None:
        self.exit_code = code
        order = orders.Shutdown(exit_code=code, reason=reason, culprit=culprit, grace_s=self.spec.shutdown_grace_s)
        for agent in self.fleet.connected():
            agent.send(order)

    # --- memory -------------------------------------------------------------------------------------------------

    def _note_actions(self) -> None:
        actions = self.execution.actions.empty()
        number = self.incident.number if self.incident is not None else 0
        if self.incident is not None:
            self.incident.acted(actions)
        self._notes.note(number, *actions)

    def _write(self) -> None:
        """One transaction per turn, before any of its messages leaves: they are sent when this turn is over."""
        self._note_actions()
        told = self.sampler.tick(time.monotonic(), time.time(), self.exit_code)
        self._notes.write({**left_to_the_next(self, time.monotonic()), **self.handling.state()}, told)

    def _next_deadline(self) -> float | None:
        times = [self.intake.next_deadline(), self.execution.next_deadline(), self.isolation.next_deadline(time.time())]
        times.append(self.departure.deadline)
        if not self.fleet.ranks:
            times.append(self.admission.next_deadline())
        if self.takeover is not None:
            times.append(self.takeover.deadline())
        elif self.incident is not None and self.incident.fresh and not self.fleet.away:
            times.append(self.incident.echo_deadline)
        return min((time for time in times if time is not None), default=None)


if __name__ == "__main__":
    from rerail.runtime.server import main

    sys.exit(main())
