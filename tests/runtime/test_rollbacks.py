"""The controller and a rank whose training goes wrong: what the ranks are told, and that it survives the controller."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from test_controller import play, training

from rerail.config import Settings
from rerail.flow import Rung
from rerail.runtime.fleet import Fleet
from rerail.runtime.intake import Intake
from rerail.runtime.orders import Beat, FormAll, InterruptAll, Shutdown
from rerail.runtime.plans import Healing
from rerail.runtime.rollbacks import Rollbacks
from rerail.runtime.wire import Unsound


def word(generation: int, version: int = 1) -> Unsound:
    return Unsound(generation=generation, version=version, what="loss", trusted=0, text="loss is nan in step 2")


def test_ranks_are_told_what_to_trust_and_what_to_leave_out_also_by_a_new_controller(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder, {"agent_back_s": 20.0}, slots=2) as (job, agent):
            await agent.say(1, word(0))
            (first,) = await job.reports(1)
            assert (first.rung, first.code) == (Rung.ROLL_BACK, "training.nan")
            assert (await agent.wait_for(InterruptAll)).interrupt.trusted == 0
            back = (await agent.wait_for(FormAll, count=2)).plan.back
            assert (back.trusted, back.watch, back.skips) == (0, 2, {})
            await agent.say(0, word(0))  # of a generation that is no more
            job.kill()
            await agent.hang_up()
            agent.port = await job.start()
            await agent.dial(ranks=agent.statuses())
            await job.reports(2)  # that the former controller was lost
            await agent.say(1, word(1))
            await job.reports(3)
            assert (await agent.wait_for(FormAll, count=3)).plan.back.skips == {1: 1}
            await agent.send(Beat(versions={0: 2, 1: 2}))
            await agent.say(1, word(2))
            stopped = await agent.wait_for(Shutdown)
            assert stopped.exit_code == 93 and "its data left out, and it went wrong all the same" in stopped.reason

    play(scenario, tmp_path)


@pytest.mark.parametrize("healing", [None, Healing(judge=1, loss=2.5, spread=0.25, target=20, until=46)])
def test_the_guard_of_a_repair_that_is_not_exact_survives_the_controller(healing: Healing | None) -> None:
    def remembering(fleet: Fleet) -> Rollbacks:
        return Rollbacks(fleet, Intake(fleet, "j", Settings(), several=False), Settings())

    former, newer = Fleet(), Fleet()
    former.healing = healing
    written = msgspec.json.decode(msgspec.json.encode(remembering(former).state()))
    remembering(newer).restore(written)
    assert newer.healing == healing


def test_a_word_of_a_generation_that_is_no_more_changes_nothing(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder, slots=2) as (job, agent):
            await agent.kill(0)
            await job.reports(1)
            await agent.say(1, word(0))
            await agent.kill(1)
            assert [report.rung for report in await job.reports(2)] == [Rung.REPLACE_RANK] * 2

    play(scenario, tmp_path)
