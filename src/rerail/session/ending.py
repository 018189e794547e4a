"""SIGTERM under torchrun or alone: the ranks agree on a step, save it, and end as they were told to.

Whoever is told first names a step that nobody can have passed and everybody still hears of in time: no rank completes a
step before all have begun it. torchrun also ends the others this way when one has failed; that step is then never
reached, and the process ends a moment later. Under `rerail run` the launcher sees to all this. Called by `session.job`.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from types import FrameType

from rerail.session.c10d import TCPStore

LOOK_S, LOOKERS = 0.15, 512
"""Seconds between two looks for a word from another rank; for more ranks than that it takes longer, to spare the store."""
HEARD = 3
"""Looks after which a word has surely reached all."""
LATE_S, LATE_STEPS = 5.0, 3
"""Seconds, or steps of the usual length, after which the step that was named will not be reached any more."""
_DIAL = timedelta(seconds=30)


class Ending:
    """Whether, and at which version, this process is to end."""

    def __init__(self, rank: int, world_size: int, durations: Sequence[float]) -> None:
        self._rank, self._world_size, self._durations = rank, world_size, durations
        self._key = ""
        self._told = False
        self._at = -1
        self._look_s = LOOK_S * max(1.0, world_size / LOOKERS)
        self._store: TCPStore | None = None
        self._bell: socket.socket | None = None
        self._over = self._said = False
        self._listener: threading.Thread | None = None

    def watch(self, epoch: int) -> None:
        """From now on a SIGTERM ends this process only when its state is safe, unless the script has plans of its own."""
        in_main = threading.current_thread() is threading.main_thread()
        if not in_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            return
        if self._world_size > 1:
            try:
                self._store = self._dial()
            except (RuntimeError, ValueError, KeyError):  # no store, no agreement: it ends at once, as it always did
                return
        heard, self._bell = socket.socketpair()
        self._bell.setblocking(False)
        other = signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)
        if other != -1:  # an event loop sees to the signals of this process
            signal.set_wakeup_fd(other)
            return
        self._key = f"rerail/end-at/{epoch}"
        self._listener = threading.Thread(
            target=self._listen, args=(heard, self._store), name="rerail-ending", daemon=True
        )
        self._listener.start()
        atexit.register(self.unwatch)  # a thread inside of torch when the interpreter ends would abort the process
        signal.signal(signal.SIGTERM, self._on_signal)

    def unwatch(self) -> None:
        """The loop is over."""
        if self._listener is None or self._bell is None:
            return
        self._over = True
        with contextlib.suppress(OSError):  # it rings already, or nobody listens any more
            self._bell.send(b"\0")
        self._listener.join()
        self._listener = None
        atexit.unregister(self.unwatch)
        signal.set_wakeup_fd(-1)
        self._bell.close()
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def due(self, version: int) -> bool:
        """Between two steps: whether this is the version to be saved, and the end."""
        if self._told and self._at < 0:
            self._at = self._agreed(version)
        if self._at >= 0 and self._rank == 0 and not self._said:
            self._said = True
            print(f"rerail: told to end: step {self._at} will be saved first", file=sys.stderr, flush=True)
        if not 0 <= self._at <= version:
            return False
        self.unwatch()
        return True

    def end(self) -> None:
        """As the signal would have done it."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _agreed(self, version: int) -> int:
        if self._store is None:
            return version
        ahead = max(1, math.ceil(HEARD * self._look_s / self._step_s)) if self._step_s else 1
        try:
            return int(self._store.compare_set(self._key, "", str(version + ahead)))
        except RuntimeError:
            return version  # the store is gone, and with it whoever started the job

    @property
    def _step_s(self) -> float:
        return statistics.median(self._durations) if self._durations else 0.0

    def _listen(self, bell: socket.socket, store: TCPStore | None) -> None:
        """Hears of the others' word, and sees that a process which was told to end does so, whatever it is stuck in."""
        late = math.inf
        bell.settimeout(self._look_s)
        while not self._over:
            with contextlib.suppress(TimeoutError):
                if signal.SIGTERM in bell.recv(64) and late == math.inf:
                    late = time.monotonic() + max(LATE_S, LATE_STEPS * max(self._step_s, HEARD * self._look_s))
            if time.monotonic() >= late:
                os._exit(128 + signal.SIGTERM)
            if store is not None and self._at < 0:
                try:
                    if store.check([self._key]):
                        self._at = int(store.get(self._key))
                except ValueError:
                    continue  # somebody is just writing it
                except RuntimeError:
                    store = None  # the job is over
        bell.close()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._told:
            self.end()  # a second time: at once
        self._told = True

    @staticmethod
    def _dial() -> TCPStore:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return TCPStore(host, port, is_master=False, timeout=_DIAL)
