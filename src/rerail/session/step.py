"""What `job.step()` gives: enters and leaves an attempt at one update. Made by `session.job`."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rerail.session.job import Job


class Step(contextlib.AbstractContextManager["Step"]):
    """One for each job; used again for each attempt."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __enter__(self) -> Step:
        self._job._begin_attempt()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._job._end_attempt(error)
