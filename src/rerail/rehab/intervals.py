"""How far apart checkpoints should be when a fault need not cost all that came after the last one: turns rates and costs into seconds.

Pure. Three answers, from the special to the general:

    PCIP        the founding model: what a recovery by prediction costs falls with the checkpoints the predictor has learnt from,
                loss_p(t) = exp(-tau1 t/Tc + tau2), and is bought back at the slope of loss_o(t) = exp(-alpha1 t + alpha2)
    young()     every fault costs all that came after the last checkpoint
    general()   a fault of kind i costs the share rho_i of that; rho is measured: 1 for recomputing, about 0 for a replica

The expected cost of a fault under PCIP, equation (15) with (10) and (14) in it, where C = xi Np exp(tau2 - alpha2) / (2 alpha1):

    Tl(Tc) = Ts / (exp(lambda (Tc + Ts)) - 1)  +  C lambda / (lambda - alpha1 + tau1 / Tc)

The first term is exact for checkpoints at every Tc + Ts. For Ts << Tc << 1/lambda it is Ts / (lambda Tc), and the minimum is (16):

    Tc = tau1 / (B + lambda sqrt(A / Ts)),    A = C tau1,    B = alpha1 - lambda

Outside that range, and where the denominator is not positive, the minimum is found by search, and the answer says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from rerail.errors import ConfigError
from rerail.planner.model import young_s
from rerail.planner.search import least

SHORTEST = 10.0
"""Times the cost of a checkpoint: below that the closed form forgets too much of it."""
LONGEST = 1.0
"""Times the mean time between faults: beyond that few intervals end without one."""
SURE = 0.05
"""Of lambda sqrt(A / Ts): a smaller denominator is a difference of two numbers that nobody knows so well."""
_FARTHEST = 1e4
"""Times the mean time between faults: nobody waits longer for a checkpoint."""


class Curves(NamedTuple):
    """What the fitter has found out: about the training's loss (alpha) and the predictor's (tau)."""

    alpha1: float
    """Per second."""
    alpha2: float
    tau1: float
    """Per checkpoint."""
    tau2: float
    deviation: float
    """xi Np: what one unit of the predictor's loss counts for in the training's, all lost parameters together."""

    @property
    def c(self) -> float:
        """Seconds that a recovery costs before the predictor has learnt anything."""
        return self.deviation * math.exp(self.tau2 - self.alpha2) / (2 * self.alpha1)


class Interval(NamedTuple):
    """An answer."""

    seconds: float
    rule: str
    """`closed form`, `numeric`, `young` or `general`."""
    cost: float
    """Expected seconds lost per fault, by the model of the rule."""
    why: str = ""


class Risk(NamedTuple):
    """One kind of fault, and what becomes of the work since the last checkpoint."""

    rate: float
    """Per second."""
    rho: float
    """Share of that work that is lost in the end."""


def pcip_cost(interval_s: float, curves: Curves, rate: float, save_s: float) -> float:
    """Equation (15): expected seconds lost per fault; infinite where the model has no finite answer."""
    falls = rate - curves.alpha1 + curves.tau1 / interval_s
    if falls <= 0:
        return math.inf
    return _saving(interval_s, rate, save_s) + curves.c * rate / falls


def pcip_closed(curves: Curves, rate: float, save_s: float) -> float | None:
    """Equation (16); None where its denominator is not positive."""
    below = curves.alpha1 - rate + rate * math.sqrt(curves.c * curves.tau1 / save_s)
    return curves.tau1 / below if below > 0 else None


def pcip(curves: Curves, rate: float, save_s: float) -> Interval:
    """The best interval by the founding model: the closed form where it holds, else by search."""
    _insist(rate=rate, save_s=save_s, alpha1=curves.alpha1, tau1=curves.tau1, deviation=curves.deviation)
    seconds = pcip_closed(curves, rate, save_s)
    if not (why := _doubts(seconds, curves, rate, save_s)) and seconds is not None:
        return Interval(seconds, "closed form", pcip_cost(seconds, curves, rate, save_s))
    seconds = least(
        lambda tc: pcip_cost(tc, curves, rate, save_s), *_bounds(curves, rate, save_s), marks=400, closer=80
    )
    return Interval(seconds, "numeric", pcip_cost(seconds, curves, rate, save_s), why)


def _doubts(seconds: float | None, curves: Curves, rate: float, save_s: float) -> str:
    """Why the closed form does not hold here, or nothing."""
    if seconds is None:
        return "the closed form has no positive denominator: the predictor learns too little per checkpoint"
    if seconds < SHORTEST * save_s:
        return f"the closed form is for intervals of more than {SHORTEST:g} times the cost of a checkpoint"
    if seconds * rate > LONGEST:
        return "the closed form is for intervals shorter than the time between faults"
    if curves.tau1 / seconds < SURE * rate * math.sqrt(curves.c * curves.tau1 / save_s):
        return "the denominator of the closed form is a small difference of large numbers"
    return ""


def _bounds(curves: Curves, rate: float, save_s: float) -> tuple[float, float]:
    """Between which intervals the cost is finite, and worth a look."""
    longest = _FARTHEST / rate
    if curves.alpha1 > rate:
        longest = min(longest, curves.tau1 / (curves.alpha1 - rate) * (1 - 1e-9))
    return min(save_s / 100, longest / 2), longest


def young(rate: float, save_s: float) -> Interval:
    """Young's interval: every fault costs half of it on average."""
    return general([Risk(rate, 1.0)], save_s)._replace(rule="young")


def general(risks: Iterable[Risk], save_s: float) -> Interval:
    """Tc = sqrt(2 Ts / sum(lambda_i rho_i)): Young with the rate of those faults that really cost the work."""
    known = list(risks)
    _insist(save_s=save_s, rate=sum(risk.rate for risk in known))
    for risk in known:
        if not (risk.rate >= 0 and 0 <= risk.rho < math.inf):
            raise ConfigError(f"a fault cannot have a rate of {risk.rate} per second and cost {risk.rho} of the work")
    total, weighted = sum(risk.rate for risk in known), sum(risk.rate * risk.rho for risk in known)
    if not weighted:
        return Interval(math.inf, "general", 0.0, "no fault costs any work: checkpoints are for the worst case only")
    seconds = young_s(save_s, 1 / weighted)
    return Interval(seconds, "general", save_s / (total * seconds) + weighted / total * seconds / 2)


def general_power(rate: float, save_s: float, scale: float, power: float) -> Interval:
    """The same where t seconds of work since the last checkpoint cost scale * t ** power in the end, as measured for one kind."""
    _insist(rate=rate, save_s=save_s, scale=scale, power=power)
    seconds = ((power + 1) * save_s / (scale * power * rate)) ** (1 / (power + 1))
    return Interval(seconds, "general", save_s / (rate * seconds) + scale * seconds**power / (power + 1))


def _saving(interval_s: float, rate: float, save_s: float) -> float:
    """Seconds spent on checkpoints between two faults."""
    between = rate * (interval_s + save_s)
    return save_s / math.expm1(between) if between < 700 else 0.0


def _insist(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} is {value}, but has to be a positive number")
