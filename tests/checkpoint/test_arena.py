"""The arena: slots are sealed when whole, a torn one is never read, and one that is being read is never filled."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from rerail.checkpoint.arena import Arena
from rerail.checkpoint.dtypes import view_of
from rerail.checkpoint.layout import Piece
from rerail.checkpoint.staging import Stager
from rerail.errors import StateError


@pytest.fixture
def fd() -> Iterator[int]:
    descriptor = os.memfd_create("arena")
    yield descriptor
    os.close(descriptor)


def state(value: float) -> list[Piece]:
    tensors = {
        "w": torch.full((3, 5), value),
        "step": torch.tensor(value),
        "none": torch.empty(0),
        "i": torch.arange(4),
        "half": torch.full((3,), value, dtype=torch.bfloat16),
    }
    return [Piece(name, t, tuple(t.shape), (0,) * t.dim(), name != "half", name == "i") for name, t in tensors.items()]


def versions(arena: Arena) -> list[int]:
    return [seal.version for seal in arena.seals()]


@pytest.mark.parametrize("overlap", [True, False])
def test_the_newest_two_are_kept_and_read_back_by_a_successor(fd: int, overlap: bool) -> None:
    stager = Stager(Arena(fd), overlap=overlap)
    for version in (2, 4, 6):
        assert stager.stage(version, state(float(version)), f"small {version}".encode())
    stager.settle()
    successor = Arena(fd)
    assert versions(successor) == [4, 6]
    meta = successor.meta(6)
    assert meta.small == b"small 6"
    found = {entry.name: view_of(successor.image(6), entry) for entry in meta.entries}
    assert all(torch.equal(found[piece.name], piece.tensor) for piece in state(6.0))


def test_a_version_written_again_takes_its_own_slot(fd: int) -> None:
    stager = Stager(Arena(fd))
    for version in (2, 4, 4):
        stager.stage(version, state(float(version)), b"")
    stager.settle()
    assert versions(stager.arena) == [2, 4]


def test_what_changes_in_a_forward_pass_is_copied_before_stage_returns(fd: int) -> None:
    stager, pieces = Stager(Arena(fd)), state(1.0)
    stager.stage(1, pieces, b"")
    next(piece.tensor for piece in pieces if piece.changing).zero_()
    stager.settle()
    entry = next(entry for entry in stager.arena.meta(1).entries if entry.name == "i")
    assert view_of(stager.arena.image(1), entry).tolist() == [0, 1, 2, 3]


def test_a_torn_seal_hides_its_slot(fd: int) -> None:
    stager = Stager(Arena(fd))
    stager.stage(2, state(2.0), b"")
    stager.stage(4, state(4.0), b"")
    stager.settle()
    with mmap.mmap(fd, 4096) as page:
        page[64 + 64] ^= 1  # the seal of the second slot
    assert versions(Arena(fd)) == [2]


def test_a_version_that_is_not_there_is_an_error(fd: int) -> None:
    with pytest.raises(StateError, match=r"not in this rank's arena"):
        Arena(fd).meta(3)


def test_larger_state_begins_the_arena_anew(fd: int) -> None:
    stager = Stager(Arena(fd))
    stager.stage(2, state(2.0), b"")
    large = torch.zeros(1 << 16)
    stager.stage(4, [Piece("w", large, tuple(large.shape), (0,), True)], b"")
    stager.settle()
    assert versions(stager.arena) == [4]


READER = """
import sys
from rerail.checkpoint.arena import Arena
arena = Arena(int(sys.argv[1]))
print(arena.lock_for_reading(int(sys.argv[2])), flush=True)
sys.stdin.read()
"""


def test_a_slot_that_another_process_reads_is_left_alone_until_that_process_ends(fd: int) -> None:
    stager = Stager(Arena(fd), overlap=False)
    stager.stage(2, state(2.0), b"")
    stager.stage(4, state(4.0), b"")
    command = [sys.executable, "-c", READER, str(fd), "2"]
    with subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "True\n"
        assert not stager.stage(6, state(6.0), b""), "a slot that is being read was filled"
        assert versions(stager.arena) == [2, 4]
        reader.kill()
        reader.wait()
    assert stager.stage(6, state(6.0), b"")
    assert versions(stager.arena) == [4, 6]


def test_an_ordered_version_is_kept_though_nobody_reads_it_yet(fd: int) -> None:
    stager = Stager(Arena(fd), overlap=False)
    stager.stage(2, state(2.0), b"")
    stager.stage(4, state(4.0), b"")
    assert not stager.stage(6, state(6.0), b"", pinned=frozenset({2}))
    assert stager.stage(6, state(6.0), b"")


def test_while_one_is_being_saved_the_other_slot_holds_the_newest(fd: int) -> None:
    stager = Stager(Arena(fd), overlap=False)
    stager.stage(2, state(2.0), b"")
    stager.stage(4, state(4.0), b"")
    for version in (6, 8):
        assert stager.stage(version, state(float(version)), b"", pinned=frozenset({2}), renew=True)
        assert versions(stager.arena) == [2, version]
    assert not stager.stage(9, state(9.0), b"", pinned=frozenset({2, 8}), renew=True)


def test_the_only_snapshot_there_is_stays_until_there_is_another(fd: int) -> None:
    stager = Stager(Arena(fd), slots=1, overlap=False)
    stager.stage(2, state(2.0), b"")
    assert not stager.stage(4, state(4.0), b"", renew=True)
    assert versions(stager.arena) == [2]


# --- the training has gone back ---


def test_what_is_left_of_a_past_that_was_further_takes_no_slot(fd: int) -> None:
    """Two slots: were the later version kept as the newest one, a save under way would keep all others from being taken."""
    stager = Stager(Arena(fd), overlap=False)
    for version in (80, 90):
        assert stager.stage(version, state(float(version)), b"")
    for version, pinned in ((20, set[int]()), (30, {20}), (40, set[int]()), (50, {40})):
        assert stager.stage(version, state(float(version)), b"", pinned=frozenset(pinned)), f"no slot for {version}"
    assert versions(stager.arena) == [40, 50]


def test_a_later_version_that_is_being_saved_stays_until_it_is(fd: int) -> None:
    stager = Stager(Arena(fd), overlap=False)
    stager.stage(80, state(80.0), b"")
    stager.stage(90, state(90.0), b"")
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(fd), "90"], pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with reader:
        assert reader.stdout is not None and reader.stdin is not None
        assert reader.stdout.readline() == b"True\n"
        stager.arena.drop_later(20)
        assert versions(stager.arena) == [90]
        assert stager.stage(20, state(20.0), b"")
        assert versions(stager.arena) == [20, 90]
        reader.stdin.close()
    assert stager.stage(30, state(30.0), b"")
    assert versions(stager.arena) == [20, 30]


UNLOCKER = """
import sys
from rerail.checkpoint.arena import Arena
arena = Arena(int(sys.argv[1]))
print(arena.lock_for_reading(4), flush=True)
sys.stdin.readline()
arena.unlock(4)
print("unlocked", flush=True)
sys.stdin.read()
"""


def test_a_slot_whose_seal_is_broken_while_it_is_read_is_free_once_that_is_over(fd: int) -> None:
    """Its reader, a persister, lives as long as the rank: a lock that it forgot would take the slot for good."""
    stager = Stager(Arena(fd), overlap=False)
    stager.stage(2, state(2.0), b"")
    stager.stage(4, state(4.0), b"")
    reader = subprocess.Popen(
        [sys.executable, "-c", UNLOCKER, str(fd)], pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with reader:
        assert reader.stdout is not None and reader.stdin is not None
        assert reader.stdout.readline() == b"True\n"
        stager.arena.drop_behind(2)  # not to be trusted
        reader.stdin.write(b"\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == b"unlocked\n"
        assert stager.stage(3, state(3.0), b"") and stager.stage(5, state(5.0), b"")
        assert versions(stager.arena) == [3, 5]
        reader.stdin.close()


def test_a_version_that_is_being_saved_gets_no_second_slot(fd: int) -> None:
    """It was reached once more, after all had gone back: who reads it must not be handed another one in the middle."""
    stager = Stager(Arena(fd), overlap=False)
    for version in (5, 8):
        assert stager.stage(version, state(float(version)), b"")
    assert not stager.stage(8, state(80.0), b"", pinned=frozenset({8}), renew=True)
    assert versions(stager.arena) == [5, 8]
    assert stager.stage(8, state(80.0), b"")
    assert versions(stager.arena) == [5, 8]


def test_a_later_version_that_is_ordered_and_not_yet_read_stays(fd: int) -> None:
    stager = Stager(Arena(fd), overlap=False)
    for version in (80, 90):
        stager.stage(version, state(float(version)), b"")
    assert stager.stage(20, state(20.0), b"", pinned=frozenset({90}))
    assert versions(stager.arena) == [20, 90]
    stager.arena.drop_later(20)
    assert versions(stager.arena) == [20]
