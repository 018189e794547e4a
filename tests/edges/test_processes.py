"""Processes that die, freeze, refuse to go or have children: training goes on or ends cleanly, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from edge_helpers import TRAIN, Run, running

from rerail.cli.main import main

pytestmark = pytest.mark.timeout(150)
TWO = ("--nproc-per-node", "2", TRAIN)


def finish(run: Run, hold: Path) -> None:
    """Let the ranks take their last step; all must be done, with the same weights."""
    hold.touch()
    assert run.ended() == 0, run.story()
    digests = re.findall(r" done (\w+) world 2", run.out)
    assert len(digests) == 2 and len(set(digests)) == 1, run.story()
    run.leaves_nothing()


def _status(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `rerail status` says."""
    assert main(["status", "--run-dir", str(folder)]) == 0
    return capsys.readouterr().out


def test_ctrl_c(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(tmp_path, *TWO, "--until", "100000") as run:
        run.controller()
        pid = run.rank_pid(0)
        limit = time.monotonic() + 30.0
        while f"pid {pid}" not in (told := _status(run.run_dirs()[0], capsys)):
            assert time.monotonic() < limit, told
            time.sleep(0.1)
        run.signal(signal.SIGINT)
        assert run.ended() == 130, run.story()
        assert "ended with exit code 130 (stopped by SIGINT)" in _status(run.run_dirs()[0], capsys)
        assert "Traceback" not in run.err, run.story()
        run.leaves_nothing()


@contextlib.contextmanager
def deaf(folder: Path, shutdown_s: int) -> Iterator[Run]:
    """All are past join(), and asleep inside their first step: neither Stop nor SIGTERM moves them."""
    arguments = ("--shutdown-timeout", str(shutdown_s), *TWO, "--until", "100000", "--deaf", "--delay", "600")
    with running(folder, *arguments) as run:
        run.controller()
        run.await_record("action", lambda action: action.verb == "form")
        run.signal(signal.SIGINT)
        yield run
        assert run.ended() == 130, run.story()
        run.leaves_nothing()


def test_a_rank_that_ignores_sigterm(tmp_path: Path) -> None:
    with deaf(tmp_path, shutdown_s=1):
        pass


def test_a_second_ctrl_c_ends_it_at_once_and_with_the_same_code(tmp_path: Path) -> None:
    with deaf(tmp_path, shutdown_s=100) as run:
        run.line("once more ends it at once")
        run.signal(signal.SIGINT)
    assert run.err.count("rerail: ending at once") == 1, run.story()


def test_kill_9_of_the_launcher(tmp_path: Path) -> None:
    with running(tmp_path, *TWO, "--until", "100000", "--parent") as run:
        run.controller()
        run.rank_pid(1)
        run.signal(signal.SIGKILL)
        assert run.ended() == -signal.SIGKILL
        run.leaves_nothing()


def test_kill_9_of_the_agent(tmp_path: Path) -> None:
    hold = tmp_path / "go"
    with running(tmp_path, *TWO, "--until", "20", "--hold", str(hold)) as run:
        run.controller()
        first = run.rank_pid(0, step=18)
        os.kill(run.pid_of("agent"), signal.SIGKILL)
        run.line(r"rerail: the agent was killed \(SIGKILL\); starting a new one")
        (report,) = run.reports(1)
        assert report.code == "node.lost" and report.ok and report.ranks == (0, 1), run.story()
        assert first not in run.alive()
        assert report.resumed_step > 0, f"memory outlives the agent\n{run.story()}"
        finish(run, hold)


def test_kill_9_of_the_controller_and_then_of_a_rank(tmp_path: Path) -> None:
    hold = tmp_path / "go"
    with running(tmp_path, *TWO, "--until", "20", "--hold", str(hold)) as run:
        survivor, victim = run.rank_pid(0, step=18), run.rank_pid(1, step=18)
        os.kill(int(run.controller()["pid"]), signal.SIGKILL)
        os.kill(victim, signal.SIGKILL)
        run.line("rerail: the controller was killed")
        reports = run.reports(1)
        assert any(report.ranks == (1,) and report.ok and report.attempts == 1 for report in reports), run.story()
        assert survivor in run.alive()
        run.controller()
        finish(run, hold)


def test_a_rank_with_children_of_its_own(tmp_path: Path) -> None:
    hold = tmp_path / "go"
    with running(tmp_path, *TWO, "--until", "20", "--parent", "--hold", str(hold)) as run:
        run.controller()
        child = int(run.line(r"rank 1 has child (\d+)")[1])
        os.kill(run.rank_pid(1, step=18), signal.SIGKILL)
        (report,) = run.reports(1)
        assert report.ranks == (1,) and report.ok, run.story()
        run.await_end(child)
        finish(run, hold)


def test_a_frozen_rank_is_replaced_and_cannot_come_back(tmp_path: Path) -> None:
    hold = tmp_path / "go"
    with running(tmp_path, *TWO, "--until", "200", "--hold", str(hold)) as run:
        run.controller()
        zombie = run.rank_pid(1, step=9)
        os.kill(zombie, signal.SIGSTOP)
        (report,) = run.reports(1)
        assert report.code == "process.stopped" and report.ranks == (1,) and report.ok, run.story()
        run.await_end(zombie)
        finish(run, hold)
