"""Dealing: the samples of each update are fixed, whoever shares them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from rerail.errors import StateError
from rerail.session import rng
from rerail.session.cursor import Cursor
from rerail.session.dealing import Dealer, deal, order_of, share
from rerail.session.job import Job, Place

WORLD = 5


class Table:
    """All seats of a job in one process; who sits there changes."""

    def __init__(self, length: int, batch: int, seed: int, workers: int = 0) -> None:
        self.taken = tuple(range(WORLD))
        self.data = TensorDataset(torch.arange(length))
        self.dealers = [
            deal(self.data, batch, seed, True, rank=seat, world_size=WORLD, seats=lambda: self.taken)
            for seat in range(WORLD)
        ]
        self._workers = workers
        self.cursors = [self.cursor(seat) for seat in range(WORLD)]

    def cursor(self, seat: int) -> Cursor:
        return Cursor(DataLoader(self.data, batch_sampler=self.dealers[seat], num_workers=self._workers), endless=True)

    def update(self, version: int) -> list[int]:
        found = []
        for seat in self.taken:
            batch, _ = self.cursors[seat].take(version, rng.capture())
            found += batch[0].tolist()
        return found

    def change(self, taken: tuple[int, ...], version: int) -> None:
        """As a repair does it: those who stay throw away what they have, newcomers start where the others are."""
        position, stayed = self.cursors[self.taken[0]].position(), set(self.taken)
        self.taken = taken
        for seat in taken:
            if seat not in stayed:
                self.cursors[seat] = self.cursor(seat)
            self.cursors[seat].go_back(version, position, fresh=True)


@pytest.mark.parametrize("seed", range(25))
def test_no_sample_is_lost_or_repeated_over_any_changes_of_who_is_there(seed: int) -> None:
    dice = random.Random(seed)
    batch = dice.randint(WORLD, 20)
    table = Table(dice.randint(batch, 90), batch, seed)
    terms = table.dealers[0].terms
    per_epoch = terms.length // batch
    for version in range(40):
        if dice.random() < 0.3:
            seats = dice.sample(range(WORLD), dice.randint(1, WORLD))
            table.change(tuple(sorted(seats)), version)
        order = list(map(int, order_of(terms, version // per_epoch)))
        at = version % per_epoch * batch
        assert table.update(version) == order[at : at + batch], f"update {version} among {table.taken}"


def test_what_workers_have_fetched_ahead_for_others_is_thrown_away() -> None:
    table = Table(60, 10, seed=1, workers=1)
    whole = [table.update(version) for version in range(3)]
    table.change((0, 3), 3)
    assert table.dealers[0].moved is False
    again = Table(60, 10, seed=1)
    assert [again.update(version) for version in range(3)] == whole
    assert table.update(3) == again.update(3)
    table.cursors.clear()  # their workers end here, and not whenever the cycle is collected


def test_shares_differ_by_one_at_most_and_weights_make_the_mean_that_of_all() -> None:
    for seats in ((0,), (1, 4), (0, 2, 3), tuple(range(WORLD))):
        shares = [share(13, seats, seat) for seat in seats]
        assert [start for start, _ in shares] == [sum(n for _, n in shares[:i]) for i in range(len(seats))]
        counts = [count for _, count in shares]
        assert sum(counts) == 13 and max(counts) - min(counts) <= 1
        weights = [dealer(seats, seat).weight for seat in seats]
        assert sum(weights) == pytest.approx(WORLD)  # DDP divides by the number of seats


def dealer(seats: tuple[int, ...], seat: int) -> Dealer:
    return deal(range(100), 13, 0, True, rank=seat, world_size=WORLD, seats=lambda: seats)


def test_a_full_table_with_even_shares_weighs_nothing() -> None:
    assert deal(range(100), 15, 0, True, rank=2, world_size=WORLD, seats=lambda: range(WORLD)).weight == 1.0


def test_a_place_is_found_without_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(600, 6, seed=0)
    for version in range(150):
        table.update(version)
    position, read = table.cursors[2].position(), []
    fresh = table.cursor(2)
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, index: read.append(index))
    fresh.go_back(150, position, fresh=True)
    assert not read


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"batch": WORLD - 1}, "shared by 5 ranks"),
        ({"batch": 0}, "shared by 5 ranks"),
        ({"batch": 10.5}, "whole number"),
        ({"batch": True}, "whole number"),
        ({"batch": "12"}, "whole number"),
        ({"batch": 101}, "only 100 samples"),
        ({"seed": -1}, "from 0 to"),
        ({"seed": None}, "whole number"),
        ({"dataset": iter([1, 2, 3])}, "has no length"),
        ({"dataset": []}, "only 0 samples"),
    ],
)
def test_what_cannot_be_dealt_is_refused(arguments: dict[str, Any], said: str) -> None:
    given = {"dataset": range(100), "batch": 10, "seed": 0, "shuffle": True, **arguments}
    with pytest.raises(StateError, match=said):
        deal(**given, rank=0, world_size=WORLD, seats=lambda: range(WORLD))


def test_a_dataset_that_changes_its_length_is_noticed() -> None:
    data = list(range(50))
    one = deal(data, 10, 0, True, rank=0, world_size=WORLD, seats=lambda: range(WORLD))
    next(iter(one))
    data.append(50)
    with pytest.raises(StateError, match=r"had 50 samples when job.deal.. was called and has 51"):
        iter(one)


def test_a_place_of_another_order_is_refused() -> None:
    table, other = Table(60, 10, seed=1), Table(60, 10, seed=2)
    table.update(0)
    with pytest.raises(StateError, match=r"seed 1, and job.deal.. has 60 samples, batches of 10 and seed 2"):
        other.cursors[0].go_back(1, table.cursors[0].position(), fresh=True)


def job() -> Job:
    return Job(None, Place(0, 1, 0, torch.device("cpu")))


def test_dealing_comes_once_and_before_the_first_step() -> None:
    one = job()
    data = TensorDataset(torch.arange(10))
    loader = DataLoader(data, batch_sampler=one.deal(data, batch=5))
    with pytest.raises(StateError, match="called already"):
        one.deal(data, batch=5)
    (batch,) = next(one.steps(loader))
    assert len(batch) == 5
    with pytest.raises(StateError, match="before the first"):
        one.deal(data, batch=5)


def test_a_loader_that_is_not_dealt_to_is_refused_where_the_script_deals() -> None:
    one = job()
    data = TensorDataset(torch.arange(10))
    one.deal(data, batch=5)
    with pytest.raises(StateError, match=r"takes no batches from job\.deal"):
        next(one.steps(DataLoader(data, batch_size=5)))


def test_without_dealing_a_loss_weighs_what_it_is() -> None:
    assert job().weight == 1.0 and job().seats == (0,)
