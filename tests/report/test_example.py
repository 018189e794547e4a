"""The example of the README tells its loss, so that its report has a curve."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rerail.report.summary import reading

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt.py"


def test_the_example_tells_its_loss(tmp_path: Path) -> None:
    # the journal keeps a sample a second, so the run has to take a few
    small = ["--steps", "3000", "--every", "20", "--layers", "1", "--width", "32", "--length", "16"]
    command = [
        sys.executable,
        "-m",
        "rerail.cli.main",
        "run",
        "--nproc-per-node",
        "1",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    env = {**os.environ, "RERAIL_HOME": str(tmp_path)}
    done = subprocess.run([*command, str(EXAMPLE), *small], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    with reading(tmp_path / "run") as journal:
        samples, _ = journal.history()
    assert any(one.loss is not None for one in samples), "without it the report says that there is no curve"
