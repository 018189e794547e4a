"""The same script without `rerail run`: under torchrun, and alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from harness import SCRIPT, torchrun


def run(folder: Path, *command: str) -> list[dict[str, object]]:
    env = {**os.environ, "TEST_DIR": str(folder), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    told = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert told.returncode == 0, told.stdout + told.stderr
    lines = told.stdout.replace("}{", "}\n{").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_under_torchrun(tmp_path: Path) -> None:
    launcher = (sys.executable, *torchrun(tmp_path), "--standalone", "--nproc-per-node", "2")
    events = run(tmp_path, *launcher, str(SCRIPT), "ddp", "5")
    assert list((tmp_path / "torchrun").iterdir()), "torchrun's own folder went elsewhere"
    digests = [event["digest"] for event in events if "digest" in event]
    assert len(digests) == 2 and len(set(digests)) == 1, events


def test_alone(tmp_path: Path) -> None:
    events = run(tmp_path, sys.executable, str(SCRIPT), "ddp", "5")
    assert [event["step"] for event in events if "step" in event] == [1, 2, 3, 4, 5]
