"""Shared by the node-side tests: a job description, a child description, and looks at the process table."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from rerail.config import JobSpec
from rerail.runtime.children import ChildSpec

HERE = Path(__file__).parent
SOURCE = HERE.parent.parent / "src"


def job(run_dir: Path, **changes: Any) -> JobSpec:
    fields: dict[str, Any] = {"job": "test", "script": "none.py", "slots": 2, "run_dir": str(run_dir)}
    return JobSpec(**{**fields, "shutdown_grace_s": 0.5, **changes})


def standin(*words: str) -> ChildSpec:
    """Processes that speak the wire without torch."""
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "STANDIN": " ".join(words), "PYTHONUNBUFFERED": "1"}
    return ChildSpec(command=(sys.executable, str(HERE / "standin.py")), env=env)


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def wait_gone(pids: list[int], timeout: float = 20.0) -> list[int]:
    """Those still there after at most `timeout` seconds."""
    deadline = time.monotonic() + timeout
    left = [pid for pid in pids if not gone(pid)]
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [pid for pid in left if not gone(pid)]
    return left
