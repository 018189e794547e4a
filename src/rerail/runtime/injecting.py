"""Carries out orders to break something (`rerail inject`) on one node, and tells the controller what was done.

What a signal can do to a rank, and what concerns the machine (`runtime.breaking`), is done here; what must happen inside a
step is passed on to the rank (`session.injected`). Called by `runtime.agent`. Without --allow-inject nothing is done.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence

from rerail.runtime import breaking, processes
from rerail.runtime.breaking import Broken, Refused
from rerail.runtime.children import Child
from rerail.runtime.injections import DONE, KINDS, NOT_ALLOWED, OVER, REFUSED, Where
from rerail.runtime.slots import Slot
from rerail.runtime.wire import Inject, Injected

AGAIN_S = 0.1
"""Seconds between two cuts of a network that stays cut."""
JOINING_S = 60.0
"""Seconds in which a script may yet come to rerail.join()."""
NO_STEPS = "nothing can be done inside its steps; kill, stop, term and segv work on every script"
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}

Payload = dict[str, str | int | float | bool]
Tell = Callable[[str, Slot | None, Payload], object]


class Injector:
    """The orders of one node."""

    def __init__(self, slots: Sequence[Slot], tell: Tell, *, allowed: bool) -> None:
        self._slots, self._tell_controller, self._allowed = slots, tell, allowed
        self._tasks: set[asyncio.Task[None]] = set()
        self._passed_on: dict[str, Inject] = {}

    def order(self, order: Inject) -> None:
        """Begin to carry it out; never waits."""
        task = asyncio.get_running_loop().create_task(self._carry_out(order), name=order.id)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def answered(self, slot: Slot, message: Injected) -> None:
        """A rank tells what became of an order."""
        order = self._passed_on.get(message.order)
        if order is not None:
            self._tell(message.source, order, slot, message.text)

    async def _carry_out(self, order: Inject) -> None:
        about = None
        try:
            kind = KINDS.get(order.kind)
            if not self._allowed or kind is None:
                raise Refused(NOT_ALLOWED if kind is not None else f"this node's rerail knows no kind {order.kind!r}")
            await asyncio.sleep(order.after_s)
            slot = self._slot(order.rank, needed=kind.where is not Where.NODE)
            about = None if kind.where is Where.NODE else slot
            if kind.where is Where.STEP:
                self._pass_on(order, slot)
            elif order.kind in SIGNALS:  # without a thread: the news of it must come before the news of the rank's end
                await self._last(order, about, _signalled(slot, SIGNALS[order.kind]))
            else:
                await self._last(order, about, await asyncio.to_thread(self._break, order, slot))
        except Refused as refusal:
            self._tell(REFUSED, order, about, str(refusal))
        except Exception as error:  # whoever asked waits for a word, and the agent is not to be hurt by what was asked
            self._tell(REFUSED, order, about, f"{type(error).__name__}: {error}")

    async def _last(self, order: Inject, slot: Slot | None, broken: Broken) -> None:
        self._tell(DONE, order, slot, broken.text)
        if broken.undo is None or not order.for_s:
            return
        end = time.monotonic() + order.for_s
        try:
            while broken.again is not None and time.monotonic() < end:
                await asyncio.sleep(AGAIN_S)
                await asyncio.to_thread(broken.again)
            await asyncio.sleep(max(0.0, end - time.monotonic()))
        finally:  # also when the agent ends first
            broken.undo()
        self._tell(OVER, order, slot, f"over after {order.for_s:g} s")

    def _break(self, order: Inject, slot: Slot) -> Broken:
        """In a thread: some of it takes its time."""
        match order.kind:
            case "network-cut":
                return breaking.network_cut(_process(slot).pid, order.port)
            case "kernel-log":
                return breaking.kernel_log(order.line)
            case "device-lost":
                return breaking.device_lost(slot.local_rank)
            case "disk-full":
                return breaking.disk_full(order.folder, order.max_size)
            case "slow-disk":
                pids = [one.child.pid for one in self._slots if one.running and one.child is not None]
                return breaking.slow_disk(order.folder, pids, _is_ours)
            case "corrupt-checkpoint":
                return breaking.corrupt_checkpoint(order.folder, order.seed)
        raise Refused(f"nobody knows how to do {order.kind}")

    def _pass_on(self, order: Inject, slot: Slot) -> None:
        if not slot.joined or not slot.replaceable:
            raise Refused(self._no_steps(slot))
        if order.kind == "oom":
            breaking.check_memory(_process(slot).pid, order.max_size)
        self._passed_on[order.id] = order
        _process(slot).send(order)

    def _no_steps(self, slot: Slot) -> str:
        """Why nothing can be done inside this rank's steps: never, or not yet."""
        who = f"the script of rank {slot.rank}"
        if slot.joined:
            return f"{who} made its process group before rerail.join(), so {NO_STEPS}"
        others = any(one.joined for one in self._slots)
        if others or slot.age_s < JOINING_S:
            since = "other ranks have" if others else f"it was started {slot.age_s:.0f} s ago"
            again = "try again when rerail status shows its first step"
            return f"{who} has not reached rerail.join() yet ({since}); {again}"
        return f"{who} has not called rerail.join() within {slot.age_s:.0f} s; if it never does, {NO_STEPS}"

    def _slot(self, rank: int, *, needed: bool) -> Slot:
        for slot in self._slots:
            if slot.rank == rank and (slot.running or not needed):
                return slot
        raise Refused(f"rank {rank} has no process on this node at the moment")

    def _tell(self, source: str, order: Inject, slot: Slot | None, text: str) -> None:
        payload: Payload = {"order": order.id, "kind": order.kind, "seed": order.seed, "message": text}
        for name in ("after_s", "for_s"):
            if getattr(order, name):
                payload[name] = getattr(order, name)
        self._tell_controller(source, slot, payload)


def _process(slot: Slot) -> Child:
    assert slot.child is not None, "a slot with a rank has a process"
    return slot.child


def _signalled(slot: Slot, signum: signal.Signals) -> Broken:
    child = _process(slot)
    os.kill(child.pid, signum)

    def undo() -> None:
        if child.alive:
            processes.signal_process(child.pid, signal.SIGCONT)

    text = f"sent {signum.name} to rank {slot.rank} (pid {child.pid})"
    return Broken(text, undo if signum is signal.SIGSTOP else None)


def _is_ours(pid: int) -> bool:
    """A rank or what it has started, this agent, or the launcher and controller around it."""
    launcher = int(os.environ.get("RERAIL_LAUNCHER", os.getppid()))
    return pid in (launcher, os.getpid()) or pid in processes.descendants(launcher)
