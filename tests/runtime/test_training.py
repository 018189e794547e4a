"""Beats of ranks become findings: who is slow, whose numbers are sick, whose state is another."""

from __future__ import annotations

from rerail.runtime.clock import Metric, Took
from rerail.runtime.orders import Beat
from rerail.runtime.training import Finding, TrainingWatch
from rerail.runtime.wire import Unsound, Voted

GROUPS = 8

PIDS = {0: 100, 1: 101, 2: 102}


def steps(watch: TrainingWatch, first: int, count: int, slow: dict[int, float] | None = None) -> list[Finding]:
    found = []
    for version in range(first, first + count):
        took = {rank: [Took(version, 0.01, 0.1 * (slow or {}).get(rank, 1.0), 0.02, 0.0)] for rank in PIDS}
        found += watch.take(Beat(versions={}, pids=PIDS, took=took))
    return found


def vote(
    watch: TrainingWatch, version: int, bad: int = -1, ranks: tuple[int, ...] = (0, 1, 2), back: int = -1
) -> list[Finding]:
    sums = {rank: tuple(version + group + (group == 3 and rank == bad) for group in range(GROUPS)) for rank in ranks}
    return watch.voted(Voted(generation=0, version=version, sums=sums, back=back))


def test_a_slow_rank_is_named_and_its_recovery_told() -> None:
    watch = TrainingWatch()
    assert steps(watch, 1, 60) == []
    (named,) = steps(watch, 61, 20, slow={2: 1.3})
    assert (named.rank, named.state, named.over) == (2, "compute", False)
    (over,) = steps(watch, 81, 100)
    assert over.rank == 2 and over.over


def test_a_slow_rank_that_is_replaced_starts_with_a_clean_sheet() -> None:
    watch = TrainingWatch()
    steps(watch, 1, 60)
    assert steps(watch, 61, 20, slow={2: 1.3})
    (over,) = watch.take(Beat(versions={}, pids={**PIDS, 2: 999}))
    assert over.rank == 2 and over.over


def test_a_number_that_is_not_finite_is_told_once_even_if_only_one_step_had_it() -> None:
    watch = TrainingWatch()

    def metric(version: int, value: float, unsound: int) -> list[Finding]:
        return watch.take(Beat(versions={}, pids=PIDS, metrics={1: {"loss": Metric(version, value, unsound)}}))

    assert metric(10, 2.0, 0) == []
    (found,) = metric(14, 2.0, 12)
    assert (found.rank, found.step, found.state) == (1, 12, "nan")
    assert metric(15, 2.0, 12) == []
    (over,) = metric(30, 2.0, 12)
    assert over.over
    assert metric(31, 2.0, 12) == []
    assert [one.step for one in metric(40, float("nan"), 40)] == [40]


def test_the_replica_that_differs_is_named() -> None:
    (found,) = vote(TrainingWatch(), 200, bad=1)
    assert (found.rank, found.step, found.state) == (1, 200, "differs") and "1 of 8 parts" in found.text
    assert "back" not in found.payload, "nothing is to be done about it"


def test_of_two_replicas_nobody_is_named_until_they_have_computed_it_again() -> None:
    watch = TrainingWatch()
    (found,) = vote(watch, 100, bad=1, ranks=(0, 1), back=80)
    assert (found.rank, found.state, found.payload["back"]) == (-1, "tie", 80) and "ranks 0, 1" in found.text
    (found,) = vote(watch, 100, ranks=(0, 1))
    assert (found.rank, found.state) == (1, "replayed") and "what rank 0 had" in found.text
    assert vote(watch, 100, ranks=(0, 1)) == [], "told once"


def test_replicas_that_differ_again_are_told_so() -> None:
    watch = TrainingWatch()
    vote(watch, 100, bad=1, ranks=(0, 1), back=80)
    (found,) = vote(watch, 100, bad=1, ranks=(0, 1))
    assert (found.rank, found.state) == (-1, "again")


def test_an_empty_beat_says_nothing() -> None:
    assert TrainingWatch().take(Beat(versions={0: 1})) == []


def spiking(watch: TrainingWatch, first: int, count: int, loss: float) -> list[Finding]:
    found = []
    for version in range(first, first + count):
        took = {0: [Took(version, 0.01, 0.1, 0.02, 0.0)]}
        beat = Beat(
            versions={}, pids=PIDS, took=took, metrics={0: {"loss": Metric(version, loss + 0.01 * (version % 3), 0)}}
        )
        found += watch.take(beat)
    return found


def test_a_spike_asks_to_go_back_only_where_the_setting_says_so() -> None:
    for roll_back, back in (((), -1), (("nan",), -1), (("nan", "spike"), 98)):
        watch = TrainingWatch(roll_back)
        assert spiking(watch, 1, 99, 2.0) == []
        (found,) = spiking(watch, 100, 6, 9.0)
        assert (found.state, found.back) == ("loss_spike", back), roll_back
        assert ("back" in found.payload) == (back >= 0)


def test_after_going_back_the_same_steps_are_looked_at_again() -> None:
    watch = TrainingWatch(["spike"])
    spiking(watch, 1, 99, 2.0)
    assert spiking(watch, 100, 6, 9.0)
    watch.went_back(98)
    assert spiking(watch, 99, 20, 2.0) == []
    (again,) = spiking(watch, 119, 6, 9.0)
    assert again.back == 117


def test_a_rank_that_says_itself_that_its_loss_is_nan_is_not_told_of_twice() -> None:
    watch = TrainingWatch(["nan"])
    word = Unsound(generation=0, version=12, what="loss", trusted=11, text="loss is nan")
    found = watch.unsound(1, word)
    assert (found.rank, found.step, found.state, found.payload["back"]) == (1, 12, "nan", 11)
    nan = Metric(13, float("nan"), 12)
    assert watch.take(Beat(versions={}, pids=PIDS, metrics={1: {"loss": nan}})) == []
    batch = Unsound(generation=0, version=12, what="batch", trusted=12, text="not wanted")
    assert watch.unsound(1, batch).state == "bad_batch"
