"""What a rank keeps of the way its parameters go, and how a lost shard goes on from two snapshots."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rerail.checkpoint.arena import Arena
from rerail.checkpoint.staging import Stager
from rerail.runtime.plans import Source
from rerail.session import drifting, restore
from rerail.session.drifting import KEPT, Drifting
from rerail.session.pieces import Pieces
from rerail.session.tracked import Tracked


@pytest.fixture
def tracked() -> Tracked:
    torch.manual_seed(0)
    tracked, model = Tracked(), nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50), nn.Linear(50, 10))
    tracked.add("model", model)
    tracked.add("optimizer", torch.optim.AdamW(model.parameters(), lr=1e-2))
    return tracked


@pytest.fixture
def fd() -> Iterator[int]:
    descriptor = os.memfd_create("arena")
    yield descriptor
    os.close(descriptor)


def move(tracked: Tracked, drift: float, noise: float, seed: int) -> None:
    """Every parameter by the same drift as ever, and by noise of its own that is gone the next time."""
    steady, chance = torch.Generator().manual_seed(1), torch.Generator().manual_seed(100 + seed)
    with torch.no_grad():
        for one in tracked.parameters().values():
            way = torch.randn(one.shape, generator=steady)
            one.copy_(drift * seed * way + noise * torch.randn(one.shape, generator=chance))


def seen(tracked: Tracked, count: int, drift: float, noise: float) -> Drifting:
    found = Drifting(tracked, on=True)
    for at in range(count):
        move(tracked, drift, noise, at)
        found.note(10 * at)
    return found


def test_a_straight_line_pays_where_there_is_drift_and_not_where_there_is_noise_alone(tracked: Tracked) -> None:
    assert seen(tracked, KEPT, drift=1.0, noise=0.1).straight() < 0.7
    assert seen(tracked, KEPT, drift=0.0, noise=1.0).straight() >= 0.95


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_of_few_snapshots_nobody_knows(tracked: Tracked, count: int) -> None:
    assert seen(tracked, count, drift=1.0, noise=0.1).straight() == 1.0


def test_numbers_that_are_none_say_nothing(tracked: Tracked) -> None:
    found = seen(tracked, KEPT, drift=1.0, noise=0.1)
    next(iter(tracked.parameters().values())).data.fill_(float("nan"))
    found.note(1000)
    assert found.straight() == 1.0


def test_only_where_it_is_allowed_anything_is_kept(tracked: Tracked) -> None:
    found = Drifting(tracked, on=False)
    found.note(10)
    assert not found._rows and found.straight() == 1.0


def test_who_goes_back_forgets_what_was_to_come_and_the_sample_stays_small(
    tracked: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drifting, "ELEMENTS", 100)
    found = seen(tracked, 2 * KEPT, drift=1.0, noise=0.1)
    assert len(found._rows) == KEPT
    assert all(len(row) <= 110 for row in found._rows.values())
    found.note(80)
    assert sorted(found._rows)[-2:] == [70, 80]


def test_parameters_go_on_as_they_moved_and_all_else_stays_as_it_was_kept(tracked: Tracked, fd: int) -> None:
    stager = Stager(Arena(fd), overlap=False)
    model: Any = tracked.modules["model"]
    optimizer: Any = tracked.optimizers["optimizer"]
    model(torch.randn(8, 40)).sum().backward()
    optimizer.step()
    for at in (1, 2):
        move(tracked, 1.0, 0.0, at)
        model[1].running_mean.fill_(float(at))
        optimizer.state[model[0].weight]["exp_avg"].fill_(float(at))
        assert stager.stage(10 * at, Pieces(tracked, 0, 1).all(), b"")
    then = {name: one.clone() for name, one in tracked.parameters().items()}
    snapshots: Any = SimpleNamespace(arena=stager.arena)
    job: Any = SimpleNamespace(_snapshots=snapshots, _tracked=tracked, rank=0, world_size=1)
    restore.straight_on(job, Source(kind="stale", at=20, before=10), 25)
    for name, one in tracked.parameters().items():
        assert torch.allclose(one, then[name] * 1.25, atol=1e-5), name
    assert float(model[1].running_mean[0]) == 2.0
    assert float(optimizer.state[model[0].weight]["exp_avg"][0, 0]) == 2.0
