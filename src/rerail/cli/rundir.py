"""Turns the wish for a run directory into one that belongs to this job alone, or goes on with one whose node was lost.

Called by `cli.run`; `report.summary` says where they live, and finds them again. Whoever talks to the job of one begins here.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from rerail.config import EXIT_FAILED
from rerail.errors import UsageError
from rerail.report.summary import run_root
from rerail.runtime.journal import FILE_NAME, Journal

CLAIM = "job.json"
"""Made exclusively by the job that owns the directory: whoever finds it there must go elsewhere."""
CLOCK_S = 2.0
"""A process that began this much later than the claim is another one with the same number."""


def claim_run_dir(asked: str | None, job: str, hosts_controller: bool, several: bool = False) -> Path:
    """A directory that no other job has; made, and marked with the job's name."""
    if asked:
        path = Path(asked).absolute()
        if not _claim(path, job) and not _claim_again(path, job, several):
            raise UsageError(
                f"run directory {path} belongs to job {owner(path)}",
                hint="choose another --run-dir, or remove that one",
            )
        return path
    # A node without the controller keeps logs only: apart, so that a shared home does not mix it with the job's own.
    folder = run_root() if hosts_controller else run_root() / ".nodes"
    name = job if hosts_controller else f"{job}.{socket.gethostname()}"
    number = 1
    while not _claim(path := (folder / (name if number == 1 else f"{name}.{number}")).absolute(), job):
        number += 1
    return path


def owner(path: Path) -> str:
    """The job a run directory belongs to, for messages."""
    return str(_claimed(path).get("job", "unknown"))


def is_running(path: Path) -> bool:
    """Whether the launcher that has claimed this run directory still runs; of another machine it cannot be known."""
    claimed = _claimed(path)
    if claimed.get("host", "") not in ("", socket.gethostname()):
        return True
    try:
        process = psutil.Process(int(claimed.get("pid", 0)))
        same = process.create_time() <= float(claimed.get("started", 0.0)) + CLOCK_S
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, ValueError, TypeError):
        return False


def _claimed(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / CLAIM).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _claim_again(path: Path, job: str, several: bool) -> bool:
    """The same job once more in its own directory, when its processes here are gone: its journal, with the quarantine, goes on.

    Of several nodes others may still be there, and wait: then it is taken over. Otherwise it begins anew.
    """
    if owner(path) != job:
        return False
    try:
        descriptor = os.open(path / CLAIM, os.O_RDWR)
    except OSError:
        return False
    if not _hold(descriptor) or is_running(path):
        os.close(descriptor)
        return False
    if not several:
        _end_journal(path / FILE_NAME)
    _sign(descriptor, job)
    return True


def _hold(descriptor: int) -> bool:
    """Lock the claim for as long as this process lives: the descriptor stays open. False if another one lives."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks: what stands in it has to do
    return True


def _sign(descriptor: int, job: str) -> None:
    words = {"job": job, "host": socket.gethostname(), "pid": os.getpid(), "started": time.time()}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(words).encode(), 0)


def _end_journal(path: Path) -> None:
    """A run that was killed has not written its end, and would be taken for one that goes on."""
    if path.is_file():
        with contextlib.closing(Journal(path)) as journal:
            if journal.state().get("exit_code") is None:
                journal.append([], {"exit_code": EXIT_FAILED})


def _claim(path: Path, job: str) -> bool:
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / CLAIM, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        if not path.is_dir():
            raise UsageError(f"run directory {path} is a file", hint="choose another with --run-dir DIR") from None
        return False
    except OSError as error:
        raise UsageError(
            f"run directory {path} cannot be written: {error.strerror}",
            hint="choose another with --run-dir DIR, or set RERAIL_HOME",
        ) from None
    _hold(descriptor)
    _sign(descriptor, job)
    return True


def to_controller(folder: Path, path: str, body: bytes | None = None) -> urllib.request.Request:
    """A request to the controller of this run; OSError, ValueError, KeyError or TypeError if it has left no address."""
    where = json.loads((folder / "controller.json").read_text())
    host = f"[{where['host']}]" if ":" in where["host"] else where["host"]
    headers = {"Authorization": f"Bearer {where.get('token', '')}"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    return urllib.request.Request(f"http://{host}:{where['port']}{path}", data=body, headers=headers)


def refusal(error: urllib.error.HTTPError) -> dict[str, Any]:
    """The controller's answer that it will not; why stands in `refused`."""
    try:
        found = dict(json.load(error))
        return found if "refused" in found else {"refused": str(found["error"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {"refused": f"the controller answered {error.code}"}
