"""Stragglers: named soon, never invented, over when they are over."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from math import exp

import pytest

from rerail.diagnose.lockstep import LAG
from rerail.diagnose.straggler import HISTORY, Phases, Straggler, StragglerWatch

Slowness = Callable[[int, int], tuple[float, float]]
"""Of a rank at a step: factors of its data and compute time."""


def even(rank: int, step: int) -> tuple[float, float]:
    return 1.0, 1.0


def slow(ranks: Iterable[int], phase: str, factor: float = 1.3, begin: int = 0, end: int = 1 << 30) -> Slowness:
    chosen = set(ranks)

    def slowness(rank: int, step: int) -> tuple[float, float]:
        times = factor if rank in chosen and begin <= step < end else 1.0
        return (times, 1.0) if phase == "data" else (1.0, times)

    return slowness


def run_of(
    ranks: int, steps: int, sigma: float, seed: int, slowness: Slowness = even, pause: str = ""
) -> Iterator[tuple[int, int, Phases]]:
    """Steps of a synchronous job: jitter, steps slow for all, spikes on single ranks, a pause every 50 steps."""
    rng = random.Random(seed)
    jitter = [exp(rng.gauss(0.0, sigma)) for _ in range(40_009)]  # drawn once: a million draws would take seconds
    for step in range(steps):
        common = 3.0 if rng.random() < 0.02 else 1.0
        at = rng.randrange(len(jitter))
        own = []
        for rank in range(ranks):
            at = (at + 7919) % len(jitter)
            data, compute = slowness(rank, step)
            own.append((0.2 * data * common * jitter[at], compute * common * jitter[at - 1]))
        for _ in range(sum(rng.random() < 0.005 for _ in range(min(ranks, 64)))):
            hit = rng.randrange(ranks)
            own[hit] = own[hit][0] * 5.0, own[hit][1] * 5.0
        slowest = max(data + compute for data, compute in own)
        for rank, (data, compute) in enumerate(own):
            stops = step % 50 == 49 and (pause == "all" or (pause in ("one", "hidden") and rank == 0))
            computing = compute + (5.0 if stops and pause == "hidden" else 0.0)
            saving = 5.0 if stops and pause != "hidden" else 0.0
            yield rank, step, Phases(data, computing, slowest - data - compute, saving)


def seen(watch: StragglerWatch, reports: Iterable[tuple[int, int, Phases]]) -> list[Straggler]:
    return [one for rank, step, phases in reports for one in watch.take(rank, step, phases)]


@pytest.mark.parametrize("phase", ["data", "compute"])
@pytest.mark.parametrize(("ranks", "sigma"), [(2, 0.05), (4, 0.1), (8, 0.02), (8, 0.1), (64, 0.1)])
def test_a_slow_rank_is_named_within_20_steps(ranks: int, sigma: float, phase: str) -> None:
    for seed in range(3):
        found = seen(StragglerWatch(), run_of(ranks, 120, sigma, seed, slow([1], phase, begin=60)))
        assert [(one.rank, one.phase, one.over) for one in found] == [(1, phase, False)]
        assert 60 + 6 <= found[0].step + 1 <= 60 + 20
        assert abs(found[0].since - 60) <= 8 and 1.2 <= found[0].ratio < 1.45


def test_a_slow_rank_among_a_thousand_is_named_within_20_steps() -> None:
    found = seen(StragglerWatch(), run_of(1024, 40, 0.1, 1, slow([777], "compute", begin=20)))
    assert [(one.rank, one.phase) for one in found] == [(777, "compute")] and found[0].step < 40


@pytest.mark.parametrize("ranks", [4, 8, 64])
def test_a_slow_rank_is_named_under_heavy_noise_too_but_later(ranks: int) -> None:
    for seed in range(3):
        found = seen(StragglerWatch(), run_of(ranks, 160, 0.2, seed, slow([2], "compute", begin=60)))
        assert [(one.rank, one.phase, one.over) for one in found] == [(2, "compute", False)]
        assert found[0].step < 60 + 80


@pytest.mark.parametrize("sigma", [0.1, 0.2])
@pytest.mark.parametrize(("ranks", "pause"), [(2, "all"), (2, "hidden"), (4, "one"), (8, "hidden"), (64, "all")])
def test_noise_is_no_straggler(ranks: int, pause: str, sigma: float) -> None:
    assert seen(StragglerWatch(), run_of(ranks, 2000, sigma, ranks, pause=pause)) == []


@pytest.mark.parametrize("sigma", [0.1, 0.2])
def test_noise_among_a_thousand_is_no_straggler(sigma: float) -> None:
    assert seen(StragglerWatch(), run_of(1024, 200, sigma, 5, pause="one")) == []


def test_a_rank_that_is_merely_noisier_is_no_straggler() -> None:
    rng = random.Random(2)
    noisy = (
        (rank, step, Phases(exp(rng.gauss(0, 0.5 if rank == 3 else 0.05)), 1.0))
        for step in range(1500)
        for rank in range(8)
    )
    assert seen(StragglerWatch(), noisy) == []


def test_all_slow_is_no_straggler_nor_is_the_only_fast_one() -> None:
    assert seen(StragglerWatch(), run_of(8, 400, 0.1, 3, slow(range(8), "compute", 2.0, begin=100))) == []
    assert seen(StragglerWatch(), run_of(8, 400, 0.1, 3, slow(range(1, 8), "compute", 2.0, begin=100))) == []


def test_what_costs_nothing_is_no_straggler() -> None:
    reports = ((rank, step, Phases(1e-5 * (3 if rank == 0 else 1), 1.0)) for step in range(200) for rank in range(8))
    assert seen(StragglerWatch(), reports) == []
    zeros = ((rank, step, Phases(0.0, 0.5 if rank == 0 else 0.0)) for step in range(200) for rank in range(8))
    assert [(one.rank, one.ratio) for one in seen(StragglerWatch(), zeros)] == [(0, 1000.0)]


def test_two_stragglers_at_once() -> None:
    both = slow([1, 6], "compute", begin=50)
    found = seen(StragglerWatch(), run_of(8, 100, 0.1, 4, both))
    assert sorted((one.rank, one.over) for one in found) == [(1, False), (6, False)]
    assert all(one.step < 50 + 20 for one in found)


def test_two_stragglers_in_different_phases_and_one_in_both() -> None:
    watch, data, compute = StragglerWatch(), slow([0, 5], "data", 1.5), slow([3, 5], "compute", 1.5)
    found = seen(watch, run_of(8, 60, 0.1, 4, lambda rank, step: (data(rank, step)[0], compute(rank, step)[1])))
    assert {(one.rank, one.phase) for one in found} == {(0, "data"), (5, "data"), (3, "compute"), (5, "compute")}


def test_an_episode_begins_once_and_ends_once() -> None:
    begin, end, found = slow([1], "data", begin=50, end=600), 600, []
    found = seen(StragglerWatch(), run_of(8, 1000, 0.1, 6, begin))
    assert [(one.rank, one.phase, one.over) for one in found] == [(1, "data", False), (1, "data", True)]
    assert end <= found[1].step < end + 25 and found[1].since == found[0].since and found[1].ratio < 1.15


def test_steps_of_different_ranks_come_in_any_order_and_some_are_missing() -> None:
    rng = random.Random(8)
    reports = list(run_of(8, 120, 0.1, 7, slow([1], "compute", begin=60)))
    queues = [[report for report in reports if report[0] == rank and rng.random() > 0.1] for rank in range(8)]
    mixed = []
    while any(queues):
        queue = rng.choice([queue for queue in queues if queue])
        mixed += [queue.pop(0) for _ in range(min(len(queue), rng.randrange(1, 6)))]
    found = seen(StragglerWatch(), mixed)
    assert [(one.rank, one.over) for one in found] == [(1, False)] and found[0].step < 85


def test_lots_of_many_steps_are_compared_like_single_ones() -> None:
    reports = list(run_of(4, 256, 0.1, 7, slow([1], "compute", begin=100)))
    lots = [
        report
        for lot in range(0, 256, 64)
        for rank in range(4)
        for report in reports
        if report[0] == rank and lot <= report[1] < lot + 64
    ]
    found = seen(StragglerWatch(), lots)
    assert [(one.rank, one.over) for one in found] == [(1, False)] and found[0].step < 120


def test_a_silent_rank_does_not_keep_the_others_from_being_judged() -> None:
    reports = run_of(8, 400, 0.1, 7, slow([1], "compute", begin=60))
    found = seen(StragglerWatch(), (report for report in reports if not (report[0] == 5 and 50 < report[1] < 350)))
    assert [(one.rank, one.over) for one in found] == [(1, False)]


def test_ranks_appear_and_vanish() -> None:
    reports = list(run_of(8, 300, 0.1, 9, slow([6], "compute", begin=150)))
    watch = StragglerWatch()
    assert seen(watch, (report for report in reports if report[0] < 4 and report[1] < 100)) == []
    assert watch.forget(3) == []
    found = seen(watch, (report for report in reports if report[0] != 3 and report[1] >= 100))
    assert [(one.rank, one.over) for one in found] == [(6, False)] and found[0].step < 170


def test_a_replaced_straggler_is_over_and_its_successor_begins_anew() -> None:
    reports = list(run_of(8, 200, 0.1, 9, slow([6], "compute", begin=50, end=100)))
    watch = StragglerWatch()
    assert [one.rank for one in seen(watch, (report for report in reports if report[1] < 100))] == [6]
    assert [(one.rank, one.phase, one.over) for one in watch.forget(6)] == [(6, "compute", True)]
    assert watch.forget(6) == []
    assert seen(watch, (report for report in reports if report[1] >= 100)) == []


def test_forgetting_the_last_one_missing_lets_the_others_be_judged() -> None:
    watch = StragglerWatch()
    reports = [report for report in run_of(8, 60, 0.05, 9, slow([6], "compute")) if report[0] != 2 or report[1] < 5]
    assert seen(watch, reports) == []
    assert [(one.rank, one.over) for one in watch.forget(2)] == [(6, False)]


def test_a_job_that_goes_back_is_watched_on() -> None:
    watch = StragglerWatch()
    assert seen(watch, run_of(8, 200, 0.1, 9)) == []
    found = seen(watch, run_of(8, 140, 0.1, 10, slow([4], "data", begin=100)))
    assert [(one.rank, one.over) for one in found] == [(4, False)] and found[0].step < 120


def test_memory_is_bounded() -> None:
    watch = StragglerWatch()
    for step in range(3 * LAG):  # rank 1 says nothing more
        watch.take(0, step, Phases(1.0, 1.0))
        if step < 2:
            watch.take(1, step, Phases(1.0, 1.0))
    assert len(watch._open) <= LAG + 1 and set(watch._last) == {0}
    assert all(len(track._history) <= HISTORY for track in watch._tracks)


def test_a_step_of_a_thousand_ranks_is_not_judged_pair_by_pair() -> None:
    reports = list(run_of(1024, 60, 0.1, 11))
    watch, fastest = StragglerWatch(), 1.0
    for step in range(60):
        began = time.perf_counter()
        for rank, at, phases in reports[1024 * step : 1024 * (step + 1)]:
            watch.take(rank, at, phases)
        fastest = min(fastest, time.perf_counter() - began)
    assert fastest < 0.1, (
        "0.6 ms on a machine with nothing else to do, a second where every rank is held against every other"
    )
