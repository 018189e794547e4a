"""What every test owes the next one in the same process: no child process of its own is left running."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

HELPERS = ("resource_tracker", "forkserver", "torch_shm_manager")
"""Started by multiprocessing and torch once per process, and meant to stay."""


def running() -> dict[int, str]:
    """Living child processes of this one, whichever thread started them."""
    found = {}
    assert Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists(), "this kernel does not tell of children"
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        try:
            pids = [int(pid) for pid in (task / "children").read_text().split()]
        except OSError:
            continue
        for pid in pids:
            try:
                state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if state not in (b"Z", b"X") and not any(name in command for name in HELPERS):
                found[pid] = command
    return found


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    before = running().keys()
    yield
    deadline = time.monotonic() + 5
    while left := {pid: command for pid, command in running().items() if pid not in before}:
        gc.collect()  # workers of a DataLoader that hangs in a cycle end with it
        if time.monotonic() > deadline:
            pytest.fail(f"the test left processes running: {left}")
        time.sleep(0.05)
