"""A node is lost and a spare one takes its ranks under living survivors: nothing but the lost processes is new."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from edge_helpers import SOURCE, TRAIN, Run, free_port, running

from rerail.flow import Action, Decision, OutcomeKind, Place

pytestmark = pytest.mark.timeout(300)
UNTIL = "300"


def node(folder: Path, number: int, port: int, *flags: str) -> contextlib.AbstractContextManager[Run]:
    """One of two nodes with a rank each, or, numbered 2, their spare."""
    place = ("--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", f"127.0.0.{number + 1}", "--rdzv-id", "spared")
    size = ("--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1", "--spare-nodes", "1")
    script = (TRAIN, "--until", UNTIL, "--delay", "0.06")
    env = {"RERAIL_TOKEN": "the same on all", "RERAIL_NODE": f"node{number}"}
    return running(folder / str(number), *size, *place, *flags, *script, env=env)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    with running(
        tmp_path_factory.mktemp("undisturbed"), "--nproc-per-node", "2", TRAIN, "--until", UNTIL, "--delay", "0"
    ) as run:
        assert run.ended() == 0, run.story()
        return digest(run)


def digest(*runs: Run) -> str:
    """What all ranks came to, if it is the same."""
    found = re.findall(r" done (\w+) world 2", "".join(run.out for run in runs))
    assert len(found) == 2 and len(set(found)) == 1, "".join(run.story() for run in runs)
    return str(found[0])


@contextlib.contextmanager
def three(folder: Path) -> Iterator[tuple[Run, Run, Run]]:
    port = free_port()
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(node(folder, number, port)) for number in range(2)]
        runs[0].rank_pid(0)
        runs.append(stack.enter_context(node(folder, 2, port)))
        yield runs[0], runs[1], runs[2]


def test_the_ranks_of_a_lost_node_move_to_a_spare_one(tmp_path: Path, undisturbed: str) -> None:
    with three(tmp_path) as (first, second, spare):
        survivor = first.rank_pid(0)
        second.rank_pid(1)
        first.line("node2 waits as a spare")
        second.signal(signal.SIGKILL)  # of its launcher: everything of that node goes, its memory, too
        (report,) = first.reports(1)
        assert report.ok and report.code == "node.lost" and report.rung == "swap_node", first.story() + spare.story()
        decision = next(one for one in first.records("decision") if isinstance(one, Decision))
        assert decision.moves == {1: Place("node2", 0)}
        assert survivor in first.alive()
        assert first.ended() == 0 and spare.ended() == 0, first.story() + spare.story()
        assert digest(first, spare) == undisturbed
        for run in (first, second, spare):
            run.leaves_nothing()


def test_a_rank_on_a_bad_device_is_switched_to_a_spare_one_without_losing_a_step(
    tmp_path: Path, undisturbed: str
) -> None:
    flags = ("--nproc-per-node", "2", "--spare-devices", "1")
    with running(tmp_path, *flags, TRAIN, "--until", UNTIL, "--delay", "0.06", env={"RERAIL_NODE": "n0"}) as run:
        survivor, leaver = run.rank_pid(0), run.rank_pid(1)
        done = ask(run, "quarantine", "add", "n0/1", "--reason", "it smells")
        assert done.returncode == 0, done.stderr
        (report,) = run.reports(1)
        assert report.ok and report.rung == "hot_switch" and report.lost_steps == 0, run.story()
        assert report.moves == {1: Place("n0", 2)} and "it smells" in report.summary
        run.await_end(leaver)
        assert survivor in run.alive()
        assert run.ended() == 0, run.story()
        assert digest(run) == undisturbed
        run.leaves_nothing()


def ask(run: Run, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rerail.cli.main", *words]
    env = {**os.environ, "RERAIL_HOME": str(run.home), "PYTHONPATH": str(SOURCE)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_a_device_that_needs_a_reset_gets_one_and_its_rank_comes_back_there(tmp_path: Path, undisturbed: str) -> None:
    note = tmp_path / "reset"
    command = f"sh -c 'echo {{device}} >> {note}'"
    env = {"RERAIL_NODE": "n0", "RERAIL_FAULT_SENDERS": "tester", "RERAIL_RESET_COMMAND": command}
    flags = ("--nproc-per-node", "2")
    with running(tmp_path / "run", *flags, TRAIN, "--until", UNTIL, "--delay", "0.06", env=env) as run:
        survivor, leaver = run.rank_pid(0), run.rank_pid(1)
        report_fault(run, code="gpu.xid.95", subject="gpu1", text="Uncontained: LTC TAG")
        (report,) = run.reports(1)
        assert report.ok and report.rung == "reset_device" and report.code == "gpu.xid.95", run.story()
        assert note.read_text().split() == ["1"]
        run.await_end(leaver)
        assert survivor in run.alive() and run.ended() == 0, run.story()
        assert digest(run) == undisturbed
        run.leaves_nothing()


def test_a_reset_that_fails_costs_its_rank_a_process_and_the_job_no_restart(tmp_path: Path, undisturbed: str) -> None:
    env = {"RERAIL_NODE": "n0", "RERAIL_FAULT_SENDERS": "tester", "RERAIL_RESET_COMMAND": "false {device}"}
    flags = ("--nproc-per-node", "2")
    with running(tmp_path / "run", *flags, TRAIN, "--until", UNTIL, "--delay", "0.06", env=env) as run:
        survivor, leaver = run.rank_pid(1), run.rank_pid(0)
        report_fault(run, code="gpu.xid.48", subject="gpu0", text="DBE")
        (report,) = run.reports(1)
        assert report.ok and report.rung == "replace_rank" and report.attempts == 2, run.story()
        run.await_end(leaver)
        assert survivor in run.alive() and run.ended() == 0, run.story()
        assert digest(run) == undisturbed
        (report,) = run.reports(1)
        actions = [one for one in run.records("action") if isinstance(one, Action) and one.verb == "reset"]
        assert [one.outcome for one in actions] == [OutcomeKind.PERMANENT], run.story()
        assert "device n0/0 could not be reset: false: exit code 1" in run.err
        assert "rank 0 stays in place, though" in run.err
        page = ask(run, "report", "1").stdout
        assert "could not be reset" in page
        run.leaves_nothing()


def report_fault(run: Run, **fault: str) -> None:
    """As another system of the machine would."""
    where = run.controller()
    headers = {"Authorization": f"Bearer {where['token']}", "Content-Type": "application/json"}
    body = json.dumps({"sender": "tester", **fault}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{where['port']}/faults", body, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 202, answer.read()
