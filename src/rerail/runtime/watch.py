"""Looks at every local rank's clock and process each beat and hands what it sees to `detect.hang`.

Called by `runtime.agent`, which turns verdicts into signals. The judgement itself is pure and lives in `detect.hang`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence

from rerail.config import Settings
from rerail.detect.hang import Facts, Verdict, all_waiting, judge, limit, stall_age
from rerail.runtime import processes
from rerail.runtime.clock import Reading
from rerail.runtime.slots import Slot

LATE_S = 0.5
"""A look that comes later than this says more about this machine (suspended, overloaded) than about the ranks."""
CPU_EVERY_S = 1.0
"""Counting a tree's CPU walks through /proc: not at every look."""


class _Observation:
    """What has been seen of one process without a gap."""

    def __init__(self, pid: int, now: float) -> None:
        self.pid = pid
        self.since = now
        self.stopped_since: float | None = None
        self.stall_since: float | None = None
        self.cpu_at_stall = 0.0
        self.cpu_seen = 0.0
        self.cpu_seen_at = 0.0

    def note_state(self, state: str, now: float) -> float:
        """Seconds it has been stopped."""
        if state not in ("T", "t"):
            self.stopped_since = None
            return 0.0
        if self.stopped_since is None:
            self.stopped_since = now
        return now - self.stopped_since

    def note_stall(self, age: float, allowed: float, now: float) -> None:
        """Begin to count CPU at half the limit; refresh the count once it matters."""
        if age <= allowed / 2:
            self.stall_since = None
        elif self.stall_since is None:
            self.stall_since = now
            self.cpu_at_stall = self.cpu_seen = self._count_cpu(now)
        elif age > allowed and now - self.cpu_seen_at >= CPU_EVERY_S:
            self.cpu_seen = self._count_cpu(now)

    def _count_cpu(self, now: float) -> float:
        self.cpu_seen_at = now
        return processes.cpu_seconds((self.pid, *processes.descendants(self.pid)))


class Watch:
    """Watches the slots of one node."""

    def __init__(
        self,
        settings: Settings,
        slots: Sequence[Slot],
        hung: Callable[[Slot, Verdict], Coroutine[None, None, None]],
        stalled: Callable[[float, dict[int, Reading]], Coroutine[None, None, None]],
    ) -> None:
        self._settings = settings
        self._slots = slots
        self._hung = hung
        self._stalled = stalled
        self._observed: dict[int, _Observation] = {}
        self._reported: set[tuple[int, int]] = set()
        self._telling: set[asyncio.Future[None]] = set()
        """Held on to, or they might be forgotten half-way."""
        self._stall_reported: tuple[int, int] = (-1, -1)

    async def run(self) -> None:
        """Look every `beat_s` seconds; after a gap, begin the observation anew."""
        due = time.monotonic() + self._settings.beat_s
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            now = time.monotonic()
            if now - due > LATE_S:
                self._observed.clear()
            else:
                self.look(now)
            due = now + self._settings.beat_s

    def look(self, now: float) -> None:
        """One look at all ranks."""
        readings: dict[int, Reading] = {}
        watched = float("inf")
        for slot in self._slots:
            if slot.child is None or not slot.child.alive or slot.beside:
                self._observed.pop(slot.local_rank, None)
                continue
            seen = self._observed.get(slot.local_rank)
            if seen is None or seen.pid != slot.child.pid:
                seen = self._observed[slot.local_rank] = _Observation(slot.child.pid, now)
            reading = slot.clock.read()
            verdict = judge(reading, self._facts(slot, seen, reading, now), self._settings)
            if verdict is not None and (slot.rank, slot.generation) not in self._reported:
                self._reported.add((slot.rank, slot.generation))
                self._tell(self._hung(slot, verdict))
            if slot.joined:
                readings[slot.rank] = reading
                watched = min(watched, now - seen.since)
        if readings and len(readings) == sum(slot.child is not None and not slot.beside for slot in self._slots):
            self._look_at_collectives(readings, watched)

    def _facts(self, slot: Slot, seen: _Observation, reading: Reading, now: float) -> Facts:
        state = processes.process_state(seen.pid)
        facts = Facts(
            state=state,
            joined=slot.joined,
            observed_s=now - seen.since,
            stopped_s=seen.note_state(state, now),
        )
        seen.note_stall(stall_age(reading, facts), limit(reading.durations, self._settings), now)
        if seen.stall_since is None:
            return facts
        return Facts(
            state=state,
            joined=slot.joined,
            observed_s=facts.observed_s,
            stopped_s=facts.stopped_s,
            stall_s=max(0.0, seen.cpu_seen_at - seen.stall_since),
            cpu_s=seen.cpu_seen - seen.cpu_at_stall,
        )

    def _look_at_collectives(self, readings: dict[int, Reading], watched: float) -> None:
        seen = list(readings.values())
        waited = all_waiting(seen, watched, self._settings)
        key = (max(reading.generation for reading in seen), min(reading.collectives for reading in seen))
        if waited > 0.0 and key != self._stall_reported:
            self._stall_reported = key
            self._tell(self._stalled(waited, readings))

    def _tell(self, telling: Coroutine[None, None, None]) -> None:
        self._telling.add(told := asyncio.ensure_future(telling))
        told.add_done_callback(self._telling.discard)
