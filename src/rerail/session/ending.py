"""SIGTERM under torchrun or alone: the ranks agree on a step, save it, and end as they were told to.

Whoever is told first names a step that nobody can have passed and everybody still hears of in time: no rank completes a
step before all have begun it. Under `rerail run` the launcher sees to all this. Called by `session.job`.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from types import FrameType

from rerail.session.c10d import TCPStore

KEY = "rerail/end-at"
HEARD_S = 0.5
"""Seconds in which a word surely reaches all ranks."""
_FOREVER = timedelta(days=3650)
_DIAL = timedelta(seconds=30)


class Ending:
    """Whether, and at which version, this process is to end."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._told = False
        self._at = -1
        self._store: TCPStore | None = None

    def watch(self) -> None:
        """From now on a SIGTERM ends this process only when its state is safe, unless the script has plans of its own."""
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        ):
            return
        if self._world_size > 1:
            try:
                self._store = self._dial()
                listener = self._dial()
            except (RuntimeError, ValueError, KeyError):  # no store, no agreement: it ends at once, as it always did
                return
            threading.Thread(target=self._listen, args=(listener,), name="rerail-ending", daemon=True).start()
        signal.signal(signal.SIGTERM, self._on_signal)

    def unwatch(self) -> None:
        """The loop is over."""
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def due(self, version: int, durations: Sequence[float]) -> bool:
        """Between two steps: whether this is the version to be saved, and the end."""
        if self._told and self._at < 0:
            self._at = self._agreed(version, durations)
            if self._rank == 0:
                print(f"rerail: told to end: step {self._at} will be saved first", file=sys.stderr, flush=True)
        return 0 <= self._at <= version

    def end(self) -> None:
        """As the signal would have done it."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _agreed(self, version: int, durations: Sequence[float]) -> int:
        if self._store is None:
            return version
        step_s = statistics.median(durations) if durations else 0.0
        ahead = max(1, math.ceil(HEARD_S / step_s)) if step_s else 1
        try:
            return int(self._store.compare_set(KEY, "", str(version + ahead)))
        except RuntimeError:
            return version  # the store is gone, and with it whoever started the job

    def _listen(self, store: TCPStore) -> None:
        try:
            store.wait([KEY], _FOREVER)
            self._at = int(store.get(KEY))
        except RuntimeError:
            pass  # the job is over

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._told:
            self.end()  # a second time: at once
        self._told = True

    @staticmethod
    def _dial() -> TCPStore:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return TCPStore(host, port, is_master=False, timeout=_DIAL)
