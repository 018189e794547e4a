"""What is still to be saved when a job's processes are gone: lets savers finish, then saves the newest snapshots.

Only the launcher is left by then, and it owns the memory. A second Ctrl-C ends this, too. Called by `runtime.launcher`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

from rerail.runtime import processes
from rerail.runtime.processes import say

LONGEST_S = 300.0
"""Seconds that saving may take altogether."""
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
    with subprocess.Popen(
        command, pass_fds=arenas, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as saver:
        while saver.poll() is None and patient():
            time.sleep(_LOOK_S)
        saver.kill()
        told = saver.stdout.read() if saver.stdout is not None else ""
    for line in told.splitlines():
        say(line.removeprefix("rerail: "))
