"""The place in the data: going back gives the same batches, in the same process and in a new one."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

from rerail.session import rng
from rerail.session.cursor import Cursor, Position


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.arange(20)), batch_size=4, shuffle=True)


def walk(cursor: Cursor, first: int, count: int) -> tuple[list[list[int]], list[Position], list[rng.RandomState]]:
    batches, positions, randoms = [], [], []
    for version in range(first, first + count):
        before = rng.capture()
        positions.append(cursor.position())
        randoms.append(before)
        (batch,), _ = cursor.take(version, before)
        batches.append(batch.tolist())
        torch.rand(3)  # the step draws, too
    return batches, positions, randoms


def test_a_survivor_goes_back_over_an_epoch_s_end() -> None:
    torch.manual_seed(3)
    cursor = Cursor(loader(), endless=True)
    batches, positions, randoms = walk(cursor, 0, 8)
    cursor.go_back(3, positions[3], fresh=False)
    rng.restore(randoms[3])
    assert walk(cursor, 3, 5)[0] == batches[3:]


def test_a_new_process_finds_the_place_by_reading_again() -> None:
    torch.manual_seed(3)
    batches, positions, randoms = walk(Cursor(loader(), endless=True), 0, 8)
    for version in (0, 2, 5, 6):
        torch.manual_seed(99)
        successor = Cursor(loader(), endless=True)
        successor.go_back(version, positions[version], fresh=True)
        rng.restore(randoms[version])
        assert walk(successor, version, 8 - version)[0] == batches[version:], version


class Counting:
    """Counts up; its state is where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> torch.Tensor:
        self.at += 1
        return torch.tensor([self.at])

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_place_that_is_reached_again_from_memory_can_be_found_by_others() -> None:
    """A survivor goes back, and what it writes down on its way is what a new process starts from."""
    cursor = Cursor(Counting(), endless=True)
    positions = []
    for version in range(9):
        positions.append(cursor.position())
        cursor.take(version, rng.capture(), positions[-1])
    cursor.go_back(3, positions[3], fresh=False)
    for version in range(3, 7):
        assert cursor.take(version, rng.capture(), cursor.position())[0].tolist() == [version + 1]
    position = cursor.position()
    assert position == positions[7]
    for read in (0, 12):
        loader = Counting()
        loader.at = read
        successor = Cursor(loader, endless=True)
        successor.go_back(7, position, fresh=True)
        assert successor.take(7, rng.capture())[0].tolist() == [8], f"{read} batches were read there before"


def test_a_loader_with_state_is_restored_by_it() -> None:
    cursor = Cursor(Counting(), endless=True)
    for version in range(5):
        cursor.take(version, rng.capture())
    position = cursor.position()
    successor = Cursor(Counting(), endless=True)
    successor.go_back(5, position, fresh=True)
    assert successor.take(5, rng.capture())[0].tolist() == [6]


def test_without_a_loader_the_step_number_is_the_batch() -> None:
    assert Cursor(None, endless=True).take(7, rng.capture())[0] == 7


def test_what_is_left_out_is_left_out_by_survivors_and_by_new_processes_alike() -> None:
    torch.manual_seed(3)
    cursor, told = Cursor(loader(), endless=True), list[tuple[int, list[tuple[int, int]]]]()
    cursor.on_skip = lambda version, places: told.append((version, places))
    batches, positions, randoms = walk(cursor, 0, 5)
    wanted = [batches[0], *batches[3:]]
    cursor.leave_out({1: 2})
    assert cursor.stale
    cursor.go_back(0, positions[0], fresh=False)
    assert not cursor.stale
    rng.restore(randoms[0])
    again, places, _ = walk(cursor, 0, 3)
    assert again == wanted and told == [(1, [(0, 1), (0, 2)])]
    cursor.go_back(1, places[1], fresh=False)
    assert walk(cursor, 1, 2)[0] == wanted[1:], "kept batches are those behind the ones left out"
    successor = Cursor(loader(), endless=True)
    successor.leave_out({1: 2})
    successor.go_back(1, places[1], fresh=True)
    rng.restore(randoms[1])
    assert walk(successor, 1, 2)[0] == wanted[1:]


def test_without_a_loader_the_numbers_pass_over_what_is_left_out() -> None:
    cursor = Cursor(None, endless=False)
    cursor.leave_out({4: 2, 6: 1})
    numbers, places = [], []
    for version in range(3, 8):
        places.append(cursor.position())
        numbers.append(cursor.take(version, rng.capture())[0])
    assert numbers == [3, 6, 7, 9, 10]
    cursor.go_back(6, places[3], fresh=True)
    assert cursor.take(6, rng.capture())[0] == 9
