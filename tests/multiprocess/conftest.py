"""Fixtures: a run that is always ended, and the digest of an undisturbed run to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import Run, Start


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    runs: list[Run] = []

    def begin(*args: str, **options: object) -> Run:
        run = Run(tmp_path / f"run{len(runs)}", *args, **options)  # type: ignore[arg-type]
        runs.append(run)
        return run

    yield begin
    for run in runs:
        run.end()


@pytest.fixture
def undisturbed(start: Start) -> Callable[..., dict[int, str]]:
    """Digests of the same run when nothing goes wrong."""

    def digests(*args: str) -> dict[int, str]:
        run = start(*args)
        run.finish()
        assert run.digests, run.told("digests")
        return run.digests

    return digests
