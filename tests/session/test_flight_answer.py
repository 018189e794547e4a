"""A rank that begins no more collectives answers the agent's question with torch's record, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rerail.diagnose import flight as judging
from rerail.runtime import stacks
from rerail.session import flight
from rerail.session.c10d import HashStore
from rerail.session.flight import QUIET_BEATS, Answerer

NOTHING = b'{"version": "2.10"}'


def answerer(folder: Path, dump: Callable[[], bytes]) -> Answerer:
    return Answerer(str(folder / "error.json"), lambda: {"gloo": dump})


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


def test_only_a_quiet_rank_that_is_asked_answers_and_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def dump() -> bytes:
        calls.append(1)
        return NOTHING

    rank, answer = answerer(tmp_path, dump), tmp_path / stacks.FLIGHT
    assert answer.read_bytes() == b"", "it is there from the start: this rank answers"
    for _ in range(10):
        rank.look(7)
    assert not calls, "nobody asked"
    (tmp_path / stacks.FLIGHT_ASK).touch()
    for begun in range(8, 20):
        rank.look(begun)
    assert not calls, "a rank that goes on does not even look"
    for _ in range(QUIET_BEATS):
        rank.look(19)
    until(lambda: answer.stat().st_size)
    for _ in range(10):
        rank.look(19)
    assert len(calls) == 1 and not (tmp_path / stacks.FLIGHT_ASK).exists()
    assert judging.read(answer.read_bytes()) is not None


def test_a_recorder_that_does_not_answer_holds_up_no_beat(tmp_path: Path) -> None:
    free = threading.Event()

    def dump() -> bytes:
        free.wait(10.0)
        return NOTHING

    rank = answerer(tmp_path, dump)
    (tmp_path / stacks.FLIGHT_ASK).touch()
    began = time.monotonic()
    for _ in range(20):
        rank.look(1)
        (tmp_path / stacks.FLIGHT_ASK).touch()
    assert time.monotonic() - began < 5.0
    assert sum(thread.name == "rerail-flight" for thread in threading.enumerate()) == 1, "one question at a time"
    free.set()
    until(lambda: (tmp_path / stacks.FLIGHT).stat().st_size)


def test_a_recorder_that_fails_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)

    def dump() -> bytes:
        raise RuntimeError("the flight recorder answers 400")

    rank = answerer(tmp_path, dump)
    (tmp_path / stacks.FLIGHT_ASK).touch()
    for _ in range(QUIET_BEATS + 1):
        rank.look(1)
    until(lambda: not any(thread.name == "rerail-flight" for thread in threading.enumerate()))
    assert (tmp_path / stacks.FLIGHT).read_bytes() == b"" and not raised


def test_without_a_recorder_or_a_place_nothing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert flight.answer("") is None
    assert flight.answer(str(tmp_path / "missing" / "error.json")) is None
    assert flight.handler("no_such_handler") is None
    monkeypatch.setattr(flight, "HANDLERS", {"gloo": "no_such_handler"})
    assert flight.answer(str(tmp_path / "error.json")) is None
    assert not (tmp_path / stacks.FLIGHT).exists(), "the agent is not to wait for an answer"


def test_nccl_is_not_asked_once_its_wires_were_aborted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def handler(name: str) -> Callable[[], bytes]:
        def dump() -> bytes:
            asked.append(name)
            return NOTHING

        return dump

    monkeypatch.setattr(flight, "handler", handler)
    for aborted, expected in ((False, ["fr_trace_json", "dump_nccl_trace_json"]), (True, ["fr_trace_json"])):
        monkeypatch.setattr(flight.fabric, "aborted", aborted)
        asked.clear()
        (tmp_path / stacks.FLIGHT).unlink(missing_ok=True)
        look = flight.answer(str(tmp_path / "error.json"))
        assert look is not None
        (tmp_path / stacks.FLIGHT_ASK).touch()
        for _ in range(QUIET_BEATS + 1):
            look(1)
        until(lambda: (tmp_path / stacks.FLIGHT).stat().st_size)
        assert asked == expected


def test_torchs_own_recorder_answers_and_can_be_read() -> None:
    dump = flight.handler(flight.HANDLERS["gloo"])
    if dump is None:
        pytest.skip("this torch has no handler for the flight recorder")
    before = len(_entries(dump()))
    group = dist.ProcessGroupGloo(HashStore(), 0, 1)
    group.allreduce(torch.ones(8, 4)).wait()
    until(lambda: len(_entries(dump())) > before)
    newest = _entries(dump())[-1]
    assert (newest.operation, newest.input_sizes, newest.is_p2p) == ("all_reduce", [[8, 4]], False)
    until(lambda: _entries(dump())[-1].over)


def _entries(data: bytes) -> list[judging.Entry]:
    record = judging.read(b'{"traces": {"gloo": ' + data + b"}}")
    assert record is not None, data[:300]
    return record.traces["gloo"].entries
