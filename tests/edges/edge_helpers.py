"""Runs the real `rerail run` and looks at what it says, does and leaves behind. Used by every test of this folder."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from rerail.flow import Report
from rerail.runtime.journal import FILE_NAME, Journal

HERE = Path(__file__).parent
SOURCE = HERE.parent.parent / "src"
TRAIN = str(HERE / "scripts" / "train.py")
SHOW = str(HERE / "scripts" / "show.py")
BROKEN = str(HERE / "scripts" / "broken.py")
LIMIT_S = 90.0
MARK = "RERAIL_EDGE_TEST"


class Run:
    """One `rerail run`, its output in files, its state under `folder`. All its processes carry a mark of their own."""

    def __init__(self, folder: Path, *arguments: str, env: dict[str, str] | None = None, prefix: Sequence[str] = ()):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.home, self.mark = folder, folder / "home", uuid.uuid4().hex
        self._shm = set(os.listdir("/dev/shm"))
        self.ports: set[int] = set()
        paths = [SOURCE, *filter(None, (env or {}).get("PYTHONPATH", "").split(os.pathsep))]
        environment = {
            **os.environ,
            "RERAIL_HOME": str(self.home),
            MARK: self.mark,
            **(env or {}),
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
        }
        command = [*prefix, sys.executable, "-m", "rerail.cli.main", "run", *arguments]
        with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )

    # --- what it says ---

    @property
    def out(self) -> str:
        return (self.folder / "stdout").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")

    def line(self, pattern: str, count: int = 1) -> re.Match[str]:
        """Wait for the count-th line, on either stream, in which the pattern is found."""

        def found() -> re.Match[str] | None:
            matches = list(re.finditer(pattern, self.out + "\n" + self.err, re.MULTILINE))
            return matches[count - 1] if len(matches) >= count else None

        match = self._await(found, f"{pattern!r} in its output")
        assert match is not None, pattern
        return match

    def reports(self, count: int) -> list[Report]:
        """Wait until the journal holds this many reports."""
        return self._await(lambda: found if len(found := self.all_reports()) >= count else None, f"{count} reports")

    def all_reports(self) -> list[Report]:
        return [record for record in self.records("report") if isinstance(record, Report)]

    def records(self, kind: str) -> list[Any]:
        if not self.run_dirs():
            return []
        journal = Journal(self.run_dirs()[0] / FILE_NAME, read_only=True)
        try:
            return list(journal.records(kind=kind))
        finally:
            journal.close()

    def await_record(self, kind: str, test: Callable[[Any], bool]) -> None:
        """Wait until the journal holds a record of this kind that passes."""
        self._await(lambda: any(test(record) for record in self.records(kind)), f"such a {kind} in the journal")

    def run_dirs(self) -> list[Path]:
        return sorted(path.parent for path in self.home.glob(f"*/{FILE_NAME}"))

    # --- its processes ---

    def controller(self) -> dict[str, Any]:
        """Where the controller listens, once it does."""

        def read() -> dict[str, Any] | None:
            for path in self.home.glob("*/controller.json"):
                with contextlib.suppress(OSError, ValueError):
                    return dict(json.loads(path.read_text()))
            return None

        found: dict[str, Any] = self._await(read, "controller.json")
        self.ports.add(int(found["port"]))
        return found

    def pid_of(self, module: str) -> int:
        """The process of agent or controller."""

        def find() -> int | None:
            for pid in self.alive():
                with contextlib.suppress(psutil.Error):
                    if f"rerail.runtime.{module}" in psutil.Process(pid).cmdline():
                        return pid
            return None

        return int(self._await(find, f"a process of the {module}"))

    def rank_pid(self, rank: int, step: int = 3) -> int:
        """The process that is this rank, once it has completed a step past `step`."""
        match = self.line(rf"rank {rank} pid (\d+) step ({step}|[1-9]\d+)$")
        return int(match[1])

    def await_end(self, pid: int) -> None:
        self._await(lambda: pid not in self.alive(), f"an end of process {pid}")

    def alive(self) -> list[int]:
        """Every process that carries this run's mark; zombies do not count."""
        needle, found = f"{MARK}={self.mark}".encode(), []
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError):
                if needle in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
        return found

    # --- its end ---

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def ended(self) -> int:
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end\n{self.story()}") from None

    def leaves_nothing(self) -> None:
        """No process, no listening port, no file in /dev/shm."""
        self._await(lambda: not self.alive(), "the end of all its processes", needs_life=False)
        for port in self.ports:
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", port)) != 0, f"port {port} is still open"
        # other tests may run at the same time: what they have put there goes by itself
        self._await(lambda: not set(os.listdir("/dev/shm")) - self._shm, "an empty /dev/shm", needs_life=False)

    def clean_up(self) -> None:
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)

    def story(self) -> str:
        return (
            f"--- exit code {self.process.returncode}\n--- stdout\n{self.out[-3000:]}\n--- stderr\n{self.err[-6000:]}"
        )

    def _await(self, look: Callable[[], Any], what: str, *, needs_life: bool = True) -> Any:
        deadline = time.monotonic() + LIMIT_S
        while True:
            over = needs_life and self.process.poll() is not None
            if found := look():
                return found
            assert not over, f"it ended before there was {what}\n{self.story()}"
            assert time.monotonic() < deadline, f"no {what} in {LIMIT_S:.0f} s\n{self.story()}"
            time.sleep(0.02)


@contextlib.contextmanager
def running(folder: Path, *arguments: str, **options: Any) -> Iterator[Run]:
    """A run that is cleaned up whatever the test finds."""
    run = Run(folder, *arguments, **options)
    try:
        yield run
    finally:
        run.clean_up()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
