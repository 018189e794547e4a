"""Several runs side by side: what they said is in the file, whatever became of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rehab_all

SCRIPT = """
import sys, time, json
for at in range(3):
    print(json.dumps({"seed": sys.argv[-1], "at": at}), flush=True)
print("no result", flush=True)
print('{"cut', end="", flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rehab.py").write_text(SCRIPT)
    monkeypatch.setattr(rehab_all, "BENCH", tmp_path)
    monkeypatch.setattr(rehab_all, "LEAST_S", 0.0)


def test_lines_of_all_are_kept_even_of_those_that_fail(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    lines = rehab_all.side_by_side([["0", "0", "--seed", "4"], ["0", "3", "--seed", "5"]], at_once=2, out=out)
    assert sorted(lines) == sorted(out.read_text().splitlines(keepends=True)) and len(lines) == 6
    assert {json.loads(line)["seed"] for line in lines} == {"4", "5"}


def test_when_the_time_is_up_what_runs_is_ended_and_nothing_is_begun(tmp_path: Path) -> None:
    out, began = tmp_path / "out.jsonl", time.monotonic()
    lines = rehab_all.side_by_side([["60", "0", "a"], ["60", "0", "b"]], at_once=1, out=out, seconds=3)
    assert time.monotonic() - began < 30
    assert [json.loads(line)["seed"] for line in lines] == ["a"] * 3
    assert len(out.read_text().splitlines()) == 3


def test_it_says_what_it_would_run() -> None:
    script = Path(rehab_all.__file__)
    done = subprocess.run([sys.executable, str(script), "--list"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "--shape mini --to-end --seed 4"
