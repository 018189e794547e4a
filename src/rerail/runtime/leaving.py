"""The end of a node: turns running ranks and standbys into nothing, in good order. Called by `runtime.agent`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rerail.runtime.children import end_all
from rerail.runtime.slots import Slot
from rerail.runtime.standbys import StandbyPool
from rerail.runtime.wire import Stop

LOOK_S = 0.2
LEAVE_S = 8.0
"""Seconds to wait for the controller's answer to LeaveJob; as long as it can be reached."""
STOP_S = 1.0
"""Seconds a rank that knows rerail has to leave by itself, so that the culprit can show its traceback."""


def unless_answered(connected: Callable[[], bool], end: Callable[[], None]) -> None:
    """The controller has been asked to end the job: end this node alone if it is gone, or does not answer in time."""
    loop = asyncio.get_running_loop()
    until = loop.time() + LEAVE_S

    def look() -> None:
        if not connected() or loop.time() >= until:
            end()
        else:
            loop.call_later(LOOK_S, look)

    loop.call_later(LOOK_S, look)


async def end_node(
    slots: Sequence[Slot], pool: StandbyPool, reason: str, culprit: int, grace_s: float, end_orphans: Callable[[], int]
) -> None:
    """Stop, SIGTERM, grace, SIGKILL with all below. `end_orphans` gives the number of those it found."""
    standbys = pool.close()
    for child in standbys:
        child.kill()
    ranks = [slot.child for slot in slots if slot.child is not None and slot.child.alive]
    polite = [slot for slot in slots if slot.running and slot.joined]
    for slot in polite:
        assert slot.child is not None, "a running slot has a process"
        slot.child.send(Stop(reason=reason, culprit=slot.rank == culprit))
    if polite and grace_s > 0:
        await asyncio.gather(*(slot.child.wait(min(STOP_S, grace_s)) for slot in polite if slot.child))
    await end_all([child for child in ranks if child.alive], grace_s)
    await end_all(standbys, 0.0)
    for _ in range(100):
        if not end_orphans():
            break
        await asyncio.sleep(0.02)
    for child in (*ranks, *(slot.child for slot in slots if slot.child is not None)):
        child.close_output()
