"""What repairs have cost in this job, and how often each kind of them succeeded: by this the next one is chosen.

Filled by `runtime.controller` at the end of each incident, and by `runtime.takeover` from the journal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from rerail.decide.situation import Tally
from rerail.flow import Cost, Report, Rung
from rerail.planner.outlook import Healed, Outlook, look_ahead
from rerail.planner.rates import usual
from rerail.runtime.fleet import Fleet


class Experience:
    """Of one job."""

    def __init__(self, healed: Sequence[Healed] = ()) -> None:
        """`healed`: faults after which all went on, though a shard was lost; filled by `runtime.rollbacks`."""
        self._healed = healed
        self._costs: dict[Rung, list[Cost]] = {}
        self.tallies: dict[Rung, Tally] = {}
        self._behind: list[float] = []
        self._lost: list[float] = []
        """When faults came that cost work since the last snapshot, and those that cost the snapshots: wall clock."""
        self.began = 0.0
        """Since when the job runs; 0: nobody has asked yet."""

    def note(self, report: Report, failed: Iterable[Rung] = ()) -> None:
        """An incident is over; `failed` are rungs that were tried before the one that is reported."""
        failed = set(failed)
        if report.ok and report.attempts:
            self._costs.setdefault(report.rung, []).append(report.cost)
        for rung in {report.rung, *failed} if report.attempts else ():
            before = self.tallies.get(rung, Tally())
            self.tallies[rung] = Tally(before.taken + 1, before.ok + (report.ok and rung not in failed))

        if report.attempts and (report.lost_steps or report.rung is Rung.RESTART_ALL):
            (self._lost if report.rung is Rung.RESTART_ALL else self._behind).append(report.at)

    def outlook(self, fleet: Fleet, rung: Rung | None, back: bool, wall: float) -> Outlook:
        """What has to be expected from here on; asked whenever a generation is planned. The incident that it ends counts."""
        self.began = self.began or wall
        lost = [*self._lost, wall] if rung is Rung.RESTART_ALL else self._lost
        behind = [*self._behind, wall] if back and rung is not Rung.RESTART_ALL else self._behind
        agents = [fleet.agents.get(rank.node) for rank in fleet.ranks.values()]
        devices = sum(agent is not None and bool(agent.accelerators) for agent in agents)
        prior = usual(devices, len(agents) - devices)
        return look_ahead(behind, lost, self.began, wall, prior, self._healed)

    @property
    def history(self) -> dict[Rung, Cost]:
        """What each rung usually cost so far: medians, so that one fault that was found late does not speak for all.

        How long a fault went unseen is no rung's doing.
        """
        return {rung: usual_cost(costs) for rung, costs in self._costs.items()}


def usual_cost(costs: Sequence[Cost]) -> Cost:
    """The median of each part, detection aside."""
    parts = [name for name in Cost.__struct_fields__ if name != "detect"]
    return Cost(**{name: median(getattr(cost, name) for cost in costs) for name in parts})
