"""Places that fail: they are left alone, the ranks meet at another one, and what works again is used again."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from two_ranks import Job, start

from rerail.checkpoint import agreeing, catalog, guarded, health, names, probing, saving
from rerail.checkpoint.copying import Copier
from rerail.checkpoint.files import FileTier
from rerail.checkpoint.guarded import GuardedPlaces
from rerail.checkpoint.health import Gone, Health, Hung, Kind, Slow, State, kind_of
from rerail.checkpoint.names import StepId
from rerail.checkpoint.places import Places
from rerail.checkpoint.saving import Outcome, carry_out
from rerail.checkpoint.tiers import Source, Tier
from rerail.checkpoint.writer import Writer

LIMIT_S = 60.0
HANG_S = 0.3
MB = 1 << 20


# --- one place, by the book ---


def test_a_place_goes_out_and_is_probed_ever_more_rarely_until_a_probe_gets_through() -> None:
    place = Health()
    assert place.failed(Kind.FULL, "no space", 100.0) and place.out and not place.failed(Kind.FULL, "no space", 101.0)
    pauses, now = [], 100.0
    for _ in range(9):
        pauses.append(place.next_probe - now)
        now = place.next_probe
        assert not place.probed("still full", now)
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    assert place.probed("", now) and place.state is State.GOOD and not place.why


def test_pauses_become_short_again_only_when_a_whole_save_gets_through() -> None:
    place = Health()
    place.failed(Kind.FULL, "no space", 0.0)
    place.probed("", 5.0)
    place.failed(Kind.FULL, "no space", 6.0)
    assert place.next_probe == 6.0 + 10.0, "a probe got through, but the save behind it did not"
    place.probed("", 16.0)
    place.saved()
    place.failed(Kind.FULL, "no space", 20.0)
    assert place.next_probe == 20.0 + 5.0


def test_a_save_that_is_due_brings_the_next_probe_forward_but_not_at_once_behind_the_last() -> None:
    place = Health()
    place.failed(Kind.GONE, "gone", 0.0)
    for now in (5.0, 15.0, 35.0):
        place.probed("gone", now)
    assert place.next_probe == 35.0 + 40.0
    place.hurry(36.0)
    assert place.next_probe == 35.0 + 5.0
    place.hurry(50.0)
    assert place.next_probe == 40.0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, ""), Kind.FULL),
        (OSError(errno.EDQUOT, ""), Kind.FULL),
        (OSError(errno.EROFS, ""), Kind.READ_ONLY),
        (PermissionError(errno.EACCES, ""), Kind.FORBIDDEN),
        (OSError(errno.ESTALE, ""), Kind.GONE),
        (Gone(errno.ENOENT, ""), Kind.GONE),
        (Hung(errno.ETIMEDOUT, ""), Kind.HUNG),
        (Slow(errno.ETIMEDOUT, ""), Kind.SLOW),
        (OSError(errno.EIO, ""), Kind.BROKEN),
        (OSError("a driver's own words"), Kind.BROKEN),
        (FileNotFoundError(errno.ENOENT, ""), None),
        (FileExistsError(errno.EEXIST, ""), None),
        (ValueError(), None),
    ],
)
def test_errors_say_what_is_wrong_with_a_place_or_nothing_about_it(error: Exception, kind: Kind | None) -> None:
    assert kind_of(error) is kind
    assert kind is None or health.advice(kind)


def test_what_is_slow_or_hung_goes_by_what_is_usual() -> None:
    place = Health()
    assert place.silence_s(1600 * MB, 30.0) == 100.0, "nothing is known: a slow disk has its time"
    assert place.longest_s(1600 * MB, 300.0) is None
    for _ in range(3):
        place.wrote(100 * MB, 1.0)
    assert place.silence_s(100 * MB, 30.0) == 30.0 and place.silence_s(1000 * MB, 30.0) == 50.0
    assert place.longest_s(10_000 * MB, 300.0) == 400.0 and place.longest_s(MB, 300.0) == 300.0
    place.wrote(100 * MB, 4.5)
    assert place.state is State.DOUBTFUL and "usually takes 1.0 s" in place.why
    place.wrote(100 * MB, 1.0)
    assert place.state is State.GOOD


# --- calls that hang ---


class Gate(FileTier):
    """A directory whose writes hang as long as the gate is shut."""

    def __init__(self, root: str | Path) -> None:
        super().__init__(root)
        self.open = gates.setdefault(str(root), threading.Event())

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        assert self.open.wait(LIMIT_S)
        super().put(path, data, exclusive=exclusive)

    def put_large(self, path: str, source: Source, size: int, chunk: int) -> list[str]:
        assert self.open.wait(LIMIT_S)
        return super().put_large(path, source, size, chunk)


gates: dict[str, threading.Event] = {}


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], threading.Event]]:
    """Makes a directory hang, to guarded places; probes follow each other fast."""
    gates.clear()
    monkeypatch.setattr(guarded, "tier_at", lambda url: Gate(url) if url in gates else FileTier(url))
    monkeypatch.setattr(health, "FIRST_S", 0.05)
    yield lambda root: gates.setdefault(str(root), threading.Event())
    for gate in gates.values():
        gate.set()


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.01)


def tier_threads() -> int:
    return sum(thread.name in ("rerail-tier", "rerail-probe") for thread in threading.enumerate())


def test_a_call_that_hangs_is_left_behind_and_further_ones_fail_at_once_until_it_answers(
    tmp_path: Path, gated: Callable[[Path], threading.Event]
) -> None:
    gate, told = gated(tmp_path), list[tuple[str, State]]()
    places = GuardedPlaces(HANG_S, lambda url, state, why: told.append((url, state)))
    tier = places.at(str(tmp_path))
    before = tier_threads()
    with pytest.raises(Hung, match="no answer"):
        tier.put("file", b"data")
    for _ in range(50):
        with pytest.raises(OSError, match="left alone since it is hung"):
            tier.names()
    assert places.out(str(tmp_path)) and places.ward(str(tmp_path)).stuck == 1
    assert tier_threads() - before <= 2, "one call and one probe may hang, and no more"
    gate.set()
    until(lambda: not places.out(str(tmp_path)), "the place to be used again")
    tier.put("again", b"data")
    assert told == [(str(tmp_path), State.OUT), (str(tmp_path), State.GOOD)]
    assert not [name for name in tier.names() if name.startswith(names.TRASH)], "the probe has left something"
    places.close()


def test_a_large_write_may_take_its_time_as_long_as_it_goes_on(tmp_path: Path) -> None:
    url, floor_s, chunks = f"memory://{tmp_path}", 3.0, 16
    places, began = GuardedPlaces(floor_s), time.monotonic()

    def slowly(offset: int, size: int) -> memoryview:
        time.sleep(floor_s / 12)
        return memoryview(bytearray(size))

    places.at(url).put_large("file", slowly, chunks * 4096, 4096)
    assert time.monotonic() - began > floor_s and not places.out(url)


def test_a_write_that_is_far_slower_than_usual_is_given_up(tmp_path: Path) -> None:
    places = GuardedPlaces(LIMIT_S)
    ward, go_on = places.ward(str(tmp_path)), threading.Event()
    ward.slow_floor_s = HANG_S
    for _ in range(3):
        ward.health.wrote(100 * MB, 0.01)

    def never_done(offset: int, size: int) -> memoryview:
        go_on.wait(0.01)
        return memoryview(bytearray(4096))

    with pytest.raises(Slow, match="far more than usual"):
        places.at(str(tmp_path)).put_large("file", never_done, 4096 * 100_000, 4096)
    assert places.out(str(tmp_path)).startswith("slow")
    places.close()


def test_a_directory_that_vanishes_is_gone_and_not_made_again_below_a_mount_point(tmp_path: Path) -> None:
    places, root = GuardedPlaces(LIMIT_S), tmp_path / "mount" / "run"
    tier = places.at(str(root))
    tier.make_folder("step")
    (tmp_path / "mount").rename(tmp_path / "away")
    for use in (tier.make_folder, tier.names):
        with pytest.raises(Gone, match="not there any more"):
            use("next")
    assert not (tmp_path / "mount").exists()
    places.ward(str(root)).alone = True
    tier.make_folder("next")
    assert (root / "next").is_dir(), "where it is the only place, and was no mount, it is made again"


def test_a_place_that_is_too_full_for_a_save_is_not_used_again(tmp_path: Path) -> None:
    room = os.statvfs(tmp_path)
    probing.probe(FileTier(tmp_path), 4096)
    with pytest.raises(OSError, match="are free, a save needs"):
        probing.probe(FileTier(tmp_path), 2 * room.f_blocks * room.f_frsize)
    assert os.listdir(tmp_path) == []


def test_places_are_asked_in_a_process_of_its_own_and_errors_are_answers(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tiers: list[Tier] = [FileTier(tmp_path), FileTier(tmp_path / "not" / "there"), FileTier(tmp_path / "file")]
    assert probing.silent(tiers, write=True) == [] and probing.silent(tiers, write=False) == []
    assert os.listdir(tmp_path) == ["file"]


def test_a_place_that_never_answers_is_asked_by_one_process_however_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "_ASK", "import time; time.sleep(600)")
    tiers: list[Tier] = [FileTier(tmp_path)]
    try:
        assert probing.silent(tiers, write=True, limit_s=0.1) == tiers
        child = probing._asking[str(tmp_path), True]
        assert probing.silent(tiers, write=True, limit_s=0.1) == tiers
        assert probing._asking[str(tmp_path), True] is child, "it was asked again"
    finally:
        child.kill()
        child.wait(LIMIT_S)


# --- ranks that see a place differently ---


def saved_by(job: Job, version: int, roots: list[Path], of_rank: list[Places]) -> list[Outcome]:
    job.stage(version)

    def one(rank: int) -> Outcome:
        order = job.order(version, roots, rank)
        return list(carry_out(order, job.arenas[rank], lambda: {order.id}, places=of_rank[rank]))[-1]

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def committed(root: Path) -> list[int]:
    return [found.id.step for found in catalog.folders(FileTier(root)) if found.committed]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_meet_at_the_next_place_when_one_of_them_leaves_the_first_alone(
    tmp_path: Path, job: Job, rank: int
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    of_rank = [GuardedPlaces(LIMIT_S), GuardedPlaces(LIMIT_S)]
    of_rank[rank].failed(str(one), OSError(errno.EROFS, "read-only"))
    outcomes = saved_by(job, 20, [one, two], list(of_rank))
    assert [(outcome.ok, outcome.url) for outcome in outcomes] == [(True, str(two))] * 2, outcomes
    assert committed(one) == [] and committed(two) == [20] and start([FileTier(one), FileTier(two)]) == (20, [])
    assert not of_rank[1 - rank].out(str(one)), "to the other rank nothing is wrong with it"


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_meet_at_the_next_place_when_the_first_hangs_for_one_of_them(
    tmp_path: Path, job: Job, gated: Callable[[Path], threading.Event], rank: int
) -> None:
    """It can say nothing there: neither that it failed, nor, as the coordinator, that the save is given up."""
    one, two = tmp_path / "one", tmp_path / "two"
    gated(one)
    of_rank: list[Places] = [Places(), Places()]
    of_rank[rank] = GuardedPlaces(HANG_S)
    outcomes = saved_by(job, 20, [one, two], of_rank)
    assert [(outcome.ok, outcome.url) for outcome in outcomes] == [(True, str(two))] * 2, outcomes
    assert committed(one) == [] and start([FileTier(two)]) == (20, [])


def test_a_rank_that_went_on_although_the_step_was_committed_behind_it_is_let_go(tmp_path: Path, job: Job) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    job.save(20, [one])
    order, places = job.order(20, [one, two], 1), GuardedPlaces(LIMIT_S)
    places.failed(str(one), OSError(errno.EROFS, "read-only"))

    def late() -> list[Outcome]:
        return list(carry_out(order, job.arenas[1], lambda: {order.id}, places=places))

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(late)
        manifest = two / order.id.folder / names.manifest_name(1)
        until(manifest.exists, "rank 1 to wait at the second place")
        agreeing.let_go(FileTier(two), job.order(20, [one, two]), str(one))
        (outcome,) = waiting.result(LIMIT_S)
    assert outcome.ok and outcome.url == str(one), outcome
    told = list[Outcome]()
    copier = Copier(told.append)
    copier.offer(job.order(20, [one, two]), str(one))
    copier.close()
    assert [copy.ok for copy in told] == [True], told
    assert start([FileTier(two)]) == (20, [])


def test_a_rank_that_comes_to_the_next_place_when_the_others_are_through_does_not_wait_for_them(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator has given the save up, and what it left to say so is removed already."""
    monkeypatch.setattr(saving, "LATE_S", 0.1)
    one, two = tmp_path / "one", tmp_path / "two"
    job.stage(20)
    order, places = job.order(20, [one, two], 1, deadline_s=LIMIT_S), GuardedPlaces(HANG_S)
    places.failed(str(one), OSError(errno.EROFS, "read-only"))
    (outcome,) = carry_out(order, job.arenas[1], lambda: {order.id}, places=places)
    assert not outcome.ok and "the coordinator is not here" in outcome.notes[0], outcome
    assert names.failure_name(1) in os.listdir(two / order.id.folder), "should it come after all, it need not wait"


# --- the process that writes ---


def test_a_first_place_that_goes_away_and_comes_back_gets_what_it_missed_and_the_next_saves(
    tmp_path: Path, job: Job
) -> None:
    one, two, told = tmp_path / "one", tmp_path / "two", list[Outcome]()
    writers = [Writer(fd, told.append) for fd in job.fds]

    def save(version: int) -> set[str]:
        job.stage(version)
        for rank, writer in enumerate(writers):
            writer.save(job.order(version, [one, two], rank, deadline_s=LIMIT_S))
        assert all(writer.wait(LIMIT_S) for writer in writers), told
        found = [o for o in told if o.version == version and not o.copied_to and not o.place]
        assert all(outcome.ok for outcome in found), told
        return {outcome.url for outcome in found}

    try:
        assert save(10) == {str(one)}
        one.rename(tmp_path / "away")
        assert save(20) == {str(two)}
        outs = [outcome for outcome in told if outcome.place == "out"]
        assert {outcome.url for outcome in outs} == {str(one)} and "put the directory back" in outs[0].notes[0], outs
        (tmp_path / "away").rename(one)
        until(lambda: sum(outcome.place == "back" for outcome in told) == len(outs), "both ranks to use it again")
        until(lambda: 20 in committed(one), "the copy of what was missed")
        assert save(30) == {str(one)}
    finally:
        assert all(writer.close(LIMIT_S) for writer in writers)
    assert committed(one) == [10, 20, 30] and committed(two)[-2:] == [20, 30]
    assert start([FileTier(one)]) == start([FileTier(two)]) == (30, [])


def test_what_a_full_place_has_of_a_save_is_removed_before_it_is_probed(tmp_path: Path, job: Job) -> None:
    """Here of a rank that could write although another could not."""
    one, two, told = tmp_path / "one", tmp_path / "two", list[Outcome]()
    step = StepId(1, 20, 0)
    FileTier(one).make_folder(step.folder)
    FileTier(one).put(f"{step.folder}/{names.failure_name(1)}", b"No space left on device")
    writers = [Writer(fd, told.append) for fd in job.fds]
    job.stage(20)
    for rank, writer in enumerate(writers):
        writer.save(job.order(20, [one, two], rank, deadline_s=LIMIT_S))
    try:
        until(lambda: any(outcome.copied_to == str(one) for outcome in told), "the copy")
    finally:
        assert all(writer.close(LIMIT_S) for writer in writers)
    assert committed(two) == committed(one) == [20], "what failed is replaced by a copy"
    assert start([FileTier(one)]) == (20, [])
