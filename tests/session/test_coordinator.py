"""Work is done in the moments in which a rank waits, in no others, and never more of it than is allowed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from rerail.session.coordinator import MOST_S, Coordinator
from rerail.session.waiting import Idle, idle, idling


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.002)


def spun(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Rank:
    """Waits when it is told to; the work writes down whether it did."""

    def __init__(self, share: float = 1.0) -> None:
        self.slots = Idle()
        self.coordinator = Coordinator(share, self.slots)
        self.seen: list[float] = []

    def bits(self, count: int, bit_s: float = 0.0005) -> Iterator[None]:
        for _ in range(count):
            self.seen.append(self.slots.since)
            spun(bit_s)
            yield


def test_all_of_it_is_done_while_the_rank_waits() -> None:
    rank = Rank()
    rank.coordinator.give(rank.bits(20))
    rank.slots.since = time.monotonic()
    until(lambda: not rank.coordinator.busy, "20 bits to be done")
    assert rank.coordinator.bits == 20 and rank.coordinator.problem is None


def test_none_of_it_while_it_does_not() -> None:
    rank = Rank()
    rank.coordinator.give(rank.bits(1000))
    for _ in range(5):
        before = len(rank.seen)
        rank.slots.since = time.monotonic()
        until(lambda before=before: len(rank.seen) > before + 2, "a few bits")  # type: ignore[misc]
        rank.slots.since = 0.0
        with rank.coordinator.paused():
            pass  # the one under way is over
        stopped = len(rank.seen)
        time.sleep(0.05)
        assert len(rank.seen) <= stopped + 1, "at most one that had looked already"
    assert rank.coordinator.busy


def test_no_more_than_its_share_of_a_cpu() -> None:
    rank = Rank(share=0.05)
    rank.slots.since = time.monotonic()
    began = time.monotonic()
    rank.coordinator.give(rank.bits(100_000))
    until(lambda: time.monotonic() - began > 2.0, "two seconds")
    with rank.coordinator.paused():
        used = sum(1 for _ in rank.seen) * 0.0005
    took = time.monotonic() - began
    assert 0 < used <= MOST_S + 0.05 * took + 0.05, f"{used:.2f} s of {took:.2f} s"


def test_newer_work_takes_the_place_of_older() -> None:
    rank = Rank()
    rank.coordinator.give(rank.bits(1_000_000))
    rank.slots.since = time.monotonic()
    until(lambda: rank.seen, "the first to begin")
    rank.coordinator.give(rank.bits(3))
    until(lambda: not rank.coordinator.busy, "the second to end")


def test_work_that_fails_is_given_up_and_the_next_is_done() -> None:
    rank = Rank()
    rank.slots.since = time.monotonic()

    def bad() -> Iterator[None]:
        yield
        raise ValueError("bad numbers")

    rank.coordinator.give(bad())
    until(lambda: not rank.coordinator.busy, "it to be given up")
    assert isinstance(rank.coordinator.problem, ValueError)
    rank.coordinator.give(rank.bits(2))
    until(lambda: len(rank.seen) == 2, "the next")


def test_where_the_rank_waits_for_its_data_or_its_device_it_is_seen() -> None:
    assert idle.since == 0.0
    with idling():
        assert 0 < idle.since <= time.monotonic()
    assert idle.since == 0.0


def test_nobody_has_a_thread_before_there_is_work() -> None:
    before = threading.active_count()
    Coordinator(1.0)
    assert threading.active_count() == before
