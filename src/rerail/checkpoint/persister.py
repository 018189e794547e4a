"""The process that writes checkpoints while the rank trains on: `python -m rerail.checkpoint.persister LINK ARENA`.

Orders come over a socket, one message each, with a link to the rank's tensors where no snapshot was taken; outcomes go
back. Several saves may be under way. When the socket closes the rank is gone or done: what was ordered is finished, then
the process ends. It never imports torch and holds no copy of the state. Started by `checkpoint.writer`.

Places that fail are left alone until they work again (`checkpoint.guarded`); the rank hears of it. A place that hangs keeps
neither a save nor the end of this process from happening.
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

from rerail.checkpoint import catalog, names, nodes
from rerail.checkpoint.agreeing import let_go
from rerail.checkpoint.arena import Arena
from rerail.checkpoint.copying import Copier
from rerail.checkpoint.guarded import GuardedPlaces
from rerail.checkpoint.health import State
from rerail.checkpoint.names import StepId
from rerail.checkpoint.retention import prune
from rerail.checkpoint.saving import Held, Order, Outcome, carry_out
from rerail.checkpoint.stream import Streamed
from rerail.checkpoint.tiers import Tier
from rerail.config import DEPOTS, settings_of_rank
from rerail.errors import CheckpointError

_order = msgspec.json.Decoder(Order)

LONGEST = 1 << 17
"""Bytes of a message."""
NOTES, NOTE = 16, 1000
"""How many notes of an outcome are told, and how many characters of each: six bytes each at most, they fit."""
NICE = 10
GIVEN_UP = 64
"""Of how many saves that failed somewhere it is remembered that something may be left of them."""
SEEN_S = 5.0
"""Seconds after which every rank has seen that a save was given up, and its files may go."""


class Persister:
    """Takes orders until the link closes."""

    def __init__(self, link: socket.socket, arena: Arena) -> None:
        self._link, self._arena = link, arena
        self._lock = threading.Lock()
        self._busy: set[StepId] = set()
        self._threads: list[threading.Thread] = []
        self._places = GuardedPlaces(settings_of_rank().storage_hang_s, self._on_place, self._tidy_up)
        self._copier = Copier(self._tell, self._places)
        self._gone = threading.Event()
        """The rank is gone or done."""
        self._given_up: dict[tuple[str, StepId], float] = {}
        """Where saves failed, and when: what is left of them takes room that the next one may need."""
        self._newest: tuple[Order, str] | None = None
        """What was committed last, and where: steps that were busy when others were removed are to go at the end."""

    def run(self) -> None:
        while True:
            try:
                data, links, *_ = socket.recv_fds(self._link, LONGEST, 1)
            except ConnectionError:  # the rank was killed with words of ours unread
                break
            if not data:
                break
            order = _order.decode(data)
            self._arena.refresh()
            held = Streamed(socket.socket(fileno=links[0])) if links else self._arena
            self._prepare(order)
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
            self._tidy(*self._newest)
        self._places.close()

    def _prepare(self, order: Order) -> None:
        if order.depots and order.depots != os.environ.get(DEPOTS):
            os.environ[DEPOTS] = order.depots
            self._places.forget(nodes.URL)
        for url in order.tiers:
            ward = self._places.ward(url)
            ward.alone, ward.slow_floor_s = len(order.tiers) == 1, order.deadline_s / 2
            ward.hurry()

    def _carry_out(self, order: Order, held: Held) -> None:
        told, committed = False, ""
        try:
            self._settle_before(order)
            for outcome in carry_out(order, held, self._under_way, self._gone.is_set, self._places):
                told = True
                self._tell(outcome)
                if outcome.ok and order.rank == min(order.group):
                    committed = outcome.url
                if order.rank == min(order.group):
                    self._note_given_up(order, outcome)
            if committed:
                self._newest = order, committed
                self._copier.offer(order, committed)
        except Exception as error:  # whatever it is: the rank must hear of it, and the next save must be tried
            if not told:
                self._tell(Outcome(version=order.version, ok=False, notes=(f"{type(error).__name__}: {error}",)))
            else:
                raise
        finally:
            with self._lock:
                self._busy.discard(order.id)

    def _settle_before(self, order: Order) -> None:
        """Before the next save: clears up behind those that failed, and lets ranks go that came late for the last."""
        for url in order.tiers:
            with contextlib.suppress(OSError, CheckpointError):
                tier, newest = self._places.at(url), self._newest
                if newest is not None and newest[1] != url:
                    let_go(tier, *newest)
                self._tidy_up(tier)

    def _note_given_up(self, order: Order, outcome: Outcome) -> None:
        tried = order.tiers[: order.tiers.index(outcome.url)] if outcome.ok else order.tiers
        with self._lock:
            self._given_up.update({(url, order.id): time.monotonic() for url in tried})
            for one in list(self._given_up)[:-GIVEN_UP]:
                del self._given_up[one]

    def _tidy_up(self, tier: Tier) -> None:
        """Remove from this tier what is left of saves that were given up there."""
        with self._lock:
            seen = time.monotonic() - SEEN_S
            old = [step for (url, step), at in self._given_up.items() if url == tier.url and at <= seen]
            old = [step for step in old if step not in self._busy]
        for step in set(old) - self._copier.steps:
            there = tier.names(step.folder)
            if there and not {names.COMMIT, names.COPYING} & set(there):
                tier.remove(step.folder)
            with self._lock:
                self._given_up.pop((tier.url, step), None)

    def _under_way(self) -> set[StepId]:
        with self._lock:
            return self._busy | self._copier.steps

    def _tidy(self, order: Order, url: str) -> None:
        with contextlib.suppress(OSError, CheckpointError):
            tier = self._places.at(url)
            committed = (found.id for found in catalog.folders(tier) if found.committed)
            prune(tier, order.keep, max(committed, default=order.id), set())

    def _on_place(self, url: str, state: State, why: str) -> None:
        out = state is State.OUT
        self._tell(Outcome(version=-1, ok=not out, url=url, place="out" if out else "back", notes=(why,)))
        if not out:
            self._copier.back(url)

    def _tell(self, outcome: Outcome) -> None:
        try:
            short = tuple(note[:NOTE] for note in outcome.notes[-NOTES:])
            self._link.send(msgspec.json.encode(msgspec.structs.replace(outcome, notes=short)))
        except OSError:
            pass  # the rank is gone; what is saved is saved


def main() -> None:
    link_fd, arena_fd = (int(text) for text in sys.argv[1:3])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # meant for the rank; when that is gone this process ends by itself
    os.nice(NICE)
    _lowest_io_priority()
    with socket.socket(fileno=link_fd) as link:
        Persister(link, Arena(arena_fd)).run()
        # threads that hang in a place would be waited for otherwise, and would keep the link open for as long
        with contextlib.suppress(OSError):  # the rank is gone
            link.shutdown(socket.SHUT_RDWR)
        sys.stderr.flush()
        os._exit(0)


def _lowest_io_priority() -> None:
    """Best effort, at the end of the queue: behind whatever the training reads."""
    import psutil

    try:
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)
    except (OSError, psutil.Error):
        pass


if __name__ == "__main__":
    main()
