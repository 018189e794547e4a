"""A rank dies in the middle of a save: its successor finishes or gives up what the others wait for, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from two_ranks import Job, pieces, start

from rerail.checkpoint import names, shards
from rerail.checkpoint.files import FileTier
from rerail.checkpoint.names import StepId
from rerail.checkpoint.saving import Order, Outcome
from rerail.checkpoint.shards import Part
from rerail.checkpoint.staging import Stager
from rerail.errors import CheckpointError
from rerail.session import owed
from rerail.session.owed import Newcomer

LIMIT_S = 60.0
STEP = StepId(1, 20, 0)
SUCCESSOR = Newcomer(rank=0, coordinator=0, now=StepId(1, 20, 0), begun=-1)


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.close()


def die_before_committing(job: Job, place: Path) -> None:
    """What rank 0 leaves if its node loses power behind its own part: shard and manifest, and nobody who commits."""
    order = job.order(STEP.step, [place], 0)
    tier, arena = FileTier(place), job.arenas[0]
    tier.make_folder(STEP.folder)
    shards.write(Part(tier, order, arena, arena.meta(STEP.step), [], lambda: None, later=False))


def others_wait(job: Job, place: Path, pool: ThreadPoolExecutor) -> Future[Outcome]:
    waiting = pool.submit(job.carry_out, job.order(STEP.step, [place], 1, deadline_s=LIMIT_S))
    while names.manifest_name(1) not in FileTier(place).names(STEP.folder):
        threading.Event().wait(0.01)
    return waiting


def of_the_others(job: Job, place: Path, seen_to: Callable[[FileTier], None]) -> Outcome:
    """What becomes of the save on rank 1, which waits while somebody sees to what rank 0 has left."""
    job.stage(STEP.step)
    die_before_committing(job, place)
    with ThreadPoolExecutor(1) as pool:
        waiting = others_wait(job, place, pool)
        seen_to(FileTier(place))
        return waiting.result(LIMIT_S)


def test_a_save_that_nobody_is_left_to_commit_is_given_up_by_the_successor(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owed, "GONE_S", 0.1)
    outcome = of_the_others(job, tmp_path, lambda tier: owed.settle([tier], SUCCESSOR, None, pytest.fail))
    assert not outcome.ok and "lost before it could commit" in outcome.notes[0]
    assert outcome.seconds < LIMIT_S / 2, "they waited for the deadline"


def test_what_still_lies_in_memory_is_committed_after_all(tmp_path: Path, job: Job) -> None:
    order = job.order(STEP.step, [tmp_path], 0)
    job.stage(STEP.step)
    kept = Stager(job.arenas[0], overlap=False)
    assert kept.stage(STEP.step, pieces(STEP.step, 0, 2), b"small 20 of 0", order=msgspec.json.encode(order))
    die_before_committing(job, tmp_path)
    orders: list[Order] = []
    with ThreadPoolExecutor(1) as pool:
        waiting = others_wait(job, tmp_path, pool)
        owed.settle([FileTier(tmp_path)], SUCCESSOR, job.arenas[0], orders.append)
        assert orders == [order]
        assert job.carry_out(order).ok
        assert waiting.result(LIMIT_S).ok
    assert start([FileTier(tmp_path)]).version == STEP.step


def test_a_predecessor_s_persister_that_lives_on_elsewhere_may_still_commit(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:

    def commits(seconds: float) -> None:
        assert job.carry_out(job.order(STEP.step, [tmp_path], 0)).ok

    monkeypatch.setattr(owed, "time", SimpleNamespace(sleep=commits))
    assert of_the_others(job, tmp_path, lambda tier: owed.settle([tier], SUCCESSOR, None, pytest.fail)).ok
    assert names.ABORT not in FileTier(tmp_path).names(STEP.folder)


def test_a_coordinator_whose_seat_stays_empty_is_not_waited_for(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owed, "GONE_S", 0.1)
    outcome = of_the_others(job, tmp_path, lambda tier: owed.give_up_for([tier], 1, STEP.step, [0], coordinator=0))
    assert not outcome.ok and "the job goes on without it" in outcome.notes[0]
    assert outcome.seconds < LIMIT_S / 2, "they waited for the deadline"


@pytest.mark.parametrize("rank", [1, 2])
def test_only_the_coordinator_answers_for_what_is_not_committed(tmp_path: Path, rank: int) -> None:
    tier = FileTier(tmp_path)
    tier.make_folder(STEP.folder)
    for number in (0, 1, 2):
        tier.put(f"{STEP.folder}/{names.manifest_name(number)}", b"{}")
    before = tier.names(STEP.folder)
    owed.settle([tier], SUCCESSOR._replace(rank=rank), None, pytest.fail)
    assert tier.names(STEP.folder) == before


@pytest.mark.parametrize(
    ("step", "theirs"),
    [
        (StepId(1, 20, 3), True),  # it is at this very version
        (StepId(1, 12, 3), True),
        (StepId(1, 90, 2), True),  # from before all went back
        (StepId(1, 16, 3), False),  # it has begun this one itself
        (StepId(1, 21, 3), False),  # it may be about to
        (StepId(1, 12, 4), False),  # all have gone back once more, and it has begun anew
        (StepId(0, 12, 3), False),  # of another start of the job
    ],
)
def test_a_newcomer_s_own_saves_are_not_its_predecessor_s(step: StepId, theirs: bool) -> None:
    who = Newcomer(rank=1, coordinator=0, now=StepId(1, 20, 3), begun=16)
    assert who.owes(step) is theirs


def test_a_step_that_is_whole_on_another_tier_is_not_given_up(tmp_path: Path, job: Job) -> None:
    one, two = FileTier(tmp_path / "one"), FileTier(tmp_path / "two")
    assert all(outcome.ok for outcome in job.save(STEP.step, [tmp_path / "one"]))
    two.make_folder(STEP.folder)
    two.put(f"{STEP.folder}/{names.manifest_name(1)}", b"{}")
    owed.settle([one, two], SUCCESSOR, None, pytest.fail)
    assert names.ABORT not in one.names(STEP.folder)


def test_a_place_that_cannot_be_read_costs_nobody_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> list[str]:
        raise CheckpointError("no listing")

    monkeypatch.setattr(FileTier, "names", broken)
    owed.settle([FileTier(tmp_path)], SUCCESSOR, None, pytest.fail)
