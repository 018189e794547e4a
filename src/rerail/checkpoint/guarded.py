"""Places that may hang, fill up or vanish without holding anybody up: each call is made in a thread that can be left behind.

    call -> answer                       as the tier itself would give it
    call -> nothing for too long         Hung, and the place is out: every further call fails at once
    out -> probe after probe -> back     one thread for each place that is out, and no other

At most a few calls hang in one place at the same time, since nobody makes new ones while it is out. Used by
`checkpoint.persister` and `checkpoint.gasp`. Needs no torch.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from rerail.checkpoint.health import Health, Hung, Slow, State, advice, kind_of
from rerail.checkpoint.places import Places
from rerail.checkpoint.probing import device_of, insist_there, probe
from rerail.checkpoint.tiers import Read, Source, Tier, tier_at
from rerail.errors import CheckpointError

REMOVE_TIMES = 10
"""How many times as long the removal of a folder may take as any other call: it may hold thousands of files."""
MOST_STUCK = 2
"""Calls that may still hang in a place that is used again."""
_T = TypeVar("_T")


class _Out(OSError):
    """The place is out; nothing was tried."""


class _Call:
    """One call under way."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.heard_at = time.monotonic()
        self.asking = 0
        """Threads that wait for the bytes to write: for as long, it is not the place that is silent."""
        self.left = False
        """Nobody waits for it any more."""


class Ward:
    """One place: its health, and what is under way there."""

    def __init__(self, url: str, floor_s: float, tell: Callable[[Ward], None]) -> None:
        self.url = url
        self.health = Health()
        self.need = 0
        """Bytes that a save takes."""
        self.device: int | None = None
        """The file system it was first seen on."""
        self.alone = False
        """There is no other place."""
        self.slow_floor_s = 300.0
        """Seconds that a write may take, however fast others are."""
        self.tidy: Callable[[Tier], None] = lambda tier: None
        """Before a probe: removes what saves that were given up have left there."""
        self.closing = threading.Event()
        self._floor_s, self._tell = floor_s, tell
        self._lock = threading.Lock()
        self._stuck: set[_Call] = set()
        self._wake = threading.Event()

    @property
    def stuck(self) -> int:
        """Calls that have never come back."""
        with self._lock:
            return len(self._stuck)

    def call(self, task: Callable[[], _T], times: float = 1.0) -> _T:
        """The task's answer. Hung if there is none in time."""
        self._insist_in()
        return self._made(_Call(), task, times * self._floor_s)

    def write(self, task: Callable[[Source], _T], source: Source, size: int) -> _T:
        """The same for a large write: it may take long, as long as it goes on."""
        self._insist_in()
        call, began = _Call(), time.monotonic()

        def heard(offset: int, here: int) -> memoryview:
            if call.left:
                raise CheckpointError("it was given up")
            with self._lock:
                call.asking += 1
            try:
                return source(offset, here)
            finally:
                with self._lock:
                    call.asking, call.heard_at = call.asking - 1, time.monotonic()

        silence_s = self.health.silence_s(size, self._floor_s)
        found = self._made(call, lambda: task(heard), silence_s, self.health.longest_s(size, self.slow_floor_s))
        self.health.wrote(size, time.monotonic() - began)
        return found

    def quietly(self, task: Callable[[], object]) -> None:
        """Even if the place is out, and without an answer."""
        threading.Thread(target=_suppressed, args=(task,), name="rerail-tier", daemon=True).start()

    def failed(self, error: OSError) -> None:
        """The place is out from now on, if the error says so."""
        kind = kind_of(error)
        if kind is None or isinstance(error, _Out):
            return
        with self._lock:
            news = self.health.failed(kind, _words(error), time.monotonic())
        if news:
            self._tell(self)
            threading.Thread(target=self._until_back, name="rerail-probe", daemon=True).start()

    def hurry(self) -> None:
        """Look again soon."""
        if self.health.out:
            self.health.hurry(time.monotonic())
            self._wake.set()

    def _insist_in(self) -> None:
        if self.health.out:
            raise _Out(errno.EHOSTDOWN, f"left alone since it is {self.health.kind}: {self.health.why}")

    def _made(self, call: _Call, task: Callable[[], _T], silence_s: float, longest_s: float | None = None) -> _T:
        answers: list[_T] = []
        problems: list[BaseException] = []

        def work() -> None:
            try:
                answers.append(task())
            except BaseException as error:  # whatever it is, it is raised again where it is waited for
                problems.append(error)
            finally:
                call.done.set()
                with self._lock:
                    self._stuck.discard(call)

        began = time.monotonic()
        threading.Thread(target=work, name="rerail-tier", daemon=True).start()
        while not call.done.wait(max(0.0, _left_s(call, began, silence_s, longest_s))):
            if _left_s(call, began, silence_s, longest_s) <= 0 and self._leave(call):
                error = _too_long(call, began, silence_s)
                self.failed(error)
                raise error
        if problems:
            raise problems[0]
        return answers[0]

    def _leave(self, call: _Call) -> bool:
        with self._lock:
            if call.done.is_set():
                return False
            call.left = True
            self._stuck.add(call)
            return True

    def _until_back(self) -> None:
        """Probe until it works. If a probe hangs, this is the thread that waits for it."""
        while not self.closing.is_set():
            self._wake.wait(max(0.0, self.health.next_probe - time.monotonic()))
            self._wake.clear()
            if self.closing.is_set() or time.monotonic() < self.health.next_probe:
                continue
            problem = self._problem()
            with self._lock:
                back = self.health.probed(problem, time.monotonic())
            if back:
                self._tell(self)
                return

    def _problem(self) -> str:
        try:
            tier = tier_at(self.url)
            insist_there(tier, self.device, alone=self.alone)
            self.tidy(tier)
            probe(tier, self.need)
        except Exception as error:  # drivers have errors of their own kinds
            return str(error) or type(error).__name__
        return f"{self.stuck} calls of before still hang" if self.stuck > MOST_STUCK else ""

    def close(self) -> None:
        self.closing.set()
        self._wake.set()


def _left_s(call: _Call, began: float, silence_s: float, longest_s: float | None) -> float:
    now = time.monotonic()
    left = (now if call.asking else call.heard_at) + silence_s - now
    return left if longest_s is None else min(left, began + longest_s - now)


def _too_long(call: _Call, began: float, silence_s: float) -> OSError:
    now = time.monotonic()
    if now >= call.heard_at + silence_s:
        return Hung(errno.ETIMEDOUT, f"no answer for {now - call.heard_at:.0f} s")
    return Slow(errno.ETIMEDOUT, f"not done after {now - began:.0f} s, far more than usual")


def _suppressed(task: Callable[[], object]) -> None:
    with contextlib.suppress(OSError, CheckpointError):
        task()


def _words(error: OSError) -> str:
    return error.strerror or str(error)


class GuardedTier:
    """A tier whose every call goes through its ward."""

    def __init__(self, tier: Tier, ward: Ward) -> None:
        self._tier, self._ward = tier, ward
        self.url, self.lasting = tier.url, tier.lasting

    def names(self, folder: str = "") -> list[str]:
        return self._ward.call(lambda: self._tier.names(folder) or self._nothing())

    def size(self, path: str) -> int:
        return self._ward.call(lambda: self._tier.size(path))

    def get(self, path: str, limit: int) -> bytes:
        return self._ward.call(lambda: self._tier.get(path, limit))

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[Read]:
        opened = self._tier.reading(path)
        read = self._ward.call(opened.__enter__)
        try:
            yield lambda offset, buffer, size: self._ward.call(lambda: read(offset, buffer, size))
        finally:
            self._ward.quietly(lambda: opened.__exit__(None, None, None))

    def make_folder(self, folder: str) -> None:
        self._ward.call(lambda: self._made(folder))

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        self._ward.call(lambda: self._tier.put(path, data, exclusive=exclusive))

    def put_large(self, path: str, source: Source, size: int, chunk: int) -> list[str]:
        return self._ward.write(lambda heard: self._tier.put_large(path, heard, size, chunk), source, size)

    def remove(self, folder: str) -> None:
        self._ward.call(lambda: self._tier.remove(folder), REMOVE_TIMES)

    def _nothing(self) -> list[str]:
        """No names are there: because there are none, or because the place itself is gone."""
        insist_there(self._tier, self._ward.device, alone=self._ward.alone)
        return []

    def _made(self, folder: str) -> None:
        ward = self._ward
        insist_there(self._tier, ward.device, alone=ward.alone)
        self._tier.make_folder(folder)
        ward.device = device_of(self._tier)


class GuardedPlaces(Places):
    """All places of one process. `tell(url, state, text)` hears of each that is out, and of each that is back.

    `tidy(tier)` is called before a place is probed.
    """

    def __init__(
        self,
        floor_s: float,
        tell: Callable[[str, State, str], None] = lambda *_: None,
        tidy: Callable[[Tier], None] = lambda tier: None,
    ) -> None:
        self.silence_s, self._tell, self._tidy = floor_s, tell, tidy
        self._wards: dict[str, Ward] = {}
        self._lock = threading.Lock()

    def at(self, url: str) -> Tier:
        return GuardedTier(tier_at(url), self.ward(url))

    def out(self, url: str) -> str:
        health = self.ward(url).health
        return f"{health.kind}: {health.why}" if health.out else ""

    def failed(self, url: str, error: Exception, size: int = 0) -> None:
        ward = self.ward(url)
        ward.need = max(ward.need, size)
        if isinstance(error, OSError):
            ward.failed(error)

    def saved(self, url: str) -> None:
        self.ward(url).health.saved()

    def ward(self, url: str) -> Ward:
        with self._lock:
            if url not in self._wards:
                self._wards[url] = Ward(url, self.silence_s, self._changed)
                self._wards[url].tidy = self._tidy
            return self._wards[url]

    def forget(self, url: str) -> None:
        """Something else lies there from now on."""
        with self._lock:
            ward = self._wards.pop(url, None)
        if ward is not None:
            ward.close()

    @property
    def stuck(self) -> list[str]:
        """Places in which calls hang."""
        with self._lock:
            return [url for url, ward in self._wards.items() if ward.stuck or ward.health.out]

    def close(self) -> None:
        """No more probes."""
        with self._lock:
            for ward in self._wards.values():
                ward.close()

    def _changed(self, ward: Ward) -> None:
        health = ward.health
        if health.out and health.kind is not None:
            self._tell(ward.url, State.OUT, f"{health.kind} ({health.why}); what to do: {advice(health.kind)}")
        else:
            self._tell(ward.url, State.GOOD, "")
