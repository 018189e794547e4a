"""Turns the wish for a run directory into one that belongs to this job alone.

Called by `cli.run`; `report.summary` says where they live, and finds them again. Whoever talks to the job of one begins here.
"""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.request
from pathlib import Path

from rerail.errors import UsageError
from rerail.report.summary import run_root

CLAIM = "job.json"
"""Made exclusively by the job that owns the directory: whoever finds it there must go elsewhere."""


def claim_run_dir(asked: str | None, job: str, hosts_controller: bool) -> Path:
    """A directory that no other job has; made, and marked with the job's name."""
    if asked:
        path = Path(asked).absolute()
        if not _claim(path, job):
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
    try:
        return str(json.loads((path / CLAIM).read_text())["job"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown"


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
    with os.fdopen(descriptor, "w") as file:
        json.dump({"job": job, "pid": os.getpid(), "started": time.time()}, file)
    return True


def to_controller(folder: Path, path: str, body: bytes | None = None) -> urllib.request.Request:
    """A request to the controller of this run; OSError, ValueError, KeyError or TypeError if it has left no address."""
    where = json.loads((folder / "controller.json").read_text())
    host = f"[{where['host']}]" if ":" in where["host"] else where["host"]
    headers = {"Authorization": f"Bearer {where.get('token', '')}"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    return urllib.request.Request(f"http://{host}:{where['port']}{path}", data=body, headers=headers)
