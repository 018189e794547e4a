"""One run and what it came to: turns a scenario, policies and a seed into Results that can be compared.

Called by `cli.simulate`, `sim.sweep` and `bench/simulate.py`; `predict` is for holding the simulator against a real job.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec

from rerail.errors import UsageError
from rerail.flow import Cost, Rung
from rerail.planner.model import Tier
from rerail.planner.rates import DAY_S
from rerail.sim.faults import Fault, generate
from rerail.sim.kinds import shape_of
from rerail.sim.policies import Plan, rerail_detects
from rerail.sim.scenario import Scenario

try:
    from rerail.sim.job import Job
except ModuleNotFoundError as error:
    if error.name != "simpy":
        raise
    raise UsageError("the simulator needs SimPy, which is not installed", hint="pip install 'rerail[sim]'") from error


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What one run came to. Seconds are of the whole job: all its devices together."""

    policy: str
    seed: int
    gpus: int
    wall_s: float
    productive_s: float
    by_stage: dict[str, float]
    """Seconds lost, by what they went into; largest first."""
    by_cause: dict[str, float]
    """The same seconds, by the kind of fault; `-` for what no fault is to blame for."""
    struck: dict[str, int]
    """Faults by kind, also those of nodes that the job did not use."""
    rungs: dict[str, int]
    """Interruptions by the rung that ended them."""
    interruptions: int
    stops: int
    """Times that the job ended and had to be started again from outside."""
    mtbf_s: float
    mttr_s: float
    every: dict[str, float]
    """Steps between two saves at the end of the run, by tier."""
    spare_share: float
    """Of all devices held, those that are spare."""

    @property
    def goodput(self) -> float:
        """Productive share of the time of the job's own devices."""
        return self.productive_s / self.wall_s

    @property
    def goodput_held(self) -> float:
        """The same with the spare nodes counted as if they could have trained."""
        return self.goodput * (1 - self.spare_share)


def run(scenario: Scenario, plan: Plan, faults: Sequence[Fault], seed: int = 0) -> Result:
    """One policy under these faults."""
    job = Job(scenario, plan, faults)
    job.run()
    losses, spent = job.training.losses, job.spent
    nodes = scenario.nodes + scenario.spare_nodes
    return Result(
        policy=plan.name,
        seed=seed,
        gpus=scenario.gpus,
        wall_s=scenario.wall_s,
        productive_s=job.training.productive,
        by_stage=losses.by(0),
        by_cause=losses.by(1),
        struck=dict(job.struck.most_common()),
        rungs={rung.value: count for rung, count in job.rungs.most_common()},
        interruptions=len(spent),
        stops=job.repair.stops,
        mtbf_s=scenario.wall_s / len(spent) if spent else scenario.wall_s,
        mttr_s=statistics.fmean(spent) if spent else 0.0,
        every=job.training.every,
        spare_share=scenario.spare_nodes / nodes,
    )


def compare(
    scenario: Scenario,
    plans: Sequence[Plan],
    seeds: Sequence[int],
    trace: Sequence[Fault] | None = None,
    tell: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Every policy that can be had under the same faults, for every seed; `tell` is called after each run."""
    found = []
    for seed in seeds:
        faults = trace if trace is not None else generate(scenario, seed)
        for plan in plans:
            if plan.feasible(scenario):
                found.append(run(scenario, plan, faults, seed))
            tell()
    return found


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A real job in numbers, for `predict`."""

    wall_s: float
    step_s: float
    gpus: int
    per_node: int
    tiers: tuple[Tier, ...]
    every: dict[str, float]
    """Steps between two saves, by tier."""
    costs: dict[Rung, Cost]
    """What each rung took, T1 to T4; T0 is the simulator's to find out, and what loading from a tier takes comes on top of T3."""
    detect_s: dict[str, float] = {}
    """Until it was noticed, by how it shows (`sim.kinds.SEEN`); rerail's own limits where it is not given."""
    replicas: int = 1
    spare_nodes: int = 0
    faults: tuple[tuple[float, int, int, str], ...] = ()
    """Second, node, device and code of each."""


def predict(measured: Measured, plan: Plan) -> Result:
    """What the simulator says of a real job: its goodput and where the rest went, from its own figures and faults.

    `plan` gives rungs and settings (`policies.policy("rerail")`); tiers, intervals and costs are the measured ones.
    """
    scenario = Scenario(
        gpus=measured.gpus,
        per_node=measured.per_node,
        spare_nodes=measured.spare_nodes,
        days=measured.wall_s / DAY_S,
        step_s=measured.step_s,
        replicas=measured.replicas,
        attempt_fails=0.0,
    )
    own = msgspec.structs.replace(
        plan,
        tiers=lambda _: measured.tiers,
        when={name: _Every(steps) for name, steps in measured.every.items()},
        times=lambda _, rung: _without_t0(measured.costs, rung),
        detects=lambda s, fault, settings: measured.detect_s.get(fault.seen, rerail_detects(s, fault, settings)),
    )
    return run(scenario, own, [_injected(n, *one) for n, one in enumerate(measured.faults)])


class _Every(msgspec.Struct, frozen=True):
    interval: float

    def steps(self, costs: object) -> int:
        return max(1, round(self.interval))


def _without_t0(costs: Mapping[Rung, Cost], rung: Rung) -> Cost:
    cost = costs.get(rung, Cost())
    return Cost(t1=cost.t1, t2=cost.t2, t3=cost.t3, t4=cost.t4)


def _injected(number: int, at: float, node: int, device: int, code: str) -> Fault:
    shape = shape_of(code)
    return Fault(number=number, at=at, node=node, device=device, code=code, **msgspec.structs.asdict(shape))
