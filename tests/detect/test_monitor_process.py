"""The monitor as a process: what the kernel says comes out as JSON at once, and it goes with its parent."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from rerail.detect.kernel_log import INJECTED, KMSG

WAIT_S = 30.0
PARENT = """
import os, subprocess, sys
os.environ["RERAIL_AGENT_PID"] = str(os.getpid())
child = subprocess.Popen([sys.executable, "-m", "rerail.detect.monitor"], stdout=int(sys.argv[1]), pass_fds=[int(sys.argv[1])])
print(child.pid, flush=True)
sys.stdin.read()
os._exit(0)
"""


@pytest.fixture
def own(tmp_path: Path) -> tuple[str, dict[str, str]]:
    """A fault that nobody else on this machine knows, and the environment that makes a monitor know it."""
    mark = f"flux{uuid.uuid4().hex}"
    file = tmp_path / "own.toml"
    file.write_text(
        f"[[fault]]\ncode = 'own.flux'\ntitle = 't'\nclass = 'gpu'\nseen = ['kernel']\npattern = '{mark}'\nadvice = 'A.'\n"
    )
    return mark, {**os.environ, "RERAIL_FAULT_FILES": str(file), "RERAIL_INJECT": "1", "OMP_NUM_THREADS": "1"}


def lines_of(stream: IO[bytes]) -> queue.SimpleQueue[dict[str, Any]]:
    found: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in stream:
            body = json.loads(line)
            if body["code"] == "own.flux":
                found.put(body)

    threading.Thread(target=read, daemon=True).start()
    return found


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def say(text: str) -> None:
    with open(KMSG, "wb", buffering=0) as stream:
        stream.write(f"<4>{INJECTED}{text}\n".encode())


@pytest.mark.skipif(not os.access(KMSG, os.R_OK | os.W_OK), reason="/dev/kmsg cannot be read and written here")
def test_a_line_of_the_kernel_comes_out_as_json_within_a_second(own: tuple[str, dict[str, str]]) -> None:
    mark, env = own
    with subprocess.Popen([sys.executable, "-m", "rerail.detect.monitor"], env=env, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            found = lines_of(process.stdout)
            for number in range(15):  # until it has begun to watch
                say(f"{mark} hello {number}")
                try:
                    found.get(timeout=2.0)
                    break
                except queue.Empty:
                    assert process.poll() is None, "the monitor has ended"
            else:
                pytest.fail("no line came within thirty seconds")
            time.sleep(0.3)
            while not found.empty():
                found.get()
            took = []
            for number in range(3):  # the best of three: this machine may be busy
                began = time.monotonic()
                say(f"{mark} at 0000:3b:00.0 {number}")
                body = found.get(timeout=WAIT_S)
                took.append(time.monotonic() - began)
                assert (body["detector"], body["subject"]) == ("kernel_log", "0000:3b:00") and mark in body["text"]
            assert min(took) < 1.0, f"lines took {took} s"
        finally:
            process.kill()


@pytest.mark.parametrize("how", ["the parent is killed", "nobody reads"])
def test_it_ends_when_its_parent_ends(own: tuple[str, dict[str, str]], how: str) -> None:
    reading, writing = os.pipe()
    command = [sys.executable, "-c", PARENT, str(writing)]
    with subprocess.Popen(
        command, env=own[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[writing]
    ) as parent:
        os.close(writing)
        assert parent.stdout is not None and parent.stdin is not None
        child = int(parent.stdout.readline())
        try:
            assert not gone(child)
            if how == "nobody reads":
                os.close(reading)
            else:
                parent.kill()
            deadline = time.monotonic() + WAIT_S
            while not gone(child) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert gone(child), f"the monitor lives on although {how}"
        finally:
            parent.kill()
            if how != "nobody reads":
                os.close(reading)
            if not gone(child):
                psutil.Process(child).kill()
