from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import psutil
import pytest
from node_helpers import gone, standin, wait_gone

from rerail.runtime import processes
from rerail.runtime.children import Child, Mode, end_all
from rerail.runtime.slots import Slot
from rerail.runtime.wire import Assign, FromRank, Joined, Parked, Warm


class Heard:
    """What a child has said, awaitable."""

    def __init__(self, child: Child) -> None:
        self.messages: asyncio.Queue[FromRank] = asyncio.Queue()
        child.on_message = lambda _, message: self.messages.put_nowait(message)

    async def next(self) -> FromRank:
        return await asyncio.wait_for(self.messages.get(), 30)


def with_child(body: Callable[[Child, Heard], Awaitable[None]], *words: str, mode: Mode = Mode.PRELOAD) -> None:
    async def main() -> None:
        child = Child.spawn(standin(*words), mode)
        try:
            await body(child, Heard(child))
        finally:
            child.kill()
            await child.wait(20)
            child.stdout.close()
            child.stderr.close()

    asyncio.run(main())


async def become_rank(child: Child, heard: Heard, slot: Slot) -> None:
    assert isinstance(await heard.next(), Warm)
    child.assign(Assign(generation=0, rank=3, world_size=4, newcomer=False), slot.memory)


def test_a_child_becomes_a_rank_and_gets_its_memory() -> None:
    async def body(child: Child, heard: Heard) -> None:
        slot = Slot(0)
        await become_rank(child, heard, slot)
        joined, parked = await heard.next(), await heard.next()
        assert isinstance(joined, Joined) and joined.rank == 3
        assert isinstance(parked, Parked)
        slot.clock.read()

    with_child(body)


def test_a_script_standby_says_that_it_waits_at_join() -> None:
    async def body(child: Child, heard: Heard) -> None:
        warm = await heard.next()
        assert isinstance(warm, Warm) and warm.at_join

    with_child(body, mode=Mode.SCRIPT)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_the_end_is_seen_with_its_signal_after_the_last_message(signum: signal.Signals) -> None:
    async def body(child: Child, heard: Heard) -> None:
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        child.on_exit = lambda each: ended.set_result(heard.messages.qsize())
        await become_rank(child, heard, Slot(0))
        await heard.next()
        os.kill(child.pid, signum)
        await asyncio.wait_for(ended, 30)
        assert child.exit_status == -signum and not child.alive

    with_child(body)


def test_a_disowned_child_falls_silent_and_leaves() -> None:
    async def body(child: Child, heard: Heard) -> None:
        child.on_exit = lambda each: pytest.fail("the end of a disowned child is nobody's business")
        await become_rank(child, heard, Slot(0))
        child.disown()
        assert await child.wait(30)

    with_child(body)


def test_a_rank_that_ignores_sigterm_is_killed_after_its_grace() -> None:
    async def body(child: Child, heard: Heard) -> None:
        await become_rank(child, heard, Slot(0))
        await heard.next()
        await end_all([child], grace_s=0.2)
        assert child.exit_status == -signal.SIGKILL

    with_child(body, "deaf")


def test_a_stopped_rank_hears_sigterm() -> None:
    async def body(child: Child, heard: Heard) -> None:
        await become_rank(child, heard, Slot(0))
        await heard.next()
        os.kill(child.pid, signal.SIGSTOP)
        await end_all([child], grace_s=20)
        assert child.exit_status == -signal.SIGTERM

    with_child(body)


def test_grandchildren_go_too_even_from_a_session_of_their_own() -> None:
    async def body(child: Child, heard: Heard) -> None:
        await become_rank(child, heard, Slot(0))
        await heard.next()
        below = processes.descendants(child.pid)
        assert len(below) == 2
        await end_all([child], grace_s=0)
        assert not wait_gone(below)

    with_child(body, "grandchild")


def test_a_crash_takes_its_own_group_along() -> None:
    async def body(child: Child, heard: Heard) -> None:
        await become_rank(child, heard, Slot(0))
        await heard.next()
        own_group = [pid for pid in processes.descendants(child.pid) if os.getpgid(pid) == child.pid]
        others = [pid for pid in processes.descendants(child.pid) if pid not in own_group]
        os.kill(child.pid, signal.SIGKILL)
        assert await child.wait(30)
        assert own_group and not wait_gone(own_group)
        for pid in others:
            os.kill(pid, signal.SIGKILL)

    with_child(body, "grandchild")


def test_orphans_are_known_by_their_mark() -> None:
    async def body(child: Child, heard: Heard) -> None:
        await become_rank(child, heard, Slot(0))
        await heard.next()
        marks: set[str | None] = {None}
        while None in marks:  # a process that is just being started has no environment for a moment
            await asyncio.sleep(0.01)
            marks = {processes.mark_of(pid) for pid in processes.descendants(child.pid)}
        assert marks == {child.mark}
        assert processes.mark_of(os.getpid()) is None

    with_child(body, "grandchild")


def test_a_child_that_breaks_the_protocol_is_ended() -> None:
    async def main() -> None:
        spec = standin()
        code = "import os; os.write(int(os.environ['RERAIL_LINK_FD']), b'\\xff' * 64); import time; time.sleep(300)"
        child = Child.spawn(type(spec)(command=(spec.command[0], "-c", code), env=spec.env), Mode.PRELOAD)
        assert await child.wait(30)
        assert child.exit_status == -signal.SIGKILL

    asyncio.run(main())


def test_a_lowered_priority_is_raised_with_the_assignment() -> None:
    if not processes.may_undo_nice():
        pytest.skip("this user may not raise a priority again, and then it is never lowered")

    async def main() -> None:
        child = Child.spawn(standin(), Mode.PRELOAD, nice=10)
        assert psutil.Process(child.pid).nice() == 10
        child.assign(Assign(generation=0, rank=0, world_size=1, newcomer=False), Slot(0).memory)
        assert psutil.Process(child.pid).nice() == 0
        child.kill()
        assert await child.wait(30)
        assert gone(child.pid)

    asyncio.run(main())


def test_a_replaced_child_that_was_collected_with_the_orphans_has_ended_too() -> None:
    """Its end is seen once, not over and over: the descriptor that tells it must be let go of."""

    async def body(child: Child, heard: Heard) -> None:
        child.disown()
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)  # as `end_orphans` does, ahead of the loop
        assert await child.wait(20) and not child.alive

    with_child(body)
