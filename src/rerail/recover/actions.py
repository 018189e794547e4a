"""Writes down what is done: turns verbs and targets into Action records. Kept by `recover.execute`, emptied by the controller."""

from __future__ import annotations

from rerail.flow import Action, OutcomeKind, new_id
from rerail.runtime.fleet import Fleet


class ActionLog:
    """Actions that are taken but not yet journaled."""

    def __init__(self, job: str, fleet: Fleet) -> None:
        self._job, self._fleet = job, fleet
        self._taken: list[Action] = []
        self.cause = ""
        """The decision that is being carried out."""
        self.wall = 0.0

    def note(
        self,
        verb: str,
        target: str,
        deadline_s: float = 0.0,
        *,
        outcome: OutcomeKind = OutcomeKind.OK,
        detail: str = "",
    ) -> None:
        self._taken.append(
            Action(
                id=new_id("action"),
                job=self._job,
                at=self.wall,
                cause_id=self.cause,
                verb=verb,
                target=target,
                generation=self._fleet.generation,
                deadline_s=deadline_s,
                outcome=outcome,
                detail=detail,
            )
        )

    def empty(self) -> list[Action]:
        """All there are, once."""
        taken, self._taken = self._taken, []
        return taken
