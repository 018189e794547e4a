"""How often faults come: turns the times between those there were into a rate with its confidence, and says by which rule. Pure.

Three questions, in this order:

    has it changed?     a likelihood ratio over every place where old and new could part; what came before is then forgotten
    how sure is it?     a Gamma posterior: what is usual for this hardware counts as one fault, a new job as half a fault in
                        its first ten minutes; whichever expects more is believed
    is it even?         Weibull instead of exponential where there are enough faults, and their times say so clearly

`estimate` is for a running job, which has to expect the faults of its first minutes; used by `runtime.experience`. `learnt` is for a
journal, whose job is over: what is usual weighs one fault there, however far the two are apart. Used by `rerail plan --journal`.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

import msgspec

DAY_S = 86_400.0
PER_DEVICE_S = 0.47 / 1000 / DAY_S
"""Faults of one accelerator, its host and network: 419 in 54 days on 16,384 of them (Llama 3)."""
PER_HOST_S = PER_DEVICE_S / 10
"""Of a rank that has no accelerator."""
CHANGED = 10.0
"""Twice the log likelihood ratio from which the rate has changed: seldom by chance, and a tenfold change shows within five faults."""
FEWEST = 3
"""Faults that a change is seen by."""
CLEARLY = 6.0
"""The same for Weibull against exponential; the usual measure asks for 2, and nobody should believe it lightly."""
AT_MOST = 4.0
"""How far the rate to come may be from the mean one: nobody knows the end of a distribution so well."""
ENOUGH = 10
"""Times between faults from which their distribution can be told."""
KEPT = 256
_SETTLING_S, _SETTLING = 600.0, 0.5
"""What is expected of a job that has only begun: most errors of a script show in its first minutes."""
_TAIL, _MARKS = 12.0, 6000
"""How far beyond what is likely an estimate looks, in logarithms, and at how many places."""


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate."""

    per_s: float
    """To be expected next."""
    mean: float
    """Over a long time; another one only where faults do not come evenly."""
    low: float
    high: float
    """It is between these with a probability of 90 %."""
    faults: int
    """Those that it was made from; fewer than there were after a change."""
    weight: float
    """The same with what was believed before: time without a fault lowers the rate the sooner, the less this is."""
    shape: float = 1.0
    """Weibull's: 1 for faults that come evenly, less where one is soon followed by the next."""
    why: str = ""

    @property
    def between_s(self) -> float:
        """Mean seconds between two."""
        return 1.0 / self.per_s


def usual(devices: int, hosts: int = 0) -> float:
    """Faults per second that hardware of this size has, as others have counted; hosts are ranks without accelerators."""
    return max(devices * PER_DEVICE_S + hosts * PER_HOST_S, PER_HOST_S)


def estimate(gaps: Sequence[float], since_s: float, prior: float) -> Rate:
    """From the seconds between faults, oldest first (the first since the start), and those since the last one."""
    gaps = [max(gap, 1e-3) for gap in gaps[-KEPT:]]
    since_s = max(since_s, 0.0)
    cut = _cut(gaps, since_s, prior)
    recent = gaps[max(cut, 0) :]
    events, seconds = float(len(recent)), sum(recent) + since_s
    if cut >= 0:
        weight, over, why = max(events, 0.5), seconds, f"{len(recent)} since the rate changed"
    else:
        beliefs = ((events + _SETTLING, seconds + _SETTLING_S), (events + 1, seconds + 1 / prior))
        weight, over = max(beliefs, key=lambda one: one[0] / one[1])
        why = f"{len(recent)} so far, and what is usual" if recent else "none so far: what is usual"
    found, low, high = _posterior(weight, over)
    rate = Rate(per_s=found, mean=found, low=low, high=high, faults=len(recent), weight=weight, why=why)
    return _weibull(rate, recent, since_s) if len(recent) >= ENOUGH else rate


def learnt(gaps: Sequence[float], since_s: float, prior: float) -> Rate:
    """The same from the journal of a job: what is usual weighs exactly one fault, in both directions.

    The logarithm of the rate is as likely to be so much above what is usual as below, e times less for each e-fold (Laplace). So above it
    one fault counts as chance, below it as one more that could have come, and every fault moves the estimate by a like amount.
    """
    gaps = [max(gap, 1e-3) for gap in gaps[-KEPT:]]
    since_s, cut = max(since_s, 0.0), _last_change(gaps, max(since_s, 0.0))
    recent = gaps[cut:]
    events, seconds = len(recent), max(sum(recent) + since_s, 1e-3)
    middle, top = math.log(prior), math.log((events + 1) / seconds)
    least, most = min(middle, top) - _TAIL, max(middle, top) + _TAIL
    marks = [least + (most - least) * n / _MARKS for n in range(_MARKS + 1)]
    fits = [events * x - math.exp(x) * seconds - abs(x - middle) for x in marks]
    best = max(fits)
    weights = list(itertools.accumulate(math.exp(one - best) for one in fits))
    low, median, high = (
        math.exp(marks[bisect.bisect_left(weights, share * weights[-1])]) for share in (0.05, 0.5, 0.95)
    )
    why = "since the rate changed" if cut else ""
    return Rate(per_s=median, mean=median, low=low, high=high, faults=events, weight=events + 1.0, why=why)


def _last_change(gaps: Sequence[float], since_s: float) -> int:
    """Behind how many gaps the rate has changed for the last time; 0: it never has. Crowds are no changes."""
    least = _crowded(gaps) if len(gaps) >= ENOUGH else 0.0
    found = 0
    while (further := _parts(gaps[found:], since_s, least)) > 0:
        found += further
    return found


def _posterior(events: float, seconds: float) -> tuple[float, float, float]:
    """Mean and 90 % of a Gamma distribution (by Wilson and Hilferty's cube root)."""
    mean, spread = events / seconds, 1 / (9 * events)
    low, high = (max(0.0, 1 - spread + z * math.sqrt(spread)) ** 3 * mean for z in (-1.645, 1.645))
    return mean, low, high


def _cut(gaps: Sequence[float], since_s: float, prior: float) -> int:
    """Behind how many gaps the rate has changed for the last time; -1: it never has. 0: it never was what is usual."""
    found, told = -1, [1 / prior, *gaps]
    while (further := _parts(told, since_s)) > 0:
        found += further
        told = told[further:]
    return found if found < 0 or len(gaps) < ENOUGH or _parts([1 / prior, *gaps], since_s, _crowded(gaps)) > 0 else -1


def _parts(gaps: Sequence[float], since_s: float, least: float = CHANGED) -> int:
    """Behind how many gaps old and new part, where they part most clearly; 0: nowhere."""
    total_n, total_s = float(len(gaps)), sum(gaps) + since_s
    best, where, old_s = max(least, CHANGED), 0, 0.0
    for old_n, gap in enumerate(gaps, start=1):
        old_s += gap
        new_n, new_s = total_n - old_n, total_s - old_s
        if 0 < new_n < FEWEST or new_s <= 0:
            continue
        ratio = 2 * (_fits(old_n, old_s) + _fits(new_n, new_s) - _fits(total_n, total_s))
        if ratio > best:
            best, where = ratio, old_n
    return where


def _fits(events: float, seconds: float) -> float:
    """Log likelihood of so many faults in that time, at the rate that fits them best."""
    return events * math.log(events / seconds) - events if events > 0 and seconds > 0 else 0.0


def _crowded(gaps: Sequence[float]) -> float:
    """Twice the log likelihood ratio for faults that come in crowds, which looks like one change after the other."""
    shape, _, ratio = _uneven(gaps)
    return ratio if shape < 1 else 0.0


def _uneven(gaps: Sequence[float]) -> tuple[float, float, float]:
    """Shape and scale of the Weibull distribution that fits best, and by how much it fits better than the exponential."""
    shape = _shape(gaps)
    largest, count = max(gaps), len(gaps)
    scale = largest * (sum((gap / largest) ** shape for gap in gaps) / count) ** (1 / shape)
    fits = count * math.log(shape / scale) + (shape - 1) * sum(math.log(gap / scale) for gap in gaps) - count
    return shape, scale, 2 * (fits - _fits(count, sum(gaps)))


def _weibull(rate: Rate, gaps: Sequence[float], since_s: float) -> Rate:
    """The rate to come, where the times between faults are clearly not exponential."""
    shape, scale, ratio = _uneven(gaps)
    if ratio <= CLEARLY:
        return rate
    ahead = 0.25 / rate.per_s
    coming = (math.pow((since_s + ahead) / scale, shape) - math.pow(since_s / scale, shape)) / ahead
    times = min(max(coming / rate.per_s, 1 / AT_MOST), AT_MOST)
    words = "one fault is soon followed by the next" if shape < 1 else "faults come at even distances"
    return Rate(
        per_s=rate.per_s * times,
        mean=rate.mean,
        low=rate.low * times,
        high=rate.high * times,
        faults=rate.faults,
        weight=rate.weight,
        shape=shape,
        why=f"{rate.why}; {words} (Weibull, shape {shape:.2f})",
    )


def _shape(gaps: Sequence[float]) -> float:
    """Of the Weibull distribution that fits best, by bisection: the equation grows with the shape."""
    mean = sum(math.log(gap) for gap in gaps) / len(gaps)
    largest = max(gaps)

    def grows(shape: float) -> float:
        powers = [math.pow(gap / largest, shape) for gap in gaps]
        return sum(p * math.log(g) for p, g in zip(powers, gaps, strict=True)) / sum(powers) - 1 / shape - mean

    low, high = 0.05, 20.0
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if grows(middle) < 0 else (low, middle)
    return math.sqrt(low * high)
