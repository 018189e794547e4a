"""The rank's side of saving: starts the persister, sends it orders, and keeps count of what became of them.

A persister that dies is started again and given its open orders once more; a slot it was reading is free again by the
kernel's word. Called by `session.checkpoints`. Needs no torch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from rerail.checkpoint.persister import LONGEST
from rerail.checkpoint.saving import Order, Outcome
from rerail.checkpoint.stream import Stream

_outcome = msgspec.json.Decoder(Outcome)

STARTS = 3
"""Times that one order may take a persister down before it is given up."""
ENDS_S = 2.0
"""Seconds that a persister may take to end once its link is closed."""


class _Open(NamedTuple):
    """An order without an outcome."""

    order: Order
    starts: int
    """Persisters that have been given it."""
    stream: Stream | None


class Writer:
    """Orders under way, and the process that carries them out."""

    def __init__(self, arena_fd: int, on_outcome: Callable[[Outcome], None]) -> None:
        self._arena_fd = arena_fd
        self._on_outcome = on_outcome
        self._open: dict[int, _Open] = {}
        self._changed = threading.Condition()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._listener: threading.Thread | None = None

    @property
    def pinned(self) -> frozenset[int]:
        """Versions that are ordered and not yet saved: their slots must not be filled again."""
        with self._changed:
            return frozenset(self._open)

    @property
    def pid(self) -> int:
        """The persister's process id; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    def save(self, order: Order, stream: Stream | None = None) -> None:
        """Hand over an order: to save a sealed version, or what `stream` offers. Its outcome comes from another thread."""
        with self._changed:
            self._open[order.version] = _Open(order, 1, stream)
            self._send(order, stream)

    def wait(self, limit_s: float | None = None) -> bool:
        """Until every order has an outcome. False if that took longer than `limit_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, limit_s)

    def close(self, limit_s: float | None = None) -> bool:
        """Wait for what is under way, copies included, and let the persister go; another order starts another one.

        False if that took longer than `limit_s`: it then finishes by itself.
        """
        until = None if limit_s is None else time.monotonic() + limit_s
        self.wait(limit_s)
        with self._changed:
            link, self._link = self._link, None
        if link is not None:
            with contextlib.suppress(OSError):  # it died just now
                link.shutdown(socket.SHUT_WR)
        if self._listener is not None:
            self._listener.join(None if until is None else max(0.0, until - time.monotonic()))
        return self._listener is None or not self._listener.is_alive()

    def kill(self) -> None:
        """End a persister that hangs: what it was to do is tried again by another, as often as for one that dies."""
        process = self._process
        if process is not None:
            process.kill()

    def _send(self, order: Order, stream: Stream | None) -> None:
        if self._link is None:
            try:
                self._start()
            except OSError as error:
                self._settle(Outcome(version=order.version, ok=False, notes=(f"no persister could start: {error}",)))
                return
        assert self._link is not None, "it was made above"
        data = [msgspec.json.encode(order)]
        with contextlib.suppress(OSError):  # it died just now: the listening thread starts another and sends this again
            if stream is None:
                self._link.sendmsg(data)
            else:
                with stream.connect() as theirs:
                    socket.send_fds(self._link, data, [theirs.fileno()])

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "rerail.checkpoint.persister", str(theirs.fileno()), str(self._arena_fd)]
        environment = {
            **os.environ,
            "RERAIL_SPARED": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        with theirs, contextlib.ExitStack() as undo:
            undo.enter_context(ours)
            self._process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(), self._arena_fd),
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the rank; what was ordered is finished
            )
            undo.pop_all()
        self._link = ours
        self._listener = threading.Thread(
            target=self._listen, args=(ours, self._process), name="rerail-saved", daemon=True
        )
        self._listener.start()

    def _listen(self, link: socket.socket, process: subprocess.Popen[bytes]) -> None:
        while True:
            try:
                data = link.recv(LONGEST)
            except OSError:
                data = b""
            if not data:
                break
            self._settle(_outcome.decode(data))
        code = _code(process)
        link.close()
        with self._changed:
            if self._process is process:
                self._process = None
            if self._link is not link:  # it was let go
                return
            self._link = None
            again = list(self._open.values())
        for one in again:
            self._try_again(*one, code)

    def _try_again(self, order: Order, starts: int, stream: Stream | None, code: int) -> None:
        how = f"the persister ended with code {code}"
        if starts >= STARTS:
            self._settle(Outcome(version=order.version, ok=False, notes=(f"{how}, {starts} times",)))
            return
        with self._changed:
            self._open[order.version] = _Open(order, starts + 1, stream)
            self._send(order, stream)

    def _settle(self, outcome: Outcome) -> None:
        self._on_outcome(outcome)
        if outcome.copied_to or outcome.place:
            return
        with self._changed:
            self._open.pop(outcome.version, None)
            self._changed.notify_all()


def _code(process: subprocess.Popen[bytes]) -> int:
    """Its exit code; -1 for one that has said goodbye, but cannot end as long as a place hangs."""
    try:
        return process.wait(ENDS_S)
    except subprocess.TimeoutExpired:
        return -1
