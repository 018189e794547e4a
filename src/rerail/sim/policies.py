"""The policies that are compared, as data: what is saved where and how often, which rungs there are, and what each of them takes.

All of them go through the same diagnosis and the same decisions; a policy that can only restart the job simply has no other rung.
Called by `sim.run`; `plan_of` is where rerail's planner is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from rerail.checkpoint.schedule import CheckFreq, Concurrent, Costs, EverySeconds, EverySteps, When
from rerail.config import Settings
from rerail.errors import UsageError
from rerail.flow import Cost, Rung
from rerail.planner.model import Hazard, Problem, Tier
from rerail.planner.optimise import best
from rerail.sim.faults import Fault
from rerail.sim.kinds import node_share
from rerail.sim.scenario import SNAPSHOT_GB, Scenario
from rerail.wording import guess

ALWAYS = 1_000_000_000
"""Restarts of a job whose scheduler starts it again and again."""
SELDOM_S = 30 * 86_400.0
"""How often something is expected that only the store outlives, before anything is known."""
HOUR_S = 3600.0

Tiers = Callable[[Scenario], tuple[Tier, ...]]
Times = Callable[[Scenario, Rung], Cost]
Delay = Callable[[Scenario, Fault, Settings], float]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One policy."""

    name: str
    title: str
    source: str
    """Where its behaviour comes from."""
    settings: Settings = Settings()
    aware: bool = True
    """Ranks can be repaired in place."""
    replicas: bool = False
    """State is taken from ranks that hold the same."""
    shadow: bool = False
    """A shard that nobody holds is restored as it was a little before, and the others keep their own."""
    restarts: int = ALWAYS
    tiers: Tiers
    when: dict[str, When] = {}
    """By tier; a tier that is not named here is planned."""
    times: Times
    detects: Delay
    nodes: int = 1
    """The fewest that it can be had with."""

    def feasible(self, scenario: Scenario) -> bool:
        """Whether the cluster is large enough for it."""
        return scenario.nodes >= self.nodes


# --- where state is kept ---


def _store(scenario: Scenario, stall_s: float, *, shortest_s: float = 0.0) -> Tier:
    save_s, restore_s = scenario.load_s, scenario.load_s
    return Tier(
        name="store", stall_s=stall_s, save_s=save_s, restore_s=restore_s, survives="job", shortest_s=shortest_s
    )


def _waiting(scenario: Scenario) -> tuple[Tier, ...]:
    return (_store(scenario, scenario.load_s),)


def _behind(scenario: Scenario) -> tuple[Tier, ...]:
    """The trainer waits for a copy in host memory, which is written behind its back."""
    return (_store(scenario, scenario.copy_s),)


def _peers(scenario: Scenario) -> tuple[Tier, ...]:
    near = Tier(name="peers", stall_s=0.0, save_s=scenario.transfer_s, restore_s=scenario.transfer_s, survives="node")
    return (near, _store(scenario, scenario.copy_s))


def _rerail(scenario: Scenario) -> tuple[Tier, ...]:
    stall_s = scenario.snapshot_stall_s * scenario.shard_gb / SNAPSHOT_GB
    memory = Tier(
        name="memory",
        stall_s=stall_s,
        save_s=scenario.copy_s,
        restore_s=scenario.copy_s,
        survives="process",
        shortest_s=scenario.step_s,
    )
    return (memory, _store(scenario, stall_s, shortest_s=2 * scenario.load_s))


# --- what repairs take: T1 to T4, without loading, which the source of the state decides ---


def _job_restart(scenario: Scenario, rung: Rung) -> Cost:
    return Cost(t1=scenario.job_restart_s)


def _flash(scenario: Scenario, rung: Rung) -> Cost:
    return Cost(t1=scenario.job_restart_s if rung is Rung.RESTART_ALL else scenario.flash_s)


def rerail_times(scenario: Scenario, rung: Rung) -> Cost:
    """As measured on small jobs, with what grows with the number of ranks."""
    by, form, larger = scenario.repair_factor, scenario.form_s * scenario.repair_factor, scenario.larger_s
    if rung is Rung.RESTART_ALL:
        return Cost(t1=by * scenario.process_restart_s)
    if rung in (Rung.RETRY_STEP, Rung.ROLL_BACK, Rung.SHRINK):
        return Cost(t1=by * (scenario.retry_s + larger), t2=form)
    if rung is Rung.HOT_SWITCH:
        return Cost(t1=by * (scenario.retry_s + larger), t2=form)
    moved = rung in (Rung.SWAP_NODE, Rung.GROW)
    first = (scenario.swap_s if moved else scenario.standby_s) + scenario.build_s + larger
    return Cost(t1=by * first, t2=form, t4=by * scenario.rehearsals * scenario.step_s)


# --- how long a fault goes unnoticed ---


def _stock(scenario: Scenario, fault: Fault, settings: Settings) -> float:
    if fault.seen == "silent":
        return scenario.silent_s
    if fault.seen == "hang" or fault.silent_root:
        return scenario.watchdog_s
    return scenario.explicit_s if fault.seen == "explicit" else scenario.exit_s


def _seconds(scenario: Scenario, fault: Fault, settings: Settings) -> float:
    """FlashRecovery says that it finds everything within seconds."""
    if fault.seen == "silent":
        return scenario.silent_s
    return scenario.explicit_s if fault.seen == "explicit" else scenario.exit_s


def rerail_detects(scenario: Scenario, fault: Fault, settings: Settings) -> float:
    """By the settings of the job, which are what decides it in production as well."""
    if fault.seen == "silent":  # at the next vote
        return (1 - fault.luck) * settings.vote_every * scenario.step_s
    if fault.seen == "hang" or fault.silent_root:  # a device that hangs keeps its process busy: the longer limit
        return max(settings.busy_floor_s, settings.busy_factor * scenario.step_s)
    return settings.agent_lost_s if fault.scope in ("node", "batch") else settings.beat_s


class _Slowest(NamedTuple):
    """What all of these rules allow."""

    rules: tuple[When, ...]

    def steps(self, costs: Costs) -> int:
        return max(rule.steps(costs) for rule in self.rules)


POLICIES = (
    Plan(
        name="hourly",
        title="hourly checkpoints, job restart",
        source="the founding default",
        settings=Settings(rungs="restart_all"),
        aware=False,
        tiers=_waiting,
        when={"store": EverySeconds(HOUR_S)},
        times=_job_restart,
        detects=_stock,
    ),
    Plan(
        name="checkfreq",
        title="CheckFreq",
        source="FAST'21: as often as 3.5 % of slowdown allows, job restart",
        settings=Settings(rungs="restart_all"),
        aware=False,
        tiers=_behind,
        when={"store": CheckFreq()},
        times=_job_restart,
        detects=_stock,
    ),
    Plan(
        name="pccheck",
        title="PCcheck",
        source="ASPLOS'25: every ten steps, two saves side by side, job restart",
        settings=Settings(rungs="restart_all"),
        aware=False,
        tiers=_behind,
        when={"store": _Slowest((EverySteps(10), Concurrent()))},
        times=_job_restart,
        detects=_stock,
    ),
    Plan(
        name="gemini",
        title="peer memory, every step (Gemini)",
        source="SOSP'23: copies in other nodes' memory at no cost, the store every three hours, job restart",
        settings=Settings(rungs="restart_all"),
        aware=False,
        tiers=_peers,
        when={"peers": EverySteps(1), "store": EverySeconds(3 * HOUR_S)},
        times=_job_restart,
        detects=_stock,
        nodes=2,
    ),
    Plan(
        name="replica",
        title="replicas, no checkpoints (FlashRecovery)",
        source="arXiv 2509.03047: only what is faulty is started anew, state from replicas, at most a step lost",
        settings=Settings(rungs="replace_rank, swap_device, swap_node, restart_all"),
        replicas=True,
        tiers=_behind,
        when={"store": EverySeconds(3 * HOUR_S)},
        times=_flash,
        detects=_seconds,
    ),
    Plan(
        name="rerail",
        title="rerail, default settings",
        source="this program",
        replicas=True,
        restarts=Settings().max_restarts,
        tiers=_rerail,
        times=rerail_times,
        detects=rerail_detects,
    ),
    Plan(
        name="rerail-fast",
        title="rerail with prediction and shadow",
        source="this program, where results need not be exact; the shadow is measured and not in the ladder yet",
        settings=Settings(fidelity="fast"),
        replicas=True,
        shadow=True,
        restarts=Settings().max_restarts,
        tiers=_rerail,
        times=rerail_times,
        detects=rerail_detects,
    ),
)
"""In the order in which they are shown."""


def policy(name: str) -> Plan:
    """By its name, or an error that says which there are."""
    names = [one.name for one in POLICIES]
    for one in POLICIES:
        if one.name == name:
            return one
    raise UsageError(f"there is no policy {name!r}{guess(name, names)}", hint=f"policies: {', '.join(names)}")


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What a job has seen of faults, per second: by what they took with them."""

    process: float
    node: float
    job: float = 1 / SELDOM_S


def plan_of(plan: Plan, scenario: Scenario, rates: Rates) -> dict[str, float]:
    """Steps between two saves of each tier: by the policy's rule, or by rerail's planner."""
    tiers = plan.tiers(scenario)
    found: dict[str, float] = {}
    for tier in tiers:
        rule = plan.when.get(tier.name)
        if rule is not None:
            costs = Costs(step_s=scenario.step_s, stall_s=tier.stall_s, save_s=tier.save_s)
            found[tier.name] = float(rule.steps(costs))
    if len(found) == len(tiers):
        return found
    rho = 0.0 if plan.replicas and scenario.replicas > 1 else 1.0
    hazards = (
        Hazard(name="process", rate=rates.process, scope="process", rho=rho),
        Hazard(name="node", rate=rates.node, scope="node", rho=rho),
        Hazard(name="everything", rate=rates.job, scope="job"),
    )
    planned = best(Problem(tiers=tiers, hazards=hazards)).intervals
    return {**{name: max(1.0, seconds / scenario.step_s) for name, seconds in planned.items()}, **found}


def usual_rates(scenario: Scenario) -> Rates:
    """Before anything is seen: what is published, all kinds."""
    hardware = scenario.faults / 1000 / 86_400 * scenario.gpus
    total = max(hardware + scenario.software_per_day / 86_400, 1e-12)
    node = min(hardware * node_share(), total)
    return Rates(process=max(total - node, 1e-12), node=max(node, 1e-12))
