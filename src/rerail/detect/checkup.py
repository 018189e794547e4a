"""Turns one short look at everything into the health of this machine: two samples of every detector, and the kernel log.

`checkup` is called by `rerail check` and before a standby node is admitted; `detect.deep` adds tests to its result. Looks
and tests are done by child processes, because drivers and file systems hang: then the child hangs, and that is a finding.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase

import msgspec

from rerail.detect import inventory
from rerail.detect.detector import Detector, Reading
from rerail.detect.judge import Judge
from rerail.detect.levels import Levels
from rerail.detect.process import signal_name
from rerail.faults.catalog import Fault
from rerail.faults.matcher import Matcher
from rerail.faults.sightings import sightings
from rerail.flow import Handling, Role, Severity
from rerail.runtime.processes import kill_tree, process_state

APART_S = 1.5
"""Between the two samples of a detector: long enough for a counter that runs away to be seen running."""
TIMEOUT_S = 30.0
"""A driver that was unloaded may take many seconds to come up; what takes longer hangs."""
RECENT_S = 3600.0
"""What the kernel said longer ago is history and does not count: the detectors see whether it still holds."""
GRACE_S = 5.0
"""For a process to end, when all else is done."""
KERNEL_LOG = "kernel-log"
SERIOUS = (Severity.ERROR, Severity.CRITICAL)


class State(StrEnum):
    """How an area stands."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    NOT_SEEN = "not seen"


class Problem(msgspec.Struct, frozen=True, kw_only=True, tag="problem"):
    """Something is wrong, for sure."""

    area: str
    code: str
    """Of the fault catalogue, or `check.*` where a test of this check has failed."""
    title: str
    severity: Severity = Severity.ERROR
    subject: str = ""
    """Of the machine: `gpu3`, `core 12`, a directory."""
    text: str = ""
    """The evidence: what was read, a log line, how a test ended."""
    advice: str = ""
    action: Handling = Handling.DRAIN_NODE
    hardware: bool = False
    old: bool = False
    """History: it was so, and does not count."""


class Figure(msgspec.Struct, frozen=True, kw_only=True, tag="figure"):
    """One thing measured."""

    area: str
    name: str
    value: float
    unit: str = ""
    subject: str = ""


class Unseen(msgspec.Struct, frozen=True, kw_only=True, tag="unseen"):
    """What could not be looked at, and why."""

    area: str
    what: str
    why: str


class Phase(msgspec.Struct, frozen=True, kw_only=True, tag="phase"):
    """A child process begins with this; what hangs or crashes next is blamed on it."""

    area: str


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The last word of a child process that came to its end."""


Note = Problem | Figure | Unseen | Phase | Finished
_note: msgspec.json.Decoder[Note] = msgspec.json.Decoder(Note)


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The result: of one area or of all."""

    areas: dict[str, State] = {}
    problems: tuple[Problem, ...] = ()
    figures: tuple[Figure, ...] = ()
    unseen: tuple[Unseen, ...] = ()

    @property
    def healthy(self) -> bool:
        """Warnings do not count: work can be given to this machine."""
        return State.FAILED not in self.areas.values()

    def __add__(self, other: Health) -> Health:
        """Both looks as one."""
        return Health(
            areas=self.areas | other.areas,
            problems=self.problems + other.problems,
            figures=self.figures + other.figures,
            unseen=self.unseen + other.unseen,
        )


def quick_areas() -> list[str]:
    """What `checkup` can look at."""
    return [*inventory.areas(), KERNEL_LOG]


def checkup(only: Sequence[str] = (), *, timeout_s: float = TIMEOUT_S) -> Health:
    """Look at all areas, or only at these."""
    wanted = [area for area in quick_areas() if not only or area in only]
    if not wanted:
        return Health()
    order = msgspec.json.encode((timeout_s, wanted)).decode()
    task = Task(area=wanted[0], argv=(sys.executable, "-m", "rerail.detect.checkup", order))
    return concluded(run_tasks([task], timeout_s + APART_S + GRACE_S), wanted)


def concluded(notes: Iterable[Note], wanted: Iterable[str]) -> Health:
    """What the child processes say, as a result. An area nobody says anything of is left out."""
    said = [note for note in notes if not isinstance(note, Finished | Phase)]
    ours = {area: [note for note in said if note.area == area] for area in wanted}
    return Health(
        areas={area: _state(of_it) for area, of_it in ours.items() if of_it},
        problems=tuple(note for note in said if isinstance(note, Problem)),
        figures=tuple(note for note in said if isinstance(note, Figure)),
        unseen=tuple(dict.fromkeys(note for note in said if isinstance(note, Unseen))),
    )


def _state(notes: Sequence[Note]) -> State:
    problems = [note for note in notes if isinstance(note, Problem) and not note.old]
    if problems:
        return State.FAILED if any(one.severity in SERIOUS for one in problems) else State.WARNING
    return State.OK if any(isinstance(note, Figure) for note in notes) else State.NOT_SEEN


def broken(area: str, code: str, title: str, subject: str, text: str) -> Problem:
    """Something did not come to its end."""
    advice = f"look for a reason in the kernel log (dmesg); rerail check --only {area} shows whether it comes again"
    return Problem(area=area, code=code, title=title, subject=subject, text=text, advice=advice)


# --- child processes with a deadline ---
class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One child process to run: it calls `report` and says what it finds."""

    argv: tuple[str, ...]
    area: str
    """Blamed until the child says what it is at."""
    subject: str = ""
    env: dict[str, str] = {}


class _Child:
    def __init__(self, task: Task, ended: queue.SimpleQueue[_Child]) -> None:
        self.task, self.area = task, task.area
        self.notes: list[Note] = []
        self.finished = False
        self._ended = ended
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self._process = subprocess.Popen(
            task.argv, env={**os.environ, **task.env}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines, contextlib.suppress(msgspec.MsgspecError):
            for line in lines:
                note = _note.decode(line)
                self.finished = isinstance(note, Finished)
                if self.finished:
                    break
                self.area = note.area if isinstance(note, Phase) else self.area
                self.notes.append(note)
        self._ended.put(self)

    def crash(self) -> Problem:
        """It has ended without its last word."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        code = self._process.poll()
        how = signal_name(-code) if code is not None and code < 0 else f"exit status {code}"
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        text = ": ".join([f"ended by {how}", *words])
        return broken(self.area, "check.crash", "a test has crashed", self.task.subject, text)

    def hang(self, timeout_s: float) -> Problem:
        """It has not come back."""
        text = f"no end after {timeout_s:g} s (process state {process_state(self._process.pid)})"
        return broken(self.area, "check.hang", "a test hangs", self.task.subject, text)

    def end(self) -> None:
        """Kill it if it is still there. One that even SIGKILL does not end is left behind."""
        for patience in (GRACE_S if self.finished else 0.0, GRACE_S):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
                break
            kill_tree(self._process.pid)
        self._errors.close()


def run_tasks(tasks: Iterable[Task], timeout_s: float, *, linked: bool = False) -> list[Note]:
    """Run all of them at once; how one ends that does not come to its end is a problem among their notes.

    Those that are `linked` wait for one another: when one has failed, the others are ended, and not blamed.
    """
    ended: queue.SimpleQueue[_Child] = queue.SimpleQueue()
    until = time.monotonic() + timeout_s
    children: list[_Child] = []
    failed = False
    try:
        for task in tasks:
            children.append(_Child(task, ended))
        left = list(children)
        while left:
            try:
                child = ended.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            left.remove(child)
            if not child.finished and not (linked and failed):
                child.notes.append(child.crash())
            if linked and not failed and any(isinstance(note, Problem) for note in child.notes):
                failed, until = True, min(until, time.monotonic() + GRACE_S)
        for child in left if not failed else ():
            child.notes.append(child.hang(timeout_s))
    finally:
        for child in children:
            child.end()
    return [note for child in children for note in child.notes]


@contextlib.contextmanager
def report() -> Iterator[Callable[[Note], None]]:
    """In a child process: gives the way to tell notes. Other output goes to stderr; the child dies with its parent."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def tell(note: Note) -> None:
        out.write(msgspec.json.encode(note) + b"\n")

    yield tell
    tell(Finished())
    os._exit(0)  # threads that hang would keep the interpreter from ending


# --- in the child process ---
class _Look(threading.Thread):
    """Both samples of one detector."""

    def __init__(self, area: str, detector: Detector, apart_s: float) -> None:
        super().__init__(name=detector.name, daemon=True)
        self.area, self.detector, self._apart_s = area, detector, apart_s
        self.samples: list[tuple[float, list[Reading]]] = []
        self.unseen: list[str] = []
        self.done = False

    def run(self) -> None:
        try:
            if why := self.detector.supported():
                self.unseen.append(why)
                return
            self.samples.append((time.monotonic(), self.detector.check()))
            time.sleep(self._apart_s)
            self.samples.append((time.monotonic(), self.detector.check()))
            self.unseen += self.detector.blind_spots()
        except Exception as error:  # a detector is a guest here: that it is broken is told, and the others go on
            self.unseen.append(f"the detector failed: {type(error).__name__}: {error}")
        finally:
            self.done = True


def examine(
    detectors: Mapping[str, Sequence[Detector]], faults: Iterable[Fault], timeout_s: float, apart_s: float = APART_S
) -> list[Note]:
    """Two samples of every detector, held against the catalogue."""
    looks = [_Look(area, detector, apart_s) for area, group in detectors.items() for detector in group]
    for look in looks:
        look.start()
    end = time.monotonic() + timeout_s + apart_s
    for look in looks:
        look.join(max(0.0, end - time.monotonic()))
    notes: list[Note] = []
    for look in looks:
        notes += [Unseen(area=look.area, what=look.name, why=why) for why in list(look.unseen)]
        if not look.done:
            text = f"has not come back for {timeout_s:g} s"
            notes.append(broken(look.area, "check.detector_hangs", "a detector hangs", look.name, text))
    notes += _judged(looks, Judge(faults))
    for area in detectors:
        counts = [len(look.samples[-1][1]) for look in looks if look.area == area and look.samples]
        if counts:
            notes.append(Figure(area=area, name="readings", value=sum(counts)))
    return notes


def _judged(looks: Iterable[_Look], judge: Judge) -> list[Problem]:
    """What both samples show; what began and ended in between is no fault of now."""
    samples = [(at, look.area, readings) for look in looks for at, readings in list(look.samples)]
    held: dict[tuple[str, str], Problem] = {}
    for at, area, readings in sorted(samples, key=lambda sample: sample[0]):
        for reading in readings:
            for finding in judge.take(reading, at):
                key = (finding.fault.code, reading.subject)
                if not finding.begins:
                    held.pop(key, None)
                elif finding.fault.matters and finding.fault.severity is not Severity.INFO:
                    held[key] = of_fault(finding.fault, area, reading.subject, finding.text)
    return list(held.values())


def of_fault(fault: Fault, area: str, subject: str, text: str) -> Problem:
    """A fault of the catalogue that is seen here."""
    shared = {name: getattr(fault, name) for name in ("code", "title", "severity", "advice", "action", "hardware")}
    return Problem(area=area, subject=subject, text=text, **shared)


def judge_log(lines: Iterable[tuple[float, str]], faults: Sequence[Fault]) -> list[Problem]:
    """What the kernel said of this machine, each line with its age in seconds, oldest first. Faults of programs do not count."""
    matcher = Matcher(faults)
    seen: dict[tuple[str, str], list[tuple[float, str]]] = {}
    known: dict[str, Fault] = {}
    for age, line in lines:
        for one in sightings(matcher, line):
            fault = known[one.fault.code] = one.fault
            if fault.role is Role.CLEAR:
                for code in [code for code, device in seen if device == one.device]:
                    if any(fnmatchcase(code, glob) for glob in fault.clears):
                        del seen[code, one.device]
            elif fault.matters and "kernel" in fault.seen and fault.scope not in ("process", "job"):
                seen.setdefault((fault.code, one.device), []).append((age, line))
    return [told for (code, device), found in seen.items() for told in _from_log(known[code], device, found)]


def _from_log(fault: Fault, device: str, found: Sequence[tuple[float, str]]) -> Iterator[Problem]:
    """A problem, if the fault was seen as often, and within as short a time, as makes it one."""
    spans = [first[0] - last[0] for first, last in zip(found, found[fault.times - 1 :], strict=False)]
    if fault.severity is Severity.INFO or not spans or (fault.within_s and min(spans) > fault.within_s):
        return
    age, line = found[-1]
    told = of_fault(fault, KERNEL_LOG, device, f"{line} ({len(found)}x, last {age / 60:.0f} min ago)")
    old = age > RECENT_S
    lowered = Severity.WARNING if old and fault.serious else fault.severity
    yield msgspec.structs.replace(told, severity=lowered, old=old)


def main(order: str) -> None:
    """The child process of `checkup`."""
    timeout_s, wanted = msgspec.json.decode(order, type=tuple[float, list[str]])
    with report() as tell:
        faults = Levels.from_environment().catalog().faults
        detectors = {}
        for area in wanted:
            tell(Phase(area=area))
            if area != KERNEL_LOG:
                detectors[area] = inventory.detectors_of(area)
                continue
            lines, why = inventory.kernel_log()
            tell(Unseen(area=area, what=area, why=why) if why else Figure(area=area, name="lines", value=len(lines)))
            for problem in judge_log(lines, faults):
                tell(problem)
        for note in examine(detectors, faults, timeout_s):
            tell(note)


if __name__ == "__main__":
    main(sys.argv[1])
