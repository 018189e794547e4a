"""The process that watches a machine: runs all detectors, holds what they see against the catalogue, and tells what is wrong.

Started by the agent as `python -m rerail.detect.monitor`, one per node; writes one JSON object per line to standard output.
A process of its own, because drivers and file systems hang: then this process hangs and not the agent. Every detector has a
thread of its own, because one that hangs must not stop the others.
"""

from __future__ import annotations

import fnmatch
import os
import queue
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import IO

import msgspec

from rerail.config import settings_of_rank
from rerail.detect.detector import Detector, Line, Reading, Told, Watcher
from rerail.detect.judge import Judge
from rerail.detect.kernel_log import KernelLog
from rerail.detect.levels import Levels
from rerail.faults.catalog import Catalog, Fault, load_catalog
from rerail.faults.matcher import Matcher
from rerail.faults.sightings import sightings
from rerail.flow import Role

SOURCE = "machine"
"""Of the signals that are made of it."""
AGENT = "RERAIL_AGENT_PID"
"""In the monitor's environment: whose it is. Asked by itself, it could be too late: the agent may be gone by then."""
RATE = 20
"""Findings of one code that are told within RATE_S; more of the same say nothing new."""
RATE_S = 60.0
STUCK_S = 60.0
"""A detector that has not come back for this long is told of once."""
IDLE_S = 2.0
"""Between two looks at whether the agent is still there."""
BREAKS = 5
"""A detector that failed this often in a row is given up."""


class Found(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that began or ended; a line of this process's output."""

    code: str
    detector: str
    subject: str = ""
    text: str = ""
    """The log line, or what was read."""
    over: bool = False
    """The fault has ended."""
    at: float = 0.0
    """Wall clock when it was seen."""


class Monitor:
    """Detectors, catalogue and an outlet."""

    def __init__(self, catalog: Catalog, tell: Callable[[Found], None], levels: Levels | None = None) -> None:
        self._levels = levels or Levels()
        faults = [fault for fault in map(self._levels.apply, catalog.faults) if fault is not None]
        self._matcher = Matcher(faults)
        self._judge = Judge(faults)
        self._by_code = {fault.code: fault for fault in faults}
        self._cleared = {
            clear.code: [code for code in self._by_code if any(fnmatch.fnmatchcase(code, g) for g in clear.clears)]
            for clear in faults
            if clear.role is Role.CLEAR
        }
        self._tell = tell
        self._lock = threading.Lock()
        self._told: dict[str, deque[float]] = {}
        self._counts: dict[tuple[str, str], deque[float]] = {}
        self._busy: dict[str, float] = {}
        self._stuck: set[str] = set()

    # --- what detectors bring ---

    def line(self, line: Line, detector: str) -> None:
        """One log line: the faults it shows, seen often enough to count."""
        for sighting in sightings(self._matcher, line.text):
            fault = sighting.fault
            if line.source not in fault.seen or fault.role in (Role.BENIGN, Role.CONFIRMATION):
                continue
            subject = sighting.device
            if not self._counted(fault, subject):
                continue
            self._say(fault, detector, subject, line.text, over=fault.role is Role.CLEAR)

    def reading(self, reading: Reading, detector: str) -> None:
        """One sample: what begins or ends with it."""
        with self._lock:
            findings = self._judge.take(reading, time.monotonic())
        for finding in findings:
            said = self._say(finding.fault, detector, reading.subject, finding.text, over=not finding.begins)
            if not said:  # what lasts is told when there is room again
                with self._lock:
                    self._judge.forget(finding)

    def told(self, told: Told) -> None:
        """What another system has found."""
        fault = self._by_code.get(told.code)
        if fault is not None:  # else the user does not want to hear of it
            self._say(fault, f"reported by {told.sender}", told.subject, told.text, over=told.over, at=told.at)

    def _counted(self, fault: Fault, subject: str) -> bool:
        if fault.times <= 1:
            return True
        now = time.monotonic()
        with self._lock:
            seen = self._counts.setdefault((fault.code, subject), deque())
            seen.append(now)
            while fault.within_s and seen[0] < now - fault.within_s:
                seen.popleft()
            if len(seen) < fault.times:
                return False
            seen.clear()
        return True

    def _say(self, fault: Fault, detector: str, subject: str, text: str, *, over: bool, at: float = 0.0) -> bool:
        """Whether it was told: not where too many of its kind were."""
        now, at = time.monotonic(), at or time.time()
        with self._lock:
            told = self._told.setdefault(fault.code, deque(maxlen=RATE))
            if not over and len(told) == RATE and told[0] > now - RATE_S:
                return False
            if not over:
                told.append(now)
            for code in [fault.code] if fault.role is not Role.CLEAR else self._cleared[fault.code]:
                self._tell(Found(code=code, detector=detector, subject=subject, text=text[:4096], over=over, at=at))
        return True

    # --- running them ---

    def run(self, detectors: Iterable[Detector], watchers: Iterable[Watcher]) -> None:
        """One thread each; returns at once."""
        for detector in detectors:
            if self._levels.wants(detector.name):
                threading.Thread(target=self._look, args=(detector,), name=detector.name, daemon=True).start()
        for watcher in watchers:
            if self._levels.wants(watcher.name):
                threading.Thread(target=self._watch, args=(watcher,), name=watcher.name, daemon=True).start()

    def _is_supported(self, one: Detector | Watcher) -> bool:
        """Asked in its own thread: a driver may hang as early as that."""
        self._busy[one.name] = time.monotonic()
        try:
            return not one.supported()
        except Exception as error:  # a detector is a guest here: it may fail, the others go on
            note(f"detector {one.name} failed: {type(error).__name__}: {error}")
            return False
        finally:
            self._busy.pop(one.name, None)

    def _look(self, detector: Detector) -> None:
        broken = 0
        if not self._is_supported(detector):
            return
        while broken < BREAKS:
            self._busy[detector.name] = time.monotonic()
            try:
                for reading in detector.check():
                    self.reading(reading, detector.name)
                broken = 0
            except Exception as error:  # as above
                broken += 1
                note(f"detector {detector.name} failed: {type(error).__name__}: {error}")
            self._busy.pop(detector.name, None)
            time.sleep(detector.every_s)
        note(f"detector {detector.name} is given up: it failed {BREAKS} times in a row")

    def _watch(self, watcher: Watcher) -> None:
        if not self._is_supported(watcher):
            return
        try:
            for item in watcher.watch():
                if isinstance(item, Line):
                    self.line(item, watcher.name)
                elif isinstance(item, Told):
                    self.told(item)
                else:
                    self.reading(item, watcher.name)
        except Exception as error:  # as above
            note(f"detector {watcher.name} ended: {type(error).__name__}: {error}")

    def stuck(self) -> list[str]:
        """Detectors that hang, each named once."""
        now = time.monotonic()
        hanging = [name for name, since in list(self._busy.items()) if now - since > STUCK_S]
        fresh = [name for name in hanging if name not in self._stuck]
        self._stuck = set(hanging)
        return fresh


def note(text: str) -> None:
    """For the agent's log."""
    print(f"rerail monitor: {text}", file=sys.stderr, flush=True)


def _below(agent: int) -> Callable[[int], bool]:
    """Whether a process was started by the agent or one of its ranks."""
    import psutil

    def ours(pid: int) -> bool:
        try:
            return any(parent.pid == agent for parent in psutil.Process(pid).parents())
        except psutil.Error:
            return False

    return ours


def main() -> int:
    """Watch until the agent goes."""
    from rerail.detect.inventory import all_detectors, all_watchers
    from rerail.detect.notices import watchers

    parent = int(os.environ.get(AGENT) or os.getppid())
    stream: IO[bytes] = sys.stdout.buffer  # now: a vendor's package may put something else in its place for a while
    os.nice(5)
    out: queue.SimpleQueue[Found] = queue.SimpleQueue()
    levels = Levels.from_environment()
    monitor = Monitor(load_catalog(levels.files), out.put, levels)
    injected = os.environ.get("RERAIL_INJECT", "") == "1"
    monitor.run([], [KernelLog(injected=injected)])  # before anything of a driver is touched
    monitor.run(all_detectors(_below(parent)), [*all_watchers(), *watchers(settings_of_rank())])
    while os.getppid() == parent and not _unheard(stream):
        try:
            found = out.get(timeout=IDLE_S)
        except queue.Empty:
            for name in monitor.stuck():
                note(f"detector {name} has not come back for {STUCK_S:.0f} s: what it watches may hang")
            continue
        try:
            stream.write(msgspec.json.encode(found) + b"\n")
            stream.flush()
        except BrokenPipeError:
            break
    return 0


def _unheard(stream: IO[bytes]) -> bool:
    """Whether nobody reads any more what is written here: the agent may have gone before this process knew it."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


if __name__ == "__main__":
    os._exit(main())  # python would flush its streams, which may be gone, and a thread may hang in a driver
