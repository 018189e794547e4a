"""How often things have gone wrong, and how often they still may: turns a Diagnosis into updated counters.

Pure; the values live in the journal and so survive the controller. Called by `decide.choose` and `runtime.controller`.

Repairs in place are free as long as training moves between them. What is counted is standing still: the same fault of the
same ranks without a step in between that had never been completed before. Several different faults within one snapshot
interval are bad luck, and allowed more often; so are replicas that differ at one step and then, computing again, at another,
since how far that had come the highest step does not tell. A script that knows nothing of rerail has no steps; there the same exception
on the same rank counts as standing still.
"""

from __future__ import annotations

import msgspec

from rerail.flow import Diagnosis

NODE_BACK = "node.returned"
"""Code of what is no fault: empty seats can be filled again."""
EVACUATE = "evacuate"
"""Rule of a diagnosis that says: these ranks still work, but not in a good place."""
UNBROKEN = ("collective-alone", "takeover")
"""Rules of diagnoses in which no rank has a fault of its own."""


def raised(diagnosis: Diagnosis) -> bool:
    """Whether a rank has a fault of its own and lives."""
    return not diagnosis.lost and diagnosis.rule not in (*UNBROKEN, EVACUATE) and diagnosis.code != NODE_BACK


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one job."""

    restarts_used: int = 0
    high_version: int = -1
    """The highest version any rank had completed when the last incident was counted."""
    fault: str = ""
    """Code and ranks of the last incident, and the step that it is about where that is known."""
    stuck: int = 0
    """Incidents with that fault in a row, the current one included, since a new step was completed."""
    standing: int = 0
    """Incidents of any kind, the current one included, since a new step was completed."""
    raised_version: int = -1
    raised_count: int = 0
    """How often the step after `raised_version` has raised."""
    error_key: str = ""
    error_count: int = 0
    """How often in a row the same error on the same rank has ended an attempt."""

    def note(self, diagnosis: Diagnosis, high_version: int, *, aware: bool) -> Budget:
        """Count one incident. A rank that raised had completed the step before, whether or not its beat has told so."""
        high_version = max(high_version, diagnosis.step)
        moved = high_version > self.high_version
        own = raised(diagnosis)
        again = own and diagnosis.step == self.raised_version and not moved
        # an exception may hit one rank first and then another; a process that dies is that rank's own affair
        where = ",".join(map(str, sorted(diagnosis.ranks))) if diagnosis.lost else "anywhere"
        # what shows at a certain step sends all back, and all may go wrong again elsewhere: only the same step is no progress
        at = f"|{diagnosis.step}" if diagnosis.trusted >= 0 else ""
        fault = f"{diagnosis.code}|{where}{at}"
        key = "" if aware else f"{diagnosis.code}|{diagnosis.summary}"
        return Budget(
            restarts_used=self.restarts_used,
            high_version=max(high_version, self.high_version),
            fault=fault,
            stuck=self.stuck + 1 if fault == self.fault and not moved else 1,
            standing=1 if moved else self.standing + 1,
            raised_version=diagnosis.step if own else self.raised_version,
            raised_count=(self.raised_count + 1 if again else 1) if own else (0 if moved else self.raised_count),
            error_key=key,
            error_count=self.error_count + 1 if key and key == self.error_key else 1,
        )

    def spend_restart(self) -> Budget:
        return msgspec.structs.replace(self, restarts_used=self.restarts_used + 1)
