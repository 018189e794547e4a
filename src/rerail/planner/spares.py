"""How many nodes to hold ready: turns the rate at which nodes break and the time of their repair into the number that loses least. Pure.

Nodes that are being repaired at a time are Poisson with mean rate * repair, whatever the distribution of repairs (M/G/infinity).
With s spares the job has all its nodes as long as no more than s are away; beyond that a job that can shrink runs smaller, any
other waits. A job of known length begins with all nodes whole, and waits for one at most until its own end: the mean is then that over
its length. Used by `rerail plan` and the simulator.
"""

from __future__ import annotations

import math

import msgspec

from rerail.errors import ConfigError

MOST = 4096


class Spares(msgspec.Struct, frozen=True, kw_only=True):
    """An answer. Shares are of what all nodes, spares included, could do."""

    count: int
    away: float
    """Nodes that are being repaired, on average."""
    idle: float
    """What the spares themselves could have done."""
    short: float
    """What is lost because too many are away."""
    why: str


def worth(nodes: int, rate: float, repair_s: float, *, elastic: bool, length_s: float = 0.0) -> Spares:
    """`rate` is that of all nodes together, per second, of faults that take a node away; `length_s` the job's, 0: not known."""
    if nodes < 1:
        raise ConfigError(f"nodes is {nodes}; a job has at least 1")
    for name, value in (("rate", rate), ("repair_s", repair_s)):
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} of nodes is {value}; it has to be 0 or more")
    mean = min(rate * _away_s(repair_s, length_s), float(nodes))  # more than all of them cannot be away
    # a coarse look first: more than some hundred are counted in steps
    most = min(MOST, _enough(mean))
    stride = max(1, most // 256)
    near = min(range(0, most + 1, stride), key=lambda one: sum(_lost(nodes, one, mean, elastic)))
    around = range(max(0, near - stride), min(most, near + stride) + 1)
    count = min({0, *around}, key=lambda one: (sum(_lost(nodes, one, mean, elastic)), one))
    idle, short = _lost(nodes, count, mean, elastic)
    without = sum(_lost(nodes, 0, mean, elastic))
    words = "waits" if not elastic else "runs smaller"
    why = (
        f"{_shown(mean)} away on average; without spares the job {words} and loses {without:.2%}"
        if count
        else f"{_shown(mean)} away on average: a spare would cost more than it saves"
    )
    return Spares(count=count, away=mean, idle=idle, short=short, why=why)


def _shown(mean: float) -> str:
    if mean < 1e-3:
        return "hardly a node is"
    told = f"{mean:,.0f}" if mean >= 10 else f"{mean:.2g}"
    return f"{told} node is" if told == "1" else f"{told} nodes are"


def _away_s(repair_s: float, length_s: float) -> float:
    """Seconds for which a node is away, of those that the job lasts: the mean of min(t, repair) over its length."""
    if not length_s:
        return repair_s
    return length_s / 2 if length_s < repair_s else repair_s * (1 - repair_s / (2 * length_s))


def _enough(mean: float) -> int:
    return math.ceil(mean + 6 * math.sqrt(mean) + 6)


def _lost(nodes: int, spares: int, mean: float, elastic: bool) -> tuple[float, float]:
    idle = spares / (nodes + spares)
    more = missing = 0.0
    if mean > 0:
        for away in range(max(spares + 1, math.floor(mean - 10 * math.sqrt(mean))), _enough(mean) * 2):
            chance = math.exp(away * math.log(mean) - mean - math.lgamma(away + 1))
            more += chance
            missing += chance * min(away - spares, nodes) / nodes
    return idle, (1 - idle) * min(1.0, missing if elastic else more)
