"""When a rank casts its parameters into its shadow, and what comes back from there when it was lost."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from shadowed import FAST, Rank, off, train

from rerail.checkpoint.arena import Arena
from rerail.checkpoint.staging import Stager
from rerail.config import Settings
from rerail.errors import StateError
from rerail.runtime.plans import Stale
from rerail.session.pieces import Pieces
from rerail.session.shadowing import LONGEST, MEASURED, UNTIL_MEASURED, steps_between


@pytest.fixture
def fd() -> Iterator[int]:
    descriptor = os.memfd_create("arena")
    yield descriptor
    os.close(descriptor)


def test_two_are_kept_not_where_a_snapshot_is_newer_nor_before_they_may_be_used(fd: int) -> None:
    rank = Rank(fd)
    rank.snapshot(7)
    rank.step(9)
    assert rank.shadow.usable() == (), "before rehab_from none may be used"
    train(rank, 12)
    assert rank.shadow.usable() == (), "the snapshot of step 10 is as new"
    for version in range(12, 20):
        rank.step(version)
    assert rank.shadow.usable() == (16, 19)


def test_a_successor_has_the_parameters_of_the_shadow_and_all_else_of_the_snapshot(fd: int) -> None:
    true = train(Rank(fd), 17)
    newcomer = Rank(fd)
    assert newcomer.shadow.usable() == (13, 16)
    newcomer.model[1].running_mean.fill_(5.0)
    with torch.no_grad():
        for one, kept in zip(newcomer.model.parameters(), true[10], strict=True):
            one.copy_(kept)
    newcomer.shadow.load(Stale(at=10, way="shadow", version=16), 17)
    near, far = off(newcomer.parameters(), true[16]), off(true[10], true[16])
    assert near < 0.05 * far, (near, far)
    assert torch.equal(newcomer.model[2].bias, true[10][-1]), "what is frozen is exact as it is"
    assert float(newcomer.model[1].running_mean[0]) == 5.0
    newcomer.shadow.load(Stale(at=10, way="shadow", version=16, before=13), 17)
    assert off(newcomer.parameters(), true[17]) < 0.5 * off(true[16], true[17]), "on, on a straight line"


def test_digits_that_a_shadow_does_not_have_stay_those_of_the_snapshot(fd: int) -> None:
    rank = Rank(fd)
    rank.snapshot(10)
    with torch.no_grad():
        rank.model[0].weight[0] += 1.0
    now = rank.parameters()
    rank.shadow.take_if_due(13)
    rank.shadow.settle()
    with torch.no_grad():
        rank.model[0].weight[0] -= 1.0
    rank.shadow.load(Stale(at=10, way="shadow", version=13), 13)
    found = rank.parameters()
    assert torch.equal(found[0][1:], now[0][1:]), "these have not moved: no digit is lost"
    assert 0 < off([found[0][0]], [now[0][0]]) < 0.02


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_never_told_of(fd: int, value: float) -> None:
    rank = Rank(fd)
    train(rank, 14)
    with torch.no_grad():
        rank.model[0].weight[3, 3] = value
    rank.shadow.take_if_due(16)
    rank.shadow.settle()
    assert rank.shadow.usable() == (13,)
    rank.shadow.drop_unsound()
    before = rank.parameters()
    with pytest.raises(StateError, match="version 16 is gone"):
        rank.shadow.load(Stale(at=10, way="shadow", version=16), 17)
    assert all(torch.equal(*pair) for pair in zip(rank.parameters()[1:], before[1:], strict=True)), (
        "nothing was touched"
    )


def test_a_shadow_of_another_model_does_not_fit(fd: int) -> None:
    train(Rank(fd), 17)
    other = Rank(fd)
    other.optimizer.param_groups[0]["params"] = [torch.zeros(40, requires_grad=True), *other.model[2].parameters()]
    assert other.shadow.usable() == ()


def test_who_goes_back_has_no_later_ones(fd: int) -> None:
    rank = Rank(fd)
    train(rank, 17)
    rank.shadow.drop_behind(14)
    assert rank.shadow.usable() == (13,)
    rank.step(14)
    rank.shadow.settle()
    assert rank.shadow.usable() == (13, 14), "it is behind the newest that was ever taken, and takes them anew"


@pytest.mark.parametrize(
    ("settings", "replicated"),
    [
        (Settings(rehab_from=10, shadow_every=3), False),
        (Settings(fidelity="fast", rehab_from=10, shadow_cost=0), False),
        (FAST, True),
    ],
)
def test_none_where_repairs_are_exact_where_they_are_off_and_where_there_is_a_replica(
    fd: int, settings: Settings, replicated: bool
) -> None:
    rank = Rank(fd, settings, replicated=replicated)
    train(rank, 17)
    assert rank.shadow.room() == 0 and rank.shadow.usable() == ()


def test_exact_repairs_do_not_even_read_what_was_left(fd: int) -> None:
    train(Rank(fd), 17)
    assert Rank(fd, Settings(rehab_from=10)).shadow.usable() == ()


def test_without_memory_for_it_the_snapshots_go_on(fd: int, capsys: pytest.CaptureFixture[str]) -> None:
    rank = Rank(fd)
    rank.stager = Stager(Arena(fd), overlap=False)
    rank.stager.stage(1, Pieces(rank.tracked, 0, 2).all(), b"")
    successor = Rank(fd)
    train(successor, 20)
    assert successor.shadow.usable() == () and successor.stager.arena.holds(10)
    told = capsys.readouterr().err
    assert told.count("there is no memory for a shadow of its parameters") == 1


def test_how_often_follows_from_what_one_costs(fd: int) -> None:
    assert steps_between(0.0005, 0.05, 0.001) == 10
    assert steps_between(0.0, 0.05, 0.001) == 1 and steps_between(10.0, 0.05, 0.001) == LONGEST
    planned = Rank(fd, Settings(fidelity="fast", rehab_from=10))
    assert planned.shadow.every == UNTIL_MEASURED
    planned.snapshot(10)
    for version in range(10, 10 + UNTIL_MEASURED * (MEASURED + 2)):
        planned.step(version)
    assert len(planned.shadow._costs) >= MEASURED and all(cost > 0 for cost in planned.shadow._costs)
    planned.job._durations.append(1e-9)
    planned.job._durations.append(1e-9)
    assert planned.shadow.every == LONGEST
