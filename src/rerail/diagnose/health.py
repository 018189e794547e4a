"""Watches the numbers of a training run: turns loss, gradient norm and speed of each step into Health findings. Pure.

Called by `runtime.training` for every completed step. A watch is for one run at one size: begin a new one when the
number of ranks changes. Each finding comes when it begins and when it ends. How soon:

* `nan`: at once; over after 10 finite steps.
* `loss_spike`, `grad_norm`: at the 5th step within 8 that is far above those of 24 steps ago and more, so a rise that
  takes a few steps is seen, too. A single batch is none, nor is a loss that rises by less than a quarter (a learning rate
  that starts again). A level that stays for 256 steps is the new one, and the spike is over.
* `divergence`: when medians of 32 steps are 30 % above the best one and rise four times running (160 steps), or stay
  there sixteen times running with no way down (544 steps).
* `decay`: when the median step has taken 20 % longer than in the best window, more if steps are uneven, for about 100
  steps or 5 minutes, but at least 20 steps.
"""

from __future__ import annotations

from collections import deque
from math import exp, inf, isfinite, log, sqrt
from statistics import median

import msgspec

FINITE_STEPS = 10
RECENT, LEAST_RECENT, GAP = 64, 24, 24
"""Steps that make the expectation, and those between them and the newest one."""
NEWEST, STRIKES = 8, 5
"""Steps held against it, and how many of those it takes."""
Z = 6.0
"""Standard deviations, by the median absolute deviation from the trend."""
SPIKE, EXPLOSION = 0.25, log(5.0)
"""The least rise: of the loss as a share of it, of the gradient norm as a logarithm."""
NEW_LEVEL = 256
BLOCK, RISING, STAYING, FAR, REGAINED = 32, 4, 16, 0.3, 0.1
"""Steps of a median; medians that make a divergence; shares: of the best, how far above it; of that, the way back."""
SLOWER, RECOVERED, NOISE = 1.2, 1.1, 7.0
"""Against the best window; on top of it so many standard deviations of a median, for the best is also the luckiest."""
FEWEST, MOST, ENOUGH_S = 20, 100, 300.0
"""Steps of a window of speed: as many as take so long, within these bounds."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Something is wrong with the run, or no longer; `expected` is what the value was held against."""

    kind: str
    step: int
    value: float
    expected: float
    begins: bool = True
    since: int = -1
    """The last step at which all was well, as far as known."""


Change = tuple[bool, float, float]
"""Begins or ends, the value, and what was expected."""


class _Spike:
    """Several values far above the recent ones, whose trend is taken out."""

    def __init__(self, least: float, *, relative: bool) -> None:
        self._least, self._relative = least, relative
        self._values: deque[tuple[int, float]] = deque(maxlen=RECENT + GAP)
        self._strikes: deque[tuple[int, bool]] = deque(maxlen=NEWEST)
        """With the step before each."""
        self._aside: list[tuple[int, float]] = []  # the values of a spike: they become the recent ones when they stay
        self._before: list[tuple[int, float]] = []  # what was known when it began
        self._on = False
        self._last = self._good = -1  # the newest step, and the newest of which it is known that all was well

    @property
    def since(self) -> int:
        """The step before the first of those that are far above."""
        return next((step for step, far in self._strikes if far), self._last)

    def went_back(self, step: int) -> None:
        """Nothing that came later counts."""
        kept = [one for one in (self._before if self._on else self._values) if one[0] <= step]
        self._values, self._aside, self._on = deque(kept, maxlen=RECENT + GAP), [], False
        self._strikes.clear()
        self._last, self._good = min(self._last, step), step

    def take(self, step: int, value: float) -> Change | None:
        before, self._last = self._last, step
        recent = list(self._values)
        if not self._on:
            recent = recent[:-GAP] + [one for one in recent[-GAP:] if one[0] <= self._good]
        if len(recent) < LEAST_RECENT:
            self._values.append((step, value))
            return None
        expected, deviation = _trend([one for _, one in recent])
        least = self._least * abs(expected) if self._relative else self._least
        self._strikes.append((before, value - expected > max(Z * deviation, least)))
        strikes = sum(far for _, far in self._strikes)
        if not self._on:
            self._values.append((step, value))
            if strikes < STRIKES:
                return None
            self._before, self._values = list(self._values), deque(recent, maxlen=RECENT + GAP)
            self._aside, self._on = [(step, value)], True
            return True, value, expected
        self._aside.append((step, value))
        if len(self._aside) < NEW_LEVEL and strikes >= NEWEST - STRIKES:
            return None
        if strikes >= NEWEST - STRIKES:
            self._values.extend(self._aside[-RECENT - GAP :])
        self._strikes.clear()
        self._on = False
        return False, value, expected


class _Divergence:
    """The medians of blocks far above the best of them, and no way down."""

    def __init__(self) -> None:
        self._block: list[float] = []
        self._medians: deque[tuple[int, float]] = deque(maxlen=STAYING)
        """With the last step of each."""
        self._best = self._deviation = inf
        self._best_at = -1
        self._on = False

    @property
    def since(self) -> int:
        """The last step of the last block that was not far above the best; the best one's, if that is not known any more."""
        far = self._best + max(FAR * abs(self._best), 2.0 * self._deviation)
        return next((step for step, one in reversed(self._medians) if one <= far), self._best_at)

    def went_back(self, step: int) -> None:
        """Nothing that came later counts."""
        self._medians = deque((one for one in self._medians if one[0] <= step), maxlen=STAYING)
        self._block, self._on = [], False

    def take(self, step: int, loss: float) -> Change | None:
        self._block.append(loss)
        if len(self._block) < BLOCK:
            return None
        newest, deviation = median(self._block), _trend(self._block)[1]
        self._block = []
        self._medians.append((step, newest))
        if newest < self._best:
            self._best, self._deviation, self._best_at = newest, deviation, step
        far = max(FAR * abs(self._best), 2.0 * self._deviation)
        if self._on == (newest > self._best + far / 2) or (not self._on and not self._diverges(self._best + far)):
            return None
        self._on = not self._on
        return self._on, newest, self._best

    def _diverges(self, far: float) -> bool:
        last = [one for _, one in self._medians]
        above = next((count for count, one in enumerate(reversed(last)) if one <= far), len(last))
        if above == STAYING:
            before, after = median(last[: STAYING // 2]), median(last[STAYING // 2 :])
            return before - after < REGAINED * (before - self._best)
        return above >= RISING and last[-RISING:] == sorted(last[-RISING:])


class _Decay:
    """The median of the newest window of speed against the best window before."""

    def __init__(self) -> None:
        self._paces: deque[float] = deque(maxlen=MOST)
        self._first_s: list[float] = []
        self._best = inf
        self._size, self._steps, self._slow = MOST, 0, 0
        self._on = False

    def take(self, pace: float, step_s: float) -> Change | None:
        self._paces.append(pace)
        self._steps += 1
        if self._steps <= FEWEST:
            self._first_s.append(step_s)
            self._size = max(FEWEST, min(MOST, int(ENOUGH_S / median(self._first_s))))
        window = list(self._paces)[-self._size :]
        if len(window) < self._size:
            return None
        newest, slower = median(window), SLOWER * self._best
        if self._steps % self._size == 0:
            self._best = min(self._best, newest)
        if newest > slower:
            slower += NOISE * _trend(window)[1] / sqrt(self._size)
        self._slow = self._slow + 1 if newest > slower else 0
        if self._on == (self._slow >= self._size // 2 or (self._on and newest > RECOVERED * self._best)):
            return None
        self._on = not self._on
        return self._on, newest, self._best


class HealthWatch:
    """The numbers of one run, step by step."""

    def __init__(self) -> None:
        self._loss, self._grad_norm = _Spike(SPIKE, relative=True), _Spike(EXPLOSION, relative=False)
        self._divergence, self._decay = _Divergence(), _Decay()
        self._finite, self._last = FINITE_STEPS, 0.0

    def take(
        self, step: int, loss: float | None, grad_norm: float | None,
        tokens_per_s: float | None = None, step_s: float | None = None,
    ) -> list[Health]:  # fmt: skip
        """The numbers of one step, as far as they are known. Speed is by tokens where they are given."""
        numbers = [number for number in (loss, grad_norm) if number is not None]
        changes: dict[str, Change | None] = {"nan": self._nan(numbers) if numbers else None}
        if loss is not None and isfinite(loss):
            changes |= {"loss_spike": self._loss.take(step, loss), "divergence": self._divergence.take(step, loss)}
        if grad_norm is not None and isfinite(grad_norm):
            change = self._grad_norm.take(step, log(max(grad_norm, 1e-12)))
            changes["grad_norm"] = change and (change[0], exp(change[1]), exp(change[2]))
        pace = 1.0 / tokens_per_s if tokens_per_s else step_s
        if pace is not None and 0.0 < pace < inf:
            changes["decay"] = self._decay.take(pace, step_s or 1.0)
        seen = [(kind, *change) for kind, change in changes.items() if change is not None]
        since = {"loss_spike": self._loss.since, "divergence": self._divergence.since}
        return [
            Health(kind=kind, step=step, begins=a, value=b, expected=c, since=since.get(kind, step))
            for kind, a, b, c in seen
        ]

    def went_back(self, step: int) -> None:
        """All go on from this step, or one before it: what was seen since never was."""
        for one in (self._loss, self._grad_norm, self._divergence):
            one.went_back(step)

    def _nan(self, values: list[float]) -> Change | None:
        before, wrong = self._finite, [value for value in values if not isfinite(value)]
        self._finite = 0 if wrong else before + 1
        expected, self._last = self._last, self._last if wrong else values[0]
        if wrong and before >= FINITE_STEPS:
            return True, wrong[0], expected
        return (False, values[0], expected) if self._finite == FINITE_STEPS and before < FINITE_STEPS else None


def _trend(values: list[float]) -> tuple[float, float]:
    """The median of the last quarter (a loss that falls ever more slowly lies above its line), the deviation from the line."""
    half = len(values) // 2
    early, late = median(values[:half]), median(values[half:])
    slope, centre = (late - early) / (len(values) - half), (len(values) - 1) / 2
    rest = [value - slope * (at - centre) for at, value in enumerate(values)]
    middle = median(rest)
    return median(values[-(len(values) // 4) :]), 1.4826 * median([abs(one - middle) for one in rest])
