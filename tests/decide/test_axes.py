"""The three axes: each has its own worst, and every word of the catalogue has an answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rerail.decide.axes import Admission, Axes, Repair, Running, parse_levels, worst_of
from rerail.errors import ConfigError
from rerail.faults.catalog import SCOPES, shipped
from rerail.flow import Handling, Severity
from rerail.runtime.handling import shipped_levels

AXES = st.builds(
    Axes, admission=st.sampled_from(Admission), running=st.sampled_from(Running), repair=st.sampled_from(Repair)
)


def test_each_axis_takes_its_own_worst_where_one_order_of_levels_would_forget_one() -> None:
    levels = shipped_levels()
    both = worst_of(map(levels.of_level, ("PreSeparateNPU", "RestartNPU")))
    assert both == Axes(admission=Admission.NO, running=Running.NOW, repair=Repair.REPLACE)


@given(st.lists(AXES), st.randoms())
def test_the_worst_does_not_depend_on_the_order_and_is_never_better_than_any(found: list[Axes], random: object) -> None:
    mixed = list(found)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    worst = worst_of(mixed)
    assert worst == worst_of(found) and all(worst.worst(one) == worst for one in found)


@pytest.mark.parametrize(
    ("level", "axes"),
    [
        ("NotHandleFault", ("yes", "no", "nothing")),
        ("SubHealthFault", ("not_now", "no", "nothing")),
        ("PreSeparateNPU", ("no", "no", "replace")),
        ("RestartRequest", ("not_now", "now", "retry")),
        ("FreeRestartNPU", ("not_now", "boundary", "reset_device")),
        ("restartnpu", ("not_now", "now", "reset_device")),
        ("mindcluster.SeparateNPU", ("no", "now", "replace")),
        ("RESTART_APP", ("yes", "now", "restart_process")),
        ("nvidia.RESTART_BM", ("no", "now", "reboot")),
        ("amd.CORRECTABLE", ("yes", "no", "nothing")),
        ("ascend.critical", ("no", "now", "replace")),
    ],
)
def test_levels_of_other_systems_are_known(level: str, axes: tuple[str, str, str]) -> None:
    found = shipped_levels().of_level(level)
    assert (found.admission, found.running, found.repair) == axes


def test_every_handling_severity_and_scope_has_a_row_and_so_has_every_fault_that_is_shipped() -> None:
    levels = shipped_levels()
    for action in Handling:
        for severity in Severity:
            for scope in SCOPES:
                assert any(row.fits(action, severity, scope) for row in levels.handling), (action, severity, scope)
    assert set(levels.unknown) == set(Severity)
    for fault in shipped():
        axes = levels.of_handling(fault.action, fault.severity, fault.scope)
        if fault.action is Handling.IGNORE:
            assert axes.running is Running.NO, fault.code


@pytest.mark.parametrize(
    ("name", "words"), [("RestartNPUs", "did you mean RestartNPU"), ("zzz", "there are: mindcluster.")]
)
def test_an_unknown_level_is_an_error_with_a_suggestion(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        shipped_levels().of_level(name)


def test_a_broken_table_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_levels('[unknown]\ninfo = { admission = "maybe" }')
