"""What breaks, where and when: turns a Scenario and a seed into a list of faults, before anybody knows how they will be answered.

The same list hits every policy, so that policies differ and luck does not. Every purpose has random numbers of its own: to ask
for more spares does not change which node breaks. Called by `sim.run`.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import msgspec

from rerail.planner.rates import DAY_S
from rerail.sim.kinds import Kind, kinds, seen_as
from rerail.sim.scenario import Scenario

PLANNED = "planned"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happens to the cluster."""

    number: int
    at: float
    """Seconds since the job began."""
    kind: str
    code: str
    scope: str
    seen: str
    needs: str
    node: int = 0
    """Of all nodes, spare ones included; of a batch the first."""
    device: int = 0
    nodes: int = 1
    """How many a batch takes along."""
    repair_s: float = 0.0
    """Until what broke is back."""
    silent_root: bool = False
    luck: float = 0.0
    """Between 0 and 1: for whatever else is left to chance in its answer."""
    hurry: float = 0.0
    """Of software: it happens only if the danger is greater than this, per second."""


def generate(scenario: Scenario, seed: int) -> list[Fault]:
    """All faults of one run, in order of time."""
    streams = itertools.chain(_hardware(scenario, seed), _software(scenario, seed), _planned(scenario, seed))
    found = sorted(streams, key=lambda fault: (fault.at, fault.kind))
    return [msgspec.structs.replace(fault, number=number) for number, fault in enumerate(found)]


def lemons(scenario: Scenario, seed: int) -> tuple[int, ...]:
    """Nodes that break more often."""
    nodes = scenario.nodes + scenario.spare_nodes
    stream = random.Random(f"{seed}:lemons")
    expected = nodes * scenario.lemon_share
    many = int(expected) + (stream.random() < expected - int(expected))
    return tuple(sorted(stream.sample(range(nodes), min(many, nodes))))


def danger(scenario: Scenario, age_s: float) -> float:
    """Faults of software per second, so many seconds after all processes were started."""
    early = scenario.start_faults / scenario.start_fault_s
    return scenario.software_per_day / DAY_S + early * math.exp(-age_s / scenario.start_fault_s)


def _arrivals(stream: random.Random, rate: float, until: float) -> Iterator[float]:
    at = 0.0
    while rate > 0:
        at += stream.expovariate(rate)
        if at >= until:
            return
        yield at


def _hardware(scenario: Scenario, seed: int) -> Iterator[Fault]:
    """Every node has its share of the danger, in the job or not; lemons have more, and the mean is what is published."""
    nodes, sick = scenario.nodes + scenario.spare_nodes, lemons(scenario, seed)
    weight = nodes + len(sick) * (scenario.lemon_factor - 1)
    rate = scenario.faults / 1000 / DAY_S * nodes * scenario.per_node
    table = [kind for kind in kinds() if kind.scope != "job"]
    weights = [kind.count for kind in table]
    stream = random.Random(f"{seed}:hardware")
    for at in _arrivals(stream, rate, scenario.wall_s):
        kind = stream.choices(table, weights)[0]
        place = stream.random() * weight
        node = int(place) if place < nodes else sick[int((place - nodes) / max(1e-9, scenario.lemon_factor - 1))]
        yield _fault(scenario, kind, at, node, stream)


def _software(scenario: Scenario, seed: int) -> Iterator[Fault]:
    """As many as there would be if all processes had only just been started; those that are too many are left out as it runs."""
    table = [kind for kind in kinds() if kind.scope == "job"]
    stream = random.Random(f"{seed}:software")
    most = danger(scenario, 0.0)
    for at in _arrivals(stream, most, scenario.wall_s):
        kind = stream.choices(table, [kind.count for kind in table])[0]
        node = stream.randrange(scenario.nodes)
        fault = _fault(scenario, kind, at, node, stream)
        yield msgspec.structs.replace(fault, hurry=stream.random() * most)


def _planned(scenario: Scenario, seed: int) -> Iterator[Fault]:
    for at in _arrivals(random.Random(f"{seed}:planned"), scenario.planned_per_day / DAY_S, scenario.wall_s):
        yield Fault(number=0, at=at, kind=PLANNED, code="", scope="job", seen=PLANNED, needs="process")


def _fault(scenario: Scenario, kind: Kind, at: float, node: int, stream: random.Random) -> Fault:
    code, _, needs = stream.choices(kind.codes, [share for _, share, _ in kind.codes])[0]
    mean = {"reboot": scenario.reboot_s, "replace": scenario.replace_s, "outage": scenario.outage_s}.get(needs, 0.0)
    device, luck, silence = stream.randrange(scenario.per_node), stream.random(), stream.random()
    repair_s, many = stream.expovariate(1.0) * mean, stream.randint(scenario.batch_least, scenario.batch_most)
    seen = seen_as(code, kind.seen)
    return Fault(
        number=0,
        at=at,
        kind=kind.name,
        code=code,
        scope=kind.scope,
        seen=seen,
        needs=needs,
        node=node,
        device=device,
        nodes=many if kind.scope == "batch" else 1,
        repair_s=repair_s,
        silent_root=silence < scenario.silent_root and seen == "explicit" and kind.scope == "device",
        luck=luck,
    )
