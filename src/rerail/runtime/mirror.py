"""Looks at the step clock pages of a node's ranks and tells the controller what is new, so that a rank can be rebuilt elsewhere.

Only in jobs of several nodes, or with spare devices. Called by `runtime.agent`; what is told is kept by `runtime.pages`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rerail.runtime.orders import Kept
from rerail.runtime.slots import Slot
from rerail.runtime.uplink import Uplink

LOOK_S = 0.02
"""Seconds between two looks. A successor can run out the step behind the one it was left: later than that is too late."""


class Mirror:
    """The agent's side: what has been told of each rank."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[int, int, bytes]] = {}
        """By rank: process, version, and the part of the small state that seldom changes."""
        self._heard: dict[int, tuple[int, int]] = {}
        """By rank: process and number of records."""

    async def run(self, slots: Sequence[Slot], uplink: Uplink) -> None:
        """Look again and again. What is new waits for what is still unsaid."""
        while True:
            await asyncio.sleep(LOOK_S)
            if uplink.idle:
                for kept in self.news(slots):
                    uplink.send(kept)

    def forget(self) -> None:
        """The controller may be a new one, that has heard nothing."""
        self._told.clear()
        self._heard.clear()

    def news(self, slots: Sequence[Slot]) -> list[Kept]:
        """What the ranks of these slots have left since the last time."""
        return [kept for slot in slots if slot.joined and not slot.beside for kept in self._of(slot)]

    def _of(self, slot: Slot) -> list[Kept]:
        pid = slot.child.pid if slot.child is not None else 0
        newest = slot.clock.newest_small()
        before, version, rest = self._told.get(slot.rank, (0, -1, b""))
        if newest < 0 or (before == pid and version == newest):
            return []
        found = slot.clock.read_small().get(newest)
        if found is None:
            return []  # it is being written
        same = before == pid and found[1] == rest
        self._told[slot.rank] = pid, newest, found[1]
        small = Kept(rank=slot.rank, version=newest, body=found[0], rest=None if same else found[1])
        return [small, *self._heard_of(slot, pid)]

    def _heard_of(self, slot: Slot, pid: int) -> list[Kept]:
        if slot.newcomer or not slot.formed:
            return []  # it heard what its predecessor did
        known = self._heard.get(slot.rank, (0, 0))
        if known[0] == pid and known[1] and slot.resumed:
            return []
        records = slot.clock.read_heard()
        if (pid, len(records)) == known:
            return []
        self._heard[slot.rank] = pid, len(records)
        return [Kept(rank=slot.rank, heard=records)]
