"""Of everything a log shows, the root is what nothing else explains; these are the rules by which it is found."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rerail.diagnose.cascade import STORM_S, Verdict, judge
from rerail.faults.catalog import Fault
from rerail.faults.sightings import Sighting
from rerail.flow import Handling, Role, Severity


def fault(code: str, role: Role = Role.ROOT, **more: Any) -> Fault:
    return Fault(code=code, title=code, kind="gpu", role=role, **more)


CAUSE = fault("gpu.lost", severity=Severity.CRITICAL, action=Handling.DRAIN_NODE)
OTHER = fault("disk.full", action=Handling.STOP_JOB)
SLIGHT = fault("nic.slow", severity=Severity.WARNING, action=Handling.IGNORE)
SYMPTOM = fault("nccl.timeout", Role.SYMPTOM, caused_by=("gpu.*", "link.*"))
LATE = fault("process.exit", Role.SYMPTOM)
HINT = fault("link.errors", Role.CONFIRMATION, severity=Severity.WARNING, action=Handling.DRAIN_NODE)
BENIGN = fault("all.well", Role.BENIGN)
DOWN = fault("link.down")
UP = fault("link.up", Role.CLEAR, clears=("link.d*",))
XID = fault("gpu.xid", hardware=True, scope="device", action=Handling.RESET_DEVICE)


def seen(*what: Fault | tuple[Fault, dict[str, Any]]) -> list[Sighting]:
    """Sightings in this order."""
    found = []
    for order, item in enumerate(what, 1):
        one, more = item if isinstance(item, tuple) else (item, {})
        found.append(Sighting(fault=one, **{"order": order, "line": order, "file": "a.log", **more}))
    return found


def root(verdict: Verdict) -> str:
    return verdict.root.fault.code if verdict.root is not None else ""


def echoes(verdict: Verdict) -> list[str]:
    return [echo.fault.code for echo in verdict.echoes]


# --- roots and symptoms ---


def test_nothing_and_benign_lines_are_no_fault() -> None:
    for found in ([], seen(BENIGN), seen(HINT), seen(UP)):
        verdict = judge(found)
        assert verdict.root is None and verdict.echoes == () and verdict.action is Handling.IGNORE


def test_a_cause_goes_before_the_symptoms_that_were_seen_first() -> None:
    verdict = judge(seen(SYMPTOM, LATE, CAUSE, SYMPTOM))
    assert root(verdict) == "gpu.lost" and echoes(verdict) == ["nccl.timeout", "process.exit"]
    assert verdict.action is Handling.DRAIN_NODE and verdict.confidence == "high"
    assert verdict.why == "it explains 1 of the 2 others"


def test_a_symptom_without_a_cause_is_the_root_of_low_confidence() -> None:
    verdict = judge(seen(LATE, SYMPTOM))
    assert root(verdict) == "process.exit" and verdict.confidence == "low" and "not in these lines" in verdict.why


def test_a_cause_that_is_caused_by_another_is_its_echo() -> None:
    chained = fault("cuda.error", caused_by=("gpu.lost",))
    further = fault("job.failed", caused_by=("cuda.*",))
    verdict = judge(seen(further, chained, CAUSE))
    assert root(verdict) == "gpu.lost" and echoes(verdict) == ["job.failed", "cuda.error"]


def test_the_serious_go_before_the_slight_and_the_first_before_later_ones() -> None:
    assert root(judge(seen(SLIGHT, OTHER))) == "disk.full"
    assert root(judge(seen(OTHER, CAUSE))) == "disk.full"
    assert root(judge(seen(CAUSE, OTHER))) == "gpu.lost"
    assert root(judge(seen(SLIGHT))) == "nic.slow"


def test_rivals_and_slight_roots_lower_the_confidence() -> None:
    two = judge(seen(CAUSE, OTHER))
    assert two.confidence == "medium" and "first of 2 causes" in two.why and echoes(two) == ["disk.full"]
    assert judge(seen(SLIGHT)).confidence == "medium"
    assert judge(seen(CAUSE)).confidence == "high" and judge(seen(CAUSE)).why == "nothing else was seen"


def test_a_slight_cause_does_not_explain_a_symptom_that_does_not_name_it() -> None:
    assert root(judge(seen(SLIGHT, LATE))) == "nic.slow"
    slight = fault("link.slow", severity=Severity.WARNING)
    assert root(judge(seen(SYMPTOM, slight))) == "link.slow"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_faults_that_cause_each_other_stand_for_one_another(order: tuple[int, int]) -> None:
    ring = [fault("a.one", caused_by=("b.two",)), fault("b.two", caused_by=("a.one",))]
    tail = fault("c.tail", caused_by=("a.*", "b.*"))
    first, second = (ring[index] for index in order)
    verdict = judge(seen(tail, first, second))
    assert root(verdict) == first.code and set(echoes(verdict)) == {"c.tail", second.code}


def test_a_fault_is_not_the_cause_of_itself() -> None:
    own = fault("a.one", caused_by=("*",))
    assert root(judge(seen(own, own))) == "a.one"
    assert root(judge(seen(own, CAUSE))) == "gpu.lost"


def test_a_ring_behind_a_cause_is_an_echo() -> None:
    ring = [fault("a.one", caused_by=("b.two", "gpu.lost")), fault("b.two", caused_by=("a.one",))]
    assert root(judge(seen(*ring, CAUSE))) == "gpu.lost"


# --- confirmations, clears, debounce ---


def test_a_confirmation_counts_only_with_what_it_explains() -> None:
    verdict = judge(seen(SYMPTOM, HINT))
    assert root(verdict) == "link.errors" and echoes(verdict) == ["nccl.timeout"]
    assert verdict.action is Handling.DRAIN_NODE
    unexplained = judge(seen(OTHER, HINT))
    assert root(unexplained) == "disk.full" and echoes(unexplained) == []


def test_what_is_over_again_does_not_count_beside_what_stands() -> None:
    verdict = judge(seen(DOWN, UP, OTHER))
    assert root(verdict) == "disk.full" and echoes(verdict) == []


def test_what_came_and_went_is_better_than_nothing() -> None:
    assert root(judge(seen(DOWN, UP))) == "link.down"


def test_what_came_again_after_the_end_stands() -> None:
    verdict = judge(seen(DOWN, UP, OTHER, DOWN))
    assert set(echoes(verdict)) | {root(verdict)} == {"link.down", "disk.full"}
    down = next(group for group in (verdict.root, *verdict.echoes) if group and group.fault is DOWN)
    assert down.first.line == 4, "the one that was over again is not what counts"


def test_what_is_over_still_explains_a_symptom() -> None:
    assert root(judge(seen(DOWN, SYMPTOM, UP))) == "link.down"


def test_the_end_on_another_machine_or_device_is_another_s() -> None:
    elsewhere = judge(seen(DOWN, (UP, {"file": "b.log"}), SLIGHT))
    assert root(elsewhere) == "link.down"
    device = judge(seen((DOWN, {"device": "0000:3b:00"}), (UP, {"device": "0000:5e:00"}), SLIGHT))
    assert root(device) == "link.down"
    same = judge(seen((DOWN, {"device": "0000:3b:00"}), (UP, {"device": "0000:3b:00"}), SLIGHT))
    assert root(same) == "nic.slow"


def test_what_must_be_seen_several_times_is_not_a_fault_before() -> None:
    often = fault("mem.corrected", times=3)
    assert judge(seen(often, often)).root is None
    assert root(judge(seen(often, often, often))) == "mem.corrected"
    assert root(judge(seen(often, SYMPTOM))) == "nccl.timeout"
    explained = fault("app.crash", Role.SYMPTOM, caused_by=("mem.*",))
    assert root(judge(seen(often, explained))) == "mem.corrected", "as an explanation, once is enough"


def test_several_times_means_within_the_time_where_times_are_known() -> None:
    often = fault("mem.corrected", times=3, within_s=60.0)
    spread = [(often, {"time": 100.0 * number, "clock": "utc"}) for number in range(9)]
    assert judge(seen(*spread)).root is None
    dense = [*spread, *((often, {"time": 5000.0 + number, "clock": "utc"}) for number in range(3))]
    assert root(judge(seen(*dense))) == "mem.corrected"
    assert root(judge(seen(often, often, often))) == "mem.corrected", "without times, the number decides"


def test_a_fault_to_be_ignored_once_is_handled_when_it_comes_again() -> None:
    shy = fault("gpu.remap", action=Handling.IGNORE, then=Handling.DRAIN_NODE)
    assert judge(seen(shy)).action is Handling.IGNORE
    assert judge(seen(shy, shy)).action is Handling.DRAIN_NODE


# --- storms ---


def xids(*devices: str, gap_s: float = 1.0, clock: str = "uptime") -> list[Sighting]:
    return seen(*((XID, {"device": name, "time": 50 + gap_s * at, "clock": clock}) for at, name in enumerate(devices)))


def test_one_device_is_hardware_and_several_at_once_are_software() -> None:
    alone = judge(xids("0000:3b:00", "0000:3b:00"))
    assert alone.hardware and not alone.storm and alone.action is Handling.RESET_DEVICE
    storm = judge(xids("0000:3b:00", "0000:5e:00"))
    assert storm.storm and not storm.hardware and storm.action is Handling.RESTART_PROCESS
    assert storm.root is not None and storm.root.devices == ("0000:3b:00", "0000:5e:00")


def test_several_devices_one_after_the_other_are_no_storm() -> None:
    verdict = judge(xids("0000:3b:00", "0000:5e:00", gap_s=STORM_S + 1))
    assert not verdict.storm and verdict.hardware and verdict.root is not None and verdict.root.count == 2


def test_without_times_several_devices_are_a_storm() -> None:
    assert judge(xids("0000:3b:00", "0000:5e:00", clock="")).storm


def test_faults_of_whole_nodes_are_no_storm() -> None:
    node = msgspec.structs.replace(XID, scope="node")
    found = [msgspec.structs.replace(one, fault=node) for one in xids("0000:3b:00", "0000:5e:00")]
    assert not judge(found).storm


# --- order, times, ranks ---


def test_the_earliest_in_time_wins_over_the_order_of_the_files() -> None:
    for clock in ("utc", "date", "day", "hour"):
        late = (CAUSE, {"time": 200.0, "clock": clock, "file": "a.log"})
        early = (OTHER, {"time": 100.0, "clock": clock, "file": "b.log"})
        assert root(judge(seen(late, early))) == "disk.full", clock


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"time": 200.0, "clock": "utc"}, {"time": 100.0, "clock": "date"}),
        ({"time": 200.0, "clock": "utc"}, {}),
        ({}, {"time": 100.0, "clock": "utc"}),
        ({"time": 200.0, "clock": "uptime"}, {"time": 100.0, "clock": "uptime", "file": "other machine"}),
        ({"time": 86_000.0, "clock": "hour"}, {"time": 100.0, "clock": "hour"}),
    ],
    ids=["zone unknown", "one without", "the other without", "two machines", "past midnight"],
)
def test_times_that_do_not_compare_leave_the_order(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert root(judge(seen((CAUSE, first), (OTHER, second)))) == "gpu.lost"


def test_uptimes_of_one_machine_compare() -> None:
    verdict = judge(seen((CAUSE, {"time": 200.0, "clock": "uptime"}), (OTHER, {"time": 100.0, "clock": "uptime"})))
    assert root(verdict) == "disk.full"


def test_a_symptom_without_a_time_does_not_spoil_the_comparison_of_causes() -> None:
    late, early = (CAUSE, {"time": 200.0, "clock": "utc"}), (OTHER, {"time": 100.0, "clock": "utc"})
    assert root(judge(seen(SYMPTOM, late, early))) == "disk.full"


def test_the_first_sighting_in_time_stands_for_its_kind() -> None:
    verdict = judge(
        seen(
            (CAUSE, {"time": 9.0, "clock": "utc", "rank": 5, "file": "a.log"}),
            (CAUSE, {"time": 3.0, "clock": "utc", "rank": 2, "file": "b.log"}),
        )
    )
    assert verdict.root is not None and verdict.root.first.rank == 2 and verdict.root.ranks == (2, 5)
    assert verdict.root.count == 2


def test_interleaved_ranks_are_one_cascade() -> None:
    mixed = [
        (SYMPTOM, {"rank": 0}),
        (LATE, {"rank": 1}),
        (CAUSE, {"rank": 3}),
        (SYMPTOM, {"rank": 2}),
        (LATE, {"rank": 3}),
    ]
    verdict = judge(seen(*mixed))
    assert verdict.root is not None and verdict.root.first.rank == 3 and verdict.root.ranks == (3,)
    assert [(echo.fault.code, echo.ranks) for echo in verdict.echoes] == [
        ("nccl.timeout", (0, 2)),
        ("process.exit", (1, 3)),
    ]


def test_the_same_time_is_decided_by_the_order() -> None:
    same = {"time": 100.0, "clock": "utc"}
    assert root(judge(seen((OTHER, same), (CAUSE, same)))) == "disk.full"
    assert root(judge(seen((CAUSE, same), (OTHER, same)))) == "gpu.lost"


# --- whatever is seen ---

CODES = [f"{area}.{name}" for area in "abc" for name in ("one", "two")]


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    role = draw(st.sampled_from(Role))
    return fault(
        draw(st.sampled_from(CODES)),
        role,
        severity=draw(st.sampled_from(Severity)),
        caused_by=tuple(draw(st.lists(st.sampled_from([*CODES, "a.*", "*"]), max_size=2))),
        clears=("b.*",) if role is Role.CLEAR else (),
        times=draw(st.sampled_from([1, 1, 1, 2])),
        hardware=draw(st.booleans()),
        scope=draw(st.sampled_from(["device", "node"])),
    )


@st.composite
def logs(draw: st.DrawFn) -> list[Sighting]:
    known = {one.code: one for one in draw(st.lists(faults(), min_size=1, max_size=6))}
    picked = draw(st.lists(st.sampled_from(sorted(known)), max_size=15))
    return [
        Sighting(
            fault=known[code],
            order=order,
            file=draw(st.sampled_from(["a.log", "b.log", "c.log"])),
            rank=draw(st.integers(-1, 3)),
            device=draw(st.sampled_from(["", "x", "y"])),
            time=float(draw(st.integers(0, 100))),
            clock=draw(st.sampled_from(["utc", "utc", "day", "uptime"])),
        )
        for order, code in enumerate(picked, 1)
    ]


@given(logs())
@settings(max_examples=300, deadline=None)
def test_the_root_is_one_of_the_sightings_and_nothing_is_told_twice(found: list[Sighting]) -> None:
    verdict = judge(found)
    told = [group for group in (verdict.root, *verdict.echoes) if group is not None]
    assert all(any(group.first is one for one in found) for group in told)
    codes = [group.fault.code for group in told]
    assert len(set(codes)) == len(codes)
    assert all(group.count == sum(one.fault.code == group.fault.code for one in found) for group in told)
    assert verdict.confidence in ("high", "medium", "low") and verdict.why
    if verdict.root is None:
        assert not verdict.echoes and verdict.action is Handling.IGNORE
    else:
        assert verdict.root.fault.role in (Role.ROOT, Role.SYMPTOM, Role.CONFIRMATION)


@given(logs(), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_the_order_in_which_they_are_handed_over_does_not_matter(found: list[Sighting], dice: random.Random) -> None:
    shuffled = list(found)
    dice.shuffle(shuffled)
    assert judge(shuffled) == judge(found)


@given(st.lists(st.sampled_from([CAUSE, OTHER, SYMPTOM, LATE, HINT]), min_size=1, max_size=8), st.permutations("abc"))
@settings(max_examples=200, deadline=None)
def test_with_times_the_order_of_the_files_does_not_matter(kinds: list[Fault], names: list[str]) -> None:
    def read(order_of_files: list[str]) -> Verdict:
        written = [(name, at, kind) for at, kind in enumerate(kinds) for name in "abc"]  # each file says the same
        written.sort(key=lambda line: (order_of_files.index(line[0]), line[1]))
        return judge(seen(*((kind, {"file": name, "time": float(at), "clock": "utc"}) for name, at, kind in written)))

    one, other = read(list("abc")), read(names)
    assert (root(one), echoes(one), one.action, one.confidence) == (
        root(other),
        echoes(other),
        other.action,
        other.confidence,
    )


@given(
    st.lists(st.sampled_from([CAUSE, OTHER, SYMPTOM, LATE, SLIGHT]), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
@settings(max_examples=200, deadline=None)
def test_equal_sightings_in_other_files_change_nothing(kinds: list[Fault], dice: random.Random) -> None:
    alone = judge(seen(*kinds))
    more = list(kinds)
    dice.shuffle(more)
    together = judge(seen(*kinds, *((kind, {"file": "b.log"}) for kind in more)))
    assert (root(together), together.action, together.confidence) == (root(alone), alone.action, alone.confidence)
