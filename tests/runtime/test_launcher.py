"""The real launcher, agent and ranks (programs run with --no-python, so that no torch is imported) and a fake controller."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from node_helpers import HERE, SOURCE, job, wait_gone

SLEEP = "echo ready $RANK; exec sleep 300"
DEAF = "trap '' TERM; sleep 300 & setsid sleep 300 & echo ready $RANK; while :; do sleep 1; done"
GRANDCHILDREN = "sleep 300 & setsid sleep 300 & echo ready $RANK; wait"


class Job:
    """One `rerail run` in the making."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.process: subprocess.Popen[str] | None = None

    def start(self, shell: str, controller: str = "fake_controller", **changes: Any) -> subprocess.Popen[str]:
        fields = {"script": "sh", "script_args": ("-c", shell), "no_python": True, **changes}
        spec = msgspec.json.encode(job(self.tmp_path, **fields)).decode()
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "launch_driver.py"), spec, controller],
            env={**os.environ, "PYTHONPATH": f"{SOURCE}:{HERE}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self.process

    def ready(self, count: int = 2) -> list[int]:
        """All processes of the job once `count` ranks have said so, the launcher last."""
        assert self.process is not None and self.process.stdout is not None, "the job was started"
        seen = 0
        while seen < count:
            line = self.process.stdout.readline()
            assert line, f"the job ended early: {self.process.communicate()[1]}"
            seen += "ready" in line
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)] + [self.process.pid]

    def named(self, module: str) -> int:
        """The process that runs this module."""
        assert self.process is not None, "the job was started"
        for child in psutil.Process(self.process.pid).children():
            if module in " ".join(child.cmdline()):
                return child.pid
        raise AssertionError(f"no process runs {module}")

    def end(self) -> tuple[int, str]:
        """Exit code and what was said on stderr."""
        assert self.process is not None, "the job was started"
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Job]:
    running = Job(tmp_path)
    yield running
    process = running.process
    if process is not None and process.poll() is None:
        left = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.communicate()
        for child in left:
            if child.is_running():
                child.kill()


def test_the_exit_code_is_the_jobs(run: Job) -> None:
    run.start("echo out $RANK; echo err $RANK >&2")
    assert run.process is not None
    out, err = run.process.communicate(timeout=60)
    assert run.process.returncode == 0
    assert sorted(out.splitlines()) == ["out 0", "out 1"] and sorted(err.splitlines()) == ["err 0", "err 1"]
    assert (run.tmp_path / "logs/attempt_0/1/stderr.log").read_text() == "err 1\n"


def test_a_failing_rank_ends_the_job_with_one(run: Job) -> None:
    flag = run.tmp_path / "go"
    run.start(f"echo ready; while ! test $RANK = 0 -a -e {flag}; do sleep 0.05; done; exit 3")
    pids = run.ready()
    flag.touch()
    assert run.end()[0] == 1
    assert not wait_gone(pids)


@pytest.mark.parametrize("shell", [SLEEP, DEAF, GRANDCHILDREN], ids=["plain", "ignores SIGTERM", "grandchildren"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(run: Job, shell: str, signum: signal.Signals) -> None:
    process = run.start(shell)
    pids = run.ready()
    process.send_signal(signum)
    assert run.end()[0] == 128 + signum
    assert not wait_gone(pids)


def test_a_second_signal_ends_everything_at_once(run: Job) -> None:
    process = run.start(DEAF, shutdown_grace_s=600)
    pids = run.ready()
    process.send_signal(signal.SIGINT)
    wait_gone([run.named("rerail.runtime.agent")], timeout=0.5)
    process.send_signal(signal.SIGINT)
    assert run.end()[0] != 0
    assert not wait_gone(pids)


@pytest.mark.parametrize("shell", [SLEEP, DEAF, GRANDCHILDREN], ids=["plain", "ignores SIGTERM", "grandchildren"])
def test_a_killed_launcher_takes_everything_along(run: Job, shell: str) -> None:
    process = run.start(shell)
    pids = run.ready()
    process.kill()
    assert not wait_gone(pids)
    run.end()


def test_a_killed_agent_leaves_no_rank_behind_and_is_started_again(run: Job) -> None:
    process = run.start(GRANDCHILDREN)
    before = run.ready()
    agent, controller = run.named("rerail.runtime.agent"), run.named("fake_controller")
    os.kill(agent, signal.SIGKILL)
    after = run.ready()
    assert run.named("rerail.runtime.agent") != agent and run.named("fake_controller") == controller
    assert not wait_gone([pid for pid in before if pid not in (controller, process.pid)])
    process.send_signal(signal.SIGINT)
    code, err = run.end()
    assert code == 130 and "the agent was killed (SIGKILL); starting a new one" in err
    assert not wait_gone(after)


def test_a_killed_controller_is_started_again_and_the_ranks_live_on(run: Job) -> None:
    flag = run.tmp_path / "go"
    run.start(f"echo ready; while ! test -e {flag}; do sleep 0.05; done")
    run.ready()
    port = json.loads((run.tmp_path / "controller.json").read_text())["port"]
    old = run.named("fake_controller")
    os.kill(old, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while json.loads((run.tmp_path / "controller.json").read_text())["pid"] == old and time.monotonic() < deadline:
        time.sleep(0.02)
    found = json.loads((run.tmp_path / "controller.json").read_text())
    assert found["pid"] != old and found["port"] == port
    flag.touch()
    code, err = run.end()
    assert code == 0 and "the controller was killed (SIGKILL); starting a new one" in err


def test_an_agent_that_is_killed_again_and_again_is_given_up(run: Job) -> None:
    run.start(SLEEP)
    pids: list[int] = []
    for _ in range(6):
        pids += run.ready()
        os.kill(run.named("rerail.runtime.agent"), signal.SIGKILL)
    code, err = run.end()
    assert code == 1 and "giving up" in err
    assert not wait_gone(pids)


def test_a_controller_that_cannot_start_ends_the_job(run: Job) -> None:
    run.start(SLEEP, controller="no_such_module")
    code, err = run.end()
    assert code == 1 and "the controller could not start" in err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tee": "9"}, "--tee '9'"),
        ({"signals_to_handle": ("SIGWRONG",)}, "'SIGWRONG' is not a signal"),
        ({"log_dir": "/proc/none"}, "/proc/none cannot be made"),
    ],
)
def test_mistakes_are_told_without_a_traceback(run: Job, changes: dict[str, Any], message: str) -> None:
    run.start(SLEEP, **changes)
    code, err = run.end()
    assert code == 1 and message in err and "Traceback" not in err
