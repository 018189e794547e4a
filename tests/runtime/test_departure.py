"""A job that is asked to end: its ranks keep the version they are at before they are ended, and nothing holds that up for long."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from test_controller import play, training

from rerail.runtime.departure import LIMIT_S
from rerail.runtime.orders import FormAll, InterruptAll, LeaveJob, Shutdown
from rerail.runtime.wire import Unsound

WISH = LeaveJob(reason="stopped by SIGTERM", exit_code=143)


def test_all_ranks_keep_what_they_hold_at_one_version_and_are_ended_then(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder, slots=2) as (job, agent):
            await job.trained()
            await agent.send(WISH, WISH)  # every node of a cluster is told
            assert (await agent.wait_for(InterruptAll)).ranks == (0, 1)
            plan = (await agent.wait_for(FormAll, count=2)).plan
            assert plan.leaving and plan.generation == 1
            ended = await agent.wait_for(Shutdown)
            assert (ended.exit_code, ended.reason) == (143, "stopped by SIGTERM")
            assert not await job.reports(0), "to be asked to end is no fault"

    play(scenario, tmp_path)


def test_what_was_not_to_be_trusted_long_ago_is_over(tmp_path: Path) -> None:
    """All went back once: snapshots and checkpoints of later steps are as good as any when the job is asked to end."""

    async def scenario(folder: Path) -> None:
        async with training(folder, slots=2) as (job, agent):
            await job.trained()
            word = Unsound(generation=0, version=1, what="loss", trusted=0, text="loss is nan in step 2")
            await agent.say(1, word)
            await job.reports(1)
            assert (await agent.wait_for(InterruptAll)).interrupt.trusted == 0
            await agent.send(WISH)
            assert (await agent.wait_for(InterruptAll, count=2)).interrupt.trusted == -1
            plan = (await agent.wait_for(FormAll, count=3)).plan
            assert plan.leaving and plan.back.trusted == -1
            await agent.wait_for(Shutdown)

    play(scenario, tmp_path)


def test_a_first_plan_is_not_one_to_leave_by(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder, slots=2) as (job, agent):
            assert not (await agent.wait_for(FormAll)).plan.leaving
            await agent.kill(1)
            await job.reports(1)
            assert not (await agent.wait_for(FormAll, count=2)).plan.leaving

    play(scenario, tmp_path)


@pytest.mark.parametrize("what", ["a rank dies", "a rank does not park"])
def test_whoever_does_not_take_part_is_not_waited_for(tmp_path: Path, what: str) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder, slots=2) as (job, agent):
            await job.trained()
            agent.holding = {1}
            began = time.monotonic()
            await agent.send(WISH)
            await agent.wait_for(InterruptAll)
            if what == "a rank dies":
                await agent.kill(1)
            async with asyncio.timeout(2 * LIMIT_S + 30):
                assert (await agent.wait_for(Shutdown)).exit_code == 143
            if what == "a rank dies":
                assert time.monotonic() - began < LIMIT_S, "it was waited for"

    play(scenario, tmp_path)


def test_a_script_that_knows_nothing_of_rerail_is_ended_at_once(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder, slots=2, aware=False) as (_, agent):
            await agent.send(WISH)
            assert (await agent.wait_for(Shutdown)).exit_code == 143
            assert not [one for one in agent.got if isinstance(one, InterruptAll)]

    play(scenario, tmp_path)
