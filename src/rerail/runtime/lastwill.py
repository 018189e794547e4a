"""What is still to be saved when a job's processes are gone: lets savers finish, then saves the newest snapshots.

Only the launcher is left by then, and it owns the memory. A second Ctrl-C ends this, too. Called by `runtime.launcher`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from rerail.runtime import processes
from rerail.runtime.processes import say

LONGEST_S = 300.0
"""Seconds that saving may take altogether."""
ENDS_S = 1.0
"""Seconds for a process that has been killed to end."""
_LOOK_S = 0.02


def carry_out(arenas: list[int], in_a_hurry: Callable[[], bool]) -> None:
    """Wait for the savers of ranks that are gone, then save what is only in these arenas; none, if the job is done.

    `in_a_hurry`: give up at once.
    """
    until = time.monotonic() + LONGEST_S

    def patient() -> bool:
        return time.monotonic() < until and not in_a_hurry()

    while (left := _savers()) and patient():
        time.sleep(_LOOK_S)
    for pid in left:
        say(f"a checkpoint was still being written by process {pid}; it is left unfinished and will not be used")
        processes.signal_process(pid, 9)
        processes.reap(pid)
    if arenas and all(os.fstat(fd).st_size for fd in arenas) and patient() and _anything_unsaved(arenas):
        _save_from_memory(arenas, patient)


def _savers() -> list[int]:
    return [pid for pid in processes.children_of_self() if not processes.reap(pid) and processes.is_spared(pid)]


def _anything_unsaved(arenas: list[int]) -> bool:
    from rerail.checkpoint.arena import Arena  # here, because most jobs end without anything to save
    from rerail.checkpoint.gasp import unsaved

    return unsaved([Arena(fd) for fd in arenas])


def _save_from_memory(arenas: list[int], patient: Callable[[], bool]) -> None:
    command = [sys.executable, "-m", "rerail.checkpoint.gasp", *map(str, arenas)]
    environment = {**os.environ, processes.SPARED: "1"}
    saver = subprocess.Popen(
        command, pass_fds=arenas, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    told: list[str] = []
    # in a thread: of a process that hangs in a place for checkpoints not even the output ends, whatever is done to it
    reader = threading.Thread(target=_read, args=(saver, told), name="rerail-last-will", daemon=True)
    reader.start()
    while reader.is_alive() and patient():
        time.sleep(_LOOK_S)
    saver.kill()
    reader.join(ENDS_S)
    with contextlib.suppress(subprocess.TimeoutExpired):
        saver.wait(ENDS_S)
    for line in "".join(told).splitlines():
        say(line.removeprefix("rerail: "))


def _read(saver: subprocess.Popen[str], told: list[str]) -> None:
    if saver.stdout is not None:
        told.append(saver.stdout.read())
        saver.stdout.close()
