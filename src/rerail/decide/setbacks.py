"""Faults of the training itself, and what is done about them in turn: turns a Diagnosis into updated counters. Pure.

    first time       all go back to before it and compute the same again: what passes is gone
    the same again   all go back once more and leave the data out
    a third time     the job stops

A batch that the script itself does not want is left out at once. The values live in the journal and so survive the
controller. Called by `runtime.rollbacks`; read by `decide.verdicts` and `decide.ladder.back`.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rerail.flow import Diagnosis
from rerail.wording import counted

KINDS = {"nan": "training.nan", "spike": "training.loss_spike", "divergence": "training.divergence"}
"""What the setting `roll_back` calls them, and their codes."""
NAN, BAD_BATCH = KINDS["nan"], "training.bad_batch"
UNHEALED = "training.unhealed"
REFUSED = "training.refused"
"""No setback: it was seen before anything was changed."""
FAULTS = frozenset({*KINDS.values(), BAD_BATCH, UNHEALED})
CALM = 100
"""Steps of progress after which going back counts anew."""
MOST_SKIPPED = 1000
"""Batches that are left out at once, at most. Of a spike nobody knows which one it was."""


def rolls_back(kinds: Iterable[str]) -> frozenset[str]:
    """Codes of what all go back for under the setting `roll_back`; what the script itself refuses always is."""
    return frozenset({*(KINDS[kind] for kind in kinds), BAD_BATCH})


def is_setback(diagnosis: Diagnosis) -> bool:
    """Whether the training itself went wrong, so that what is in memory is no place to go on from."""
    return diagnosis.code in FAULTS and diagnosis.trusted >= 0


class Setbacks(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one job."""

    code: str = ""
    step: int = -1
    """Where the last one showed."""
    trusted: int = -1
    """The earliest version it can have begun from."""
    times: int = 0
    """How often this one has, the current one included."""
    in_a_row: int = 0
    """How often all went back without much progress in between, the current time included."""
    refused_at: int = -1
    refused: int = 0
    """Batches that the script did not want for the step from that version."""
    unhealed: int = 0
    """Times that a shard which was not restored exactly did not heal."""
    skips: dict[int, int] = {}
    """Batches to be left out, by the version before whose own they come."""
    added: dict[int, int] = {}
    """Those of them that the last one has brought."""

    def note(self, diagnosis: Diagnosis) -> Setbacks:
        """Count one."""
        if not is_setback(diagnosis):
            return self
        step = diagnosis.step
        if diagnosis.code == BAD_BATCH:
            refused = self.refused + 1 if step == self.refused_at else 1
            return msgspec.structs.replace(self, refused_at=step, refused=refused)._without({step: 1})
        if diagnosis.code == UNHEALED:  # no fault of the data: what is computed again is exact
            return msgspec.structs.replace(self, unhealed=self.unhealed + 1, added={})
        # a number that is not finite is of one step, unless it leapt before; of the others it is only known by when they began
        alone = diagnosis.code == NAN and diagnosis.trusted >= step - 1
        begun, end = (step, step + 1) if alone else (diagnosis.trusted, step + (diagnosis.code == NAN))
        # elsewhere it is another one: what lies before the last one was sound when it was computed then
        same = diagnosis.code == self.code and begun <= self.step and step >= self.trusted
        times = self.times + 1 if same else 1
        added = {begun: min(max(1, end - begun), MOST_SKIPPED)} if times == 2 else {}
        return msgspec.structs.replace(
            self,
            code=diagnosis.code,
            step=step,
            trusted=diagnosis.trusted,
            times=times,
            in_a_row=1 if self.step < 0 or step >= self.step + CALM else self.in_a_row + 1,
        )._without(added)

    def hopeless(self, limit: int) -> str:
        """Why going back does not help, or nothing."""
        if self.refused > limit:
            return (
                f"the script wanted none of {self.refused} batches for the step from {self.refused_at} "
                f"(roll_back_limit is {limit})"
            )
        if self.times > 2:
            return "the same was computed again, then its data left out, and it went wrong all the same"
        if self.in_a_row > limit:
            gone = counted(self.in_a_row - 1, "time")
            return (
                f"all went back {gone} with less than {CALM} steps of progress in between (roll_back_limit is {limit})"
            )
        return ""

    def _without(self, added: dict[int, int]) -> Setbacks:
        both = {version: self.skips.get(version, 0) + count for version, count in added.items()}
        return msgspec.structs.replace(self, skips={**self.skips, **both}, added=added)
