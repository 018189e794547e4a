"""Nobody waits for good in a collective whose connections are cut, not even where gloo itself forgets the waiter."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from stopping_peer import ELEMENTS, HALF, gloo

from rerail.session import groups, sockets, waiting


class Half:
    """One operation under way with a peer that is frozen in the middle of it."""

    def __init__(self, folder: Path, operation: str) -> None:
        path = str(folder / "store")
        self.peer = subprocess.Popen([sys.executable, Path(__file__).with_name("stopping_peer.py"), path, operation])
        before = sockets.open_sockets()
        self.group = gloo(path, 0)
        self._connections = sockets.established(sockets.open_sockets() - before)
        self.tensor = torch.ones(ELEMENTS)
        self.work: Any = {
            "send": lambda: self.group.send([self.tensor], 1, 0),
            "recv": lambda: self.group.recv([self.tensor], 1, 0),
            "broadcast": lambda: self.group.broadcast(self.tensor, 0),
            "allreduce": lambda: self.group.allreduce(self.tensor),
            "reduce_scatter": lambda: self.group.reduce_scatter([self.tensor[:HALF]], [list(self.tensor.split(HALF))]),
        }[operation]()
        self.cut_at = 0.0
        self.errors: list[RuntimeError] = []
        self._wait_until_frozen()

    def _wait_until_frozen(self) -> None:
        stat, end = Path(f"/proc/{self.peer.pid}/stat"), time.monotonic() + 60
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < end and self.peer.poll() is None, "the peer did not get as far as to freeze"
            time.sleep(0.02)

    def cut(self) -> None:
        self.cut_at = time.monotonic()
        assert sockets.cut(self._connections) == 1

    def wait_until_closed(self) -> None:
        end = time.monotonic() + 30
        while sockets.still_open(self._connections) and time.monotonic() < end:
            time.sleep(0.01)

    def stuck(self) -> waiting.Stuck:
        return waiting.Stuck(lambda: self.cut_at, lambda: not sockets.still_open(self._connections))

    def broke(self, error: RuntimeError) -> None:
        self.errors.append(error)

    def end(self) -> None:
        self.peer.send_signal(signal.SIGKILL)
        self.peer.wait()


@pytest.fixture
def half(tmp_path: Path) -> Iterator[Callable[[str], Half]]:
    made: list[Half] = []

    def make(operation: str) -> Half:
        made.append(Half(tmp_path, operation))
        return made[-1]

    yield make
    for one in made:
        one.end()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one.group))  # to take it apart would wait for its stuck thread


@pytest.mark.parametrize("operation", ["send", "recv", "broadcast", "allreduce", "reduce_scatter"])
def test_a_waiter_is_freed_in_the_middle_of_a_transfer(half: Callable[[str], Half], operation: str) -> None:
    under_way = half(operation)
    threading.Timer(0.5, under_way.cut).start()
    wait = waiting.wait_aside if operation in groups.AS_A_WHOLE else waiting.wait
    with pytest.raises(RuntimeError) as freed:
        wait(under_way.work, None, under_way.stuck)
    assert under_way.cut_at, "it was not the cut that freed it"
    if not isinstance(freed.value, waiting.LeftBehind):
        under_way.wait_until_closed()  # gloo tells the waiter first and closes then; whoever leaves has seen it closed
    assert not sockets.still_open(under_way._connections), "and gloo has let go of the connection"


def test_a_future_is_kept_with_the_tensors_as_they_are(half: Callable[[str], Half]) -> None:
    under_way, promises = half("broadcast"), waiting.Promises()
    future = promises.promise(under_way.work.get_future(), [under_way.tensor], under_way)
    under_way.cut()
    promises.free(future.done)
    assert future.value() == [under_way.tensor] and len(under_way.errors) == 1


def test_a_collective_that_is_only_slow_is_waited_for(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    code = f"import os, time, torch; from stopping_peer import gloo; group = gloo({path!r}, 1); time.sleep(0.5); "
    code += "group.allreduce(torch.ones(4)).wait(); os._exit(0)"
    peer = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent)
    group, tensor = gloo(path, 0), torch.ones(4)
    waiting.wait(group.allreduce(tensor), None, lambda: waiting.Stuck(lambda: 0.0, lambda: True))
    assert tensor.tolist() == [2.0] * 4
    assert peer.wait(30) == 0


def test_a_timeout_of_the_caller_counts(half: Callable[[str], Half]) -> None:
    under_way = half("broadcast")
    with pytest.raises(RuntimeError, match="timed out"):
        waiting.wait(under_way.work, timedelta(seconds=0.3), under_way.stuck)
    under_way.cut()
