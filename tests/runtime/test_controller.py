"""The controller process against fake agents over real WebSockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_agent import LIMIT_S, FakeAgent

from rerail.config import JobSpec, Settings
from rerail.flow import Decision, Diagnosis, Report, Rung
from rerail.runtime.journal import FILE_NAME, Journal
from rerail.runtime.orders import (
    Beat,
    DismissAll,
    FormAll,
    InterruptAll,
    PickPort,
    Promote,
    RankExited,
    Rejected,
    Shutdown,
    Start,
    Vacate,
    Welcome,
)
from rerail.runtime.wire import CommFailed, Finished, Message


class Job:
    """A controller process in a folder of its own."""

    def __init__(self, folder: Path, spec: dict[str, Any], settings: dict[str, Any]) -> None:
        self.folder = folder
        self.spec = JobSpec(job="j", script="train.py", run_dir=str(folder), **spec)
        self.settings = Settings(**{"echo_window_s": 0.05, **settings})
        self.process: subprocess.Popen[str] | None = None

    async def start(self) -> int:
        env = {
            **os.environ,
            "RERAIL_SPEC": msgspec.json.encode(self.spec).decode(),
            "RERAIL_SETTINGS": msgspec.json.encode(self.settings).decode(),
            "RERAIL_TOKEN": "secret",
        }
        with open(self.folder / "stderr", "a") as stderr:
            self.process = subprocess.Popen([sys.executable, "-m", "rerail.runtime.controller"], env=env, stderr=stderr)
        async with asyncio.timeout(LIMIT_S):
            while self._address().get("pid") != self.process.pid:
                assert self.process.poll() is None, self.said()
                await asyncio.sleep(0.01)
        return int(self._address()["port"])

    def _address(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self.folder / "controller.json").read_text())
            return found
        return {}

    def said(self) -> str:
        return (self.folder / "stderr").read_text()

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    async def ended(self) -> int:
        assert self.process is not None, "start first"
        return await asyncio.wait_for(asyncio.to_thread(self.process.wait), LIMIT_S)

    def records(self, kind: str) -> list[Any]:
        journal = Journal(self.folder / FILE_NAME, read_only=True)
        try:
            return list(journal.records(kind=kind))
        finally:
            journal.close()

    async def reports(self, count: int) -> list[Report]:
        async with asyncio.timeout(LIMIT_S):
            while len(found := self.records("report")) < count:
                await asyncio.sleep(0.01)
        return found

    def status(self, token: str = "secret") -> dict[str, Any]:
        url = f"http://127.0.0.1:{self._address()['port']}/status"
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    async def trained(self) -> None:
        """The controller knows that every rank has completed a step: what nodes tell at once need not arrive at once."""
        async with asyncio.timeout(LIMIT_S):
            while any(rank["version"] < 1 for rank in (await asyncio.to_thread(self.status))["ranks"]):
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(folder: Path, settings: dict[str, Any] | None = None, **spec: Any) -> AsyncIterator[tuple[Job, int]]:
    job = Job(folder, spec, settings or {})
    try:
        yield job, await job.start()
    finally:
        job.kill()


@contextlib.asynccontextmanager
async def training(
    folder: Path, settings: dict[str, Any] | None = None, *, slots: int = 4, aware: bool = True, **spec: Any
) -> AsyncIterator[tuple[Job, FakeAgent]]:
    """A job of one node whose ranks have completed their first step."""
    async with running(folder, settings, **spec) as (job, port):
        agent = FakeAgent(port, slots=slots)
        agent.aware = aware
        await agent.dial()
        await agent.wait_for(FormAll if aware else Start)
        try:
            yield job, agent
        finally:
            await agent.hang_up()


Scenario = Callable[[Path], Coroutine[Any, Any, None]]


def play(scenario: Scenario, folder: Path) -> None:
    asyncio.run(scenario(folder))


def test_a_job_starts_trains_and_ends(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder, slots=2) as (job, agent):
            start = await agent.wait_for(Start)
            assert start.generation == 0 and [a.rank for a in start.assignments] == [0, 1]
            env = start.assignments[1].env
            assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["GROUP_RANK"]) == ("1", "2", "2", "0")
            assert (env["MASTER_PORT"], env["TORCHELASTIC_RESTART_COUNT"]) == ("12345", "0")
            plan = (await agent.wait_for(FormAll)).plan
            assert plan.version == 0 and {s.kind for s in plan.sources.values()} == {"initial"}
            assert plan.store_port == 4000
            await agent.exit_all()
            assert (await agent.wait_for(Shutdown)).exit_code == 0
            await agent.hang_up()
            assert await job.ended() == 0

    play(scenario, tmp_path)


def test_a_killed_rank_is_replaced_under_living_survivors(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder) as (job, agent):
            await agent.kill(2)
            (report,) = await job.reports(1)
            promote = (await agent.wait_for(Promote)).assignment
            assert (promote.rank, promote.generation, promote.newcomer) == (2, 1, True)
            interrupt = await agent.wait_for(InterruptAll)
            assert interrupt.ranks == (0, 1, 3) and interrupt.interrupt.store_rank == 0
            plan = (await agent.wait_for(FormAll, count=2)).plan
            assert (plan.generation, plan.version, plan.sources[2].kind) == (1, 1, "replica")
            assert all(plan.sources[rank].kind == "own" for rank in (0, 1, 3))
            assert report.ok and report.attempts == 1 and report.ranks == (2,) and report.rung is Rung.REPLACE_RANK
            assert report.code == "process.killed" and report.cost.t2 == 0.01 and report.cost.detect == 0.01
            assert "rank 2 killed (SIGKILL): replaced in" in job.said()
            assert len([m for m in agent.got if isinstance(m, Start)]) == 1

    play(scenario, tmp_path)


def test_store_moves_when_rank_0_dies(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder) as (job, agent):
            await agent.kill(0)
            await job.reports(1)
            plan = (await agent.wait_for(FormAll, count=2)).plan
            assert plan.store_rank == 1 and plan.store_port == 4001

    play(scenario, tmp_path)


def test_echoes_are_folded_and_do_not_cost_an_attempt(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder, {"echo_window_s": 5.0}) as (job, agent):
            for rank in (0, 1):
                failed = CommFailed(rank=rank, generation=0, version=1, text="Connection closed by peer")
                await agent.say(rank, failed)
            await agent.kill(3)
            await agent.say(2, CommFailed(rank=2, generation=0, version=1, text="Connection closed by peer"))
            (report,) = await job.reports(1)
            assert report.code == "process.killed" and report.ranks == (3,) and report.attempts == 1
            (diagnosis,) = job.records("diagnosis")
            assert isinstance(diagnosis, Diagnosis) and len(diagnosis.echoes) >= 2

    play(scenario, tmp_path)


def test_a_collective_that_fails_alone_is_retried(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder) as (job, agent):
            await agent.say(1, CommFailed(rank=1, generation=0, version=1, text="timed out"))
            (report,) = await job.reports(1)
            assert report.rung is Rung.RETRY_STEP and report.ok
            assert not [m for m in agent.got if isinstance(m, Promote)]

    play(scenario, tmp_path)


def test_second_fault_during_a_recovery(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder) as (job, agent):
            agent.holding = {0}
            await agent.kill(2)
            await agent.wait_for(Promote)
            agent.holding = set()
            await agent.kill(1)
            (report,) = await job.reports(1)
            assert report.ok and report.attempts == 2 and report.ranks == (1, 2)
            assert "rank 2 killed" in report.summary and "rank 1 killed" in report.summary
            plan = (await agent.wait_for(FormAll, count=2)).plan
            assert plan.generation == 2 and plan.sources[1].kind == plan.sources[2].kind == "replica"
            await agent.kill(3)
            assert (await job.reports(2))[1].attempts == 1

    play(scenario, tmp_path)


def test_a_newcomer_that_dies_is_replaced_again_but_not_forever(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder) as (job, agent):
            agent.holding = {2}
            await agent.kill(2)
            for count in (1, 2, 3):
                await agent.wait_for(Promote, count=count)
                await agent.kill(2)
            agent.holding = set()
            await agent.wait_for(Start, count=2)
            (report,) = await job.reports(1)
            assert report.rung is Rung.RESTART_ALL and report.ok

    play(scenario, tmp_path)


def test_a_step_that_keeps_raising_is_retried_replaced_and_stopped(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder) as (job, agent):
            agent.resuming = False
            await agent.raise_in(3, "ValueError", 0)
            await agent.wait_for(FormAll, lambda m: m.plan.generation == 1)
            await agent.raise_in(3, "ValueError", 1)
            await agent.wait_for(Promote)
            await agent.wait_for(FormAll, lambda m: m.plan.generation == 2)
            await agent.raise_in(3, "ValueError", 2)
            end = await agent.wait_for(Shutdown)
            assert end.exit_code == 93 and end.culprit == 3 and "rank 3 raised ValueError: boom" in end.reason
            rungs = [r.rung for r in await job.reports(3)]
            assert rungs == [Rung.RETRY_STEP, Rung.REPLACE_RANK, Rung.STOP]

    play(scenario, tmp_path)


def test_same_error_on_all_ranks_is_one_incident(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder) as (job, agent):
            for rank in range(4):
                await agent.raise_in(rank, "OSError", 0)
            (report,) = await job.reports(1)
            assert report.rung is Rung.RETRY_STEP and report.attempts == 1 and report.ok

    play(scenario, tmp_path)


def test_repairs_are_unlimited_while_training_moves(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder) as (job, agent):
            for count in range(1, 8):
                await agent.kill(count % 4)
                reports = await job.reports(count)
                assert reports[-1].ok and reports[-1].attempts == 1
            assert len([m for m in agent.got if isinstance(m, Start)]) == 1

    play(scenario, tmp_path)


def test_script_that_cannot_start_is_stopped_at_once(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder, aware=False) as (_, agent):
            await agent.kill(
                0, exit_code=1, exception="ModuleNotFoundError", message="No module named 'x'", traceback="tb"
            )
            end = await agent.wait_for(Shutdown)
            assert end.exit_code == 93 and end.culprit == 0 and "No module named 'x'" in end.reason

    play(scenario, tmp_path)


def test_unaware_script_is_restarted_until_the_budget_is_used_up(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder, aware=False, max_restarts=1) as (_job, agent):
            await agent.kill(1)
            second = await agent.wait_for(Start, count=2)
            assert second.generation == 1 and second.assignments[0].env["TORCHELASTIC_RESTART_COUNT"] == "1"
            await agent.kill(2)
            end = await agent.wait_for(Shutdown)
            assert end.exit_code == 1 and "restart budget used up (1 of 1)" in end.reason

    play(scenario, tmp_path)


def test_unaware_script_with_the_same_exception_again_and_again(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder, aware=False, max_restarts=50) as (_job, agent):
            for count in (1, 2, 3):
                await agent.wait_for(Start, count=count)
                await agent.kill(1, exit_code=1, exception="ValueError", message="bad", traceback="tb")
            assert (await agent.wait_for(Shutdown)).exit_code == 93

    play(scenario, tmp_path)


def test_a_survivor_that_never_parks_is_replaced(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder, {"park_timeout_s": 0.3}) as (job, agent):
            agent.holding = {1}
            await agent.kill(2)
            await agent.wait_for(Promote)
            agent.holding = set()
            assert (await agent.wait_for(Promote, lambda m: m.assignment.rank == 1)).assignment.generation == 2
            (report,) = await job.reports(1)
            assert report.ok and report.ranks == (1, 2) and "did not leave its step" in report.summary

    play(scenario, tmp_path)


def test_old_generations_are_ignored(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder) as (job, agent):
            old = agent.ranks[2]
            await agent.kill(2)
            await job.reports(1)
            agent.ranks[2] = old
            await agent.kill(2)  # the zombie's end, told late
            await agent.say(0, CommFailed(rank=0, generation=0, version=1, text="late echo"))
            await agent.send(RankExited(rank=2, generation=0))
            agent.ranks[2] = msgspec.structs.replace(old, generation=1)
            await agent.kill(1)
            reports = await job.reports(2)
            assert [r.ranks for r in reports] == [(2,), (1,)]

    play(scenario, tmp_path)


def test_two_nodes_join_and_one_is_lost(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        settings = {"agent_back_s": 0.2}
        async with running(folder, settings, min_nodes=2, max_nodes=2) as (job, port):
            first, second = FakeAgent(port, node="a", slots=2), FakeAgent(port, node="b", slots=1)
            first.world = second.world = 3
            await second.dial(node_rank=1)
            await first.dial(node_rank=0)
            assert [a.rank for a in (await first.wait_for(Start)).assignments] == [0, 1]
            assert [a.rank for a in (await second.wait_for(Start)).assignments] == [2]
            await first.wait_for(FormAll)
            third = FakeAgent(port, node="c")
            await third.dial()
            assert "all its 2 nodes" in (await third.wait_for(Rejected)).reason
            await second.wait_for(FormAll)
            await second.hang_up()
            second = FakeAgent(port, node="b", slots=1)
            second.world, second.version = 3, 1
            await second.dial()
            await second.wait_for(FormAll, lambda m: m.plan.generation == 1)
            (report,) = await job.reports(1)
            assert report.code == "node.lost" and report.ranks == (2,) and report.rung is Rung.REPLACE_RANK
            await first.hang_up()
            await second.hang_up()
            await third.hang_up()

    play(scenario, tmp_path)


@pytest.mark.parametrize("last", [0, 1])
def test_a_node_whose_rank_lies_beyond_the_number_of_nodes_is_a_spare_whoever_comes_first(
    tmp_path: Path, last: int
) -> None:
    async def scenario(folder: Path) -> None:
        async with running(folder, min_nodes=2, max_nodes=2, spare_nodes=1) as (_, port):
            nodes = [FakeAgent(port, node=f"n{number}", slots=1) for number in range(3)]
            for number in (2, 1 - last, last):
                nodes[number].world = 2
                await nodes[number].dial(node_rank=number)
                await nodes[number].wait_for(Welcome)
            for number in range(2):
                assert [a.rank for a in (await nodes[number].wait_for(Start)).assignments] == [number]
            for agent in nodes:
                await agent.hang_up()

    play(scenario, tmp_path)


def test_a_spare_takes_the_place_of_a_node_that_does_not_come(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with running(folder, {"node_wait_s": 0.3}, min_nodes=2, max_nodes=2, spare_nodes=1) as (_, port):
            first, spare = FakeAgent(port, node="a", slots=1), FakeAgent(port, node="s", slots=1)
            first.world = spare.world = 2
            await spare.dial(node_rank=2)
            await first.dial(node_rank=0)
            assert [a.rank for a in (await first.wait_for(Start)).assignments] == [0]
            assert [a.rank for a in (await spare.wait_for(Start)).assignments] == [1]
            await first.hang_up()
            await spare.hang_up()

    play(scenario, tmp_path)


def test_fewer_nodes_are_enough_after_the_last_call(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with running(folder, min_nodes=1, max_nodes=3) as (_, port):
            agent = FakeAgent(port, slots=2)
            await agent.dial()
            assert (await agent.wait_for(Start)).assignments[0].world_size == 2
            await agent.hang_up()

    play(scenario, tmp_path)


@pytest.mark.parametrize(("wrong", "reason"), [({"token": "x"}, "RERAIL_TOKEN"), ({"job": "other"}, "runs job j")])
def test_foreign_agents_are_refused(tmp_path: Path, wrong: dict[str, str], reason: str) -> None:
    async def scenario(folder: Path) -> None:
        async with running(folder) as (_, port):
            agent = FakeAgent(port)
            await agent.dial(**wrong)
            assert reason in (await agent.wait_for(Rejected)).reason
            await agent.hang_up()

    play(scenario, tmp_path)


def test_controller_killed_and_ranks_train_on(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder) as (job, agent):
            await agent.send(Beat(versions=dict.fromkeys(range(4), 1)))
            await agent.kill(1)
            await job.reports(1)
            job.kill()
            await agent.hang_up()
            before = len(agent.got)
            assert await job.start() == agent.port
            await agent.dial(ranks=agent.statuses())
            reports = await job.reports(2)
            assert reports[1].code == "controller.lost" and reports[1].ok and reports[1].incident == 2
            await agent.wait_for(Vacate, lambda order: set(order.keep or ()) == {0, 1, 2, 3})  # they may stay
            assert all(isinstance(message, Welcome | Vacate) for message in agent.got[before:])
            await agent.kill(3)
            third = (await job.reports(3))[2]
            assert third.ok and third.incident == 3 and third.ranks == (3,)
            assert (await agent.wait_for(Promote, count=2)).assignment.generation == 2

    play(scenario, tmp_path)


def test_controller_killed_during_a_recovery(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder) as (job, agent):
            agent.holding = {0}
            await agent.kill(2)
            await agent.wait_for(Promote)
            job.kill()
            await agent.hang_up()
            agent.holding = set()
            await job.start()
            await agent.dial(ranks=agent.statuses())
            plan = (await agent.wait_for(FormAll, count=2)).plan
            assert plan.generation == 2 and plan.sources[2].kind == "replica" and plan.sources[0].kind == "own"
            assert (await job.reports(1))[0].ok

    play(scenario, tmp_path)


def test_status_needs_the_token(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder) as (job, _):
            status = await asyncio.to_thread(job.status)
            assert status["world_size"] == 4 and status["aware"] is True
            with pytest.raises(urllib.error.HTTPError) as refused:
                await asyncio.to_thread(job.status, "guess")
            assert refused.value.code == 401
            refused.value.close()

    play(scenario, tmp_path)


def test_busy_port_is_said_without_a_traceback(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        (folder / "a").mkdir()
        (folder / "b").mkdir()
        async with running(folder / "a") as (_, port):
            other = Job(folder / "b", {"endpoint_port": port}, {})
            with pytest.raises(AssertionError):
                await other.start()
            assert other.process is not None and other.process.returncode == 2
            assert f"port {port} on 127.0.0.1 is in use" in other.said() and "Traceback" not in other.said()

    play(scenario, tmp_path)


def test_sigterm_ends_it_cleanly(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder) as (job, _):
            assert job.process is not None, "started above"
            job.process.send_signal(signal.SIGTERM)
            assert await job.ended() == 0
            assert "Traceback" not in job.said()
            assert (folder / "controller.json").stat().st_mode & 0o777 == 0o600

    play(scenario, tmp_path)


def test_every_report_can_be_walked_back_to_its_signal(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder) as (job, agent):
            await agent.kill(2)
            (report,) = await job.reports(1)
            records = {r.id: r for r in Journal(folder / FILE_NAME, read_only=True).records(incident=1)}
            chain, current = [], records[report.id]
            while current.cause_id:
                current = records[current.cause_id]
                chain.append(type(current).__name__)
            assert chain == ["Recovery", "Decision", "Diagnosis", "Event", "Signal"]
            decision = next(r for r in records.values() if isinstance(r, Decision))
            assert {c.rung for c in decision.candidates} == set(Rung)

    play(scenario, tmp_path)


@pytest.mark.parametrize("order", [PickPort, Start, InterruptAll, Promote, FormAll])
def test_an_order_that_is_lost_with_its_connection_is_given_again(tmp_path: Path, order: type[Message]) -> None:
    async def scenario(folder: Path) -> None:
        async with running(folder) as (job, port):
            agent = FakeAgent(port, slots=3)
            if order in (PickPort, Start):
                agent.losing = {order}
            await agent.dial()
            if agent.losing:
                await agent.cut_off.wait()
                await agent.dial()
            await agent.wait_for(FormAll)
            if order not in (PickPort, Start):
                agent.losing = {order}
            await agent.kill(2)
            if agent.losing:
                await agent.cut_off.wait()
                await agent.dial(ranks=agent.statuses())
            (report,) = await job.reports(1)
            assert report.ok and report.rung is Rung.REPLACE_RANK and report.attempts == 1 and report.ranks == (2,)
            assert (await agent.wait_for(FormAll, count=2)).plan.generation == 1
            await agent.hang_up()

    play(scenario, tmp_path)


def test_the_last_word_of_a_finished_job_is_given_again(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder, slots=2) as (_, agent):
            agent.losing = {DismissAll}
            for rank in range(2):
                await agent.say(rank, Finished(rank=rank, version=1))
            await agent.cut_off.wait()
            await agent.dial(ranks=agent.statuses())
            await agent.wait_for(DismissAll)

    play(scenario, tmp_path)


def test_a_node_that_is_cut_off_when_another_loses_a_rank(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with running(folder, min_nodes=2, max_nodes=2) as (job, port):
            first, second = FakeAgent(port, node="a", slots=2), FakeAgent(port, node="b", slots=1)
            first.world = second.world = 3
            await first.dial(node_rank=0)
            await second.dial(node_rank=1)
            await asyncio.gather(first.wait_for(FormAll), second.wait_for(FormAll))
            await job.trained()
            second.losing = {InterruptAll}
            await first.kill(1)
            await second.cut_off.wait()
            await second.dial(ranks=second.statuses())
            (report,) = await job.reports(1)
            assert report.ok and report.ranks == (1,) and report.attempts == 1
            await first.hang_up()
            await second.hang_up()

    play(scenario, tmp_path)


def test_a_stall_counts_when_all_nodes_see_it_and_names_who_is_behind(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with running(folder, min_nodes=2, max_nodes=2) as (job, port):
            first, second = FakeAgent(port, node="a", slots=2), FakeAgent(port, node="b", slots=1)
            first.world = second.world = 3
            await first.dial(node_rank=0)
            await second.dial(node_rank=1)
            await asyncio.gather(first.wait_for(FormAll), second.wait_for(FormAll))
            await job.trained()
            await first.observe("collective.stalled", -1, collectives="0:9,1:9")
            await first.observe("collective.stalled", -1, collectives="0:9,1:9")
            assert not job.records("signal"), "the other node is busy: its ranks are waited for"
            await second.observe("collective.stalled", -1, collectives="2:7")
            await first.observe("collective.stalled", -1, collectives="0:9,1:9")
            (report,) = await job.reports(1)
            assert report.ok and report.ranks == (2,) and report.rung is Rung.RETRY_STEP
            assert "rank 2 is behind" in report.summary and len(job.records("signal")) == 1
            await first.hang_up()
            await second.hang_up()

    play(scenario, tmp_path)


def test_echoes_wait_for_a_node_that_may_be_their_cause(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        settings = {"agent_back_s": 1.0, "echo_window_s": 0.05}
        async with running(folder, settings, min_nodes=2, max_nodes=2) as (job, port):
            first, second = FakeAgent(port, node="a", slots=2), FakeAgent(port, node="b", slots=1)
            first.world = second.world = 3
            await first.dial(node_rank=0)
            await second.dial(node_rank=1)
            await asyncio.gather(first.wait_for(FormAll), second.wait_for(FormAll))
            await job.trained()
            await second.hang_up()
            await first.say(0, CommFailed(rank=0, generation=0, version=1, text="Connection closed by peer"))
            second = FakeAgent(port, node="b", slots=1)
            second.world, second.version = 3, 1
            await second.dial(node_rank=1)
            await job.reports(1)
            (diagnosis,) = job.records("diagnosis")
            assert diagnosis.code == "node.lost" and diagnosis.ranks == (2,)
            await first.hang_up()

    play(scenario, tmp_path)


@pytest.mark.parametrize(("victim", "cause"), [(4711, "memory.oom_global"), (815, "process.killed")])
def test_the_out_of_memory_killer_is_the_cause_of_the_process_it_names(tmp_path: Path, victim: int, cause: str) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder) as (job, agent):
            await agent.send(Beat(versions={}, pids={1: 4711, 2: 815}))
            line = f"Out of memory: Killed process {victim} (python3) total-vm:98811200kB"
            record = {"code": "memory.oom_global", "detector": "kernel_log", "evidence": line, "victim": victim}
            await agent.observe("machine", -1, **record)
            await agent.kill(1)
            (report,) = await job.reports(1)
            assert (report.code, report.ranks) == (cause, (1,))

    play(scenario, tmp_path)
