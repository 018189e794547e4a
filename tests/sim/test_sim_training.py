"""How far a job is: seconds are never lost or made, and saves are where they should be."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rerail.planner.model import Tier
from rerail.sim.training import Training

STORE = Tier(name="store", stall_s=2.0, save_s=5.0, restore_s=7.0, survives="job")
MEMORY = Tier(name="memory", stall_s=0.1, save_s=0.0, restore_s=0.1, survives="process")


def test_steps_follow_from_the_time_and_what_is_under_way_is_lost() -> None:
    training = Training(10.0, [STORE], {"store": 4})
    assert training.wall_step_s == 10.5
    training.begin(100.0)
    assert training.version_at(100 + 10.5 * 9 + 1) == 9
    training.halt(100 + 10.5 * 9 + 3, "gpu")
    assert training.version == 9
    assert training.productive == 90
    assert training.losses.by(0) == {"saving": 4.5, "lost work (T0)": pytest.approx(3.0)}
    assert training.newest("job") == (8, STORE)


def test_a_save_counts_when_it_is_done() -> None:
    training = Training(10.0, [STORE], {"store": 4})
    training.begin(0.0)
    training.halt(10.5 * 4 + 4.9, "gpu")  # the save of version 4 takes 5 s
    assert training.newest("job") == (0, STORE)
    training.begin(100.0)
    training.halt(100 + 10.5 * 4 + 5.1, "gpu")
    assert training.newest("job") == (8, STORE)


def test_what_is_newer_and_outlives_the_fault_is_gone_on_from() -> None:
    training = Training(1.0, [MEMORY, STORE], {"memory": 1, "store": 50})
    training.begin(0.0)
    training.halt(training.wall_step_s * 120 + 0.01, "gpu")
    assert training.newest("process")[0] == 120
    assert training.newest("node") == (100, STORE)
    training.forget("node")
    assert training.newest("process") == (100, STORE)
    training.go_back(100, "gpu")
    assert training.version == 100 and training.productive == pytest.approx(100.0)


def test_wrong_results_go_back_to_before_they_began() -> None:
    training = Training(1.0, [STORE], {"store": 10})
    training.begin(0.0)
    training.halt(training.wall_step_s * 95, "sdc")
    assert training.newest("job", trusted=57)[0] == 50


def test_a_tier_that_is_not_used_keeps_nothing_new() -> None:
    training = Training(1.0, [MEMORY, STORE], {"memory": math.inf, "store": 10})
    training.begin(0.0)
    training.halt(50.0, "gpu")
    assert training.newest("process")[1] is STORE


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.tuples(st.floats(0.0, 5000.0), st.sampled_from(["process", "node", "job"]), st.floats(0.2, 1.0)),
        min_size=1,
        max_size=12,
    ),
    st.floats(0.05, 30.0),
    st.integers(1, 40),
    st.booleans(),
)
def test_seconds_add_up(stretches: list, step_s: float, every: int, shadow: bool) -> None:
    training = Training(step_s, [MEMORY, STORE], {"memory": every, "store": 3 * every})
    now = 0.0
    for seconds, scope, share in stretches:
        training.begin(now, share)
        now += seconds
        training.halt(now, "gpu")
        version, _ = training.newest(scope)
        assert 0 <= version <= training.version
        training.go_back(version, "gpu", 0.1 if shadow else 1.0)
        training.forget(scope)
    training.begin(now)
    now += 17.0
    training.finish(now)
    assert training.productive >= 0
    assert training.productive + sum(training.losses.by(0).values()) == pytest.approx(now)
    assert sum(training.losses.by(0).values()) == pytest.approx(sum(training.losses.by(1).values()))
