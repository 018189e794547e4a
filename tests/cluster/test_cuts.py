"""Links that are cut, slow or unsteady, and nodes that are gone: the job goes on, and no rank is ever trained twice."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from cluster_helpers import STEPS, Cluster, cluster
from edge_helpers import running

pytestmark = pytest.mark.timeout(280)

FENCED = r"no word from the controller for .*: this node ends its ranks"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What three ranks hold at the end if nothing happens to them."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "go").touch()
    work = ("--witness", str(folder / "witness"), "--go", str(folder / "go"), "--until", str(STEPS))
    script = str(Path(__file__).parent.parent.parent / "bench" / "cluster_train.py")
    with running(folder, "--nproc-per-node", "3", script, *work, env={"RERAIL_DETECTORS": "0"}) as run:
        assert run.ended() == 0, run.story()
        return {line.split()[3] for line in run.out.splitlines() if " done " in line}


def process_of(job: Cluster, rank: int) -> int:
    return next(step.pid for step in reversed(job.steps()) if step.rank == rank)


def loses_power(job: Cluster, node: int) -> int:
    """Once something is saved. The generation it was in."""
    job.runs[0].line(r"checkpoint of step \d+ saved")
    generation = job.newest.generation
    job.wires.kill(node)
    job.runs.pop(node).leaves_nothing()
    return generation


def test_a_cut_shorter_than_the_lease_costs_nothing(tmp_path: Path, undisturbed: set[str]) -> None:
    with cluster(tmp_path) as job:
        before = [process_of(job, rank) for rank in range(3)]
        job.wires.cut(2)
        time.sleep(1.0)
        job.wires.restore(2)
        job.moving()
        assert [process_of(job, rank) for rank in range(3)] == before, job.story()
        assert job.finish() == undisturbed


def test_a_node_that_is_cut_off_ends_its_ranks_and_takes_part_again(tmp_path: Path, undisturbed: set[str]) -> None:
    with cluster(tmp_path) as job:
        lonely, generation = process_of(job, 2), job.newest.generation
        job.wires.cut(2)
        job.said(2, FENCED)
        job.runs[2].await_end(lonely)
        job.gives_up("node2")
        job.wires.restore(2)
        job.moving(generation=generation + 1)
        assert job.finish() == undisturbed


def test_a_node_that_stays_away_is_left_behind_and_comes_back_as_one_more(tmp_path: Path) -> None:
    with cluster(tmp_path, "2:3", RERAIL_NODE_WAIT_S="1") as job:
        job.wires.cut(2, carrier=True)
        job.moving(world=2)
        job.wires.restore(2)
        time.sleep(2)
        # its place is taken over by the one that was left behind
        job.wires.kill(1)
        job.runs.pop(1).leaves_nothing()
        job.moving(world=2, generation=job.newest.generation + 1)
        assert len(job.finish(world=2, nodes=(0, 2))) == 1


@pytest.mark.slow
def test_a_flapping_link_costs_no_weights(tmp_path: Path, undisturbed: set[str]) -> None:
    with cluster(tmp_path) as job:
        job.wires.flap(1, times=4, down_s=0.7, up_s=0.7)
        job.wires.flap(1, times=1, down_s=4.5, up_s=0.3)
        job.wires.flap(1, times=2, down_s=0.7, up_s=0.7)
        job.moving(more=5)
        assert job.finish() == undisturbed


@pytest.mark.slow
def test_a_slow_link_is_no_fault(tmp_path: Path, undisturbed: set[str]) -> None:
    with cluster(tmp_path) as job:
        before = [process_of(job, rank) for rank in range(3)]
        job.wires.slow(1, "1mbit")
        job.moving(more=10)
        assert [process_of(job, rank) for rank in range(3)] == before, job.story()
        job.wires.restore(1)
        assert job.finish() == undisturbed


def test_a_node_that_loses_its_power_is_replaced_by_one_of_its_name(tmp_path: Path, undisturbed: set[str]) -> None:
    with cluster(tmp_path, "3", "--save", str(tmp_path / "saved")) as job:
        generation = loses_power(job, 2)
        job.wires.restore(2)
        job.start(2)
        job.moving(generation=generation + 1)
        assert job.finish() == undisturbed


@pytest.mark.parametrize("alone", [0, 2], ids=["controller-alone", "controller-with-one"])
def test_a_split_stops_the_side_without_the_controller(tmp_path: Path, undisturbed: set[str], alone: int) -> None:
    with cluster(tmp_path) as job:
        generation = job.newest.generation
        others = [node for node in range(3) if node != alone]
        job.wires.split([alone], others)
        cut_off = others if alone == 0 else [alone]
        for node in cut_off:
            job.said(node, FENCED)
        job.wires.heal()
        job.moving(generation=generation + 1)
        assert job.finish() == undisturbed


def test_the_node_of_the_controller_dies_and_comes_back(tmp_path: Path, undisturbed: set[str]) -> None:
    with cluster(tmp_path, "3", "--save", str(tmp_path / "saved")) as job:
        generation = loses_power(job, 0)
        for node in (1, 2):
            job.said(node, FENCED)
        job.wires.restore(0)
        job.start(0)
        job.moving(generation=generation + 1)
        assert job.finish() == undisturbed


@pytest.mark.slow
def test_a_controller_that_is_started_anew_on_a_living_node_costs_no_rank(
    tmp_path: Path, undisturbed: set[str]
) -> None:
    with cluster(tmp_path) as job:
        before = [process_of(job, rank) for rank in range(3)]
        os.kill(job.runs[0].pid_of("controller"), signal.SIGKILL)
        job.runs[0].line("the controller was killed")
        job.moving(more=10)
        assert [process_of(job, rank) for rank in range(3)] == before, job.story()
        assert job.finish() == undisturbed


def test_an_agent_that_is_suspended_does_not_let_its_ranks_train_on(tmp_path: Path) -> None:
    """They average their weights so seldom that each could go on by itself."""
    with cluster(tmp_path, "3", "--local", "1000") as job:
        agent, rank = job.runs[2].pid_of("agent"), process_of(job, 2)
        os.kill(agent, signal.SIGSTOP)
        job.runs[2].await_end(rank)
        job.gives_up("node2")
        os.kill(agent, signal.SIGCONT)
        job.moving(generation=job.newest.generation + 1)
        job.finish()
