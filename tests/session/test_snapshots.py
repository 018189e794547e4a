"""The arena: two slots, sealed when whole; a torn one is never read."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest
import torch

from rerail.errors import StateError
from rerail.session.snapshots import Arena


@pytest.fixture
def fd() -> Iterator[int]:
    descriptor = os.memfd_create("arena")
    yield descriptor
    os.close(descriptor)


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3, 5), value), "step": torch.tensor(value), "none": torch.empty(0), "i": torch.arange(4)}


def test_the_newest_two_are_kept_and_read_back_by_a_successor(fd: int) -> None:
    arena = Arena(fd)
    for version in (2, 4, 6):
        arena.write(version, state(float(version)), f"small {version}".encode())
    successor = Arena(fd)
    assert successor.versions() == (4, 6)
    snapshot = successor.read(6)
    assert snapshot.small == b"small 6"
    assert all(torch.equal(snapshot.tensors[name], tensor) for name, tensor in state(6.0).items())


def test_a_version_written_again_takes_its_own_slot(fd: int) -> None:
    arena = Arena(fd)
    for version in (2, 4, 4):
        arena.write(version, state(float(version)), b"")
    assert arena.versions() == (2, 4)


def test_small_state_alone_is_not_a_whole_snapshot(fd: int) -> None:
    arena = Arena(fd)
    arena.write(8, {}, b"small")
    assert arena.small_versions() == (8,) and arena.versions() == ()


def test_a_torn_seal_hides_its_slot(fd: int) -> None:
    arena = Arena(fd)
    arena.write(2, state(2.0), b"")
    arena.write(4, state(4.0), b"")
    with mmap.mmap(fd, 4096) as page:
        page[64 + 64] ^= 1  # the seal of the second slot
    assert Arena(fd).versions() == (2,)


def test_a_version_that_is_not_there_is_an_error(fd: int) -> None:
    with pytest.raises(StateError, match=r"no snapshot|not in this rank's arena"):
        Arena(fd).read(3)


def test_larger_state_begins_the_arena_anew(fd: int) -> None:
    arena = Arena(fd)
    arena.write(2, state(2.0), b"")
    arena.write(4, {"w": torch.zeros(1 << 16)}, b"")
    assert arena.versions() == (4,)
