"""Where a rank stands when it hangs: the agent asks by a signal, the rank's own C code writes its stacks to a file.

Python's faulthandler answers even when the interpreter is stuck. Called by `session.join` (answers) and `runtime.agent` (asks).
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
from pathlib import Path

SIGNAL = signal.SIGRTMIN + 7
ANSWER_S = 0.1
"""A process that runs at all answers at once."""
FRAMES = 12
"""Of the main thread that are shown: the innermost."""
NAME = "stacks.txt"
FLIGHT, FLIGHT_ASK = "flight.json", "flight.ask"
"""Answer and question of `runtime.flight` and `session.flight`, in the same folder."""


def answer(error_file: str) -> None:
    """From now on this process tells where it stands when asked."""
    if error_file:
        with contextlib.suppress(OSError):
            faulthandler.register(SIGNAL, file=open(Path(error_file).with_name(NAME), "w"), all_threads=True)  # noqa: SIM115


async def ask(pid: int, error_file: Path) -> str:
    """The stack of the main thread, innermost frame first; empty if the process does not answer."""
    path = error_file.with_name(NAME)
    if not path.exists():
        return ""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, SIGNAL)
    await asyncio.sleep(ANSWER_S)
    try:
        return main_thread(path.read_text(errors="replace"))
    except OSError:
        return ""


def main_thread(text: str) -> str:
    """Of the newest dump of all threads, the main one: it is the last."""
    parts = text.strip().split("\n\n")
    lines = [line.strip() for line in parts[-1].splitlines() if line.lstrip().startswith("File ")]
    return "\n".join(lines[:FRAMES])
