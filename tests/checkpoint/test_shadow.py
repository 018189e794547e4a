"""The shadow: two halves behind the slots, written in turns; one that is not whole is never taken."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from rerail.checkpoint.arena import Arena, Entry, NoRoom
from rerail.checkpoint.casting import Caster, mold_of
from rerail.checkpoint.dtypes import view_of
from rerail.checkpoint.layout import Piece
from rerail.checkpoint.shadow import Shadow, describe, room_for
from rerail.checkpoint.staging import Stager
from rerail.errors import StateError

ENTRIES = [Entry("w", "U8", (5000,), "cpu", 0, (5000,), (0,))]
DESCRIBED = describe(ENTRIES)


@pytest.fixture
def fd() -> Iterator[int]:
    descriptor = os.memfd_create("arena")
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def arena(fd: int) -> Arena:
    found = Arena(fd)
    found.reserve(2, 100, 100, behind=room_for(DESCRIBED, 5000))
    return found


def fill(shadow: Shadow, version: int, *, seal: bool = True) -> None:
    half = shadow.begin(version, DESCRIBED, 5000)
    assert half is not None
    memory, base = shadow.place(half, DESCRIBED)
    memory[base : base + 5000] = bytes([version]) * 5000
    if seal:
        shadow.seal(half, version, DESCRIBED)


def test_the_newest_two_are_kept_and_read_back_by_a_successor(arena: Arena, fd: int) -> None:
    for version in (3, 6, 9):
        fill(Shadow(arena), version)
    found = Shadow(Arena(fd))
    assert found.versions() == (6, 9) and found.entries(9) == ENTRIES
    for version in (6, 9):
        assert bytes(found.image(version)[:5000]) == bytes([version]) * 5000


def test_a_half_that_is_not_whole_is_not_there_and_the_other_one_is(arena: Arena, fd: int) -> None:
    for version in (3, 6):
        fill(Shadow(arena), version)
    fill(Shadow(arena), 9, seal=False)
    assert Shadow(Arena(fd)).versions() == (6,)
    with pytest.raises(StateError, match="no shadow of version 9"):
        Shadow(Arena(fd)).entries(9)


@pytest.mark.parametrize("byte", range(24))
def test_a_torn_seal_hides_its_half(arena: Arena, fd: int, byte: int) -> None:
    fill(Shadow(arena), 3)
    with mmap.mmap(fd, 0) as memory:
        memory[arena.behind()[1] + byte] ^= 0x55
    assert Shadow(Arena(fd)).versions() == ()


def test_a_description_that_was_overwritten_is_noticed(arena: Arena) -> None:
    fill(Shadow(arena), 3)
    memory, base, _ = arena.behind()
    assert memory is not None
    memory[base + 4096] ^= 1
    with pytest.raises(StateError, match="overwritten"):
        Shadow(arena).entries(3)


def test_too_small_a_room_and_none_at_all(arena: Arena) -> None:
    assert Shadow(arena).begin(3, DESCRIBED, 20_000) is None
    fd = os.memfd_create("arena")
    without = Arena(fd)
    assert Shadow(without).empty and Shadow(without).versions() == ()
    without.reserve(2, 100, 100)
    assert not Shadow(without).empty and Shadow(without).begin(3, DESCRIBED, 5000) is None
    os.close(fd)


def test_who_has_gone_back_makes_later_ones_anew(arena: Arena) -> None:
    shadow = Shadow(arena)
    for version in (3, 6):
        fill(shadow, version)
    fill(shadow, 5)
    assert shadow.versions() == (3, 5)
    shadow.drop_behind(4)
    assert shadow.versions() == (3,)
    shadow.drop(3)
    assert shadow.versions() == ()


WRITER = """
import sys
from rerail.checkpoint.arena import Arena, Entry
from rerail.checkpoint.shadow import Shadow, describe
shadow, described = Shadow(Arena(int(sys.argv[1]))), describe([Entry("w", "U8", (5000,), "cpu", 0, (5000,), (0,))])
version = 0
while True:
    version += 1
    half = shadow.begin(version, described, 5000)
    memory, base = shadow.place(half, described)
    memory[base : base + 5000] = bytes([version % 251]) * 5000
    shadow.seal(half, version, described)
    if version == 1000:
        print("going", flush=True)
"""


def test_what_a_process_leaves_that_is_killed_at_any_moment_is_whole(arena: Arena, fd: int) -> None:
    for _ in range(3):
        Shadow(arena).drop_behind(-1)
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(fd)], pass_fds=[fd], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None and writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        left = Shadow(Arena(fd))
        assert left.versions()
        for version in left.versions():
            assert bytes(left.image(version)[:5000]) == bytes([version % 251]) * 5000


def pieces(size: int) -> list[Piece]:
    return [Piece("w", torch.ones(size), (size,), (0,), True)]


def test_snapshots_and_shadow_share_an_arena_that_grows(fd: int) -> None:
    """A larger state begins it anew, the shadow too; one that is only wanted larger does not touch what is sealed."""
    wanted = room_for(DESCRIBED, 5000)
    stager = Stager(Arena(fd), overlap=False, behind=lambda: wanted)
    assert stager.stage(2, pieces(10), b"")
    fill(Shadow(stager.arena), 3)
    assert stager.stage(4, pieces(10), b"") and Shadow(Arena(fd)).versions() == (3,)
    assert stager.stage(6, pieces(1 << 16), b"")
    assert Shadow(Arena(fd)).versions() == () and [seal.version for seal in Arena(fd).seals()] == [6]
    fill(Shadow(stager.arena), 7)
    successor = Stager(Arena(fd), overlap=False, behind=lambda: 10 * wanted)
    assert successor.stage(8, pieces(1 << 16), b"")
    assert [seal.version for seal in Arena(fd).seals()] == [6, 8] and Shadow(Arena(fd)).versions() == (7,)
    assert torch.equal(view_of(successor.arena.image(8), successor.arena.meta(8).entries[0]), torch.ones(1 << 16)), (
        "the slots are where they were"
    )


def test_where_there_is_no_room_for_both_the_snapshots_have_it(fd: int) -> None:
    stager = Stager(Arena(fd), overlap=False, most=16 << 20, behind=lambda: 64 << 20)
    assert stager.stage(2, pieces(10), b"")
    assert Shadow(stager.arena).begin(3, DESCRIBED, 5000) is None
    with pytest.raises(NoRoom):
        Stager(Arena(fd), overlap=False, most=4096, behind=lambda: 4096).stage(4, pieces(1 << 20), b"")


def test_parameters_are_cast_and_small_types_stay_as_they_are(fd: int) -> None:
    torch.manual_seed(0)
    tensors = {
        "wide": torch.randn(7, 11),
        "double": torch.randn(5, dtype=torch.float64),
        "half": torch.randn(3).half(),
        "brain": torch.randn(9).bfloat16(),
        "scalar": torch.tensor(0.1),
    }
    arena = Arena(fd)
    arena.reserve(2, 100, 100, behind=mold_of(tensors).room)
    caster = Caster(Shadow(arena))
    for version in (3, 6):
        assert caster.take(version, {name: one + version for name, one in tensors.items()})
        caster.before_update()
    caster.settle()
    left = Shadow(Arena(fd))
    assert left.versions() == (3, 6)
    for version in (3, 6):
        found = {entry.name: view_of(left.image(version), entry) for entry in left.entries(version)}
        for name, one in tensors.items():
            kept = (one + version).to(torch.float16 if name == "half" else torch.bfloat16)
            assert found[name].dtype == kept.dtype and torch.equal(found[name], kept), name


def test_the_update_waits_until_all_is_copied(fd: int) -> None:
    tensors = {str(index): torch.ones(1 << 18) for index in range(16)}
    arena = Arena(fd)
    arena.reserve(2, 100, 100, behind=mold_of(tensors).room)
    caster = Caster(Shadow(arena))
    for version in range(1, 20):
        assert caster.take(version, tensors)
        caster.before_update()
        assert not caster.busy, "on a CPU nothing is left to do then"
        for one in tensors.values():
            one += 1.0
        image = caster.shadow.image(version)
        for entry in caster.shadow.entries(version):
            assert bool((view_of(image, entry) == version).all())
