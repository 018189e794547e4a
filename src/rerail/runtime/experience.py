"""What repairs have cost in this job, and how often each kind of them succeeded: by this the next one is chosen.

Filled by `runtime.controller` at the end of each incident, and by `runtime.takeover` from the journal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rerail.decide.situation import Tally
from rerail.flow import Cost, Report, Rung


class Experience:
    """Of one job."""

    def __init__(self) -> None:
        self._costs: dict[Rung, list[Cost]] = {}
        self.tallies: dict[Rung, Tally] = {}

    def note(self, report: Report, failed: Iterable[Rung] = ()) -> None:
        """An incident is over; `failed` are rungs that were tried before the one that is reported."""
        failed = set(failed)
        if report.ok and report.attempts:
            self._costs.setdefault(report.rung, []).append(report.cost)
        for rung in {report.rung, *failed} if report.attempts else ():
            before = self.tallies.get(rung, Tally())
            self.tallies[rung] = Tally(before.taken + 1, before.ok + (report.ok and rung not in failed))

    @property
    def history(self) -> dict[Rung, Cost]:
        """Mean cost of each rung so far."""
        return {rung: mean_cost(costs) for rung, costs in self._costs.items()}


def mean_cost(costs: Sequence[Cost]) -> Cost:
    """The mean of each part, over the incidents of one kind."""
    return Cost(**{name: sum(getattr(cost, name) for cost in costs) / len(costs) for name in Cost.__struct_fields__})
