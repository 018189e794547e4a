"""The agent asks its ranks for the flight recorder, waits for those that can answer, and never for long."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rerail.runtime import flight, stacks


def slot(folder: Path, rank: int, *, beat_age: float = 0.05, answers: bool = True, **other: Any) -> Any:
    place = folder / str(rank)
    place.mkdir()
    if answers:
        (place / stacks.FLIGHT).write_bytes(b"the answer to an older question")
    clock = SimpleNamespace(read=lambda: SimpleNamespace(beat_age=beat_age))
    facts = {"running": True, "joined": True, "error_file": place / "error.json", "clock": clock, **other}
    return SimpleNamespace(rank=rank, **facts)


def answer(*numbers: int, waits: bool) -> bytes:
    entries = [
        {
            "process_group": ["0", ""],
            "collective_seq_id": number,
            "profiling_name": "gloo:barrier",
            "state": "scheduled",
            "retired": not (waits and number == max(numbers)),
            "time_created_ns": 1,
        }
        for number in numbers
    ]
    return json.dumps({"groups": {"0": [0, 1, 2]}, "traces": {"gloo": {"entries": entries}}}).encode()


async def asked(slots: list[Any], answers: dict[int, bytes]) -> tuple[str, float]:
    """What is told, and how long that took, when the ranks answer a moment after they are asked."""

    async def rank(folder: Path, data: bytes) -> None:
        while not (folder / stacks.FLIGHT_ASK).exists():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        (folder / stacks.FLIGHT).write_bytes(data)

    ranks = [
        asyncio.create_task(rank(one.error_file.parent, answers[one.rank])) for one in slots if one.rank in answers
    ]
    began = time.monotonic()
    told = await flight.ask(slots)
    took = time.monotonic() - began
    for task in ranks:
        task.cancel()
    return told, took


def test_the_answers_are_compared(tmp_path: Path) -> None:
    slots = [slot(tmp_path, rank) for rank in range(3)]
    waits = answer(4, 5, waits=True)
    told, _ = asyncio.run(asked(slots, {0: waits, 1: answer(4, waits=False), 2: waits}))
    assert told == "flight recorder: rank 1 has not begun barrier #5 of group default, which ranks 0, 2 wait in"


def test_a_rank_that_runs_no_python_is_not_waited_for(tmp_path: Path) -> None:
    slots = [slot(tmp_path, 0), slot(tmp_path, 1, beat_age=2.0)]
    told, took = asyncio.run(asked(slots, {0: answer(5, waits=True)}))
    assert told == "flight recorder: rank 0 waits in barrier #5 of group default; rank 1 gives no record"
    assert took < flight.ANSWER_S


def test_half_an_answer_and_one_that_never_comes_are_no_answers(tmp_path: Path) -> None:
    slots = [slot(tmp_path, 0), slot(tmp_path, 1)]
    told, took = asyncio.run(asked(slots, {0: answer(5, waits=True)[:-9]}))
    assert told == "" and took < flight.ANSWER_S + 2.0


def test_ranks_that_have_no_recorder_are_not_asked(tmp_path: Path) -> None:
    slots = [
        slot(tmp_path, 0, answers=False),
        slot(tmp_path, 1, running=False),
        slot(tmp_path, 2, joined=False),
        slot(tmp_path, 3, error_file=Path()),
    ]
    told, took = asyncio.run(asked(slots, {}))
    assert told == "" and took < flight.ANSWER_S
    assert not list(tmp_path.rglob(stacks.FLIGHT_ASK))
