"""What a user can get wrong before and at the start: each has a clear message, an exit code, and leaves nothing behind."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from edge_helpers import BROKEN, SHOW, TRAIN, running

pytestmark = pytest.mark.timeout(150)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nproc-per-nodes", "2", TRAIN], "unknown option --nproc-per-nodes\n  did you mean --nproc-per-node?"),
        (["--nproc-per-node", "2", TRAIN.replace("train", "trian")], "trian.py does not exist\n  did you mean"),
        (["--nproc-per-node", "two", TRAIN], "--nproc-per-node is 'two'"),
        (["--nnodes", "2", TRAIN], "several nodes need to know where to meet"),
    ],
)
def test_a_wrong_command_line(tmp_path: Path, arguments: list[str], says: str) -> None:
    with running(tmp_path, *arguments) as run:
        assert run.ended() == 2
        assert says in run.err and "Traceback" not in run.err, run.story()
        assert not run.home.exists()
        run.leaves_nothing()


def test_an_unwritable_run_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with running(tmp_path, "--run-dir", str(tmp_path / "file" / "x"), TRAIN) as run:
        assert run.ended() == 2
        assert "cannot be written: Not a directory" in run.err and "--run-dir" in run.err, run.story()
        assert "Traceback" not in run.err
        run.leaves_nothing()


def test_a_script_that_fails_at_import(tmp_path: Path) -> None:
    with running(tmp_path, "--nproc-per-node", "2", BROKEN) as run:
        run.controller()
        assert run.ended() == 93, run.story()
        assert run.err.count("Traceback") == 1, run.story()
        assert "No module named 'a_module_that_nobody_has_installed'" in run.err
        run.leaves_nothing()


@pytest.mark.parametrize("raisers", ["1", "0,1"])
def test_an_exception_that_repeats_at_the_same_step(tmp_path: Path, raisers: str) -> None:
    with running(tmp_path, "--nproc-per-node", "2", TRAIN, "--raise-at", "5", "--raisers", raisers) as run:
        assert run.ended() == 93, run.story()
        assert run.err.count("Traceback") == 1 and run.err.count("ValueError: a bad batch\n") == 1, run.story()
        assert "without completing a new step" in run.err
        rungs = [report.rung.value for report in run.all_reports()]
        assert rungs[0] == "retry_step" and rungs[-1] == "stop", run.story()
        run.leaves_nothing()


def test_a_busy_port(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with running(tmp_path, "--rdzv-endpoint", f"127.0.0.1:{port}", "--nproc-per-node", "2", TRAIN) as run:
            assert run.ended() == 1, run.story()
            assert f"port {port} on 127.0.0.1 is in use" in run.err and "choose another" in run.err, run.story()
            assert "Traceback" not in run.err
            run.leaves_nothing()


def test_two_jobs_on_one_machine(tmp_path: Path) -> None:
    shared = {"RERAIL_HOME": str(tmp_path / "home")}
    arguments = ("--nproc-per-node", "2", TRAIN, "--until", "10")
    with (
        running(tmp_path / "a", *arguments, env=shared) as first,
        running(tmp_path / "b", *arguments, env=shared) as other,
    ):
        for run in (first, other):
            assert run.ended() == 0, run.story()
            assert len(run.out.split(" done ")) == 3, run.story()
            run.leaves_nothing()
        folders = [path.parent for path in (tmp_path / "home").glob("*/journal*")]
        assert len(set(folders)) == 2


def test_local_rank_in_the_arguments_and_numa_binding_without_devices(tmp_path: Path) -> None:
    flags = ("--nproc-per-node", "2", "--numa-binding", "node")
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    with running(tmp_path, *flags, SHOW, "--device=${local_rank}", "cost $$5", "$other", env=hidden) as run:
        assert run.ended() == 0, run.story()
        for rank in (0, 1):
            assert f"rank {rank} arguments --device={rank} cost $5 $other\n" in run.out, run.story()
        assert run.err.count("no accelerator was found on this node") == 1, run.story()
        run.leaves_nothing()
