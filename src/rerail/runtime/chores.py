"""Commands that an agent runs for the controller: reset a device, check the machine. Turns an order into a word on how it went.

They may take minutes and hang without harm to anything else. Called by `runtime.agent`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Mapping

from rerail.runtime.orders import CHECK, RESET, Chore, ChoreDone
from rerail.runtime.processes import attended

LIMIT_S = {CHECK: 1800.0, RESET: 180.0}
TEXT = 2000
DEVICE = "{device}"
"""In a command: stands for the number of the device."""
RESETTERS = {
    "nvidia-smi": "nvidia-smi --gpu-reset -i {device}",
    "npu-smi": "npu-smi set -t reset -i {device} -c 0",
    "amd-smi": "amd-smi reset --gpureset --gpu {device}",
}
"""How the vendors' own tools reset a device, by what is found on PATH."""


def reset_command(setting: str) -> str:
    """The command that resets `{device}` here; empty: nothing is known to."""
    return setting or next((command for tool, command in RESETTERS.items() if shutil.which(tool)), "")


def problem_with(setting: str) -> str:
    """Why no device could be reset by the setting `reset_command`, wherever it is run; or nothing."""
    try:
        words = shlex.split(setting)
    except ValueError as error:
        return f"it cannot be read ({str(error).lower()})"
    if not words and setting:
        return "it is blank; leave it out, so that the vendor's own tool is used"
    if words and not any(DEVICE in word for word in words):
        other = next((found[0] for word in words if (found := re.search(r"\{\w*\}", word))), "")
        meant = f"; did you mean {DEVICE} by {other}?" if other else ", which stands for the number of the device"
        return f"it has no {DEVICE}{meant}"
    return ""


def lacks(setting: str) -> str:
    """The program of the setting `reset_command` if it is not found on this machine, or nothing."""
    program = next(iter(shlex.split(setting)), "")
    return program if program and shutil.which(program) is None else ""


class Chores:
    """Those under way."""

    def __init__(self, reset: str, tell: Callable[[ChoreDone], None], env: Mapping[str, str] = os.environ) -> None:
        self._reset, self._tell = reset, tell
        self._env = {name: value for name, value in env.items() if name != "RERAIL_TOKEN"}
        self._running: set[asyncio.Task[None]] = set()

    @property
    def can_reset(self) -> bool:
        return bool(self._reset)

    def begin(self, order: Chore) -> None:
        task = asyncio.create_task(self._carry_out(order), name=f"{order.kind} {order.device}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _carry_out(self, order: Chore) -> None:
        try:
            ok, text = await _run(self._command(order), LIMIT_S[order.kind], self._env)
        except (OSError, KeyError, ValueError) as error:
            ok, text = False, str(error)
        self._tell(ChoreDone(id=order.id, ok=ok, text=text[-TEXT:]))

    def _command(self, order: Chore) -> list[str]:
        if order.kind == CHECK:
            return [sys.executable, "-m", "rerail.cli.main", "check", "--deep"]
        return [part.replace(DEVICE, str(order.device)) for part in shlex.split(self._reset)]


async def _run(command: list[str], limit_s: float, env: Mapping[str, str]) -> tuple[bool, str]:
    """Whether it ended well, and what it said."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=dict(env),
        start_new_session=True,
    )
    attended.add(process.pid)
    try:
        said, _ = await asyncio.wait_for(process.communicate(), limit_s)
    except TimeoutError:
        return False, f"{command[0]} did not end within {limit_s:.0f} s"
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        attended.discard(process.pid)
    return process.returncode == 0, said.decode(
        errors="replace"
    ).strip() or f"{command[0]}: exit code {process.returncode}"
