"""Keeps the node's monitor (`detect.monitor`) running and turns what it says into signals. Called by `runtime.agent`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable

import msgspec

from rerail.config import Settings
from rerail.detect.kernel_log import KernelLog, victim_of
from rerail.detect.monitor import AGENT, SOURCE, Found
from rerail.flow import Signal, new_id
from rerail.runtime.processes import attended, say

_found = msgspec.json.Decoder(Found)

START_S = 3.0
"""Seconds after the agent's start: the ranks come first."""
AGAIN_S = (1.0, 5.0, 30.0)
"""Seconds before a monitor that ended is started again; the last one for good."""
LONG_S = 600.0
"""A monitor that ran this long was healthy: count its ends anew."""
DYING_S = 2.0
"""Seconds that its end is waited for."""
MAX_LINE = 1 << 16


class Lookout:
    """One monitor process, started again whenever it ends."""

    def __init__(self, settings: Settings, job: str, node: str, tell: Callable[[Signal], None]) -> None:
        self._wanted = bool(settings.detectors)
        self._env = {**os.environ, "RERAIL_SETTINGS": msgspec.json.encode(settings).decode(), "OMP_NUM_THREADS": "1"}
        self._job, self._node, self._tell = job, node, tell
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Until cancelled; then the monitor is gone, too."""
        if not self._wanted:
            return
        await asyncio.sleep(START_S)
        ends = 0
        while True:
            began = time.monotonic()
            try:
                await self._one()
            except OSError as error:  # no memory, no process left: the ranks matter more
                say(f"the monitor of this node cannot be started: {error}")
            finally:
                await self._kill()
            ends = 0 if time.monotonic() - began > LONG_S else ends + 1
            if ends == len(AGAIN_S):
                say(
                    "the monitor of this node ends again and again; hardware faults may be seen late (see its messages above)"
                )
            await asyncio.sleep(AGAIN_S[min(ends, len(AGAIN_S)) - 1] if ends else 0.0)

    async def _one(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rerail.detect.monitor",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env={**self._env, AGENT: str(os.getpid())},
            limit=MAX_LINE,
        )
        attended.add(self._process.pid)
        stream = self._process.stdout
        assert stream is not None, "it was asked for"
        while True:
            try:
                line = await stream.readline()
            except ValueError:
                continue  # longer than any message of ours
            if not line:
                await self._process.wait()
                return
            with contextlib.suppress(msgspec.MsgspecError):
                self._tell(self._signal(_found.decode(line)))

    def _signal(self, found: Found) -> Signal:
        victim = victim_of(found.text) if found.detector == KernelLog.name else 0
        return Signal(
            id=new_id("sig"),
            job=self._job,
            at=found.at,
            source=SOURCE,
            node=self._node,
            payload={
                "code": found.code,
                "detector": found.detector,
                "subject": found.subject,
                "evidence": found.text,
                "over": found.over,
                **({"victim": victim} if victim else {}),
            },
        )

    async def _kill(self) -> None:
        """Nothing is left behind, not even a zombie; but one that hangs in a driver does not die at once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), DYING_S)
        if self._process is not None:
            attended.discard(self._process.pid)
