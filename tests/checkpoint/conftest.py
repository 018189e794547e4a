"""Jobs of one rank and of two, without processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from two_ranks import Job


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.close()


@pytest.fixture
def alone() -> Iterator[Job]:
    made = Job(world_size=1)
    yield made
    made.close()
