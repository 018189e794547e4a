"""What a rank keeps of the way its parameters go."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rerail.session import drifting
from rerail.session.drifting import KEPT, Drifting
from rerail.session.tracked import Tracked


@pytest.fixture
def tracked() -> Tracked:
    torch.manual_seed(0)
    tracked, model = Tracked(), nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50), nn.Linear(50, 10))
    tracked.add("model", model)
    tracked.add("optimizer", torch.optim.AdamW(model.parameters(), lr=1e-2))
    return tracked


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


def test_a_window_for_each_tensor_that_is_looked_at(tracked: Tracked) -> None:
    found = seen(tracked, 3, drift=1.0, noise=0.1)
    windows = found.windows()
    assert len(windows) == len(tracked.parameters())
    assert torch.equal(torch.cat([one.rows for one in windows], dim=1), torch.stack(list(found._rows.values())))
    assert {one.times for one in windows} == {((0.0, 10.0, 20.0), 30.0)}
    assert seen(tracked, 1, drift=1.0, noise=0.1).windows() == []
