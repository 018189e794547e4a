"""Turns a running job into what an observer outside of it can see: completed steps, process ids, standbys, reports.

Called by `rerail demo` and by the benchmark, which start a job as a user would, hurt it from outside and watch.
The training script writes `rank-N.jsonl` into the folder, one line for each completed step; `time.monotonic()` is
one clock for all processes of a machine, so these times compare with ours.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from rerail.cli.rundir import to_controller
from rerail.errors import JournalError, RerailError
from rerail.flow import Report
from rerail.runtime.journal import FILE_NAME, Journal

POLL_S = 0.01
END_S = 20.0
"""Seconds a job has to end by itself after SIGTERM."""


class WatchError(RerailError, RuntimeError):
    """The watched job did not do what was waited for; the text says what, and where its output is."""


class Step(NamedTuple):
    """One completed step of one rank."""

    at: float
    rank: int
    pid: int
    step: int
    loss: float


class WatchedJob:
    """A launcher with its job, started in `folder`. Use it as a context manager: nothing stays behind."""

    def __init__(self, command: Sequence[str], folder: Path, world: int, env: dict[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.world = folder, world
        self.steps: list[Step] = []
        self.latest: dict[int, Step] = {}
        self._offsets: dict[Path, int] = {}
        self._token = secrets.token_hex(16)
        self.started = time.monotonic()
        with open(folder / "console.log", "ab") as console:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={**os.environ, "RERAIL_TOKEN": self._token, **(env or {})},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the job if it still runs: politely, then its whole session."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def poll(self) -> list[Step]:
        """Steps completed since the last call, in the order of time."""
        fresh: list[Step] = []
        for path in self.folder.glob("rank-*.jsonl"):
            rank = int(path.stem.removeprefix("rank-"))
            with open(path, "rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]  # a line that is being written is read next time
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            fresh.extend(_step(rank, line) for line in whole.splitlines())
        fresh.sort()
        self.steps.extend(fresh)
        self.latest.update({step.rank: step for step in fresh})
        return fresh

    def wait_for(self, what: str, condition: Callable[[list[Step]], Any], limit_s: float = 120.0) -> Any:
        """The first true value of `condition(new steps)`; WatchError if the job ends or the time is over."""
        deadline = time.monotonic() + limit_s
        while True:
            ended = self.process.poll() is not None
            if found := condition(self.poll()):
                return found
            if ended or time.monotonic() > deadline:
                how = f"the job ended with exit code {self.process.returncode}" if ended else f"{limit_s:.0f} s passed"
                raise WatchError(f"{how} while waiting for: {what}\n{self.tail()}")
            time.sleep(POLL_S)

    def wait_first_step(self, limit_s: float = 180.0) -> float:
        """Seconds from the start of the launcher to the first completed step on every rank."""
        self.wait_for("the first step of all ranks", lambda _: len(self.latest) == self.world, limit_s)
        first = {step.rank: step.at for step in reversed(self.steps)}
        return max(first.values()) - self.started

    def wait_steps_after(self, moment: float, limit_s: float = 120.0) -> None:
        """Until every rank has completed a step that lies behind `moment`."""
        self.wait_for("a step of all ranks", lambda _: self._all_after(moment), limit_s)

    def wait_step(self, number: int, limit_s: float = 180.0) -> None:
        """Until every rank has completed step `number`."""
        self.wait_for(
            f"step {number} of all ranks",
            lambda _: len(self.latest) == self.world and min(step.step for step in self.latest.values()) >= number,
            limit_s,
        )

    def wait_exit(self, limit_s: float) -> int:
        """The launcher's exit code."""
        self.wait_for("the end of the job", lambda _: self.process.poll() is not None, limit_s)
        return int(self.process.returncode)

    def _all_after(self, moment: float) -> bool:
        return len(self.latest) == self.world and all(step.at > moment for step in self.latest.values())

    def pid(self, rank: int) -> int:
        """The process that completed this rank's newest step."""
        return self.latest[rank].pid

    def tail(self, lines: int = 12) -> str:
        """The end of the job's output, for an error message."""
        path = self.folder / "console.log"
        text = path.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join([f"  end of {path}:", *(f"  | {line}" for line in text)])


class RerailJob(WatchedJob):
    """A job under `rerail run` on this machine."""

    def __init__(self, script: Path, arguments: Sequence[str], folder: Path, *, world: int, standbys: int = 1) -> None:
        self.run_dir = folder / "run"
        flags = ["--nproc-per-node", str(world), "--standbys", str(standbys), "--run-dir", str(self.run_dir)]
        command = [sys.executable, "-m", "rerail.cli.main", "run", *flags, str(script), *arguments]
        super().__init__(command, folder, world)

    def controller(self) -> dict[str, Any]:
        """Where the controller listens and which process it is."""
        found: dict[str, Any] = json.loads((self.run_dir / "controller.json").read_text())
        return found

    def status(self) -> dict[str, Any]:
        """What the live controller says, or nothing while there is none."""
        try:
            with urllib.request.urlopen(to_controller(self.run_dir, "/status"), timeout=2.0) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (OSError, ValueError, urllib.error.URLError):
            return {}

    def standbys(self) -> int:
        """Standbys that are warm."""
        found = self.status().get("standbys", 0)
        return int(found.get("ready", 0) if isinstance(found, dict) else found)

    def wait_standbys(self, count: int = 1, limit_s: float = 120.0) -> None:
        """Until so many standbys are warm; looks ten times a second, for each look takes the controller's time."""
        next_look = 0.0

        def warm(_: list[Step]) -> bool:
            nonlocal next_look
            if time.monotonic() < next_look:
                return False
            next_look = time.monotonic() + 0.1
            return self.standbys() >= count

        self.wait_for(f"{count} warm standbys", warm, limit_s)

    def reports(self) -> list[Report]:
        """Reports of all incidents that are over."""
        try:
            journal = Journal(self.run_dir / FILE_NAME, read_only=True)
        except JournalError:
            return []
        try:
            return [record for record in journal.records(kind="report") if isinstance(record, Report)]
        finally:
            journal.close()


def _step(rank: int, line: bytes) -> Step:
    found = json.loads(line)
    return Step(found["at"], rank, found["pid"], found["step"], found.get("loss", 0.0))
