"""A run directory belongs to one job; the same job goes on in it when its node was lost, and only then."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rerail.cli.rundir import claim_run_dir
from rerail.errors import UsageError
from rerail.runtime.journal import FILE_NAME, Journal

HOLDER = """
import sys, time
from rerail.cli.rundir import claim_run_dir
claim_run_dir(sys.argv[1], "job", True)
print("claimed", flush=True)
time.sleep(600)
"""


def test_the_same_job_goes_on_where_its_former_process_is_gone(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, folder], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"claimed\n"
        with pytest.raises(UsageError, match="belongs to job job"):
            claim_run_dir(folder, "job", True)
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    with pytest.raises(UsageError, match="belongs to job job"):
        claim_run_dir(folder, "another", True)
    assert claim_run_dir(folder, "job", True) == tmp_path / "run"
    with pytest.raises(UsageError, match="belongs to job job"):
        claim_run_dir(folder, "job", True)


@pytest.mark.parametrize(
    ("before", "several", "after"), [(0, False, 0), (None, False, 1), (None, True, None), (0, True, 0)]
)
def test_a_job_of_one_node_begins_anew_and_one_of_several_is_taken_over_if_it_had_not_ended(
    tmp_path: Path, before: int | None, several: bool, after: int | None
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps({"job": "job", "pid": 2**30, "started": 0}))
    with contextlib.closing(Journal(folder / FILE_NAME)) as journal:
        journal.append([], {"exit_code": before})
    assert claim_run_dir(str(folder), "job", True, several) == folder
    with contextlib.closing(Journal(folder / FILE_NAME, read_only=True)) as journal:
        assert journal.state()["exit_code"] == after
