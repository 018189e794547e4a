"""Waits for gloo's collectives such that the waiter can always be freed.

When a connection ends, gloo tells the buffers it has not begun with. One that is half sent or half received is
forgotten, and whoever waits for it waits until the group's timeout. So nobody here waits inside gloo for good: when the
wires are cut, closed and quiet, the rest is left behind. Called by `session.groups`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

LOOK_EVERY_S = 0.1
QUIET_LOOKS = 3
"""So many looks in a row must find gloo's threads asleep before a collective is left behind."""
LEAVE_AFTER_S = 10.0
"""A cut connection that gloo does not even close is blocked by a buffer that is gone: nothing comes from it any more."""
_SLICE = timedelta(seconds=LOOK_EVERY_S)
_LEFT = "a collective was left behind after its connections were cut"
_WORKER = "(pt_gloo_runloop"


class Idle:
    """How long this rank has waited for others, as far as Python sees it. Plain fields: they are written in every step."""

    seconds = 0.0
    """In collectives that were waited for here."""
    since = 0.0
    """When the training began to wait for whatever it waits for now; 0.0: it does not."""
    promised = 0.0
    """When the newest one began that torch waits for."""
    kept = 0.0
    """When the newest of those ended."""


idle = Idle()


class LeftBehind(RuntimeError):
    """The collective will not end by itself."""


class Stuck:
    """Asked at every look: is what this group still has under way stuck for good, and harmless?

    Harmless means that nothing can write into its tensors any more: the connections are closed, and none of the threads
    that copy and add is running.
    """

    def __init__(self, cut_at: Callable[[], float], closed: Callable[[], bool]) -> None:
        self._cut_at, self._closed = cut_at, closed
        self._quiet = 0

    def __call__(self) -> bool:
        cut_at = self._cut_at()
        if not cut_at:
            self._quiet = 0
            return False
        if time.monotonic() - cut_at >= LEAVE_AFTER_S:
            return True
        self._quiet = self._quiet + 1 if self._closed() and _workers_asleep() else 0
        return self._quiet >= QUIET_LOOKS


_Wait = Callable[[Any, timedelta | None, Callable[[], Stuck]], None]


def _counted(wait: _Wait, work: Any, timeout: timedelta | None, judge: Callable[[], Stuck]) -> None:
    """Wait, and count the time as waited for others."""
    began = idle.since = time.monotonic()
    try:
        wait(work, timeout, judge)
    finally:
        idle.since = 0.0
        idle.seconds += time.monotonic() - began


@contextlib.contextmanager
def idling() -> Iterator[None]:
    """The training waits for something else than its peers: its device, or its data."""
    idle.since = time.monotonic()
    try:
        yield
    finally:
        idle.since = 0.0


def wait(work: Any, timeout: timedelta | None, judge: Callable[[], Stuck]) -> None:
    """Wait for a collective that gloo's own threads carry out. RuntimeError when it broke or is stuck."""
    _counted(_wait, work, timeout, judge)


def _wait(work: Any, timeout: timedelta | None, judge: Callable[[], Stuck]) -> None:
    until = time.monotonic() + timeout.total_seconds() if timeout else 0.0
    stuck: Stuck | None = None
    while True:
        try:
            work.wait(_SLICE)
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # says how it ended: it may have been well, a moment after the slice was over
                return
            if until and time.monotonic() >= until:
                raise
        stuck = stuck or judge()
        if stuck():
            raise LeftBehind(_LEFT)


def wait_aside(work: Any, timeout: timedelta | None, judge: Callable[[], Stuck]) -> None:
    """Wait for what can only be waited for as a whole, such as a message: another thread does, and may be left."""
    _counted(_wait_aside, work, timeout, judge)


def _wait_aside(work: Any, timeout: timedelta | None, judge: Callable[[], Stuck]) -> None:
    aside: _Aside | None = getattr(_own, "aside", None)
    if aside is None:
        aside = _own.aside = _Aside()
    aside.works.put((work, timeout))
    stuck: Stuck | None = None
    while True:
        try:
            outcome = aside.outcomes.get(timeout=LOOK_EVERY_S)
        except queue.Empty:
            stuck = stuck or judge()
            if stuck():
                _own.aside = None
                raise LeftBehind(_LEFT) from None
            continue
        if outcome is not None:
            raise outcome
        return


class Group(Protocol):
    """Whose collective it is."""

    def stuck(self) -> Stuck: ...

    def broke(self, error: RuntimeError) -> None: ...


class Promises:
    """Futures for collectives. Each is kept exactly once: when gloo ends the collective, or when that is stuck."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[Any, list[torch.Tensor], Group]] = {}

    def promise(self, inner: Any, outputs: list[torch.Tensor], group: Group) -> Any:
        """A future that carries the tensors as they are where `inner` would carry an error."""
        own: Any = torch._C.Future([t.device for t in outputs if t.is_cuda])
        key = id(own)
        idle.promised = time.monotonic()
        self._open[key] = own, outputs, group
        inner.add_done_callback(partial(self._ended, key))
        return own

    def free(self, over: Callable[[], bool]) -> None:
        """After a cut: keep what gloo will not. Ends when the repair is `over`, or nothing more can be stuck."""
        until = time.monotonic() + LEAVE_AFTER_S + 1
        stuck: dict[int, Stuck] = {}
        while not over() and time.monotonic() < until:
            time.sleep(LOOK_EVERY_S)
            for key, (own, outputs, group) in list(self._open.items()):
                if stuck.setdefault(key, group.stuck())() and self._open.pop(key, None) is not None:
                    group.broke(LeftBehind(_LEFT))
                    own.set_result(outputs)

    def _ended(self, key: int, inner: Any) -> None:
        idle.kept = time.monotonic()
        own, value, group = self._open.pop(key, (None, [], None))
        if own is None or group is None:
            return
        try:
            value = inner.value()
        except RuntimeError as error:
            group.broke(error)
        own.set_result(value)


class _Aside:
    """A thread that waits in another's place."""

    def __init__(self) -> None:
        self.works: queue.SimpleQueue[tuple[Any, timedelta | None]] = queue.SimpleQueue()
        self.outcomes: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="rerail-wait", daemon=True).start()

    def _run(self) -> None:
        while True:
            work, timeout = self.works.get()
            try:
                work.wait(timeout) if timeout else work.wait()
                self.outcomes.put(None)
            except RuntimeError as error:
                self.outcomes.put(error)
            del work  # its tensors are not ours to keep


_own = threading.local()


def until_asleep(timeout: float) -> None:
    """Wait until gloo's threads have nothing left to do."""
    quiet, until = 0, time.monotonic() + timeout
    while quiet < QUIET_LOOKS and time.monotonic() < until:
        time.sleep(0.01)
        quiet = quiet + 1 if _workers_asleep() else 0


def _workers_asleep() -> bool:
    for task in Path("/proc/self/task").iterdir():
        try:
            name, _, rest = (task / "stat").read_text().rpartition(")")
        except OSError:
            continue  # ended meanwhile
        if _WORKER in name and rest.split(maxsplit=1)[0] not in "SI":
            return False
    return True
