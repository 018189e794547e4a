"""What a user can get wrong with `rerail inject`: each has a clear message and an exit code, and nothing is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from edge_helpers import TRAIN, running

pytestmark = pytest.mark.timeout(200)


def inject(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rerail.cli.main", "inject", *words],
        env={**os.environ, "RERAIL_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bitflop"], "there is no kind 'bitflop' of fault\n  did you mean bitflip?"),
        (["everything"], "kinds: kill, term"),
        ([], "the following arguments are required: KIND"),
        (["kill", "--rank", "-1"], "there is no rank -1"),
        (["kill", "--rank", "one"], "argument --rank: invalid int value: 'one'"),
        (["kill", "--for", "3"], "--for means nothing to kill"),
        (["disk-full"], "disk-full needs --dir"),
        (["kernel-log"], "kernel-log needs --line"),
        (["slow", "--factor", "1"], "--factor is 1"),
        (["oom", "--max-size", "much"], "--max-size is 'much', but a size such as 8GiB"),
        (["kill", "--after", "nan"], "--after is nan: out of range"),
        (["kill", "--seed", "-3"], "--seed is -3: out of range"),
        (["kill", "--rank", "0", "--node", "n0"], "--rank and --node exclude one another"),
        (["kill"], "no job has run yet"),
        (["kill", "--job", "none"], "no job 'none' in"),
    ],
)
def test_a_wrong_command_line(tmp_path: Path, words: list[str], says: str) -> None:
    told = inject(tmp_path / "home", *words)
    assert told.returncode == 2 and says in told.stderr, told
    assert "Traceback" not in told.stderr and not told.stdout


def test_the_help_names_every_kind() -> None:
    told = inject(Path("/nowhere"), "--help")
    assert told.returncode == 0 and "corrupt-checkpoint" in told.stdout and "--loopback-port" in told.stdout


def test_a_switch_that_is_neither_on_nor_off(tmp_path: Path) -> None:
    with running(tmp_path, TRAIN, env={"RERAIL_ALLOW_INJECT": "yes"}) as run:
        assert run.ended() == 2
        assert "RERAIL_ALLOW_INJECT is 'yes', but 0 or 1 is needed" in run.err, run.story()
        run.leaves_nothing()


def test_a_job_that_runs_and_then_has_ended(tmp_path: Path) -> None:
    with running(
        tmp_path, "--allow-inject", "--nproc-per-node", "2", TRAIN, "--until", "400", "--delay", "0.05"
    ) as run:
        run.controller()
        run.rank_pid(1, 9)
        told = inject(run.home, "stop", "--rank", "5")
        assert told.returncode == 1 and "there is no rank 5\n  this job has ranks 0 to 1" in told.stderr, told
        told = inject(run.home, "stop", "--node", "elsewhere", "--json")
        assert told.returncode == 1 and "there is no node 'elsewhere'" in json.loads(told.stdout)["refused"], told
        (address,) = run.home.glob("*/controller.json")
        there = address.read_text()
        address.write_text(json.dumps({**json.loads(there), "token": "guessed"}))
        told = inject(run.home, "kill", "--rank", "1")
        assert told.returncode == 1 and "the token is wrong" in told.stderr, told
        address.write_text("{")
        assert "is not running: no controller answers" in inject(run.home, "kill").stderr
        address.write_text(there)
        assert run.ended() == 0, run.story()
        assert not run.all_reports()
        run.leaves_nothing()
        told = inject(run.home, "kill")
        assert told.returncode == 2 and "is not running: no controller answers" in told.stderr, told
