"""Copies of committed steps on further tiers: they count when they are whole, and never as anything else."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest
from two_ranks import Job, start

from rerail.checkpoint import catalog, copying, names, saving
from rerail.checkpoint.copying import Copier, copied, copy_step
from rerail.checkpoint.files import FileTier
from rerail.checkpoint.names import StepId
from rerail.checkpoint.places import Places
from rerail.checkpoint.retention import Keep
from rerail.checkpoint.saving import Order, Outcome
from rerail.checkpoint.tiers import Source, tier_at
from rerail.checkpoint.writer import Writer
from rerail.errors import CheckpointError

LIMIT_S = 30.0
FOLDER = StepId(1, 20, 0).folder


@pytest.fixture
def places(tmp_path: Path, job: Job) -> tuple[Path, Path]:
    """Step 20 in the first, nothing in the second."""
    outcomes = job.save(20, [tmp_path / "fast"])
    assert all(outcome.ok for outcome in outcomes)
    return tmp_path / "fast", tmp_path / "slow"


def step_20(root: Path) -> catalog.Step:
    return catalog.open_step(FileTier(root), StepId(1, 20, 0))


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_a_copy_is_the_step_byte_for_byte_and_is_started_from(places: tuple[Path, Path], scheme: str) -> None:
    fast, slow = places
    target = tier_at(scheme + str(slow))
    assert copy_step(step_20(fast), target)
    assert not copy_step(step_20(fast), target), "it is there already"
    for name in os.listdir(fast / FOLDER):
        assert target.get(f"{FOLDER}/{name}", 1 << 30) == (fast / FOLDER / name).read_bytes(), name
    shutil.rmtree(fast)
    assert start([FileTier(fast), target]) == (20, [])


def test_a_source_that_is_damaged_is_not_copied(places: tuple[Path, Path]) -> None:
    fast, slow = places
    step, shard = step_20(fast), fast / FOLDER / names.shard_name(1, 0)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match="checksum"):
        copy_step(step, FileTier(slow))
    assert start([FileTier(slow)]) == (0, [])


def test_a_manifest_that_changed_since_is_not_copied(places: tuple[Path, Path]) -> None:
    fast, slow = places
    step, path = step_20(fast), fast / FOLDER / names.manifest_name(0)
    path.write_bytes(path.read_bytes().replace(b'"rank":0', b'"rank":1'))
    with pytest.raises(CheckpointError):
        copy_step(step, FileTier(slow))
    assert start([FileTier(slow)]) == (0, [])


def test_a_copy_that_was_broken_off_counts_for_nothing_and_is_begun_anew(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, slow = places
    put, allowed = FileTier.put, 0

    def limited(self: FileTier, path: str, data: bytes, *, exclusive: bool = False) -> None:
        nonlocal allowed
        if self.root == slow and not allowed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allowed -= self.root == slow
        put(self, path, data, exclusive=exclusive)

    monkeypatch.setattr(FileTier, "put", limited)
    for puts in range(6):  # COPYING, manifest and mark of either rank, COMMIT
        allowed = puts
        with pytest.raises(OSError, match="No space"):
            copy_step(step_20(fast), FileTier(slow))
        assert start([FileTier(slow)]) == (0, [])
    allowed = 6
    assert copy_step(step_20(fast), FileTier(slow))
    assert start([FileTier(slow)]) == (20, [])


@pytest.mark.parametrize("how", ["flipped", "cut short"])
def test_a_copy_that_is_damaged_is_not_called_there(places: tuple[Path, Path], how: str) -> None:
    fast, slow = places
    assert copy_step(step_20(fast), FileTier(slow))
    shard = slow / FOLDER / names.shard_name(0, 0)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data if how == "flipped" else data[:10])
    with pytest.raises(CheckpointError, match="is there, but not as it should be"):
        copy_step(step_20(fast), FileTier(slow))


def test_a_copy_that_fails_leaves_nothing_behind(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = places

    def full(self: FileTier, path: str, source: Source, size: int, chunk: int) -> list[str]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(FileTier, "put_large", full)
    with pytest.raises(OSError, match="No space"):
        copy_step(step_20(fast), FileTier(slow))
    assert os.listdir(slow) == []


def test_a_folder_that_a_job_is_saving_to_is_left_alone(places: tuple[Path, Path]) -> None:
    fast, slow = places
    FileTier(slow).make_folder(FOLDER)
    FileTier(slow).put(f"{FOLDER}/{names.manifest_name(0)}", b"{}")
    with pytest.raises(CheckpointError, match="being saved to by a job"):
        copy_step(step_20(fast), FileTier(slow))
    assert os.listdir(slow / FOLDER) == [names.manifest_name(0)]


def test_a_job_that_was_replaced_commits_no_copy(places: tuple[Path, Path], job: Job) -> None:
    fast, slow = places
    saving.claim_epoch(FileTier(fast), "another")  # epoch 2: the job of epoch 1 is a zombie now
    outcome = copied(job.order(20, places), str(fast), str(slow))
    assert not outcome.ok and outcome.copied_to == str(slow) and "another job (epoch 2)" in outcome.notes[0]
    assert start([FileTier(slow)]) == (0, [])


def test_of_steps_that_wait_only_the_newest_is_copied_and_those_under_way_are_known(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, told = threading.Event(), threading.Event(), list[Outcome]()

    def slow_copy(order: Order, url: str, target: str, places: Places) -> Outcome:
        begun.set()
        assert go_on.wait(LIMIT_S)
        return Outcome(version=order.version, ok=True, copied_to=target)

    monkeypatch.setattr(copying, "copied", slow_copy)
    copier = Copier(told.append)
    tiers = [tmp_path / "a", tmp_path / "b"]
    copier.offer(job.order(10, tiers), str(tiers[0]))
    assert begun.wait(LIMIT_S)
    copier.offer(job.order(20, tiers), str(tiers[0]))
    copier.offer(job.order(30, tiers), str(tiers[0]))
    assert {step.step for step in copier.steps} == {10, 30}
    go_on.set()
    copier.close()
    assert [outcome.version for outcome in told] == [10, 30] and not copier.steps
    assert told[0].notes == () and "before their turn: 20" in told[1].notes[0]


def test_the_persister_copies_on_and_finishes_that_before_it_ends(tmp_path: Path, job: Job) -> None:
    places, told = [tmp_path / name for name in ("fast", "slow", "far")], list[Outcome]()
    writers = [Writer(fd, told.append) for fd in job.fds]
    for version in (10, 20):
        job.stage(version)
        for rank, writer in enumerate(writers):
            writer.save(job.order(version, places, rank, keep=Keep(last=1), deadline_s=LIMIT_S))
        assert all(writer.wait(LIMIT_S) for writer in writers)
    assert all(writer.close(LIMIT_S) for writer in writers)
    copies = {(outcome.version, Path(outcome.copied_to).name) for outcome in told if outcome.copied_to}
    assert {(20, "slow"), (20, "far")} <= copies and all(outcome.ok for outcome in told), told
    for place in places:
        assert start([FileTier(place)]) == (20, [])
        assert [found.id.step for found in catalog.folders(FileTier(place))] == [20], "keep=1 is not kept at the end"
    # after it was let go, another order starts another persister
    job.stage(30)
    for rank, writer in enumerate(writers):
        writer.save(job.order(30, places, rank, deadline_s=LIMIT_S))
    assert all(writer.close(LIMIT_S) for writer in writers)
    assert start([FileTier(places[2])]) == (30, [])


def test_a_place_that_cannot_be_copied_to_costs_nothing_but_the_copy(tmp_path: Path, job: Job) -> None:
    (tmp_path / "slow").write_text("a file")
    places, told = [tmp_path / name for name in ("fast", "slow", "far")], list[Outcome]()
    writers = [Writer(fd, told.append) for fd in job.fds]
    job.stage(20)
    for rank, writer in enumerate(writers):
        writer.save(job.order(20, places, rank, deadline_s=LIMIT_S))
    assert all(writer.close(LIMIT_S) for writer in writers)
    copies = {Path(outcome.copied_to).name: outcome.ok for outcome in told if outcome.copied_to}
    assert copies == {"slow": False, "far": True}
    assert [outcome.ok for outcome in told if not outcome.copied_to and not outcome.place] == [True, True]
    assert [(outcome.place, Path(outcome.url).name) for outcome in told if outcome.place] == [("out", "slow")]


def test_retention_leaves_a_step_alone_while_it_is_copied(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow places and `keep=1`: what is being read must not be pruned meanwhile."""
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    write, begun, go_on = FileTier.put_large, threading.Event(), threading.Event()

    def slowly(self: FileTier, path: str, source: Source, size: int, chunk: int) -> list[str]:
        if self.root == slow:
            begun.set()
            assert go_on.wait(LIMIT_S)
        return write(self, path, source, size, chunk)

    monkeypatch.setattr(FileTier, "put_large", slowly)
    told = list[Outcome]()
    copier = Copier(told.append)
    job.save(10, [fast], keep=Keep(last=1))
    copier.offer(job.order(10, [fast, slow], keep=Keep(last=1)), str(fast))
    assert begun.wait(LIMIT_S)
    job.stage(20)
    threads = [
        threading.Thread(
            target=lambda rank=rank: list(
                saving.carry_out(job.order(20, [fast], rank, keep=Keep(last=1)), job.arenas[rank], lambda: copier.steps)
            )
        )
        for rank in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert StepId(1, 10, 0).folder in os.listdir(fast)
    go_on.set()
    copier.close()
    assert [outcome.ok for outcome in told] == [True], told
    assert start([FileTier(slow)]) == (10, [])
