"""Two agents in one job, on one machine: one world, repairs where they are needed, and clear words while one is missing."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from edge_helpers import TRAIN, Run, free_port, running

pytestmark = pytest.mark.timeout(170)


STEPS = "100"
SAVED = str(Path(__file__).parent.parent / "multiprocess" / "saved.py")


def node(
    folder: Path, number: int, port: int, *arguments: str, ranks: int = 2, script: str = TRAIN, **env: str
) -> contextlib.AbstractContextManager[Run]:
    flags = ("--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", str(ranks), "--rdzv-id", "pair")
    # each node has an address of its own, so that nothing passes by listening on the other's
    place = ("--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", f"127.0.0.{number + 1}", "--standbys", "1")
    env = {"RERAIL_TOKEN": "the same on both", "RERAIL_NODE": f"node{number}", **env}
    return running(folder / str(number), *flags, *place, script, *arguments, env=env)


@contextlib.contextmanager
def pair(folder: Path, until: int) -> Iterator[tuple[Run, Run, Path]]:
    """Node 0 with the controller, node 1, and the file that lets them finish."""
    port, hold = free_port(), folder / "go"
    arguments = ("--until", str(until), "--hold", str(hold))
    with node(folder, 0, port, *arguments) as first, node(folder, 1, port, *arguments) as second:
        first.ports.add(port)
        yield first, second, hold


def finish(first: Run, second: Run, hold: Path) -> None:
    hold.touch()
    for run in (first, second):
        assert run.ended() == 0, run.story()
    digests = re.findall(r" done (\w+) world 4", first.out + second.out)
    assert len(digests) == 4 and len(set(digests)) == 1, first.story() + second.story()
    for run in (first, second):
        run.leaves_nothing()


def test_one_world_and_a_rank_is_replaced_on_its_node(tmp_path: Path) -> None:
    with pair(tmp_path, until=30) as (first, second, hold):
        survivors = [first.rank_pid(0), first.rank_pid(1), second.rank_pid(2)]
        os.kill(second.rank_pid(3), signal.SIGKILL)
        (report,) = first.reports(1)
        assert report.ok and report.ranks == (3,) and report.node == "node1" and report.attempts == 1, first.story()
        assert report.rung == "replace_rank"
        assert set(survivors) <= {*first.alive(), *second.alive()}
        finish(first, second, hold)


def test_kill_9_of_an_agent_replaces_its_ranks_from_the_other_node(tmp_path: Path) -> None:
    with pair(tmp_path, until=30) as (first, second, hold):
        survivors = [first.rank_pid(0), first.rank_pid(1)]
        lost = [second.rank_pid(2), second.rank_pid(3)]
        os.kill(second.pid_of("agent"), signal.SIGKILL)
        second.line("rerail: the agent was killed")
        (report,) = first.reports(1)
        assert report.code == "node.lost" and report.ok and report.ranks == (2, 3), first.story() + second.story()
        assert report.rung == "replace_rank", first.story() + second.story()
        alive = {*first.alive(), *second.alive()}
        assert set(survivors) <= alive and not set(lost) & alive
        finish(first, second, hold)


def test_a_frozen_node_is_given_up_and_its_zombies_end_when_it_thaws(tmp_path: Path) -> None:
    with pair(tmp_path, until=30) as (first, second, hold):
        first.rank_pid(0)
        zombies = [second.rank_pid(2), second.rank_pid(3)]
        frozen = [pid for pid in second.alive() if pid != second.process.pid]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        first.await_record("diagnosis", lambda diagnosis: diagnosis.code == "node.lost")
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        (report,) = first.reports(1)
        assert report.ok and {2, 3} <= set(report.ranks), first.story() + second.story()
        for pid in zombies:
            second.await_end(pid)
        finish(first, second, hold)


SAVE = r"checkpoint of step ([2-7]\d) saved to nodes://"
"""Which one comes first is up to the machine: a save is left out while the one before is still being written."""


def saving(folder: Path, number: int, port: int, store: str) -> contextlib.AbstractContextManager[Run]:
    """A node that keeps its own state and the other's, in memory or in a directory."""
    arguments = ("fsdp", STEPS, "nodes://", "--every", "5", "--sleep", "0.02")
    return node(folder, number, port, *arguments, script=SAVED, RERAIL_NODE_STORE=store, TEST_DIR=str(folder))


def digests(*runs: Run) -> set[str]:
    """Of all four ranks, when they have come to the end."""
    for run in runs:
        assert run.ended() == 0, run.story()
        run.leaves_nothing()
    return set(re.findall(r'"rank": \d, "digest": "\w+"', "".join(run.out for run in runs)))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with running(folder, "--nproc-per-node", "4", SAVED, "fsdp", STEPS, str(folder / "saved")) as run:
        return digests(run)


def test_a_lost_node_finds_its_state_in_the_memory_of_the_other(tmp_path: Path, undisturbed: set[str]) -> None:
    port, store = free_port(), "memory:64MiB"
    with saving(tmp_path / "a", 0, port, store) as first, saving(tmp_path / "a", 1, port, store) as second:
        saved = first.line(SAVE)
        second.signal(signal.SIGKILL)  # of its launcher: everything of that node goes, its memory, too
        second.leaves_nothing()
        with saving(tmp_path / "b", 1, port, store) as third:
            found = first.line(r"starts from the checkpoint of step (\d+) in nodes://")
            assert int(found[1]) >= int(saved[1]), first.story()
            assert digests(first, third) == undisturbed and len(undisturbed) == 4, first.story() + third.story()


def test_the_next_run_finds_on_one_disk_what_another_has_lost(tmp_path: Path, undisturbed: set[str]) -> None:
    port, store = free_port(), str(tmp_path / "kept")
    with saving(tmp_path / "a", 0, port, store) as first, saving(tmp_path / "a", 1, port, store) as second:
        saved = first.line(SAVE)
        first.signal(signal.SIGINT)
        assert first.ended() == 130 and second.ended() != 0
        first.leaves_nothing()
    shutil.rmtree(tmp_path / "kept" / "node0")
    with saving(tmp_path / "b", 0, port, store) as first, saving(tmp_path / "b", 1, port, store) as second:
        found = first.line(r"starts from the checkpoint of step (\d+) in nodes://")
        assert int(found[1]) >= int(saved[1]), first.story()
        assert digests(first, second) == undisturbed, first.story() + second.story()


def test_a_node_that_never_comes(tmp_path: Path) -> None:
    with node(tmp_path, 0, free_port()) as run:
        run.controller()
        run.line(r"waiting for nodes: 1 of 2 here \(node0\)")
        assert "--rdzv-endpoint 127.0.0.1:" in run.err
        run.signal(signal.SIGINT)
        assert run.ended() == 130, run.story()
        run.leaves_nothing()


def test_a_controller_that_never_comes(tmp_path: Path) -> None:
    port = free_port()
    with node(tmp_path, 1, port) as run:
        run.line(rf"waiting for the controller at 127.0.0.1:{port}")
        run.signal(signal.SIGINT)
        assert run.ended() == 130, run.story()
        run.leaves_nothing()
