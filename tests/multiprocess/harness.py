"""Runs `rerail run` on the script under test, watches its output, and breaks it. Used by the tests of this folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rerail.runtime.journal import FILE_NAME, Journal

SCRIPT = Path(__file__).with_name("train.py")
PATIENCE_S = 150.0


Start = Callable[..., "Run"]


def torchrun(folder: Path) -> list[str]:
    """Behind `python`. Its own logs go to this folder: otherwise each start leaves one in /tmp."""
    return ["-m", "torch.distributed.run", "--log-dir", str(folder / "torchrun")]


class Run:
    """One job under way."""

    def __init__(
        self, folder: Path, *args: str, ranks: int = 4, script: Path = SCRIPT, env: dict[str, str] | None = None
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.steps: dict[int, int] = {}
        self.pids: dict[int, list[int]] = {}
        self.losses: dict[tuple[int, int], float] = {}
        self.digests: dict[int, str] = {}
        self.output: list[str] = []
        self._changed = threading.Condition()
        command = [sys.executable, "-m", "rerail.cli.main", "run", "--nproc-per-node", str(ranks)]
        environment = {
            **os.environ,
            "RERAIL_HOME": str(folder),
            "TEST_DIR": str(folder),
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        self.process = subprocess.Popen(
            [*command, str(script), *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None, "the pipe was asked for"
        for line in self.process.stdout:
            with self._changed:
                self.output.append(line.rstrip("\n"))
                if line.startswith("{"):
                    self._take(json.loads(line))
                self._changed.notify_all()

    def _take(self, event: dict[str, Any]) -> None:
        rank = event["rank"]
        if "digest" in event:
            self.digests[rank] = event["digest"]
            return
        self.steps[rank] = event["step"]
        self.losses[rank, event["step"]] = event["loss"]
        if event["pid"] not in self.pids.setdefault(rank, []):
            self.pids[rank].append(event["pid"])

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for something to be seen in the output."""
        end = time.monotonic() + PATIENCE_S
        with self._changed:
            while not condition():
                left = end - time.monotonic()
                assert left > 0 and (self.process.poll() is None or self._reader.is_alive()), self.told(what)
                self._changed.wait(min(left, 0.5))

    def reach(self, step: int) -> None:
        """Wait until every rank has completed this many steps."""
        self.until(lambda: self.steps and min(self.steps.values()) >= step, f"step {step} on every rank")

    def standby(self) -> None:
        """Wait for a warm standby."""
        self.until(lambda: self.status().get("standbys", {}).get("ready", 0) > 0, "a warm standby")

    def send(self, rank: int, signum: signal.Signals) -> None:
        os.kill(self.pids[rank][-1], signum)

    def kill_controller(self) -> None:
        (told,) = self.folder.glob("*/controller.json")
        os.kill(json.loads(told.read_text())["pid"], signal.SIGKILL)

    def status(self) -> dict[str, Any]:
        return self.ask("status")

    def command(self, *words: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
        """One command about this job."""
        return subprocess.run(
            [sys.executable, "-m", "rerail.cli.main", *words],
            env={**os.environ, "RERAIL_HOME": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def ask(self, *command: str) -> Any:
        """The JSON answer of a read command about this job."""
        told = self.command(*command, "--json")
        return json.loads(told.stdout) if told.stdout.strip() else {}

    def inject(self, *words: str) -> dict[str, Any]:
        """What `rerail inject` says it did; it must have done it."""
        told = self.command("inject", *words, "--json", timeout=120)
        assert told.returncode == 0, self.told(f"{words} to be done, not {told.stdout} {told.stderr}")
        answer: dict[str, Any] = json.loads(told.stdout)
        return answer

    def records(self, kind: str) -> list[Any]:
        """Records of one kind in the job's journal."""
        (path,) = self.folder.glob(f"*/{FILE_NAME}")
        journal = Journal(path, read_only=True)
        try:
            return list(journal.records(kind=kind))
        finally:
            journal.close()

    def reports(self) -> list[dict[str, Any]]:
        answer = self.ask("incidents")
        return answer["incidents"] if isinstance(answer, dict) else answer

    def finish(self, code: int = 0) -> None:
        """Wait for the end and for its exit code."""
        self.process.wait(PATIENCE_S)
        self._reader.join(10)
        assert self.process.returncode == code, self.told(f"exit code {code}, not {self.process.returncode}")

    def told(self, wanted: str) -> str:
        return f"wanted {wanted}; the run said:\n" + "\n".join(self.output[-60:])

    def end(self) -> None:
        """Leave nothing behind."""
        self._stop()
        self._reader.join(10)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(20)
