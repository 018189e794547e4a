"""Keeps warm processes ready and hands out the best one: spawns, grades, upgrades and refills them.

One warms at a time and at low priority, so that training does not feel it. Where ranks are lost faster than standbys get warm, one
more is held for a while. Called by `runtime.agent`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rerail.runtime.children import STANDBY_NICE, Child, ChildSpec, Mode
from rerail.runtime.processes import may_undo_nice, say
from rerail.runtime.wire import FromRank, Warm

MAX_FAILURES = 3
"""Standbys that may die one after the other before no more are tried until the next recovery."""
BACK_OFF_S = 1.0
MORE_FOR_S = 3600.0
"""How long one more is held after a rank had to wait for one: faults come in crowds, and each standby has the memory of a torch."""


class StandbyPool:
    """Processes that are nobody yet."""

    def __init__(self, spec: ChildSpec, wanted: int, changed: Callable[[], None]) -> None:
        self._spec = spec
        self._least = wanted
        self._more_until = 0.0
        self._refilled = False
        self._changed = changed
        self._children: list[Child] = []
        self._nice = STANDBY_NICE if may_undo_nice() else 0
        self._failures = 0
        self._script_works = True
        self._script_proven = False
        """A standby has reached rerail.join() by itself: the script does not need its rank before."""
        self._script_mode = False
        self._closed = False

    def prepare(self, count: int) -> None:
        """Start the processes that become the job's first ranks, at once and at full priority."""
        for _ in range(count):
            self._spawn(Mode.PRELOAD, nice=0)

    @property
    def members(self) -> list[Child]:
        return list(self._children)

    def counts(self) -> tuple[int, int]:
        """Warm ones, and those on their way."""
        ready = sum(child.warm for child in self._children)
        return ready, len(self._children) - ready

    def take(self, *, awaited: bool = False) -> Child:
        """The process that will be a working rank soonest: at join, preloaded, warming, or a new one.

        Where others wait for it in the middle of the training and none was warm, there will be one more of them.
        """
        usable = [child for child in self._children if child.alive and self._usable(child)]
        if not usable:
            self._spawn(Mode.PRELOAD, nice=0)
            usable = self._children[-1:]
        best = max(usable, key=_grade)
        if awaited and self._refilled and not best.warm:
            self._hold_more()
        self._children.remove(best)
        self._failures = 0
        self._changed()
        return best

    def refill(self, *, script_mode: bool) -> None:
        """Bring the pool up to its size. Called whenever the job is calm; does nothing when nothing is to do."""
        self._script_mode = self._script_mode or script_mode
        if self._closed or self._failures >= MAX_FAILURES or any(not child.warm for child in self._children):
            return
        if self._refilled and len(self._children) > self.wanted:
            self._retire_surplus()
        mode = Mode.SCRIPT if self._script_mode and self._script_works else Mode.PRELOAD
        good_enough = [child for child in self._children if mode is Mode.PRELOAD or child.at_join]
        if len(good_enough) < self.wanted:
            self._refilled = True
            self._spawn(mode, self._nice)
            self._changed()

    @property
    def wanted(self) -> int:
        """How many are to be warm."""
        return self._least + (time.monotonic() < self._more_until)

    def _hold_more(self) -> None:
        if self._least and time.monotonic() >= self._more_until:
            say(f"a rank had to be replaced before a standby was warm: {self._least + 1} are kept for the next hour")
        self._more_until = time.monotonic() + MORE_FOR_S if self._least else 0.0

    def close(self) -> list[Child]:
        """No more standbys; returns those to be ended."""
        self._closed = True
        children, self._children = self._children, []
        for child in children:
            child.disown(hang_up=False)
        return children

    def _usable(self, child: Child) -> bool:
        # A script on its way to join() for the first time may need its rank earlier than that, and would die of it.
        return child.warm or child.mode is Mode.PRELOAD or self._script_proven

    def _spawn(self, mode: Mode, nice: int) -> None:
        child = Child.spawn(self._spec, mode, nice)
        child.on_message = self._heard
        child.on_exit = self._lost
        self._children.append(child)

    def _heard(self, child: Child, message: FromRank) -> None:
        if not isinstance(message, Warm):
            return
        child.warm, child.at_join = True, message.at_join
        self._script_proven = self._script_proven or message.at_join
        self._failures = 0
        if message.at_join:
            self._retire_surplus()
        self._changed()

    def _retire_surplus(self) -> None:
        """A better one has become ready: the lowest grades above the wanted size go."""
        surplus = sorted(self._children, key=_grade)[: max(0, len(self._children) - self.wanted)]
        for child in surplus:
            self._children.remove(child)
            child.disown()
            child.kill()

    def _lost(self, child: Child) -> None:
        """A standby's end is no fault of the job."""
        if child not in self._children:
            return
        self._children.remove(child)
        if child.mode is Mode.SCRIPT and not child.warm and not self._script_proven:
            # Most likely it reads RANK or the like before join(); a preloaded process serves such a script.
            self._script_works = False
        else:
            self._failures += 1
            if self._failures == MAX_FAILURES:
                say(f"{MAX_FAILURES} standbys have ended one after the other; none is kept. {_last_words(child)}")
        self._changed()
        if not self._closed:
            asyncio.get_running_loop().call_later(BACK_OFF_S * self._failures, self._changed)


def _grade(child: Child) -> int:
    return 2 * child.at_join + child.warm


def _last_words(child: Child) -> str:
    words = child.stderr.tail()
    return f"The last one said:\n{words}" if words else f"The last one ended with status {child.exit_status}."
