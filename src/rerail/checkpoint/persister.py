"""The process that writes checkpoints while the rank trains on: `python -m rerail.checkpoint.persister LINK ARENA`.

Orders come over a socket, one message each, with a link to the rank's tensors where no snapshot was taken; outcomes go
back. Several saves may be under way. When the socket closes the rank is gone or done: what was ordered is finished, then
the process ends. It never imports torch and holds no copy of the state. Started by `checkpoint.writer`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time

import msgspec

from rerail.checkpoint import catalog, names
from rerail.checkpoint.arena import Arena
from rerail.checkpoint.copying import Copier
from rerail.checkpoint.names import StepId
from rerail.checkpoint.retention import prune
from rerail.checkpoint.saving import Held, Order, Outcome, carry_out
from rerail.checkpoint.stream import Streamed
from rerail.checkpoint.tiers import tier_at
from rerail.config import DEPOTS
from rerail.errors import CheckpointError

LONGEST = 1 << 17
"""Bytes of a message."""
NOTES, NOTE = 16, 1000
"""How many notes of an outcome are told, and how many characters of each: six bytes each at most, they fit."""
NICE = 10
SEEN_S = 5.0
"""Seconds after which every rank has seen that a save was given up, and its files may go."""


class Persister:
    """Takes orders until the link closes."""

    def __init__(self, link: socket.socket, arena: Arena) -> None:
        self._link, self._arena = link, arena
        self._lock = threading.Lock()
        self._busy: set[StepId] = set()
        self._threads: list[threading.Thread] = []
        self._copier = Copier(self._tell)
        self._gone = threading.Event()
        """The rank is gone or done."""
        self._given_up: list[tuple[float, Order]] = []
        """Saves that failed, and when: what is left of them takes room that the next one may need."""
        self._newest: tuple[Order, str] | None = None
        """What was committed last, and where: steps that were busy when others were removed are to go at the end."""

    def run(self) -> None:
        decoder = msgspec.json.Decoder(Order)
        while True:
            data, links, *_ = socket.recv_fds(self._link, LONGEST, 1)
            if not data:
                break
            order = decoder.decode(data)
            self._arena.refresh()
            held = Streamed(socket.socket(fileno=links[0])) if links else self._arena
            if order.depots:
                os.environ[DEPOTS] = order.depots
            with self._lock:
                self._busy.add(order.id)
            thread = threading.Thread(target=self._carry_out, args=(order, held), name=f"rerail-save-{order.version}")
            thread.start()
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        self._gone.set()
        for thread in self._threads:
            thread.join()
        self._copier.close()
        if self._newest is not None:
            _tidy(*self._newest)

    def _carry_out(self, order: Order, held: Held) -> None:
        told, committed = False, ""
        try:
            self._clear_away()
            for outcome in carry_out(order, held, self._under_way, self._gone.is_set):
                told = True
                self._tell(outcome)
                if outcome.ok and order.rank == min(order.group):
                    committed = outcome.url
                if not outcome.ok and order.rank == min(order.group):
                    self._given_up.append((time.monotonic(), order))
            if committed:
                self._newest = order, committed
                if committed != order.tiers[-1]:
                    self._copier.offer(order, committed)
        except Exception as error:  # whatever it is: the rank must hear of it, and the next save must be tried
            if not told:
                self._tell(Outcome(version=order.version, ok=False, notes=(f"{type(error).__name__}: {error}",)))
            else:
                raise
        finally:
            with self._lock:
                self._busy.discard(order.id)

    def _clear_away(self) -> None:
        """The remains of saves that were given up."""
        with self._lock:
            old = [order for at, order in self._given_up if time.monotonic() - at >= SEEN_S]
            self._given_up = [(at, order) for at, order in self._given_up if order not in old]
        for order in old:
            for url in order.tiers:
                with contextlib.suppress(OSError, CheckpointError):
                    tier, folder = tier_at(url), order.id.folder
                    if names.ABORT in (there := tier.names(folder)) and names.COMMIT not in there:
                        tier.remove(folder)

    def _under_way(self) -> set[StepId]:
        with self._lock:
            return self._busy | self._copier.steps

    def _tell(self, outcome: Outcome) -> None:
        try:
            short = tuple(note[:NOTE] for note in outcome.notes[-NOTES:])
            self._link.send(msgspec.json.encode(msgspec.structs.replace(outcome, notes=short)))
        except OSError:
            pass  # the rank is gone; what is saved is saved


def _tidy(order: Order, url: str) -> None:
    with contextlib.suppress(OSError, CheckpointError):
        tier = tier_at(url)
        committed = (found.id for found in catalog.folders(tier) if found.committed)
        prune(tier, order.keep, max(committed, default=order.id), set())


def main() -> None:
    link_fd, arena_fd = (int(text) for text in sys.argv[1:3])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # meant for the rank; when that is gone this process ends by itself
    os.nice(NICE)
    _lowest_io_priority()
    with socket.socket(fileno=link_fd) as link:
        Persister(link, Arena(arena_fd)).run()


def _lowest_io_priority() -> None:
    """Best effort, at the end of the queue: behind whatever the training reads."""
    import psutil

    try:
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)
    except (OSError, psutil.Error):
        pass


if __name__ == "__main__":
    main()
