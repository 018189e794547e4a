"""How a place for checkpoints is doing: turns what went wrong there into good, doubtful or out, and into words for people.

    good -> [a save fails or hangs] -> out -> [a probe succeeds] -> good
    good -> [a save is far slower than usual] -> doubtful -> [the next one is not] -> good

A place that is out is left alone but for probes, with longer and longer pauses between them; only a save that succeeds
makes them short again. Knows no clock and no files. Called by `checkpoint.guarded`.
"""

from __future__ import annotations

import enum
import errno
import statistics
from collections import deque

FIRST_S, LONGEST_S = 5.0, 300.0
"""Seconds before the first probe, and at most between two."""
SLOW_FIRST_S = 60.0
"""The same for a place that was slow: what slows it down rarely ends within seconds."""
HANG_TIMES, SLOW_TIMES = 5.0, 4.0
"""How many times the usual a write may make no progress, and take altogether."""
LEAST_RATE = 16 << 20
"""Bytes per second that a place is trusted to take as long as nothing is known about it."""
KNOWN = 3
"""Writes after which it is known what is usual."""
LEAST_SIZE = 1 << 20
"""Bytes of a write that says something about the rate."""


class State(enum.StrEnum):
    """Whether a place is used."""

    GOOD = "good"
    DOUBTFUL = "doubtful"
    OUT = "out"


class Kind(enum.StrEnum):
    """What is wrong with a place."""

    FULL = "full"
    READ_ONLY = "read-only"
    FORBIDDEN = "forbidden"
    GONE = "gone"
    HUNG = "hung"
    SLOW = "slow"
    BROKEN = "broken"


class Gone(OSError):
    """The place is not there any more, or something else lies there."""


class Hung(OSError):
    """Nothing came back for too long."""


class Slow(OSError):
    """It takes far longer than usual."""


_BY_NUMBER = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), Kind.FULL),
    errno.EROFS: Kind.READ_ONLY,
    **dict.fromkeys((errno.EACCES, errno.EPERM), Kind.FORBIDDEN),
    **dict.fromkeys((errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENOTDIR, errno.ENOTCONN), Kind.GONE),
}
_BY_CLASS: dict[type[OSError], Kind] = {Gone: Kind.GONE, Hung: Kind.HUNG, Slow: Kind.SLOW}
_ADVICE = {
    Kind.FULL: "free space there, or let `keep` hold fewer steps",
    Kind.READ_ONLY: "see the kernel log for why it is read-only, repair it and mount it for writing",
    Kind.FORBIDDEN: "let the user of this job write there again",
    Kind.GONE: "mount it, or put the directory back",
    Kind.HUNG: "see whether its server or disk answers (kernel log, mount, df)",
    Kind.SLOW: "see who else uses it, and whether a disk of it fails",
    Kind.BROKEN: "see the kernel log and the health of its disk or server",
}


def kind_of(error: Exception) -> Kind | None:
    """What an error says about the place; None if it says nothing about it."""
    if not isinstance(error, OSError) or isinstance(error, FileNotFoundError | FileExistsError):
        return None
    return _BY_CLASS.get(type(error)) or _BY_NUMBER.get(error.errno or 0, Kind.BROKEN)


def advice(kind: Kind) -> str:
    return _ADVICE[kind]


class Health:
    """Of one place. Times are seconds of whoever calls."""

    def __init__(self) -> None:
        self.state = State.GOOD
        self.kind: Kind | None = None
        self.why = ""
        self.since = 0.0
        self.next_probe = 0.0
        self._pause_s = 0.0
        self._rates: deque[float] = deque(maxlen=8)
        """Bytes per second of the newest large writes."""

    @property
    def out(self) -> bool:
        return self.state is State.OUT

    def failed(self, kind: Kind, why: str, now: float) -> bool:
        """A save or copy could not be written. Whether that is news."""
        news = not self.out
        if news:
            self.since = now
            first = SLOW_FIRST_S if kind is Kind.SLOW else FIRST_S
            self._pause_s = min(LONGEST_S, max(first, 2 * self._pause_s))
            self.next_probe = now + self._pause_s
        self.state, self.kind, self.why = State.OUT, kind, why
        return news

    def probed(self, problem: str, now: float) -> bool:
        """What a probe has found, nothing if all was well. Whether the place is back."""
        if problem:
            self._pause_s = min(LONGEST_S, 2 * self._pause_s)
            self.next_probe = now + self._pause_s
            return False
        self.state, self.kind, self.why, self.since = State.GOOD, None, "", now
        return True

    def hurry(self, now: float) -> None:
        """A save is due: look again soon, if the last look is a while ago."""
        self.next_probe = min(self.next_probe, max(now, self.next_probe - self._pause_s + FIRST_S))

    def saved(self) -> None:
        """A whole save or copy has got through."""
        if not self.out:
            self._pause_s = 0.0

    def wrote(self, size: int, seconds: float) -> None:
        """A large write has got through."""
        usual = self.usual_s(size)
        if size >= LEAST_SIZE:
            self._rates.append(size / max(seconds, 1e-6))
        if self.out:
            return
        if usual is not None and seconds > max(1.0, SLOW_TIMES * usual):
            self.state, self.kind = State.DOUBTFUL, Kind.SLOW
            self.why = f"{seconds:.1f} s for what usually takes {usual:.1f} s"
        else:
            self.state, self.kind, self.why = State.GOOD, None, ""

    def usual_s(self, size: int) -> float | None:
        """Seconds that a write of this size usually takes; None as long as that is not known."""
        return size / statistics.median(self._rates) if len(self._rates) >= KNOWN else None

    def silence_s(self, size: int, floor_s: float) -> float:
        """Seconds without any progress after which a write of this size is called hung."""
        usual = self.usual_s(size)
        return max(floor_s, HANG_TIMES * usual if usual is not None else size / LEAST_RATE)

    def longest_s(self, size: int, floor_s: float) -> float | None:
        """Seconds altogether after which it is called slow; None: never, since nobody knows what is usual."""
        usual = self.usual_s(size)
        return max(floor_s, SLOW_TIMES * usual) if usual is not None else None
