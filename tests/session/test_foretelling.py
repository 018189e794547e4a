"""What a rank learns of its own past from checkpoint to checkpoint, and what it tells and teaches when another is lost."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shadowed import FAST, Rank

from rerail.config import Settings
from rerail.errors import StateError
from rerail.rehab.fitter import Fitter
from rerail.rehab.teaching import NETS, PLAIN, taught
from rerail.session.foretelling import Foreteller
from rerail.session.waiting import idle

NAMES = {one.name for one in PLAIN}


class Survivor:
    """A rank whose parameters drift steadily under some noise, and which waits all the time."""

    def __init__(self, fd: int, settings: Settings, *, replicated: bool = False) -> None:
        self.rank = Rank(fd, settings, replicated=replicated)
        self.job: Any = self.rank.job
        self.notes: list[dict[str, float]] = []
        self.job._rejoin = self
        self.job.seats, self.job._small = (0, 1), None
        self.job._soundness = SimpleNamespace(fitter=Fitter())
        self.foretelling = Foreteller(self.job, settings, self.rank.shadow)

    def note(self, source: str, version: int, text: str, figures: dict[str, float]) -> None:
        self.notes.append(figures)

    def save(self, version: int, noise: float = 0.05) -> None:
        steady, chance = torch.Generator().manual_seed(1), torch.Generator().manual_seed(version)
        with torch.no_grad():
            for one in self.rank.tracked.parameters().values():
                way = torch.randn(one.shape, generator=steady)
                one.copy_(version / 10 * way + noise * torch.randn(one.shape, generator=chance))
        self.foretelling.saved(version)

    def learn(self) -> None:
        end = time.monotonic() + 60
        while self.foretelling.coordinator.busy:
            idle.since = time.monotonic() - 1.0
            assert time.monotonic() < end, "it does not come to an end"
            time.sleep(0.005)
        idle.since = 0.0


@pytest.fixture
def fd() -> Iterator[int]:
    descriptor = os.memfd_create("arena")
    yield descriptor
    os.close(descriptor)


QUICK = Settings(fidelity="fast", rehab_from=10, predictor_cost=1.0)


def test_what_it_has_learnt_is_told_and_taught(fd: int) -> None:
    one = Survivor(fd, QUICK)
    one.job.world_size = 15  # each of so many does a part of the training
    for version in range(10, 70, 10):
        one.save(version)
    one.learn()
    found = one.foretelling.guesses()
    assert set(found) == NAMES | set(NETS)
    assert found["linear"][0] < 0.9, "it drifts steadily"
    assert all(needs in (2, 3) for _, needs in found.values())
    for name in NETS:
        assert taught(one.foretelling.lesson(name)).name == name
    assert one.notes and set(one.notes[-1]) >= NAMES and one.notes[-1]["predictor_loss"] < 1.0


def test_without_a_moment_to_learn_it_tells_what_needs_no_learning(fd: int) -> None:
    one = Survivor(fd, QUICK)
    for version in range(10, 70, 10):
        one.save(version)
    assert set(one.foretelling.guesses()) == NAMES
    with pytest.raises(StateError, match="has not learnt it"):
        one.foretelling.lesson("vitp")


def test_of_one_checkpoint_nobody_knows_anything(fd: int) -> None:
    one = Survivor(fd, QUICK)
    one.save(10)
    assert one.foretelling.guesses() == {} and not one.foretelling.coordinator.busy


@pytest.mark.parametrize(
    ("settings", "replicated"),
    [(Settings(rehab_from=10), False), (FAST, True), (Settings(fidelity="fast", predictor_cost=0), False)],
)
def test_nothing_where_it_is_of_no_use(fd: int, settings: Settings, replicated: bool) -> None:
    one = Survivor(fd, settings, replicated=replicated)
    for version in range(10, 70, 10):
        one.save(version)
    assert one.foretelling.guesses() == {} and not one.foretelling.coordinator.busy


def test_checkpoints_that_come_faster_than_it_learns_do_not_keep_it_from_ending(fd: int) -> None:
    one = Survivor(fd, QUICK)
    one.job.world_size = 15
    for version in range(10, 40, 10):
        one.save(version)
    for version in range(40, 80, 10):
        idle.since = time.monotonic() - 1.0
        time.sleep(0.02)
        idle.since = 0.0
        one.save(version)
    one.learn()
    assert len(one.notes) >= 1 and set(one.foretelling.guesses()) == NAMES | set(NETS)
