"""Names the rank that is slower than its peers: turns the phases of completed steps into Stragglers. Pure.

Called by `runtime.training` for every step a rank reports; one watch per set of ranks that do the same work (stages of
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

from rerail.diagnose.lockstep import Lockstep

SLOW = log(1.3)
"""The slowness that is looked for; evidence grows above half of it."""
LEAST_RATIO, LEAST_SHARE = 1.2, 0.01
"""Nobody is named who is not so much slower, or whose delay is less than this share of its own time."""
BAR, FEWEST_RANKS = 13.0, 16
"""Evidence to be named, as the logarithm of the odds; the logarithm of the number of ranks comes on top."""
LEAST_STEPS = 6
"""One step counts for at most this part of the bar."""
LEAST_NOISE, FIRST_NOISE, NOISIER = 0.04, 0.2, 1.6
"""Of a rank in a step; one with so many times the noise of the others is judged by its own."""
TO_SIGMA = 1.0484
"""From the median difference between successive steps to the standard deviation of one."""
HISTORY = 32
"""Judged steps that are kept."""
SAMPLE, GAUGES = 128, 16
"""Ranks that make the median, and on which noise is measured, where there are many."""
TINY = 1e-9
Middles = tuple[float, float, float]
"""The median of all ranks, and the median of the others for a rank above it and for one below."""


class Phases(msgspec.Struct, frozen=True, gc=False):
    """Where one completed step of one rank went, in seconds; communication is waiting for others."""

    data: float
    compute: float
    communication: float = 0.0
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
    evidence: float = 0.0
    named: bool = False


class _Track:
    """One phase of all ranks."""

    def __init__(self, phase: str) -> None:
        self._phase, self._time = phase, attrgetter(phase)
        self._suspects: dict[int, _Suspect] = {}
        self._history: deque[tuple[dict[int, Phases], Middles]] = deque(maxlen=HISTORY)
        self._newest = -1
        self._gauges: dict[int, float] = {}
        self._jumps: deque[float] = deque([FIRST_NOISE / TO_SIGMA] * GAUGES, maxlen=16 * GAUGES)

    def judge(self, step: int, peers: dict[int, Phases]) -> list[Straggler]:
        """What this step adds. A rank with no evidence against it that was not slow this time needs no look: most."""
        time_of = self._time
        times = list(map(time_of, peers.values()))
        middles = middle, below, above = _middles(sorted(times[:: max(1, len(times) // SAMPLE)]))
        self._newest = step
        self._history.append((peers, middles))
        noise, bar = self._noise(peers, middles), BAR + log(max(len(peers), FEWEST_RANKS))
        suspects, weight, most = self._suspects, SLOW / noise**2, bar / LEAST_STEPS
        slow = below * exp(max(0.75 * SLOW, 1.3 * noise))
        low, high = SLOW / 2 - most / weight, SLOW / 2 + most / weight
        fast = max(middle, below * exp(low)) if low > 0 else min(middle, above * exp(low))
        very_slow = max(middle, below * exp(high))
        for rank in [rank for rank, time in zip(peers, times, strict=True) if time > slow]:
            if rank not in suspects:
                suspects[rank] = _Suspect(step)
        found: list[Straggler] = []
        for rank in [rank for rank in suspects if rank in peers]:
            suspect, time = suspects[rank], time_of(peers[rank])
            if fast < time < very_slow:
                gain = weight * (log(time / (below if time > middle else above)) - SLOW / 2)
            else:
                gain = -most if time <= fast else most
            suspect.evidence = evidence = suspect.evidence + gain
            if evidence <= 0.0:
                del suspects[rank]
                found += [self._straggler(rank, suspect, step, over=True)] if suspect.named else []
            elif evidence >= bar:
                suspect.evidence = bar
                if not suspect.named and self._is_sure(rank, step - suspect.since + 1, noise, bar):
                    suspect.named = True
                    found.append(self._straggler(rank, suspect, step))
        return found

    def forget(self, rank: int) -> list[Straggler]:
        """What the rank did before is not its successor's."""
        suspect = self._suspects.pop(rank, None)
        ended = (
            [self._straggler(rank, suspect, self._newest, over=True)] if suspect is not None and suspect.named else []
        )
        self._gauges.pop(rank, None)
        for peers, _ in self._history:
            peers.pop(rank, None)
        return ended

    def _straggler(self, rank: int, suspect: _Suspect, step: int, over: bool = False) -> Straggler:
        excesses = self._excesses(rank, 0 if over else step - suspect.since + 1)
        ratio = min(exp(median(excesses or [0.0])), 1000.0)
        return Straggler(rank=rank, phase=self._phase, ratio=ratio, since=suspect.since, step=step, over=over)

    def _excesses(self, rank: int, steps: int) -> list[float]:
        """Of the rank's last steps."""
        kept = [_excess(self._time(peers[rank]), middles) for peers, middles in self._history if rank in peers]
        return kept[-max(steps, LEAST_STEPS) :]

    def _noise(self, peers: dict[int, Phases], middles: Middles) -> float:
        """Of one rank in one step; from differences between steps, so that being always slow is no noise."""
        before, ranks = self._gauges, [rank for rank in self._gauges if rank in peers]
        if len(ranks) < min(GAUGES, len(peers)):
            ranks += [rank for rank in peers if rank not in before][: GAUGES - len(ranks)]
        self._gauges = {rank: _excess(self._time(peers[rank]), middles) for rank in ranks}
        self._jumps.extend([abs(excess - before[rank]) for rank, excess in self._gauges.items() if rank in before])
        return max(LEAST_NOISE, TO_SIGMA * sorted(self._jumps)[len(self._jumps) // 2])

    def _is_sure(self, rank: int, steps: int, noise: float, bar: float) -> bool:
        """Slow enough, of consequence, and not merely noisier than the others, by whose noise evidence is weighed."""
        mine = [peers[rank] for peers, _ in self._history if rank in peers]
        ratio = exp(median(self._excesses(rank, steps)))
        delay = (1.0 - 1.0 / ratio) * float(median(map(self._time, mine)))
        if ratio < LEAST_RATIO or delay < LEAST_SHARE * median(one.data + one.compute for one in mine):
            return False
        excesses = self._excesses(rank, HISTORY)
        own_noise = TO_SIGMA * median(abs(one - other) for one, other in pairwise(excesses))
        return own_noise < NOISIER * noise or sum(SLOW / own_noise**2 * (one - SLOW / 2) for one in excesses) >= bar


class StragglerWatch(Lockstep[Phases, Straggler]):
    """Takes completed steps in any order of ranks, and judges one when every rank has reached it.

    `take(rank, step, phases)` and `forget(rank)` give what that shows: stragglers found, and those that are none any more.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tracks = (_Track("data"), _Track("compute"))

    def forget(self, rank: int) -> list[Straggler]:
        """The rank is gone, and whoever takes its place begins anew. Ends its episode, and may let others be judged."""
        ended = [one for track in self._tracks for one in track.forget(rank)]
        return ended + super().forget(rank)

    def judge(self, step: int, reports: dict[int, Phases]) -> list[Straggler]:
        if len(reports) < 2:
            return []
        return [one for track in self._tracks for one in track.judge(step, reports)]


def _middles(times: list[float]) -> Middles:
    half = len(times) // 2
    middle, below, above = (times[half - 1] + times[half]) / 2, times[half - 1], times[half]
    if len(times) % 2:
        middle, below, above = times[half], middle, (times[half] + times[half + 1]) / 2
    return max(middle, TINY), max(below, TINY), max(above, TINY)


def _excess(time: float, middles: Middles) -> float:
    """Logarithm of the ratio to the median of the others."""
    return log(max(time, TINY) / (middles[1] if time > middles[0] else middles[2]))
