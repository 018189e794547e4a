"""Turns a job's runs, interruptions and windows of training into pieces of time with one cause each. Pure.

Called by `report.accounts`. The pieces follow each other without gap or overlap from the first moment of the job to its last, so
that what is summed over them adds up to its wall time, whatever the journal holds:

    start-up | training, data, checkpoint | detect T1 T2 T3 T4 T0 | training ... | shut-down | not running | start-up ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Cause(StrEnum):
    """What a second of the job's wall time went into."""

    TRAINING = "training"
    LOST = "T0 lost work"
    DETECT = "detect"
    RESCHEDULE = "T1 reschedule"
    COMMUNICATION = "T2 communication"
    LOAD = "T3 load"
    COMPILE = "T4 compile"
    CHECKPOINT = "checkpoint stall"
    DATA = "waiting for data"
    STARTUP = "start-up"
    SHUTDOWN = "shut-down"
    OFF = "not running"
    UNKNOWN = "not known"


PHASES = (Cause.DETECT, Cause.LOST, Cause.RESCHEDULE, Cause.COMMUNICATION, Cause.LOAD, Cause.COMPILE)
"""Those of an incident."""
MEANING = {
    Cause.TRAINING: "steps that counted: computing and communicating",
    Cause.LOST: "work that was lost with a fault and is computed again, the interrupted step included",
    Cause.DETECT: "from a fault to the first sign of it",
    Cause.RESCHEDULE: "deciding, freeing the survivors, starting and building the newcomers",
    Cause.COMMUNICATION: "forming the groups of the new generation",
    Cause.LOAD: "bringing every rank's state to the version gone on from",
    Cause.COMPILE: "what the first step afterwards took beyond a usual one",
    Cause.CHECKPOINT: "steps that waited for a snapshot or checkpoint",
    Cause.DATA: "steps that waited for their batch",
    Cause.STARTUP: "from the job's beginning to its first step",
    Cause.SHUTDOWN: "from the last step to the end",
    Cause.OFF: "between two runs of the job",
    Cause.UNKNOWN: "nobody told: the script calls no rerail.join(), or the job was killed, or an older rerail wrote the journal",
}


@dataclass(frozen=True)
class Piece:
    """A stretch of time, from `begin` up to but without `end`, and its one cause."""

    begin: float
    end: float
    cause: Cause
    incident: int = 0
    """Whose, or 0."""

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Run:
    """One life of the job, from a controller that began it to its end, or to the last sign of it."""

    begin: float
    end: float
    trained: float | None = None
    """When its first step began; None: none was told."""
    progress: float | None = None
    """When its last new step was complete."""
    silent: bool = False
    """No rank ever told a step, nor that it would."""
    closed: bool = True
    """Its end was written down; else it runs still, or was killed."""
    repeated: int = 0
    """Steps that an earlier run had completed, and this one begins with again."""
    lost: float = 0.0
    """Seconds of them."""


@dataclass(frozen=True)
class Stop:
    """One interruption of the training, as an incident's records tell it."""

    incident: int
    begin: float
    """When the fault was, as far as the detector can tell."""
    signal: float
    parked: float
    formed: float
    end: float
    """When the first step afterwards was complete, or it was given up."""
    communication: float = 0.0
    load: float = 0.0
    """These two share the time from parked to formed."""
    compile: float = 0.0
    lost: float = 0.0
    """Seconds of work to be computed again, from `formed` on and beyond the end."""


@dataclass(frozen=True)
class Window:
    """Training between two moments at which new steps had been completed."""

    begin: float
    end: float
    data: float = 0.0
    """Share of the time, as the next."""
    checkpoint: float = 0.0


def partition(runs: Sequence[Run], stops: Sequence[Stop], windows: Sequence[Window]) -> list[Piece]:
    """All pieces, in order of time."""
    base = [piece for piece in _undisturbed(runs, stops) if piece.seconds > 0]
    if not base:
        return []
    once = list(_once(stops, base[0].begin, base[-1].end))
    debts = [(one.end, one.incident, _owed(one)) for one in stops]
    debts += [(run.trained, 0, run.lost) for run in runs if run.trained is not None and run.lost > 0]
    return list(joined(_shared(joined(_repaid(_laid_over(base, once), debts)), windows)))


def _undisturbed(runs: Sequence[Run], stops: Sequence[Stop]) -> Iterator[Piece]:
    """The job's time as if nothing had interrupted it."""
    now = None
    for run in sorted(runs, key=lambda one: one.begin):
        begin = run.begin if now is None else max(run.begin, now)
        if now is not None:
            yield Piece(now, begin, Cause.OFF)
        now = end = max(begin, run.end)
        if run.trained is None:
            yield Piece(begin, end, Cause.UNKNOWN if run.silent else Cause.STARTUP)
            continue
        first = _within(run.trained, begin, end)
        yield Piece(begin, first, Cause.STARTUP)
        last = max([first, run.progress or first, *(one.end for one in stops if begin <= one.signal < end)])
        last = _within(last, first, end)
        yield Piece(first, last, Cause.TRAINING)
        yield Piece(last, end, Cause.SHUTDOWN if run.closed else Cause.UNKNOWN)


def _once(stops: Sequence[Stop], begin: float, end: float) -> Iterator[Piece]:
    """Phases of all interruptions, each second of them once: where two overlap, it is the earlier one's."""
    now = begin
    for stop in sorted(stops, key=lambda one: (one.signal, one.incident)):
        for phase in _phases(stop):
            first, last = max(now, phase.begin), min(phase.end, end)
            if last > first:
                yield replace(phase, begin=first, end=last)
                now = last


def _laid_over(base: Sequence[Piece], cover: Sequence[Piece]) -> Iterator[Piece]:
    """What covers, and of the base what is not covered."""
    waiting = iter(cover)
    above = next(waiting, None)
    for piece in base:
        now = piece.begin
        while above is not None and above.begin < piece.end:
            yield replace(piece, begin=now, end=max(now, above.begin))
            yield replace(above, begin=max(now, above.begin), end=max(now, min(above.end, piece.end)))
            now = max(now, min(above.end, piece.end))
            if above.end > piece.end:
                break
            above = next(waiting, None)
        yield replace(piece, begin=now)


def _repaid(pieces: Iterable[Piece], debts: Sequence[tuple[float, int, float]]) -> Iterator[Piece]:
    """Steps that follow a loss are that loss until it is made good, also across the next interruption.

    A debt: from when on, whose (0: that of an earlier run), and how many seconds.
    """
    debts = sorted(debts, reverse=True)
    owed: list[tuple[int, float]] = []
    for piece in pieces:
        while debts and debts[-1][0] <= piece.begin:
            owed.append(debts.pop()[1:])
        while owed and piece.cause is Cause.TRAINING and piece.seconds > 0:
            incident, left = owed.pop(0)
            until = min(piece.end, piece.begin + left)
            yield Piece(piece.begin, until, Cause.LOST, incident)
            if until >= piece.end:
                owed.insert(0, (incident, left - (until - piece.begin)))
            piece = replace(piece, begin=until)
        yield piece


def _owed(stop: Stop) -> float:
    """Lost work that is not made good yet when the first step afterwards is complete."""
    replayed = sum(phase.seconds for phase in _phases(stop) if phase.cause is Cause.LOST)
    return max(0.0, stop.lost - replayed)


def _phases(stop: Stop) -> Iterator[Piece]:
    """An interruption from its fault to its first step."""
    signal = max(stop.begin, stop.signal)
    parked, formed = _within(stop.parked, signal, stop.end), _within(stop.formed, signal, stop.end)
    formed = max(parked, formed)
    both = stop.communication + stop.load
    loading = parked + (formed - parked) * (stop.communication / both if both > 0 else 1.0)
    # what the first step took beyond itself; where it took longer than all that is lost, the rest is warm-up, too
    compiled = _within(max(formed + stop.compile, stop.end - stop.lost), formed, stop.end)
    yield Piece(stop.begin, signal, Cause.DETECT, stop.incident)
    yield Piece(signal, parked, Cause.RESCHEDULE, stop.incident)
    yield Piece(parked, loading, Cause.COMMUNICATION, stop.incident)
    yield Piece(loading, formed, Cause.LOAD, stop.incident)
    yield Piece(formed, compiled, Cause.COMPILE, stop.incident)
    yield Piece(compiled, stop.end, Cause.LOST, stop.incident)


def _shared(pieces: Iterable[Piece], windows: Sequence[Window]) -> Iterator[Piece]:
    """What steps waited for, taken out of the training by its share in each window."""
    ordered, place = sorted(windows, key=lambda one: one.begin), 0
    for piece in pieces:
        if piece.cause is not Cause.TRAINING:
            yield piece
            continue
        now = piece.begin
        while place < len(ordered) and ordered[place].begin < piece.end:
            window = ordered[place]
            start, stop = _within(window.begin, now, piece.end), _within(window.end, now, piece.end)
            yield Piece(now, start, Cause.TRAINING)
            yield from _split(start, stop, window)
            now = stop
            if window.end > piece.end:
                break
            place += 1
        yield Piece(now, piece.end, Cause.TRAINING)


def _split(begin: float, end: float, window: Window) -> Iterator[Piece]:
    data, checkpoint = max(0.0, window.data), max(0.0, window.checkpoint)
    whole, seconds = max(1.0, data + checkpoint), end - begin
    saved = _within(end - seconds * checkpoint / whole, begin, end)
    fetched = _within(saved - seconds * data / whole, begin, saved)
    yield Piece(begin, fetched, Cause.TRAINING)
    yield Piece(fetched, saved, Cause.DATA)
    yield Piece(saved, end, Cause.CHECKPOINT)


def joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Without what is empty, and with neighbours of one cause as one."""
    last: Piece | None = None
    for piece in pieces:
        if piece.end <= piece.begin:
            continue
        if last is not None and (last.cause, last.incident, last.end) == (piece.cause, piece.incident, piece.begin):
            last = replace(last, end=piece.end)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
