"""What a turn of the controller leaves behind: collects records and writes them with the state in one transaction.

Called by `runtime.controller`, at the end of every turn, before any message of that turn leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rerail.flow import AnyRecord
from rerail.runtime.journal import Journal
from rerail.runtime.samples import Mark, Sample


class Notebook:
    """The pages not yet in the journal."""

    def __init__(self, journal: Journal, tell: Callable[[str], None]) -> None:
        self._journal, self._tell = journal, tell
        self._records: list[tuple[int, AnyRecord]] = []
        self._written: dict[str, Any] = {}
        self._ok = True

    def note(self, incident: int, *records: AnyRecord) -> None:
        """Records of this incident; 0: of none."""
        self._records += [(incident, record) for record in records]

    def add(self, records: Iterable[tuple[int, AnyRecord]]) -> None:
        self._records += records

    def write(self, state: dict[str, Any], told: tuple[list[Sample], list[Mark]] = ([], [])) -> None:
        """All records, what of the state has changed, and what is told of the time since. If it cannot be written now, training goes on."""
        changed = {key: value for key, value in state.items() if self._written.get(key) != value}
        records, self._records = self._records, []
        ok = self._journal.append(records, changed, *told)
        self._written.update(changed)
        if not ok and self._ok:
            self._tell(f"the journal {self._journal.path} cannot be written now; training goes on, check the disk")
        self._ok = ok
