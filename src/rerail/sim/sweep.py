"""Many runs: turns a base of values and one key with several values into results for each, for tables and lines.

Called by `cli.simulate` and `bench/simulate.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rerail.errors import UsageError
from rerail.sim.faults import Fault
from rerail.sim.policies import Plan
from rerail.sim.run import Result, compare
from rerail.sim.scenario import Preset, Scenario, book, checked, scenario

MOST_COPIES = int(book().keys["replicas"].most)


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """All runs with one value."""

    value: float
    results: list[Result]


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """One key with its values, in their order."""

    key: str
    points: list[Point]


def parse_sweep(text: str) -> tuple[str, list[str]]:
    """`KEY=A,B,C`."""
    key, equals, rest = text.partition("=")
    values = [value.strip() for value in rest.split(",")]
    if not (equals and key.strip()) or "" in values:
        raise UsageError(
            f"--sweep {text!r} is not KEY=VALUE,VALUE,...", hint="for example --sweep gpus=1024,4096,16384"
        )
    return key.strip(), values


def resized(base: Preset | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a preset with others put over them.

    Another number of devices has as many spare nodes in proportion; where every rank holds the same, it still does.
    """
    values = dict(base.values) if base is not None else {}
    if base is None or "gpus" not in given or "gpus" not in values:
        return {**values, **given}
    before, asked = values["gpus"], int(checked("gpus", given["gpus"]))
    values["spare_nodes"] = round(values.get("spare_nodes", 0) * asked / before)
    copies = values.get("replicas", 1)
    values["replicas"] = min(asked, MOST_COPIES) if copies == before else math.gcd(copies, asked)
    return {**values, **given}


def scenarios(base: Preset | None, given: Mapping[str, Any], key: str, values: Sequence[str]) -> list[Scenario]:
    """One for each value; all are checked before the first one runs."""
    return [scenario(resized(base, {**given, key: value})) for value in values]


def sweep(
    key: str,
    made: Sequence[Scenario],
    plans: Sequence[Plan],
    seeds: Sequence[int],
    trace: Sequence[Fault] | None = None,
    tell: Callable[[], None] = lambda: None,
) -> Sweep:
    """Every policy with every value, under the same faults where the value does not change them."""
    points = [Point(value=float(getattr(one, key)), results=compare(one, plans, seeds, trace, tell)) for one in made]
    return Sweep(key=key, points=points)
