"""What the controller remembers of faults of the training: turns a Diagnosis into what all ranks are told (`plans.Back`).

Called by `runtime.controller` with every decision, and for every checkpoint that ranks tell of. The counting is pure and
stands in `decide.setbacks`; everything here is in the journal, for the next controller.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rerail.config import Settings
from rerail.decide.setbacks import BAD_BATCH, NAN, REFUSED, Setbacks, is_setback
from rerail.flow import Diagnosis, Signal
from rerail.planner.outlook import Healed, healed
from rerail.runtime.fleet import Fleet
from rerail.runtime.incident import Incident
from rerail.runtime.intake import Intake
from rerail.runtime.plans import Back, Healing
from rerail.runtime.wire import HEALED

SAVED = ("checkpoint.saved", "checkpoint.loaded")


class Rollbacks:
    """Counters, and the versions of which there are checkpoints."""

    def __init__(self, fleet: Fleet, intake: Intake, settings: Settings) -> None:
        self._fleet, self._intake, self._limit = fleet, intake, settings.roll_back_limit
        self.setbacks = Setbacks()
        self.healed: list[Healed] = []
        """What recoveries that were not exact have cost: for `runtime.experience`."""
        self._oldest_saved = -1
        self._noted = ""

    def heard(self, signal: Signal) -> None:
        """A rank tells of a checkpoint, or that a shard which was not restored exactly has healed."""
        if signal.source == HEALED:
            self._fleet.healing = None
            if (found := healed(signal.at, signal.payload)) is not None:
                self.healed.append(found)
        if signal.source in SAVED and signal.step >= 0:
            self._oldest_saved = signal.step if self._oldest_saved < 0 else min(self._oldest_saved, signal.step)

    def note(self, diagnosis: Diagnosis, incident: Incident) -> None:
        """Before a decision: count it, and set what ranks are told with whatever is decided. Said twice, it counts once."""
        if is_setback(diagnosis) and diagnosis.id != self._noted:
            self._noted = diagnosis.id
            self.setbacks = self.setbacks.note(diagnosis)
        if diagnosis.code == REFUSED and self._fleet.healing is not None:
            self._fleet.healing = self._fleet.healing.all_refused()
        if diagnosis.trusted >= 0 and diagnosis.code not in (BAD_BATCH, REFUSED):
            limits = [limit for limit in (incident.trusted, diagnosis.trusted) if limit >= 0]
            incident.trusted = min(limits)
            self._intake.training.went_back(incident.trusted)
        watch = diagnosis.step + 1 if diagnosis.code == NAN else self._fleet.back.watch
        exact = self.setbacks.unhealed > 0
        self._fleet.back = Back(trusted=incident.trusted, watch=watch, exact=exact, skips=self.setbacks.skips)

    def facts(self, diagnosis: Diagnosis) -> dict[str, Any]:
        """Fields of the Situation."""
        before = diagnosis.trusted <= 0 or 0 <= self._oldest_saved <= diagnosis.trusted
        return {"setbacks": self.setbacks, "roll_back_limit": self._limit, "kept_before": before}

    def state(self) -> dict[str, Any]:
        """For the journal."""
        told = {
            "setbacks": self.setbacks,
            "back": self._fleet.back,
            "healing": self._fleet.healing,
            "healed": self.healed,
            "oldest_saved": self._oldest_saved,
        }
        return {"rollbacks": msgspec.to_builtins(told, str_keys=True)}

    def restore(self, state: dict[str, Any]) -> None:
        """From what a former controller wrote."""
        told = state.get("rollbacks", {})
        self.setbacks = msgspec.convert(told.get("setbacks", {}), Setbacks, str_keys=True)
        self._fleet.back = msgspec.convert(told.get("back", {}), Back, str_keys=True)
        self._fleet.healing = msgspec.convert(told.get("healing"), Healing | None)
        self.healed[:] = msgspec.convert(told.get("healed", []), list[Healed])
        self._oldest_saved = int(told.get("oldest_saved", -1))
