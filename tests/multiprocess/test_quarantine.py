"""The quarantine of a running job: asked for by people, kept by the controller, found again by the next one and the next run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Start

pytestmark = pytest.mark.timeout(400)


def test_what_is_put_into_quarantine_outlives_the_controller(start: Start) -> None:
    env = {"RERAIL_NODE": "n1"}
    run = start("ddp", "400", "--sleep", "0.05", ranks=2, env=env)
    run.reach(4)
    told = run.command("quarantine", "add", "n1/1", "--reason", "too hot")
    assert told.returncode == 0 and "device:n1/1 is out of use" in told.stdout, told
    refused = run.command("quarantine", "add", "n1", "--reason", "all of it")
    assert refused.returncode == 2 and "nothing could train" in refused.stderr, refused
    assert [one["subject"] for one in run.ask("quarantine", "list")["quarantine"]] == ["device:n1/1"]
    run.kill_controller()
    run.until(
        lambda: run.status().get("generation", -1) >= 0 and run.ask("quarantine", "list").get("quarantine"),
        "a new controller",
    )
    (entry,) = run.ask("quarantine", "list")["quarantine"]
    assert (entry["subject"], entry["reason"]) == ("device:n1/1", "too hot")
    unknown = run.command("quarantine", "release", "n1/0")
    assert unknown.returncode == 2 and "in quarantine: device:n1/1" in unknown.stderr, unknown
    assert run.command("quarantine", "release", "n1/1").returncode == 0
    assert run.ask("quarantine", "list")["quarantine"] == []
    signals = [one.payload["message"] for one in run.records("signal") if one.source == "quarantine"]
    assert signals == [
        "device:n1/1 is out of use until it is released",
        "device:n1/1 may be used again (was out of use: too hot)",
    ]


def test_the_same_job_run_again_in_its_run_directory_finds_its_quarantine(tmp_path: Path) -> None:
    script, folder = tmp_path / "noop.py", tmp_path / "mine"
    script.write_text("print('ran')\n")
    env = {**os.environ, "RERAIL_HOME": str(tmp_path / "home"), "RERAIL_NODE": "n1"}

    def rerail(*words: str) -> str:
        command = [sys.executable, "-m", "rerail.cli.main", *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done
        return done.stdout

    again = (
        "run",
        "--rdzv-id",
        "a",
        "--rdzv-backend",
        "c10d",
        "--run-dir",
        str(folder),
        "--nproc-per-node",
        "2",
        str(script),
    )
    where = ("--run-dir", str(folder))
    assert rerail(*again).count("ran") == 2
    rerail("quarantine", "add", "n1/0", "--reason", "coil whine", *where)
    assert rerail(*again).count("ran") == 2
    (entry,) = json.loads(rerail("quarantine", "list", "--json", *where))["quarantine"]
    assert (entry["subject"], entry["reason"]) == ("device:n1/0", "coil whine")
