"""The state that is saved in all tests here. They take minutes, so they run only when asked for: `make test-crash`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    asked = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(HERE) for path in asked) else True


@pytest.fixture(scope="module")
def crash() -> Iterator[object]:
    """The arena is a file here, so that the writer can open it by name."""
    from crash_helpers import COLUMNS, NEW, OLD, Crash
    from two_ranks import Job

    folder = Path(tempfile.mkdtemp(prefix="rerail-crash-"))
    job = Job(world_size=1, columns=COLUMNS)
    try:
        job.stage(OLD)
        job.stage(NEW)
        arena = folder / "arena"
        with open(f"/proc/self/fd/{job.fds[0]}", "rb") as source, open(arena, "wb") as target:
            shutil.copyfileobj(source, target)
        os.sync()
        yield Crash(folder, arena)
    finally:
        job.close()
        shutil.rmtree(folder, ignore_errors=True)
