"""Flight recorders of several ranks, in torch's own words, give the sentence that names who has not come."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rerail.diagnose.flight import Record, read, tell

FORMED = 1_000


def entry(number: int, operation: str = "all_reduce", *, over: bool = True, **other: Any) -> dict[str, Any]:
    """As torch 2.13 writes it for gloo: the state stays `scheduled`."""
    return {
        "collective_seq_id": number,
        "input_dtypes": ["Float"],
        "input_sizes": [[1024, 1024]],
        "is_p2p": False,
        "op_id": number,
        "output_dtypes": ["Float"],
        "output_sizes": [[1024, 1024]],
        "p2p_seq_id": 0,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": f"gloo:{operation}",
        "record_id": number - 1,
        "retired": over,
        "state": "scheduled",
        "thread_id": "140514566044544",
        "thread_name": "python",
        "time_created_ns": FORMED + number,
        "time_discovered_completed_ns": 0,
        "time_discovered_started_ns": 0,
        "timeout_ms": 1800000,
        **other,
    }


def raw(*entries: dict[str, Any], recorder: str = "gloo", **groups: list[int]) -> bytes:
    trace = {
        "comm_lib_version": "",
        "nccl_comm_state": {},
        "pg_config": {"": {"desc": "", "name": "", "ranks": "[]"}},
        "pg_status": {"0": {"last_completed_collective": "6"}},
        "version": "2.10",
        **({"entries": list(entries)} if entries else {}),
    }
    return json.dumps(
        {"formed_ns": FORMED, "groups": groups or {"0": [0, 1, 2, 3]}, "traces": {recorder: trace}}
    ).encode()


def record(*entries: dict[str, Any], recorder: str = "gloo", **groups: list[int]) -> Record:
    found = read(raw(*entries, recorder=recorder, **groups))
    assert found is not None
    return found


def test_the_rank_that_has_not_begun_what_the_others_wait_in_is_named() -> None:
    waits = record(entry(55), entry(56), entry(57, over=False))
    told = tell({0: waits, 1: record(entry(55), entry(56)), 2: waits, 3: waits})
    assert told == [
        "flight recorder: rank 1 has not begun all_reduce #57 of group default (1024x1024), which ranks 0, 2, 3 wait in"
    ]


def test_a_rank_that_passed_a_broadcast_and_waits_further_on_is_told_apart() -> None:
    at_57 = record(entry(57, "broadcast", over=False))
    at_58 = record(entry(57, "broadcast"), entry(58, over=False))
    told = tell({0: at_57, 1: record(entry(56)), 2: at_58})
    assert told == [
        "flight recorder: rank 1 has not begun broadcast #57 of group default (1024x1024), "
        "which rank 0 waits in, rank 2 in #58"
    ]


def test_a_rank_that_gave_nothing_is_not_accused() -> None:
    waits = record(entry(57, over=False, input_sizes=[]))
    assert tell({0: waits, 2: waits}, silent=[1]) == [
        "flight recorder: ranks 0, 2 wait in all_reduce #57 of group default; rank 1 gives no record"
    ]
    assert tell({0: waits, 2: waits}) == ["flight recorder: ranks 0, 2 wait in all_reduce #57 of group default"]


def test_two_operations_under_one_number_are_shown_side_by_side() -> None:
    told = tell(
        {
            0: record(entry(9, over=False)),
            1: record(entry(9, "broadcast", over=False, input_sizes=[[]])),
            2: record(entry(9, over=False, input_sizes=[[8], [4]])),
        }
    )
    assert told == [
        "flight recorder: ranks 0, 2 wait in all_reduce #9 of group default (1024x1024), "
        "but rank 1 in broadcast #9 of group default (scalar)"
    ]


def test_of_two_groups_the_one_whose_late_rank_waits_for_nobody_comes_first() -> None:
    """0 waits for 2 among all; 2 waits for 3 in its own group; 3 is where it all began."""
    pair = ["tensor", "undefined"]
    groups = {"0": [0, 2, 3], "tensor": [2, 3]}
    told = tell(
        {
            0: record(entry(5, over=False), **{"0": [0, 2, 3]}),
            2: record(entry(4), entry(30, over=False, process_group=pair), **groups),
            3: record(entry(4), entry(29, process_group=pair), **groups),
        }
    )
    assert [line.split(" (")[0] for line in told] == [
        "flight recorder: ranks 2, 3 have not begun all_reduce #5 of group default",
        "flight recorder: rank 3 has not begun all_reduce #30 of group tensor",
    ]
    told = tell(
        {
            0: record(entry(5, over=False), **{"0": [0, 2]}),
            2: record(entry(4), entry(30, over=False, process_group=pair), **{"0": [0, 2], "tensor": [2, 3]}),
            3: record(entry(29, process_group=pair), **{"tensor": [2, 3]}),
        }
    )
    assert [line.split(" (")[0] for line in told] == [
        "flight recorder: rank 3 has not begun all_reduce #30 of group tensor",
        "flight recorder: rank 2 has not begun all_reduce #5 of group default",
    ]


def test_only_members_of_a_group_can_be_late_for_it() -> None:
    told = tell({0: record(entry(3, over=False), **{"0": [0, 1]}), 2: record(**{"other": [2]})}, silent=[3])
    assert told == ["flight recorder: rank 0 waits in all_reduce #3 of group default (1024x1024)"]


def test_what_an_older_generation_recorded_does_not_count() -> None:
    old = entry(80, over=False, time_created_ns=FORMED - 1)
    told = tell({0: record(old, entry(2, over=False)), 1: record(old, entry(1))})
    assert told == [
        "flight recorder: rank 1 has not begun all_reduce #2 of group default (1024x1024), which rank 0 waits in"
    ]


def test_nccl_tells_by_the_state_and_a_rank_without_its_recorder_is_not_accused() -> None:
    names = {"profiling_name": "nccl:all_gather", "over": False}
    done = record(entry(7, state="completed", **names), recorder="nccl")
    waits = record(entry(7, state="completed", **names), entry(8, state="started", **names), recorder="nccl")
    assert tell({0: waits, 1: done, 2: record(entry(1))})[0].startswith(
        "flight recorder: rank 1 has not begun all_gather #8 of group default"
    )


def test_nothing_is_said_when_nobody_waits() -> None:
    sent = entry(0, is_p2p=True, over=False, profiling_name="nccl:send 0->1")
    assert tell({0: record(entry(1), sent), 1: record()}, silent=[2]) == []
    assert tell({}) == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"\x80\x04\x95",
        raw(entry(1))[:-40],
        b'{"traces": {"gloo": {"entries": [{"state": 3}]}}}',
        b'{"traces": "none"}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_what_is_no_whole_answer_is_none(data: bytes) -> None:
    assert read(data) is None
