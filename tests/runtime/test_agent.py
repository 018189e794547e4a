"""A real agent with real processes against a controller that only records and commands."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fake_controller import FakeController, assignment, assignments, plan
from node_helpers import job, standin, wait_gone

from rerail.config import Settings
from rerail.runtime import agent as agent_module
from rerail.runtime import orders, wire
from rerail.runtime.agent import Agent
from rerail.runtime.children import virtual_device
from rerail.runtime.processes import adopt_orphans, descendants

Body = Callable[[Agent, FakeController], Awaitable[None]]


class Bench:
    """Runs one test body against an agent of two slots; the body must end the agent with a Shutdown or the like."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tmp_path = tmp_path
        self.monkeypatch = monkeypatch

    def run(self, body: Body, *words: str, settings: Settings | None = None, **changes: Any) -> int:
        adopt_orphans()  # as the agent's own main() does
        self.monkeypatch.setattr(agent_module, "child_spec", lambda spec: standin(*words))

        async def main() -> int:
            controller = FakeController(self.tmp_path)
            await controller.listen()
            node = Agent(job(self.tmp_path, **changes), settings or Settings(), "secret", "n0")
            running = asyncio.create_task(node.run())
            try:
                await body(node, controller)
                return await asyncio.wait_for(running, 30)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                for child in node._children():
                    child.kill()
                await controller.close()

        return asyncio.run(main())


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


async def start(controller: FakeController, count: int = 2) -> None:
    """Bring generation 0 to its first step."""
    await controller.wait(orders.AgentHello)
    await controller.send(orders.Start(generation=0, assignments=assignments(count, 0)))
    await controller.relayed(wire.Parked, count, 0)
    await controller.send(orders.FormAll(plan=plan(count, 0)))
    await controller.relayed(wire.Resumed, count, 0)


async def standby_ready(controller: FakeController) -> None:
    await controller.wait(orders.Standbys, lambda message: message.ready > 0 and message.warming == 0)


async def stop(controller: FakeController, code: int = 0) -> None:
    await controller.send(orders.Shutdown(exit_code=code, reason="test over", grace_s=0.2))


def rank_pid(node: Agent, rank: int) -> int:
    child = node.slots[rank].child
    assert child is not None, "the rank has a process"
    return child.pid


def test_a_start_makes_ranks_of_the_waiting_processes(bench: Bench, tmp_path: Path) -> None:
    async def body(node: Agent, controller: FakeController) -> None:
        hello = (await controller.wait(orders.AgentHello))[0]
        waiting = {child.pid for child in node.pool.members}
        assert (hello.job, hello.token, hello.slots, hello.ranks) == ("test", "secret", 2, ())
        await start(controller)
        assert {rank_pid(node, 0), rank_pid(node, 1)} == waiting
        await stop(controller)

    assert bench.run(body) == 0
    assert "rank 1 of 2 in 1" in (tmp_path / "logs/attempt_0/1/stdout.log").read_text()
    assert "culprit False" in (tmp_path / "logs/attempt_0/1/stdout.log").read_text()


def test_a_killed_rank_is_reported_and_its_place_given_to_a_standby(bench: Bench, tmp_path: Path) -> None:
    async def body(node: Agent, controller: FakeController) -> None:
        await start(controller)
        await standby_ready(controller)
        standby, survivor = node.pool.members[0], rank_pid(node, 0)
        assert standby.at_join
        memory = node.slots[1].memory
        os.kill(rank_pid(node, 1), signal.SIGKILL)
        seen = (await controller.wait(orders.Observed))[0].signal
        assert (seen.source, seen.rank, seen.node, seen.payload["signal"]) == ("process.exit", 1, "n0", "SIGKILL")
        await controller.send(orders.InterruptAll(interrupt=wire.Interrupt(generation=1, store_rank=0), ranks=(0,)))
        await controller.send(orders.Promote(assignment=assignment(1, 2, 1, newcomer=True)))
        await controller.relayed(wire.Parked, 2, 1)
        assert (rank_pid(node, 0), rank_pid(node, 1)) == (survivor, standby.pid)
        assert node.slots[1].memory == memory
        assert not node.pool.members, "no standby is warmed while a recovery is under way"
        await controller.send(orders.FormAll(plan=plan(2, 1)))
        await controller.relayed(wire.Resumed, 2, 1)
        await controller.wait(orders.Standbys, lambda message: message.ready > 0, count=2)
        await stop(controller)

    assert bench.run(body) == 0
    assert "rank 1 of 2" in (tmp_path / "logs/attempt_1/1/stdout.log").read_text()


def test_where_ranks_are_lost_faster_than_standbys_get_warm_one_more_is_held(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(node: Agent, controller: FakeController) -> None:
        await start(controller)
        await standby_ready(controller)
        assert node.pool.wanted == 1
        for rank in (0, 1):
            os.kill(rank_pid(node, rank), signal.SIGKILL)
        await controller.wait(orders.Observed, count=2)
        for rank in (0, 1):
            await controller.send(orders.Promote(assignment=assignment(rank, 2, 1, newcomer=True)))
        await controller.relayed(wire.Parked, 2, 1)
        assert node.pool.wanted == 2
        await controller.send(orders.FormAll(plan=plan(2, 1)))
        await controller.relayed(wire.Resumed, 2, 1)
        await controller.wait(orders.Standbys, lambda message: message.ready == 2)
        monkeypatch.setattr(node.pool, "_more_until", 0.0)  # the hour is over
        assert node.pool.wanted == 1
        node._refill()
        assert node.pool.counts() == (1, 0)
        await stop(controller)

    assert bench.run(body) == 0


def test_a_newcomer_beside_ranks_that_train_on_makes_nobody_wait_and_needs_no_more_standbys(bench: Bench) -> None:
    async def body(node: Agent, controller: FakeController) -> None:
        await start(controller)
        await standby_ready(controller)
        for rank in (0, 1):
            order = orders.Promote(assignment=assignment(rank, 2, 1, newcomer=True), beside=True)
            await controller.send(order)
        await controller.wait(orders.Relayed, lambda message: message.beside, count=2)
        assert node.pool.wanted == 1
        await stop(controller)

    assert bench.run(body) == 0


def test_a_promotion_ends_what_is_left_of_the_rank(bench: Bench) -> None:
    async def body(node: Agent, controller: FakeController) -> None:
        await start(controller)
        old = rank_pid(node, 0)
        below = descendants(old)
        os.kill(old, signal.SIGSTOP)
        await controller.send(orders.Promote(assignment=assignment(0, 2, 1, newcomer=True)))
        await controller.relayed(wire.Parked, 1, 1)
        assert len(below) == 2 and not await asyncio.to_thread(wait_gone, [old, *below])
        assert not controller.said(orders.Observed)
        await stop(controller)

    assert bench.run(body, "grandchild") == 0


def test_orders_of_an_older_generation_are_ignored(bench: Bench) -> None:
    async def body(node: Agent, controller: FakeController) -> None:
        await start(controller)
        await controller.send(orders.Promote(assignment=assignment(0, 2, 5, newcomer=True)))
        await controller.relayed(wire.Parked, 1, 5)
        pids = rank_pid(node, 0), rank_pid(node, 1)
        await controller.send(orders.Promote(assignment=assignment(0, 2, 4, newcomer=True)))
        await controller.send(orders.Start(generation=3, assignments=assignments(2, 3)))
        await controller.send(orders.PickPort(generation=6))
        assert (await controller.wait(orders.PortPicked))[0].port > 0
        assert pids == (rank_pid(node, 0), rank_pid(node, 1))
        await stop(controller)

    assert bench.run(body) == 0


def test_a_restart_replaces_all_and_reports_none_of_the_old_ends(bench: Bench) -> None:
    async def body(node: Agent, controller: FakeController) -> None:
        await start(controller)
        old = [rank_pid(node, 0), rank_pid(node, 1)]
        await controller.send(orders.Start(generation=1, assignments=assignments(2, 1), grace_s=0.2))
        await controller.relayed(wire.Parked, 2, 1)
        assert not await asyncio.to_thread(wait_gone, old)
        assert not controller.said(orders.Observed) and not controller.said(orders.RankExited)
        await stop(controller)

    assert bench.run(body, "deaf") == 0


def test_a_script_that_needs_its_rank_early_gets_preloaded_standbys(bench: Bench) -> None:
    async def body(node: Agent, controller: FakeController) -> None:
        await start(controller)
        await standby_ready(controller)
        assert not node.pool.members[0].at_join
        assert not controller.said(orders.Observed), "the end of a standby is no fault"
        await stop(controller)

    assert bench.run(body, "needs-rank") == 0


def test_a_new_controller_hears_where_all_stand_and_what_was_missed(bench: Bench) -> None:
    async def body(node: Agent, controller: FakeController) -> None:
        await start(controller)
        await controller.close()
        os.kill(rank_pid(node, 1), signal.SIGKILL)
        child = node.slots[1].child
        assert child is not None and await child.wait(30)
        other = FakeController(controller.run_dir)
        await other.listen()
        hello = (await other.wait(orders.AgentHello))[0]
        assert [(status.rank, status.state, status.joined) for status in hello.ranks] == [
            (0, "running", True),
            (1, "lost", True),
        ]
        again = await other.relayed(wire.Resumed, 2, 0)
        assert {message.rank for message in again} == {0, 1}, "the last words before the cut may have been lost"
        missed = await other.wait(orders.Observed)
        assert [message.signal.rank for message in missed] == [1]
        await stop(other)
        await other.close()

    assert bench.run(body) == 0


def test_an_exit_code_of_zero_is_an_exit_and_any_other_a_fault(bench: Bench) -> None:
    async def body(node: Agent, controller: FakeController) -> None:
        await start(controller)
        for slot in node.slots:
            assert slot.child is not None
            slot.child.send(wire.Stop(reason="go"))
        seen = await controller.wait(orders.Observed, count=2)
        assert {message.signal.payload["exit_code"] for message in seen} == {1}
        await stop(controller, 1)

    assert bench.run(body) == 1


def test_a_stopped_rank_is_named(bench: Bench) -> None:
    async def body(node: Agent, controller: FakeController) -> None:
        await start(controller)
        os.kill(rank_pid(node, 1), signal.SIGSTOP)
        seen = (await controller.wait(orders.Observed))[0]
        assert (seen.signal.source, seen.signal.rank) == ("step.hang", 1)
        assert "SIGSTOP" in str(seen.signal.payload["evidence"]) and seen.age_s > 0
        await stop(controller)

    assert bench.run(body, "beating") == 0


def test_a_stopped_rank_is_named_even_if_it_never_joined(bench: Bench) -> None:
    async def body(node: Agent, controller: FakeController) -> None:
        await controller.wait(orders.AgentHello)
        await controller.send(orders.Start(generation=0, assignments=assignments(2, 0)))
        await controller.wait(orders.Beat, lambda message: len(message.versions) == 2)
        os.kill(rank_pid(node, 0), signal.SIGSTOP)
        assert (await controller.wait(orders.Observed))[0].signal.rank == 0
        await stop(controller)

    assert bench.run(body, "unaware") == 0


def test_a_rank_stuck_in_its_own_code_is_named(bench: Bench) -> None:
    async def body(node: Agent, controller: FakeController) -> None:
        await start(controller)
        seen = await controller.wait(orders.Observed, count=2)
        assert {message.signal.rank for message in seen} == {0, 1}
        assert "stuck in its own code" in str(seen[0].signal.payload["evidence"])
        await stop(controller)

    assert bench.run(body, "beating", "stuck", settings=Settings(hang_floor_s=0.5)) == 0


def test_a_rejected_agent_ends_its_processes(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    pids: list[int] = []

    async def body(node: Agent, controller: FakeController) -> None:
        await start(controller)
        pids.extend((rank_pid(node, 0), rank_pid(node, 1)))
        await controller.send(orders.Rejected(reason="another job"))

    assert bench.run(body) == 1
    assert not wait_gone(pids)
    assert "another job" in capfd.readouterr().err


def test_virtual_local_rank_shows_each_rank_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert virtual_device(3) == {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 7")
    assert virtual_device(1) == {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "7"}
