import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rerail.cli import machine
from rerail.cli.main import Parser, main
from rerail.cli.run import add_arguments, parse, settings_from, spec_from
from rerail.config import JobSpec
from rerail.errors import RerailError, UsageError
from rerail.runtime.journal import FILE_NAME, Journal

Spec = Callable[..., JobSpec]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a script, a home of its own and none of torchrun's variables."""
    for name in list(os.environ):
        if name.startswith(("PET_", "RERAIL_", "TORCH_ELASTIC")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("RERAIL_HOME", str(tmp_path / "state"))
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text("")
    monkeypatch.chdir(work)
    return work


def parsed(*arguments: str) -> argparse.Namespace:
    parser = Parser(prog="rerail run")
    add_arguments(parser)
    return parse(parser, arguments)


@pytest.fixture
def spec(folder: Path) -> Spec:
    return lambda *arguments: spec_from(parsed(*arguments))


def test_one_node_needs_no_address(spec: Spec) -> None:
    job = spec("--nproc-per-node", "4", "train.py")
    assert (job.slots, job.hosts_controller, job.endpoint_host, job.endpoint_port) == (4, True, "127.0.0.1", 0)
    assert job.job.startswith("run-")
    assert job.max_restarts == -1
    assert Path(job.run_dir, "job.json").is_file()


def test_what_follows_the_script_is_the_scripts(spec: Spec) -> None:
    job = spec("--nproc_per_node=2", "train.py", "--nproc-per-node", "9", "-m", "--", "x")
    assert job.slots == 2
    assert job.script_args == ("--nproc-per-node", "9", "-m", "--", "x")
    assert not job.module


def test_half_of_a_flag_behind_the_script_is_the_scripts(spec: Spec) -> None:
    assert spec("train.py", "--log", "x", "--nproc", "3").script_args == ("--log", "x", "--nproc", "3")


def torchrun_options() -> list[list[str]]:
    """Every option torch.distributed.run knows, with both spellings, asked of torch itself."""
    from torch.distributed.run import get_args_parser

    return [list(action.option_strings) for action in get_args_parser()._actions if action.option_strings]


def test_knows_every_flag_of_torchrun() -> None:
    parser = Parser(prog="rerail run")
    add_arguments(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    assert {option for options in torchrun_options() for option in options} <= known


@pytest.mark.parametrize("dash", ["-", "_"])
def test_both_spellings_mean_the_same(spec: Spec, dash: str) -> None:
    flags = {
        "--nproc-per-node": "2", "--max-restarts": "1", "--local-addr": "127.0.0.2", "--master-port": "4001",
        "--local-ranks-filter": "0,1", "--duplicate-stdout-filters": "a,b,,c", "--shutdown-timeout": "7",
        "--signals-to-handle": "SIGTERM,SIGUSR1", "--numa-binding": "node", "--master-addr": "127.0.0.3",
    }  # fmt: skip
    arguments = [part for flag, value in flags.items() for part in ("--" + flag[2:].replace("-", dash), value)]
    switch = "--virtual-local-rank".replace("-", dash).replace(dash * 2, "--", 1)
    job = spec(*arguments, switch, "train.py")
    assert (job.slots, job.max_restarts, job.local_addr, job.master_port) == (2, 1, "127.0.0.2", 4001)
    assert (job.local_ranks_filter, job.stdout_filters) == ((0, 1), ("a", "b,c"))
    assert (job.shutdown_grace_s, job.signals_to_handle) == (7.0, ("SIGTERM", "SIGUSR1"))
    assert (job.numa_binding, job.virtual_local_rank, job.master_addr) == ("node", True, "127.0.0.3")


def test_variables_give_defaults_and_flags_win(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("PET_MAX_RESTARTS", "2")
    monkeypatch.setenv("PET_STANDALONE", "1")
    job = spec("--max_restarts", "5", "train.py")
    assert (job.slots, job.max_restarts) == (3, 5)


def test_static_nodes(spec: Spec) -> None:
    common = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", "29400", "--rdzv-id", "j1"]
    first = spec(*common, "--node-rank", "0", "train.py")
    second = spec(*common, "--node-rank", "1", "train.py")
    assert (first.hosts_controller, first.node_rank) == (True, 0)
    assert (second.hosts_controller, second.node_rank) == (False, 1)
    assert first.endpoint_port == 29401, "the ranks' own port must stay free"
    assert first.run_dir != second.run_dir


def test_c10d_nodes_find_the_host_by_its_address(spec: Spec) -> None:
    common = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-id", "j2"]
    here = spec(*common, "--rdzv-endpoint", "localhost:1", "train.py")
    assert (here.hosts_controller, here.node_rank, here.endpoint_port) == (True, -1, 1)
    elsewhere = spec(*common, "--rdzv-endpoint", "192.0.2.1", "train.py")
    assert (elsewhere.hosts_controller, elsewhere.endpoint_port) == (False, 29400)
    told = spec(*common, "--rdzv-endpoint", "192.0.2.1", "--rdzv-conf", "is_host=1,timeout=9", "train.py")
    assert told.hosts_controller


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nprocs-per-node", "2", "train.py"], "did you mean --nproc-per-node?"),
        ([], "no script was given"),
        (["tran.py"], "did you mean train.py?"),
        (["-m", "no_such_module_here"], "no module named"),
        (["--no-python", "no-such-program"], "no program"),
        (["--no-python", "-m", "train"], "exclude one another"),
        (["--nproc-per-node", "0", "train.py"], "at least one rank"),
        (["--nproc-per-node", "many", "train.py"], "use a number"),
        (["--nnodes", "3:2", "train.py"], "MIN <= MAX"),
        (["--nnodes", "two", "train.py"], "MIN:MAX"),
        (["--nnodes", "2", "train.py"], "where to meet"),
        (["--nnodes", "2", "--rdzv-endpoint", "h:0", "train.py"], "port 0"),
        (["--nnodes", "2", "--rdzv-endpoint", "h:99999", "train.py"], "HOST:PORT"),
        (["--standalone", "--nnodes", "2", "train.py"], "one node"),
        (["--rdzv-backend", "etcd-v2", "train.py"], "use c10d"),
        (["--rdzv-backend", "c10", "train.py"], "static or c10d"),
        (["--rdzv-conf", "is_host=perhaps", "train.py"], "is_host=true"),
        (["--rdzv-id", "../up", "train.py"], "names a folder"),
        (["--max-restarts", "-1", "train.py"], "not be negative"),
        (["--max-restarts", "x", "train.py"], "invalid int value"),
        (["--redirects", "4", "train.py"], "LOCAL_RANK:N"),
        (["--local-ranks-filter", "a", "train.py"], "as in 0,1,2"),
        (["--signals-to-handle", "SIGTRM", "train.py"], "did you mean SIGTERM?"),
        (["--signals-to-handle", "SIGKILL", "train.py"], "cannot be handled"),
        (["--logs-specs", "mine", "train.py"], "only 'default'"),
        (["--shutdown-timeout", "nan", "train.py"], "seconds are needed"),
        (["--numa-binding", "moon", "train.py"], "invalid choice"),
        (["--config", "none.toml", "train.py"], "no such file"),
        (["--run-dir", "/proc/rerail", "train.py"], "cannot be written"),
    ],
)
def test_mistakes_are_named(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    assert main(["run", *arguments]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("rerail run: ")
    assert text in shown
    assert "Traceback" not in shown


def test_bad_switch_variable_is_named(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_STANDALONE", "yes")
    with pytest.raises(UsageError, match="PET_STANDALONE"):
        spec("train.py")


def test_a_run_directory_belongs_to_one_job(spec: Spec, folder: Path) -> None:
    spec("--run-dir", "mine", "train.py")
    with pytest.raises(UsageError, match="belongs to job run-"):
        spec("--run-dir", "mine", "train.py")
    first, second = spec("--rdzv-id", "a", "train.py"), spec("--rdzv-id", "a", "train.py")
    assert first.job == second.job
    assert first.run_dir != second.run_dir


def test_a_job_that_is_over_may_run_again_in_its_own_run_directory_and_finds_its_quarantine(
    spec: Spec, folder: Path
) -> None:
    again = ("--rdzv-id", "a", "--rdzv-backend", "c10d", "--run-dir", "mine", "train.py")
    path = Path(spec(*again).run_dir)
    with pytest.raises(UsageError, match="belongs to job a"):
        spec(*again)  # it runs: this very process has claimed it
    with contextlib.closing(Journal(path / FILE_NAME)) as journal:
        journal.append([], {"handling": {"quarantine": {}}, "placement": [["n1", 2]], "exit_code": None})
    claim = json.loads((path / "job.json").read_text())
    (path / "job.json").unlink()  # and with it what this process holds
    (path / "job.json").write_text(json.dumps({**claim, "host": "elsewhere", "pid": 2**30}))
    with pytest.raises(UsageError, match="belongs to job a"):
        spec(*again)  # of another machine it cannot be known
    (path / "job.json").write_text(json.dumps({**claim, "pid": 2**30}))
    with pytest.raises(UsageError, match="belongs to job a"):
        spec("--rdzv-id", "b", "--run-dir", "mine", "train.py")
    assert spec(*again).run_dir == str(path)
    with contextlib.closing(Journal(path / FILE_NAME, read_only=True)) as journal:
        state = journal.state()
    assert state["handling"] == {"quarantine": {}}
    assert state["exit_code"] == 1, "a run that was killed has ended, and is not taken over"


def test_a_policy_that_cannot_work_is_refused_before_anything_is_started(folder: Path) -> None:
    (folder / "rerail.toml").write_text('[[policy]]\ncode = "gpu.xid.79"\nladder = ["retry_step"]\n')
    with pytest.raises(
        RerailError, match=r"rerail.toml, policy 1: with retry_step alone, gpu.xid.79 would have no rung"
    ):
        settings_from(parsed("train.py"))
    (folder / "rerail.toml").write_text('[[policy]]\ncode = "gpu.xid.79"\nladder = ["restart_all"]\n')
    assert settings_from(parsed("train.py")).policy


def test_settings_by_precedence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "rerail.toml").write_text("standbys = 4\nmax_restarts = 7\nhang_floor_s = 9.0\n")
    monkeypatch.setenv("RERAIL_STANDBYS", "3")
    monkeypatch.setenv("RERAIL_MAX_RESTARTS", "6")
    settings = settings_from(parsed("--standbys", "2", "train.py"))
    assert (settings.standbys, settings.max_restarts, settings.hang_floor_s) == (2, 6, 9.0)
    (folder / "other.toml").write_text("standby = 4\n")
    with pytest.raises(RerailError, match="did you mean standbys"):
        settings_from(parsed("--config", "other.toml", "train.py"))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("RERAIL_DETECTORS_OFF", "host.smrt", "did you mean host.smart"),
        ("RERAIL_FAULT_SENDERS", "dcgm gpud", "no name of a sender"),
        ("RERAIL_DROP_DIR", "nowhere", "a directory is needed"),
        ("RERAIL_FAULT_FILES", "own.toml", "caused_by 'cuda.omm' names no fault that is known; did you mean cuda.oom"),
    ],
)
def test_settings_of_faults_are_refused_at_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    own = "[[fault]]\ncode = 'own.flux'\ntitle = 't'\nclass = 'gpu'\npattern = 'flux capacitor'\ncaused_by = ['cuda.omm']\n"
    (folder / "own.toml").write_text(own)
    monkeypatch.setenv(name, value)
    with pytest.raises(RerailError, match=says):
        settings_from(parsed("train.py"))


def test_devices_are_counted_by_their_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "davinci0", "davinci_manager"):
        (tmp_path / name).touch()
    assert machine.ranks_for("gpu", {}, tmp_path) == 3
    assert machine.ranks_for("auto", {"CUDA_VISIBLE_DEVICES": "2,0"}, tmp_path) == 2
    assert machine.ranks_for("gpu", {"CUDA_VISIBLE_DEVICES": "0,-1,2"}, tmp_path) == 1
    assert machine.ranks_for("npu", {}, tmp_path) == 1
    with pytest.raises(UsageError, match="no gpu is usable"):
        machine.ranks_for("gpu", {"CUDA_VISIBLE_DEVICES": ""}, tmp_path)


def test_local_addresses() -> None:
    assert machine.is_local("localhost")
    assert machine.is_local("127.0.0.1")
    assert not machine.is_local("192.0.2.1")
    assert machine.address_towards("127.0.0.1") == "127.0.0.1"
    assert sys.platform == "linux", "devices are found by their files in /dev"
