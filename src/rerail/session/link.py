"""A rank's line to its agent: turns what the agent says into calls and what the rank has to say into frames.

One thread listens (an interrupt must get through while the script is stuck in a collective), another beats the step
clock. Made by `runtime.bootstrap` before the user's script begins, used by `session.job`. Needs no torch.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from rerail.errors import JobStopped
from rerail.runtime.clock import StepClock
from rerail.runtime.frames import decode_to_rank, frame, recv_frame
from rerail.runtime.plans import Plan
from rerail.runtime.wire import Assign, Form, Formed, Inject, Interrupt, Message, Stop, ToRank

FD_VARIABLE = "RERAIL_LINK_FD"

_M = TypeVar("_M", Assign, Form)


class AgentLink:
    """The socketpair to the agent, with its two threads."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._send_lock = threading.Lock()
        self._inbox: queue.SimpleQueue[ToRank] = queue.SimpleQueue()
        self.assignment: Assign | None = None
        self.clock: StepClock | None = None
        self.arena_fd = -1
        self.assigned_at = 0.0
        self.on_interrupt: Callable[[Interrupt], None] = lambda interrupt: None
        self.collectives: Callable[[], tuple[int, int, str]] = lambda: (0, 0, "")
        """When the newest unfinished collective began (monotonic ns; 0: there is none), how many have begun, and what it is.
        Asked by the beat thread."""
        self.at_beat: Callable[[int], None] = lambda begun: None
        """Called after every beat with how many collectives have begun; must return at once."""
        self.newest_interrupt: Interrupt | None = None
        self.stop: Stop | None = None
        self.injections: deque[Inject] = deque()
        """What is to go wrong on purpose, for `session.injected`."""
        threading.Thread(target=self._listen, name="rerail-link", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send to the agent. If it is gone this process is about to be ended; nothing is lost by going on."""
        try:
            with self._send_lock:
                self._sock.sendall(frame(message))
        except OSError:
            pass

    def wait_for_assignment(self) -> Assign:
        """Block until this process is given a rank."""
        assignment = self._wait(Assign)
        self.assignment = assignment
        return assignment

    def wait_for_form(self, generation: int) -> Form | Interrupt:
        """Block until `generation` may be formed, or a newer one is announced."""
        while True:
            newest = self.newest_interrupt
            if newest is not None and newest.generation > generation:
                return newest
            message = self._next()
            if isinstance(message, Form) and message.plan.generation >= generation:
                return message
            if isinstance(message, Interrupt) and message.generation > generation:
                return message

    def wait_for_verdict(self, generation: int) -> Interrupt:
        """After Raised: block until the controller wants a newer generation (it ends us otherwise)."""
        while True:
            newest = self.newest_interrupt
            if newest is not None and newest.generation > generation:
                return newest
            self._next()

    def wait_for_plan(self, generation: int) -> Plan:
        """Block until the first generation of this process may be formed."""
        answer = self.wait_for_form(generation)
        if isinstance(answer, Interrupt):
            # Nothing is built yet: the agent starts us afresh for the newer generation.
            raise JobStopped(f"generation {answer.generation} replaces {generation} before it was formed")
        return answer.plan

    def formed(self, rank: int, generation: int) -> None:
        """The first generation stands."""
        if self.clock is not None:
            self.clock.set_generation(generation)
        self.send(Formed(rank=rank, generation=generation, version=0))

    def next_message(self) -> ToRank:
        """Block for whatever comes next; raises when the job is stopped."""
        return self._next()

    def start_beating(self, every_s: float) -> None:
        """Beat the step clock from a thread of its own, for as long as the process can run Python at all."""
        clock, never = self.clock, threading.Event()
        if clock is None:
            return

        def beat() -> None:
            while not never.wait(every_s):
                since, begun, name = self.collectives()
                clock.beat(since, begun, name)
                self.at_beat(begun)

        clock.beat()
        threading.Thread(target=beat, name="rerail-beat", daemon=True).start()

    def _wait(self, kind: type[_M]) -> _M:
        while True:
            message = self._next()
            if isinstance(message, kind):
                return message

    def _next(self) -> ToRank:
        message = self._inbox.get()
        if isinstance(message, Stop):
            self._inbox.put(message)
            raise JobStopped(message.reason)
        return message

    def _listen(self) -> None:
        while True:
            received = recv_frame(self._sock)
            if received is None:
                # The agent has closed our slot: we are a zombie of an old generation, or the agent is gone.
                os._exit(1)
            data, fds = received
            message = decode_to_rank(data)
            if isinstance(message, Assign) and len(fds) == 2:
                self.clock = StepClock(fds[0])
                os.close(fds[0])
                self.arena_fd = fds[1]
                self.clock.reset(message.generation)
                self.assigned_at = time.monotonic()
            elif isinstance(message, Interrupt):
                newest = self.newest_interrupt
                if newest is not None and newest.generation >= message.generation:
                    continue
                # Free the training thread first: once it sees the interrupt it lays new wires, which must stay.
                self.on_interrupt(message)
                self.newest_interrupt = message
            elif isinstance(message, Stop):
                self.stop = message
            elif isinstance(message, Inject):
                self.injections.append(message)
                continue
            self._inbox.put(message)


_link: AgentLink | None = None


def connect() -> AgentLink | None:
    """The link of this process, opened on first use; None when the process was not started by an agent."""
    global _link
    if _link is None:
        fd = os.environ.pop(FD_VARIABLE, "")
        if fd:
            sock = socket.socket(fileno=int(fd))
            sock.set_inheritable(False)
            _link = AgentLink(sock)
    return _link
