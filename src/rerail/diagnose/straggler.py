"""Names the rank that is slower than its peers: turns the phases of completed steps into Stragglers. Pure.

Called by `runtime.controller` for every step a rank reports; one watch per set of ranks that do the same work (stages of
a pipeline are not peers of each other). Compared is the time that is a rank's own: loading data and computing. Waiting
for others is what the innocent do, and checkpoints are uneven by design, so neither makes a straggler.

Each step gives a rank a logarithmic ratio to the median of its peers; what all share cancels out. The evidence for "1.3
times as slow" against "as fast as the others" is summed up (a CUSUM, in units of the noise seen so far), never below
zero. A single step counts for little however slow it was. At the bar the rank is named, and back at zero it is over.

With two ranks the median of the peers is the other rank, whose noise counts in full: the slower one is named only when
that is clear, which takes longer than among many. When most ranks are slow, slow is the rule and nobody is named.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from math import exp, log
from operator import attrgetter
from statistics import median

import msgspec

SLOW = log(1.3)
"""The slowness that is looked for; evidence grows above half of it."""
LEAST_RATIO, LEAST_SHARE = 1.2, 0.01
"""Nobody is named who is not so much slower, or whose delay is less than this share of its own time."""
BAR = 13.0
"""Evidence to be named, as the logarithm of the odds; the logarithm of the number of ranks comes on top."""
LEAST_STEPS = 6
"""One step counts for at most this part of the bar."""
LEAST_NOISE, FIRST_NOISE = 0.04, 0.2
NOISIER = 1.6
"""A rank with so many times the noise of the others is judged by its own."""
LAG = 16
"""Steps a rank may be behind before the others are judged without it."""
HISTORY = 32
"""Judged steps that are kept."""
SAMPLE, GAUGES = 128, 16
"""Ranks that make the median, and on which noise is measured, where there are many."""
TO_SIGMA = 1.0484
"""From the median difference between successive steps to the standard deviation of one."""


class Phases(msgspec.Struct, frozen=True, gc=False):
    """Where one completed step of one rank went, in seconds."""

    data: float
    compute: float
    communication: float = 0.0
    """Waiting for others."""
    checkpoint: float = 0.0


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """A rank is slower than its peers, or no longer."""

    rank: int
    phase: str
    """`data` or `compute`."""
    ratio: float
    """Its time over that of its peers: the median since it began, at the end that of the last steps."""
    since: int
    """The step it began with."""
    step: int
    """The step that showed it."""
    over: bool = False


class _Suspect(msgspec.Struct, gc=False):
    since: int
    steps: int = 0
    evidence: float = 0.0
    named: bool = False


class _Track:
    """One phase of all ranks."""

    def __init__(self, phase: str) -> None:
        self._phase, self._time = phase, attrgetter(phase)
        self._suspects: dict[int, _Suspect] = {}
        self._history: deque[tuple[dict[int, Phases], tuple[float, float, float]]] = deque(maxlen=HISTORY)
        self._gauges: dict[int, float] = {}
        self._jumps: deque[float] = deque([FIRST_NOISE / TO_SIGMA] * GAUGES, maxlen=16 * GAUGES)

    def judge(self, step: int, peers: dict[int, Phases]) -> list[Straggler]:
        """What this step adds. A rank with no evidence against it that was not slow this time needs no look: most."""
        times = list(map(self._time, peers.values()))
        middles = _middles(sorted(times[:: max(1, len(times) // SAMPLE)]))
        self._history.append((peers, middles))
        noise, bar = self._noise(peers, middles), BAR + log(len(peers))
        weight, most = SLOW / noise**2, bar / LEAST_STEPS
        slow = middles[1] * exp(SLOW / 2)
        for rank in [rank for rank, time in zip(peers, times, strict=True) if time > slow]:
            if rank not in self._suspects:
                self._suspects[rank] = _Suspect(step)
        found: list[Straggler] = []
        for rank, suspect in [*self._suspects.items()]:
            if rank not in peers:
                continue
            gain = weight * (_excess(self._time(peers[rank]), middles) - SLOW / 2)
            suspect.steps += 1
            suspect.evidence = min(bar, suspect.evidence + max(-most, min(most, gain)))
            if suspect.evidence <= 0.0:
                found += self._clear(rank, step)
            elif suspect.evidence >= bar and not suspect.named and self._is_sure(rank, suspect.steps, noise, bar):
                suspect.named = True
                found.append(self._straggler(rank, suspect, step, suspect.steps))
        return found

    def forget(self, rank: int, step: int) -> list[Straggler]:
        """What the rank did before is not its successor's."""
        ended = self._clear(rank, step)
        self._gauges.pop(rank, None)
        for peers, _ in self._history:
            peers.pop(rank, None)
        return ended

    def _clear(self, rank: int, step: int) -> list[Straggler]:
        suspect = self._suspects.pop(rank, None)
        if suspect is None or not suspect.named:
            return []
        return [msgspec.structs.replace(self._straggler(rank, suspect, step, LEAST_STEPS), over=True)]

    def _straggler(self, rank: int, suspect: _Suspect, step: int, steps: int) -> Straggler:
        ratio = exp(median(self._excesses(rank, steps)))
        return Straggler(rank=rank, phase=self._phase, ratio=min(ratio, 1000.0), since=suspect.since, step=step)

    def _excesses(self, rank: int, steps: int) -> list[float]:
        """Of the rank's last steps."""
        return [_excess(self._time(peers[rank]), middles) for peers, middles in self._history if rank in peers][-steps:]

    def _noise(self, peers: dict[int, Phases], middles: tuple[float, float, float]) -> float:
        """Of one rank in one step; from differences between steps, so that being always slow is no noise."""
        before = self._gauges
        ranks = [rank for rank in before if rank in peers]
        ranks += [rank for rank in peers if rank not in before][: GAUGES - len(ranks)] if len(ranks) < GAUGES else []
        self._gauges = {rank: _excess(self._time(peers[rank]), middles) for rank in ranks}
        self._jumps.extend(abs(excess - before[rank]) for rank, excess in self._gauges.items() if rank in before)
        return max(LEAST_NOISE, TO_SIGMA * median(self._jumps))

    def _is_sure(self, rank: int, steps: int, noise: float, bar: float) -> bool:
        """Slow enough, of consequence, and not merely noisier than the others, whose noise its evidence was weighed by."""
        mine = [peers[rank] for peers, _ in self._history if rank in peers]
        excesses = self._excesses(rank, HISTORY)
        ratio = exp(median(excesses[-steps:]))
        delay = (1.0 - 1.0 / ratio) * float(median(map(self._time, mine)))
        if ratio < LEAST_RATIO or delay < LEAST_SHARE * median(one.data + one.compute for one in mine):
            return False
        own_noise = TO_SIGMA * median(abs(one - other) for one, other in pairwise(excesses))
        return own_noise < NOISIER * noise or sum(SLOW / own_noise**2 * (one - SLOW / 2) for one in excesses) >= bar


class StragglerWatch:
    """Takes completed steps in any order of ranks; judges one when every rank has reached it, or is `LAG` behind."""

    def __init__(self) -> None:
        self._tracks = (_Track("data"), _Track("compute"))
        self._open: dict[int, dict[int, Phases]] = {}
        self._last: dict[int, int] = {}  # the newest step of each rank
        self._standing: dict[int, int] = {}  # how many ranks have come as far as which step
        self._judged = self._newest = -1

    def take(self, rank: int, step: int, phases: Phases) -> list[Straggler]:
        """One completed step of one rank; what it shows, if anything: a straggler found, or one that is none any more."""
        last = self._last.get(rank, -1)
        if step <= last and step <= self._newest - LAG:  # the job went back: what was under way is void
            self._open, self._last, self._standing = {}, {}, {}
            self._judged = self._newest = step - 1
            last = -1
        if step > self._judged:
            self._open.setdefault(step, {})[rank] = phases
        if step <= last:
            return []
        self._last[rank] = step
        self._standing[step] = self._standing.get(step, 0) + 1
        if step > self._newest:
            self._newest = step
        left = self._standing.get(last, 0) - 1
        if left > 0:
            self._standing[last] = left
            return []
        return self._leave(last)

    def forget(self, rank: int) -> list[Straggler]:
        """The rank is gone, and whoever takes its place begins anew. Ends its episode, and may let others be judged."""
        for peers in self._open.values():
            peers.pop(rank, None)
        ended = [one for track in self._tracks for one in track.forget(rank, self._judged)]
        last = self._last.pop(rank, -1)
        self._standing[last] = self._standing.get(last, 1) - 1
        return ended if self._standing[last] > 0 else ended + self._leave(last)

    def _leave(self, last: int) -> list[Straggler]:
        """Nobody stands at this step any more: all are complete up to the one where the hindmost stands now."""
        self._standing.pop(last, None)
        for behind in [step for step in self._standing if step <= self._newest - LAG]:
            del self._standing[behind]
        complete = min(self._standing, default=self._judged)
        ready = [(step, self._open.pop(step)) for step in sorted(self._open) if step <= complete]
        self._judged = max(self._judged, complete)
        ready = [(step, peers) for step, peers in ready if len(peers) > 1]
        return [one for step, peers in ready for track in self._tracks for one in track.judge(step, peers)]


def _middles(times: list[float]) -> tuple[float, float, float]:
    """Of sorted times: the median, and the median of the others for a rank above it and for one below."""
    half = len(times) // 2
    if len(times) % 2:
        return times[half], (times[half - 1] + times[half]) / 2, (times[half] + times[half + 1]) / 2
    return (times[half - 1] + times[half]) / 2, times[half - 1], times[half]


def _excess(time: float, middles: tuple[float, float, float]) -> float:
    """Logarithm of the ratio to the median of the others."""
    return log(max(time, 1e-9) / max(middles[1] if time > middles[0] else middles[2], 1e-9))
