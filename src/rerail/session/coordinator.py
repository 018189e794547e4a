"""Does other work in the moments in which this rank waits, and stops as soon as it need not wait any more.

    pipeline bubbles, collectives, data, the device  ->  waiting.idle.since  ->  one bit of the work, and look again

A bit takes about a millisecond, far less than a micro-batch. The thread takes no more than a share of one CPU, its looks included, however
long the rank waits: where ranks share cores, one that waits is not the only one that wants them. Used by `session.foretelling`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

from rerail.session.waiting import Idle, idle

LOOK_S = 0.002
"""Between two looks whether the rank waits, at least."""
LONG_S = 0.001
"""It is begun with when the rank has waited for so long: most waits are over before."""
MOST_S = 0.2
"""Seconds of a CPU that may be used at once."""
REST_S = 0.25


class _Account:
    """What a thread may use of a CPU, and what it has used. What was not used is kept, up to a limit."""

    def __init__(self, share: float) -> None:
        self._share, self._left = share, MOST_S
        self._at, self.used_s = time.monotonic(), time.thread_time()

    def left(self) -> float:
        """Seconds."""
        now, used = time.monotonic(), time.thread_time()
        self._left = min(MOST_S, self._left + self._share * (now - self._at)) - (used - self.used_s)
        self._at, self.used_s = now, used
        return self._left


class Coordinator:
    """One thread, which is there from the first work on."""

    def __init__(self, share: float, slots: Idle = idle) -> None:
        self._share, self._slots = share, slots
        self._lock = threading.Lock()
        """Held while a bit is done."""
        self._work: Iterator[None] | None = None
        self._there = threading.Event()
        self._thread: threading.Thread | None = None
        self.bits = 0
        self.used_s = 0.0
        """Seconds of a CPU."""
        self.problem: Exception | None = None

    def give(self, work: Iterator[None]) -> None:
        """Do this from now on, bit by bit. What was under way is dropped."""
        with self._lock:
            self._work = work
        self._there.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rerail-coordinator", daemon=True)
            self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether there is work left."""
        return self._there.is_set()

    def paused(self) -> AbstractContextManager[object]:
        """No bit is done meanwhile; one that is under way is waited for."""
        return self._lock

    def _run(self) -> None:
        account = _Account(self._share)
        while True:
            self._there.wait()
            before = account.used_s
            while self._may_go_on() and account.left() > 0:
                self._one_bit()
            left = account.left()
            self.used_s = account.used_s
            # what a look costs is paid for by looking less often
            time.sleep(REST_S if left <= 0 else max(LOOK_S, (self.used_s - before) / max(self._share, 1e-6)))

    def _may_go_on(self) -> bool:
        since = self._slots.since
        return self._work is not None and since > 0 and time.monotonic() - since >= LONG_S

    def _one_bit(self) -> None:
        with self._lock:
            if self._work is None:
                return
            try:
                next(self._work)
                self.bits += 1
                return
            except StopIteration:
                pass
            except Exception as error:  # whatever it is, the training has nothing to do with it
                self.problem = error
            self._work = None
            self._there.clear()
