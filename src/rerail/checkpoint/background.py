"""A thread that does one thing at a time beside the training, and is waited for. Called by `checkpoint.staging` and `checkpoint.casting`."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable


def _nothing() -> None:
    """Where nothing is to be done."""


class Background:
    """The thread is there from the first task on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], Callable[[], None], object]] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.cpu_s = 0.0
        """Seconds of a CPU that the newest task took."""

    @property
    def busy(self) -> bool:
        return not self._idle.is_set()

    def begin(self, task: Callable[[], None], held: object = None, failed: Callable[[], None] = _nothing) -> None:
        """Do this. `held` is kept alive until it is done; `failed` is called if it raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._idle.clear()
        self._tasks.put((task, failed, held))

    def wait(self) -> None:
        """Until it is done."""
        if not self._idle.is_set():
            self._idle.wait()

    def taken_error(self) -> BaseException | None:
        """What the newest task raised, told once."""
        error, self._error = self._error, None
        return error

    def _work(self) -> None:
        while True:
            task, failed, held = self._tasks.get()
            started = time.thread_time()
            try:
                task()
            except BaseException as error:
                self._error = error
                failed()
            del task, failed, held
            self.cpu_s = time.thread_time() - started
            self._idle.set()
