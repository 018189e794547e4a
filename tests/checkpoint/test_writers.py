"""Writers that die, stall, fail or come too late: the newest valid step stays the newest, and no save disturbs another."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from two_ranks import Job, insist, load, start

from rerail.checkpoint import catalog, names, persister, retention, saving, shards
from rerail.checkpoint.files import FileTier
from rerail.checkpoint.manifest import Commit, RankEntry
from rerail.checkpoint.names import StepId
from rerail.checkpoint.retention import Keep
from rerail.checkpoint.saving import Outcome
from rerail.checkpoint.tiers import Source
from rerail.checkpoint.writer import STARTS, Writer
from rerail.errors import CheckpointError, StateError

LIMIT_S = 60.0


def saved(outcomes: list[Outcome]) -> None:
    assert all(outcome.ok for outcome in outcomes), outcomes


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def fail_under(monkeypatch: pytest.MonkeyPatch, root: Path, code: int, name: str = "") -> list[str]:
    """Large files under `root` whose path has `name` in it cannot be written. What was tried."""
    write, tried = FileTier.put_large, list[str]()

    def put_large(self: FileTier, path: str, source: Source, size: int, chunk: int) -> list[str]:
        if self.root == root and name in path:
            tried.append(path)
            raise OSError(code, os.strerror(code))
        return write(self, path, source, size, chunk)

    monkeypatch.setattr(FileTier, "put_large", put_large)
    return tried


# --- several jobs ---


def test_every_claim_of_an_epoch_is_another_number(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: saving.claim_epoch(FileTier(tmp_path), "job"), range(24)))
    assert sorted(claimed) == list(range(1, 25))


def test_an_epoch_is_above_those_of_all_tiers(tmp_path: Path, job: Job) -> None:
    second = FileTier(tmp_path / "second")
    saved(job.save(5, [second.root], epoch=7))
    assert saving.claim_epoch(FileTier(tmp_path / "first"), "job", [second]) == 8


def test_a_zombie_of_an_old_epoch_cannot_commit(tmp_path: Path, job: Job) -> None:
    tier = FileTier(tmp_path)
    first = saving.claim_epoch(tier, "first")
    saved(job.save(10, [tmp_path], epoch=first))
    second = saving.claim_epoch(tier, "second")
    outcomes = job.save(20, [tmp_path], epoch=first)
    assert not any(outcome.ok for outcome in outcomes)
    assert "another job (epoch 2)" in outcomes[0].notes[0]
    assert start([tier]).version == 10
    saved(job.save(15, [tmp_path], epoch=second))
    assert start([tier]).version == 15


def test_a_zombie_cannot_commit_to_the_second_tier_either(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = FileTier(tmp_path / "one"), FileTier(tmp_path / "two")
    old = saving.claim_epoch(one, "first")
    saving.claim_epoch(one, "second")
    fail_under(monkeypatch, one.root, errno.ENOSPC)
    assert not any(outcome.ok for outcome in job.save(20, [one.root, two.root], epoch=old))
    assert start([one, two]).version == 0


def test_the_step_of_a_later_job_counts_even_if_its_number_is_lower(tmp_path: Path, job: Job) -> None:
    saved(job.save(50, [tmp_path], epoch=1))
    saved(job.save(20, [tmp_path], epoch=2))
    assert start([FileTier(tmp_path)]).version == 20


# --- ranks that fail ---


def test_a_rank_that_never_reports_keeps_the_step_from_being_committed(tmp_path: Path, job: Job) -> None:
    saved(job.save(10, [tmp_path]))
    (outcome,) = job.save(20, [tmp_path], ranks=[0], deadline_s=0.2)
    assert not outcome.ok and "ranks [1] have not saved" in outcome.notes[0]
    assert names.ABORT in FileTier(tmp_path).names(StepId(1, 20, 0).folder)
    assert start([FileTier(tmp_path)]).version == 10
    saved(job.save(30, [tmp_path]))
    assert start([FileTier(tmp_path)]).version == 30


def test_a_coordinator_that_never_decides_is_not_waited_for_forever(tmp_path: Path, job: Job) -> None:
    (outcome,) = job.save(20, [tmp_path], ranks=[1], deadline_s=0.2)
    assert not outcome.ok and "neither committed nor given up" in outcome.notes[0]
    assert start([FileTier(tmp_path)]).version == 0


def test_a_save_whose_folder_was_removed_is_given_up_although_nobody_could_write_that_down(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place was full for a moment, the coordinator failed and cleared up once there was room."""
    monkeypatch.setattr(saving, "LATE_S", 0.2)
    folder, outcomes = tmp_path / StepId(1, 20, 0).folder, list[Outcome]()
    waiting = threading.Thread(target=lambda: outcomes.extend(job.save(20, [tmp_path], ranks=[1], deadline_s=60.0)))
    waiting.start()
    until = time.monotonic() + LIMIT_S
    while not (folder / names.manifest_name(1)).exists() and time.monotonic() < until:
        time.sleep(0.01)
    (folder / names.failure_name(0)).write_text("no space left")  # it was here, so it may still come
    FileTier(tmp_path).remove(folder.name)
    waiting.join(LIMIT_S)
    (outcome,) = outcomes
    assert not outcome.ok and "given it up and removed it" in outcome.notes[0]
    assert not folder.exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_once_the_rank_is_gone_the_others_are_not_waited_for_to_the_deadline(
    tmp_path: Path, job: Job, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job was ended while some ranks had begun a save and others had not."""
    monkeypatch.setattr(saving, "GONE_S", 0.1)
    job.stage(5)
    order = job.order(5, [tmp_path], rank, deadline_s=600.0)
    (outcome,) = saving.carry_out(order, job.arenas[rank], set, lambda: True)
    assert not outcome.ok and "after this rank was gone" in outcome.notes[0]


def _removed_while_rank_1_waits(job: Job, tmp_path: Path) -> Outcome:
    tier, step = FileTier(tmp_path), StepId(1, 3, 0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(job.save, 3, [tmp_path], [1], deadline_s=3.0)
        while names.manifest_name(1) not in tier.names(step.folder):
            threading.Event().wait(0.01)
        tier.remove(step.folder)
        return waiting.result(20)[0]


def test_a_rank_that_looks_too_late_is_content_with_a_newer_step(tmp_path: Path, job: Job) -> None:
    """Saves may follow each other faster than a rank looks, and the rules may keep the last one only."""
    assert all(outcome.ok for outcome in job.save(6, [tmp_path]))
    assert _removed_while_rank_1_waits(job, tmp_path).ok


def test_a_step_that_is_removed_before_it_is_committed_was_not_saved(tmp_path: Path, job: Job) -> None:
    outcome = _removed_while_rank_1_waits(job, tmp_path)
    assert not outcome.ok and "neither committed nor given up" in outcome.notes[0]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_all_ranks_go_to_the_next_tier_if_one_cannot_write(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch, rank: int, code: int
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    tried = fail_under(monkeypatch, one, code, f"rank-{rank:05d}")
    outcomes = job.save(20, [one, two])
    saved(outcomes)
    assert {outcome.url for outcome in outcomes} == {str(two)}
    assert len(set(tried)) == shards.TRIES, "every try is to be a new file"
    there = FileTier(one).names(StepId(1, 20, 0).folder)
    assert names.failure_name(rank) in there and names.ABORT in there and names.COMMIT not in there
    loaded = start([FileTier(one), FileTier(two)])
    assert loaded.version == 20, loaded.reasons


def test_a_disk_that_fails_once_is_tried_again_with_a_new_file(
    tmp_path: Path, alone: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, failed = os.fsync, list[int]()

    def once(fd: int) -> None:
        if not failed and ".safetensors" in os.readlink(f"/proc/self/fd/{fd}"):
            failed.append(fd)
            raise OSError(errno.EIO, "the disk lost it")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", once)
    (outcome,) = alone.save(20, [tmp_path])
    assert failed and outcome.ok and "tried again" in outcome.notes[0]
    there = FileTier(tmp_path).names(StepId(1, 20, 0).folder)
    assert names.shard_name(0, 1) in there and names.shard_name(0, 0) not in there
    step = catalog.open_step(FileTier(tmp_path), StepId(1, 20, 0))
    insist(step, load(step))


def test_an_unsynced_directory_takes_its_new_name_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> None:
        raise OSError(errno.EIO, "the disk lost it")

    monkeypatch.setattr("rerail.checkpoint.files.sync_directory", broken)
    for exclusive in (True, False):
        with pytest.raises(OSError, match="lost it"):
            FileTier(tmp_path).put("COMMIT", b"data", exclusive=exclusive)
        assert os.listdir(tmp_path) == []


def test_no_name_is_given_away_twice(tmp_path: Path) -> None:
    tier = FileTier(tmp_path)
    tier.put("COMMIT", b"first", exclusive=True)
    with pytest.raises(FileExistsError):
        tier.put("COMMIT", b"second", exclusive=True)
    assert tier.get("COMMIT", 100) == b"first" and os.listdir(tmp_path) == ["COMMIT"]


def test_where_there_are_no_links_names_are_claimed_all_the_same(
    tmp_path: Path, alone: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refused)
    saved(alone.save(20, [tmp_path]))
    with pytest.raises(FileExistsError):
        FileTier(tmp_path).put(f"{StepId(1, 20, 0).folder}/COMMIT", b"", exclusive=True)
    assert start([FileTier(tmp_path)]).version == 20


# --- the same order twice: a persister died and another carries on ---


def test_a_committed_step_is_not_touched_by_a_second_try(tmp_path: Path, job: Job) -> None:
    saved(job.save(20, [tmp_path]))
    folder = tmp_path / StepId(1, 20, 0).folder
    before = {path.name: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()}
    for rank in (1, 0):
        saved([job.carry_out(job.order(20, [tmp_path], rank))])
        after = {path.name: (path.stat().st_ino, path.read_bytes()) for path in folder.iterdir()}
        changed = [name for name in before if before[name] != after[name] and not name.endswith(".verified")]
        assert not changed and before.keys() == after.keys()
    assert start([FileTier(tmp_path)]) == (20, [])


def test_a_second_try_of_another_state_is_refused(tmp_path: Path, alone: Job) -> None:
    saved(alone.save(20, [tmp_path]))
    memory, base = alone.arenas[0].slot_image(alone.arenas[0].seals()[0].slot)
    memory[base + 5000] ^= 1
    outcome = alone.carry_out(alone.order(20, [tmp_path]))
    assert not outcome.ok and "of another state" in outcome.notes[0]
    assert start([FileTier(tmp_path)]) == (20, [])


def test_two_persisters_with_the_same_order_agree(tmp_path: Path, job: Job) -> None:
    """The one that a dead rank left behind, and the one that saves what a dead job left in memory."""
    for version in range(1, 16):
        job.stage(version)
        orders = [job.order(version, [tmp_path], rank) for rank in (0, 0, 1, 1)]
        with ThreadPoolExecutor(len(orders)) as pool:
            saved(list(pool.map(job.carry_out, orders)))
        assert start([FileTier(tmp_path)]) == (version, [])


def test_leftovers_of_crashes_do_not_disturb_later_saves(tmp_path: Path, job: Job) -> None:
    saved(job.save(10, [tmp_path], keep=Keep(last=2)))
    folder = tmp_path / StepId(1, 20, 0).folder
    folder.mkdir()
    for attempt in range(shards.TRIES + 1):
        (folder / names.shard_name(0, attempt)).write_bytes(b"half")
    (folder / ".rank-00000.json.12345678").write_bytes(b"{")
    unfinished = tmp_path / StepId(1, 15, 0).folder
    unfinished.mkdir()
    (unfinished / names.shard_name(0, 0)).write_bytes(b"half")
    shutil.copytree(tmp_path / StepId(1, 10, 0).folder, tmp_path / f"{names.TRASH}old")
    (tmp_path / "notes.txt").write_text("not ours")
    (tmp_path / "step-of-somebody").mkdir()
    assert start([FileTier(tmp_path)]) == (10, [])
    saved(job.save(20, [tmp_path], keep=Keep(last=2)))
    assert start([FileTier(tmp_path)]) == (20, [])
    left = set(os.listdir(tmp_path))
    assert left == {StepId(1, 10, 0).folder, folder.name, "notes.txt", "step-of-somebody"}


# --- retention ---


@given(
    steps=st.sets(st.integers(0, 60), min_size=1),
    verified=st.sets(st.integers(0, 60)),
    keep=st.builds(Keep, last=st.integers(0, 3), every=st.integers(0, 20), best=st.integers(0, 2), metric=st.just("a")),
)
def test_retention_keeps_the_newest_and_the_newest_that_was_read_back(
    steps: set[int], verified: set[int], keep: Keep
) -> None:
    commits = [
        Commit(epoch=1, step=s, generation=0, world_size=1, ranks={"0": RankEntry(0, "")}, saved_at=0.0) for s in steps
    ]
    read_back = {StepId(1, step, 0) for step in verified & steps}
    kept = retention.to_keep(commits, read_back, keep)
    assert StepId(1, max(steps), 0) in kept
    assert not read_back or max(read_back) in kept
    assert {StepId(1, s, 0) for s in sorted(steps)[len(steps) - keep.last :] if keep.last} <= kept


def test_a_damaged_newest_step_does_not_cost_the_one_that_was_read_back(tmp_path: Path, job: Job) -> None:
    for version in (10, 20):
        saved(job.save(version, [tmp_path], keep=Keep(last=1), read_back=version == 10))
    flip(tmp_path / StepId(1, 20, 0).folder / names.shard_name(0, 0), 4096)
    loaded = start([FileTier(tmp_path)])
    assert loaded.version == 10, loaded.reasons
    saved(job.save(30, [tmp_path], keep=Keep(last=1)))
    left = os.listdir(tmp_path)
    assert StepId(1, 30, 0).folder in left and StepId(1, 20, 0).folder not in left


def test_a_step_that_reads_back_wrong_is_not_called_verified(
    tmp_path: Path, alone: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    saved(alone.save(10, [tmp_path], keep=Keep(last=1)))
    write = FileTier.put_large

    def lying(self: FileTier, path: str, source: Source, size: int, chunk: int) -> list[str]:
        hashes = write(self, path, source, size, chunk)
        flip(self.root / path, size - 1)
        return hashes

    monkeypatch.setattr(FileTier, "put_large", lying)
    alone.save(20, [tmp_path], keep=Keep(last=1))
    assert "read back wrong" in capfd.readouterr().err
    assert names.verified_name(0) not in FileTier(tmp_path).names(StepId(1, 20, 0).folder)
    monkeypatch.undo()
    step = catalog.open_step(FileTier(tmp_path), StepId(1, 10, 0))
    insist(step, load(step))
    with pytest.raises(CheckpointError, match="checksum"):
        load(catalog.open_step(FileTier(tmp_path), StepId(1, 20, 0)))


def test_retention_racing_a_reader_never_makes_it_read_a_wrong_state(tmp_path: Path, job: Job) -> None:
    saved(job.save(1, [tmp_path], keep=Keep(last=1)))
    done, seen, tier = threading.Event(), set[int](), FileTier(tmp_path)

    def read() -> None:
        while not done.is_set():
            step = catalog.newest([tier], lambda reason: None)
            if step is not None:
                try:
                    tensors = load(step)
                except CheckpointError:
                    continue  # it was removed meanwhile
                insist(step, tensors)
                seen.add(step.id.step)

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        try:
            for version in range(2, 40):
                saved(job.save(version, [tmp_path], keep=Keep(last=1)))
        finally:
            done.set()
        for reader in readers:
            reader.result(LIMIT_S)
    assert seen, "the readers never read anything"
    assert start([tier]) == (39, [])


# --- the arena ---


def test_a_snapshot_that_is_overwritten_while_it_is_saved_is_not_committed(
    tmp_path: Path, alone: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks keep this from happening; should they ever fail, it is noticed."""
    write, arena = FileTier.put_large, alone.arenas[0]

    def while_written(self: FileTier, path: str, source: Source, size: int, chunk: int) -> list[str]:
        arena.begin(20)
        source(0, chunk)[4096 : 4096 + 64] = bytes(64)
        return write(self, path, source, size, chunk)

    monkeypatch.setattr(FileTier, "put_large", while_written)
    (outcome,) = alone.save(20, [tmp_path])
    assert not outcome.ok and "overwritten" in outcome.notes[0]
    assert start([FileTier(tmp_path)]).version == 0


def test_a_changed_description_in_the_arena_is_noticed(tmp_path: Path, alone: Job) -> None:
    alone.stage(20)
    memory, _ = alone.arenas[0].slot_image(0)
    memory[4096 + 10] ^= 1  # the description of the first slot lies behind the first page
    with pytest.raises(StateError, match="overwritten"):
        alone.carry_out(alone.order(20, [tmp_path]))
    assert start([FileTier(tmp_path)]).version == 0


# --- the persister's process ---


class Told:
    """Outcomes as they come."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def __call__(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def appears(path: Path) -> None:
    """Wait for a file of another process."""
    tick = threading.Event()
    for _ in range(int(LIMIT_S / 0.01)):
        if path.exists():
            return
        tick.wait(0.01)
    pytest.fail(f"{path.name} did not appear within {LIMIT_S} s")


@pytest.fixture
def waiting(tmp_path: Path, job: Job) -> Iterator[tuple[Writer, Told, int]]:
    """A persister in the middle of the save of step 20: its own part is written, rank 1's is not."""
    saved(job.save(10, [tmp_path]))
    told = Told()
    writer = Writer(job.fds[0], told)
    job.stage(20)
    writer.save(job.order(20, [tmp_path], deadline_s=LIMIT_S))
    appears(tmp_path / StepId(1, 20, 0).folder / names.manifest_name(0))
    pid = writer.pid
    yield writer, told, pid
    writer.close(0.0)  # or it would start another for what is still open
    for process in psutil.Process().children():
        process.resume()
        process.kill()
        process.wait(LIMIT_S)


def test_the_order_of_a_killed_persister_is_carried_out_by_another(
    tmp_path: Path, job: Job, waiting: tuple[Writer, Told, int]
) -> None:
    writer, told, pid = waiting
    os.kill(pid, signal.SIGKILL)
    saved([job.carry_out(job.order(20, [tmp_path], 1))])
    assert writer.wait(LIMIT_S), "no outcome after the persister was killed"
    assert [(outcome.version, outcome.ok) for outcome in told.outcomes] == [(20, True)]
    assert writer.pid != pid
    writer.close(LIMIT_S)
    assert start([FileTier(tmp_path)]) == (20, [])


def test_an_order_that_takes_every_persister_down_is_given_up(
    tmp_path: Path, waiting: tuple[Writer, Told, int]
) -> None:
    writer, told, pid = waiting
    tick, killed = threading.Event(), set[int]()
    for _ in range(int(LIMIT_S / 0.01)):
        if (pid := writer.pid) and pid not in killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        if writer.wait(0):
            break
        tick.wait(0.01)
    assert len(killed) == STARTS
    assert [outcome.ok for outcome in told.outcomes] == [False] and "-9" in told.outcomes[0].notes[0]
    assert start([FileTier(tmp_path)]) == (10, [])


def test_a_stopped_persister_is_not_waited_for_and_commits_when_it_goes_on(
    tmp_path: Path, job: Job, waiting: tuple[Writer, Told, int]
) -> None:
    writer, told, pid = waiting
    os.kill(pid, signal.SIGSTOP)
    assert not writer.wait(0.05) and not told.outcomes
    assert 20 in writer.pinned, "its slot must not be filled again"
    assert start([FileTier(tmp_path)]) == (10, [])
    writer.close(0.05)
    os.kill(pid, signal.SIGCONT)
    saved([job.carry_out(job.order(20, [tmp_path], 1))])
    assert start([FileTier(tmp_path)]) == (20, [])
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=LIMIT_S)


def test_a_persister_that_cannot_be_started_is_an_outcome(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr("subprocess.Popen", refused)
    told = Told()
    writer = Writer(job.fds[0], told)
    job.stage(20)
    writer.save(job.order(20, [tmp_path]))
    assert writer.wait(LIMIT_S) and not writer.pinned
    assert [outcome.ok for outcome in told.outcomes] == [False] and "no more processes" in told.outcomes[0].notes[0]


def test_a_slot_that_is_being_saved_is_not_filled(job: Job, waiting: tuple[Writer, Told, int]) -> None:
    arena = job.arenas[0]
    slot = next(seal.slot for seal in arena.seals() if seal.version == 20)
    assert arena.begin(20) is None, "the slot was given away while the persister reads it"
    assert any(seal.slot == slot and seal.version == 20 for seal in arena.seals())


def test_the_persister_has_no_torch_and_no_copy_of_the_state(tmp_path: Path) -> None:
    job, told = Job(columns=2_000_000), Told()  # 32 MB for each rank
    job.stage(20)
    writer = Writer(job.fds[0], told)
    try:
        writer.save(job.order(20, [tmp_path], deadline_s=LIMIT_S))
        appears(tmp_path / StepId(1, 20, 0).folder / names.manifest_name(0))
        maps = Path(f"/proc/{writer.pid}/smaps").read_text()
        saved([job.carry_out(job.order(20, [tmp_path], 1, read_back=False))])
        writer.close(LIMIT_S)
    finally:
        job.close()
    assert "libtorch" not in maps
    regions = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", maps)
    ours = [region for region in regions if "memfd:" not in region.splitlines()[0]]
    assert len(ours) < len(regions), "the arena is not mapped"
    private_kb = sum(int(size) for region in ours for size in re.findall(r"Private_\w+:\s+(\d+) kB", region))
    assert private_kb < 60_000, f"the persister holds {private_kb} kB of its own"
    assert [outcome.ok for outcome in told.outcomes] == [True], told.outcomes


def test_a_step_that_was_found_damaged_counts_for_no_rule(tmp_path: Path, job: Job) -> None:
    tier = FileTier(tmp_path)
    for version in (10, 20, 30):
        saved(job.save(version, [tmp_path]))
    damaged = StepId(1, 30, 0)
    tier.put(f"{damaged.folder}/{names.verified_name(0)}", b"chunk 0 does not match its checksum")
    saved(job.save(40, [tmp_path], keep=Keep(last=2)))
    left = [found.id.step for found in catalog.folders(tier)]
    assert left == [20, 30, 40], "the good ones count, and the damaged one is left to be looked at"


@pytest.mark.parametrize("wish", [0, -1])
def test_a_number_of_steps_to_keep_that_is_none(wish: int) -> None:
    with pytest.raises(StateError, match=f"keep={wish}"):
        Keep.of(wish)
    with pytest.raises(StateError, match="must not be negative"):
        Keep(every=-5)


def test_what_is_left_of_a_save_that_was_given_up_makes_room_for_the_next(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persister, "SEEN_S", 0.0)
    job.stage(10)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    thread = threading.Thread(target=persister.Persister(theirs, job.arenas[0]).run)
    thread.start()
    with ours, theirs:
        ours.send(msgspec.json.encode(job.order(10, [tmp_path], 0, deadline_s=0.1)))  # rank 1 never comes
        assert not msgspec.json.decode(ours.recv(1 << 17), type=Outcome).ok
        assert names.ABORT in FileTier(tmp_path).names(StepId(1, 10, 0).folder)
        job.stage(20)
        ours.send(msgspec.json.encode(job.order(20, [tmp_path], 0, deadline_s=0.1)))
        assert not msgspec.json.decode(ours.recv(1 << 17), type=Outcome).ok
        ours.shutdown(socket.SHUT_WR)
        thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert [found.id.step for found in catalog.folders(FileTier(tmp_path))] == [20]
