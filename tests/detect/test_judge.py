"""Readings become faults that begin, hold and end; a counter that is reset is none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rerail.detect.detector import Reading, Value
from rerail.detect.judge import Finding, Judge
from rerail.faults.catalog import Condition, Fault


def judge(code: str = "gpu.hot", **condition: Any) -> Judge:
    return Judge([fault(code, **condition)])


def fault(code: str, name: str = "gpu.temperature", **condition: Any) -> Fault:
    if "is" in condition:
        condition["is_"] = condition.pop("is")
    return Fault(code=code, title=code, kind="gpu", reading=Condition(name=name, **condition))


def run(
    watch: Judge, values: list[Value], every_s: float = 10.0, subject: str = "gpu0", start: float = 1000.0
) -> list[str]:
    """`+` where a fault begins, `-` where it ends, `.` where nothing happens."""
    return [
        "".join(
            "+" if one.begins else "-"
            for one in watch.take(Reading("gpu.temperature", subject, value), start + at * every_s)
        )
        or "."
        for at, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("condition", "values", "expected"),
    [
        ({"above": 90}, [80, 91, 95, 90, 91], ".+.-+"),
        ({"below": 4}, [8, 4, 3, 3, 4], "..+.-"),
        ({"is": "down"}, ["up", "down", "down", "up"], ".+.-"),
        ({"is": 0}, [1, 0, "0", 0.0, 1], ".+..-"),
        ({"is_not": "Enabled"}, ["Enabled", "Disabled", "Off", "Enabled"], ".+.-"),
        ({"is_not": 4}, [4, 3, "4", 4.0], ".+-."),
        ({"above": 90}, ["hot", "N/A", "91"], "..+"),
        ({"above": 90}, [float("nan"), float("inf"), float("-inf")], ".+-"),
        ({"above": 90, "for_s": 20.0}, [91, 91, 91, 91, 80], "..+.-"),
        ({"above": 90, "for_s": 20.0}, [91, 91, 80, 91, 91, 91], ".....+"),
        ({"above": 90, "for_s": 20.0}, [91, 80, 91, 80], "...."),
        ({"rises": 1}, [5, 5, 6, 6], "..+."),
        ({"rises": 1}, [5], "."),
        ({"rises": 3, "within_s": 25.0}, [0, 1, 2, 3, 4], "....."),
        ({"rises": 3, "within_s": 35.0}, [0, 1, 2, 3, 4], "...+."),
        ({"rises": 3, "within_s": 25.0}, [0, 3, 3, 3, 3, 3], ".+.-.."),
        ({"rises": 5}, [100, 103, 0, 3, 5], "....+"),
        ({"rises": 1}, [5, 6, 0, 0, 1], ".+-.+"),
        ({"rises": 1}, ["N/A", 5, "N/A", 6], "...+"),
        ({"rises": 1}, [5, float("nan"), 6], "..+"),
        ({"above": 1}, [10**400, 2], ".+"),
    ],
)
def test_conditions(condition: dict[str, Any], values: list[Value], expected: str) -> None:
    assert "".join(run(judge(**condition), values)) == expected


@pytest.mark.parametrize("quiet", [1, 2, 5, 6, 7, 8, 30, 359, 360, 361])
def test_a_counter_that_rises_after_any_time_of_quiet_is_seen(quiet: int) -> None:
    watch = judge(rises=1, within_s=60.0)
    assert run(watch, [7] * quiet + [8])[-1] == "+", f"not seen after {quiet} equal readings"


@pytest.mark.parametrize("every_s", [10.0, 59.9, 60.0, 60.1, 85.0])
def test_a_counter_read_as_seldom_as_its_window_is_long_is_seen(every_s: float) -> None:
    assert run(judge(rises=8, within_s=60.0), [0, 0, 9], every_s)[-1] == "+"


def test_a_rise_over_hours_without_a_look_is_not_one_within_a_minute() -> None:
    assert run(judge(rises=8, within_s=60.0), [0, 9], every_s=7200.0) == [".", "."]


def test_subjects_and_faults_are_kept_apart() -> None:
    watch = Judge([fault("gpu.warm", above=80), fault("gpu.hot", above=90), fault("gpu.cold", "gpu.other", below=99)])
    first = watch.take(Reading("gpu.temperature", "gpu0", 95), 1.0)
    assert [one.fault.code for one in first] == ["gpu.warm", "gpu.hot"]
    assert len(watch.take(Reading("gpu.temperature", "gpu1", 95), 1.0)) == 2
    assert [one.fault.code for one in watch.take(Reading("gpu.temperature", "gpu0", 85), 2.0)] == ["gpu.hot"]
    assert watch.take(Reading("fan.speed", "gpu0", 1), 3.0) == []
    assert watch.known("gpu.temperature") and not watch.known("fan.speed")


def test_what_happened_in_a_moment_is_told_each_time_and_never_over() -> None:
    watch = judge(**{"is": "xid"})
    moment = Reading("gpu.temperature", "gpu0", "xid", momentary=True)
    found = [watch.take(moment, at) for at in (1.0, 2.0, 3.0)]
    assert all(len(one) == 1 and one[0].begins for one in found)
    assert watch.take(Reading("gpu.temperature", "gpu0", "well", momentary=True), 4.0) == []


def test_what_could_not_be_told_begins_again() -> None:
    watch = judge(above=90)
    (finding,) = watch.take(Reading("gpu.temperature", "gpu0", 95), 1.0)
    watch.forget(finding)
    assert [one.begins for one in watch.take(Reading("gpu.temperature", "gpu0", 95), 2.0)] == [True]
    assert watch.take(Reading("gpu.temperature", "gpu0", 95), 3.0) == []


def test_the_text_says_what_was_read() -> None:
    reading = Reading("nic.errors", "mlx5_0", 12, note="port 1")
    assert Finding(fault("x.y", rises=1), reading, True, 4.0).text == "mlx5_0: nic.errors = 12, was 4 (port 1)"
    assert Finding(fault("x.y", above=1), Reading("a.b", "c", "down"), True).text == "c: a.b = down"


@given(st.lists(st.integers(0, 20), max_size=60), st.integers(1, 6), st.sampled_from([15.0, 45.0, 1000.0]))
@settings(max_examples=200, deadline=None)
def test_a_rise_is_what_the_definition_says(steps: list[int], rises: int, within_s: float) -> None:
    """Against the definition, for a counter that only rises: as much as `rises` more than at some look within the window."""
    values = [sum(steps[: at + 1]) for at in range(len(steps))]
    watch, holds = judge(rises=rises, within_s=within_s), False
    for at, value in enumerate(values):
        reach = max(1, int(within_s // 10))
        expected = value - values[max(0, at - reach)] >= rises
        told = watch.take(Reading("gpu.temperature", "gpu0", value), at * 10.0)
        holds = told[-1].begins if told else holds
        assert holds == expected, f"at {at} of {values}"


@given(st.lists(st.one_of(st.integers(), st.floats(), st.text(max_size=5)), max_size=40))
@settings(max_examples=200, deadline=None)
def test_beginnings_and_ends_alternate_whatever_is_read(values: list[Value]) -> None:
    for condition in (
        {"above": 3},
        {"is": "1"},
        {"is_not": 1},
        {"rises": 2, "within_s": 30.0},
        {"below": 1, "for_s": 15.0},
    ):
        marks = "".join(run(judge(**condition), values)).replace(".", "")
        assert "++" not in marks and "--" not in marks and not marks.startswith("-"), f"{condition}: {marks}"
