"""How many warm processes to hold on each node: turns the rate of lost ranks and the time a process takes to warm into a number. Pure.

A rank that is lost takes a standby's place; the next standby is warm `warm_s` later, and a rank that is lost before then has to be
started cold, which takes that much longer. Lost ranks of a node within that time are Poisson. One more standby is held as long as
what it saves is more than what holding it costs. Used by `rerail plan`.
"""

from __future__ import annotations

import math

import msgspec

from rerail.planner.units import duration

SELDOM = 1e-11
"""Per second: every 3,000 years."""
MOST, _TERMS = 64, 200
"""Standbys that anybody holds, and terms of the Poisson distribution that count."""


class Standbys(msgspec.Struct, frozen=True, kw_only=True):
    """An answer."""

    count: int
    """Of each node."""
    why: str


def standbys(nodes: int, rate: float, warm_s: float, cost: float) -> Standbys:
    """`rate`: faults per second, of the whole job, that take a rank and leave its node. `cost`: share of the time that one costs."""
    count = next((n for n in range(MOST) if warm_s * _unmet(nodes, rate, warm_s, n) <= cost), MOST)
    lost = f"a rank is lost every {_every(rate)}"
    if not count:
        return Standbys(count=0, why=f"{lost}: a warm process would save {duration(warm_s)} then, less than it costs")
    again = _unmet(nodes, rate, warm_s, count)
    often = f"only every {duration(1 / again)}" if again > SELDOM else "hardly ever"
    more = f"{count + 1} on one node within {duration(warm_s)} are lost {often}, too seldom for one more"
    why = f"{lost}, and a warm process saves {duration(warm_s)} each time; {more}"
    return Standbys(count=count, why=why)


def _unmet(nodes: int, rate: float, warm_s: float, held: int) -> float:
    """Lost ranks per second that find all of so many standbys gone."""
    mean = rate / nodes * warm_s
    if not held or mean <= 0:
        return rate
    term, rest = math.exp(-mean), 0.0
    for n in range(held + _TERMS):
        rest += term if n >= held else 0.0
        term *= mean / (n + 1)
    return rate * min(1.0, rest)


def _every(rate: float) -> str:
    return duration(1 / rate) if rate > 0 else "never"
