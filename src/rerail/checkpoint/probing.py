"""Whether a place works: a small write, and whether it answers at all.

`probe` tries what a save does, in the process that calls it, and may hang as a save may. `silent` asks in a process of its
own, which can be left behind if the place never answers: a process with a thread that waits for a dead disk cannot end.
Called by `checkpoint.guarded`, and at the start of a job by `session`. Needs no torch.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence

from rerail.checkpoint import names
from rerail.checkpoint.files import FileTier
from rerail.checkpoint.health import Gone
from rerail.checkpoint.tiers import Tier

PROBE = 4096
"""Bytes that are written to find out."""
ANSWER_S = 10.0
"""Seconds that a place may take to answer at the start of a job, or it is left out."""
_LOOK_S = 0.005
_ASK = """
import os, sys
path, write = sys.argv[1], sys.argv[2] == "write"
while not os.path.isdir(path) and path != "/":
    path = os.path.dirname(path)
os.listdir(path)
if write:
    fd = os.open(path, os.O_TMPFILE | os.O_WRONLY)
    os.write(fd, b"x")
    os.fsync(fd)
"""
_asking: dict[tuple[str, bool], subprocess.Popen[bytes]] = {}
"""The newest child for each question: where, and whether by writing."""
_lock = threading.Lock()


def device_of(tier: Tier) -> int | None:
    """The file system that a directory lies on; None for any other place."""
    return os.stat(tier.root).st_dev if isinstance(tier, FileTier) else None


def insist_there(tier: Tier, device: int | None, *, alone: bool = False) -> None:
    """Gone, if the directory that was there lies there no more: what is written must not end up below a mount point.

    `device`: the file system it was on. `alone`: it is the only place, and may be made again if it was merely removed.
    """
    if device is None or not isinstance(tier, FileTier):
        return
    try:
        found = os.stat(tier.root).st_dev
    except FileNotFoundError:
        if alone and _device_above(tier) == device:
            return
        raise Gone(errno.ENOENT, "the directory is not there any more", str(tier.root)) from None
    if found != device and not any(names.step_of(name) or names.epoch_of(name) for name in tier.names()):
        raise Gone(errno.ENODEV, "another file system lies there than before", str(tier.root))


def _device_above(tier: FileTier) -> int:
    return next(os.stat(path).st_dev for path in tier.root.parents if path.exists())


def probe(tier: Tier, need: int) -> None:
    """Write something small and remove it again. OSError or CheckpointError says what is wrong; `need`: bytes of a save."""
    if isinstance(tier, FileTier):
        room = os.statvfs(tier.root)
        free = room.f_bavail * room.f_frsize
        if free < need:
            raise OSError(errno.ENOSPC, f"{free >> 20} MiB are free, a save needs {-(-need >> 20)} MiB")
    folder = f"{names.TRASH}probe-{uuid.uuid4().hex[:8]}"
    tier.make_folder(folder)
    try:
        tier.put(f"{folder}/probe", bytes(PROBE))
    finally:
        tier.remove(folder)


def silent(tiers: Sequence[Tier], *, write: bool, limit_s: float = ANSWER_S) -> list[Tier]:
    """Those that do not answer in time. An error is an answer: whoever uses the place will meet it, and say more."""
    asked = {tier.url: _asked(tier.root.as_posix(), write) for tier in tiers if isinstance(tier, FileTier)}
    until = time.monotonic() + limit_s
    for child in asked.values():
        while child is not None and child.poll() is None and time.monotonic() < until:
            time.sleep(_LOOK_S)
    return [tier for tier in tiers if (child := asked.get(tier.url)) is not None and child.poll() is None]


def _asked(path: str, write: bool) -> subprocess.Popen[bytes] | None:
    """The child that asks; one that still waits for its answer to the same question, if there is one."""
    with _lock:
        known = _asking.get((path, write))
        if known is not None and known.poll() is None:
            return known
        command = [sys.executable, "-I", "-S", "-c", _ASK, path, "write" if write else "read"]
        quiet = subprocess.DEVNULL
        try:
            child = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, cwd="/", start_new_session=True)
        except OSError:
            return None
        _asking[path, write] = child
        return child
