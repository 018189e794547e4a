"""A plan on paper: turns the size of a job and its cluster into hazards, tiers, intervals, spares and expected goodput. Pure.

Every number that the user does not give has a default, and every default a source that is printed with the answer.
Called by `rerail plan` and for the reference of the documentation.
"""

from __future__ import annotations

import math

import msgspec

from rerail.errors import ConfigError
from rerail.planner.model import Hazard, Problem, Tier, Waste, waste
from rerail.planner.optimise import Planned, best
from rerail.planner.rates import DAY_S, PER_DEVICE_S
from rerail.planner.spares import Spares, worth
from rerail.planner.standbys import Standbys, standbys
from rerail.planner.units import duration, size

HOUR_S = 3600.0
MOST, LARGEST = 1e7, 1e12
"""Devices of a job, and bytes that one of them holds."""
SHORT_S = HOUR_S
"""Jobs that are shorter need no plan (the founding advice), unless faults are frequent."""
NOT_WORTH = 0.01
"""Share of a job that has to be at stake."""
START = "start"
"""The beginning of the job as something to go back to."""
ROOMY = 200e9
"""Bytes beside its work that no device of today holds."""
SELDOMEST, OFTENEST = 1 / (1e4 * 365.25 * DAY_S), 1e3
"""Faults per second, of the whole job."""


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is planned for; seconds, bytes and pieces. Every field can stand in the TOML file, by this name, with units."""

    gpus: float
    params: float
    mtbf: float = 0.0
    """Of the whole job; 0: from `rate`."""
    rate: float = PER_DEVICE_S * 1000 * DAY_S
    """Faults per 1,000 devices and day."""
    write: float = 0.0
    """To the store beside the cluster, all nodes together; 0: 1 GB/s a node."""
    read: float = 0.0
    """0: twice as fast as writing."""
    copy: float = 25e9
    """From a device to its host's memory."""
    net: float = 25e9
    """Of one node to another."""
    per_node: float = 0
    """0: eight, or as many as there are."""
    replicas: float = 1
    """How many ranks hold the same state: more than 1, and a lost one is copied from another."""
    bytes_per_param: float = 14.0
    step: float = 10.0
    length: float = 0.0
    """Of the job; 0: not known."""
    repair: float = DAY_S
    """Until a node that was taken out is back."""
    elastic: bool = False
    node_share: float = 0.21
    """Of all faults: those that take a node with its memory."""
    job_share: float = 0.01
    """Those that take everything."""
    process_down: float = 12.0
    node_down: float = 30.0
    job_down: float = 240.0
    stall_share: float = 0.02
    """Of the copy to the host's memory: what the training feels of it."""
    noise_share: float = 0.01
    """Of the time in which a snapshot goes on to another node or to the store."""
    warm: float = 10.0
    """Until a standby process is warm; a rank that is started without one takes that much longer."""
    standby_share: float = 1e-7
    """Of a job's time: what one standby on each node costs."""

    @property
    def nodes(self) -> int:
        return math.ceil(self.gpus / (self.per_node or min(8, self.gpus)))

    @property
    def write_speed(self) -> float:
        """Bytes a second, all nodes together."""
        return self.write or 1e9 * self.nodes

    @property
    def read_speed(self) -> float:
        """The same for reading."""
        return self.read or 2 * self.write_speed

    @property
    def state(self) -> float:
        """Bytes of what has to be saved, each of them once."""
        return self.params * self.bytes_per_param

    @property
    def device_state(self) -> float:
        """Bytes of it that one device holds."""
        return min(self.state, self.state * self.replicas / self.gpus)

    @property
    def node_state(self) -> float:
        """Bytes of it that one node has to keep."""
        return min(self.state, self.state * self.replicas / self.nodes)

    @property
    def faults_s(self) -> float:
        """Per second, of the whole job."""
        return 1 / self.mtbf if self.mtbf else self.rate * self.gpus / 1000 / DAY_S

    def check(self) -> None:
        """Refuse sizes that contradict each other."""
        for name in ("gpus", "per_node", "replicas"):
            if getattr(self, name) % 1:
                raise ConfigError(f"{name} is {getattr(self, name):g}; a whole number is needed")
        if self.params < 1:
            raise ConfigError(f"params is {self.params:g}; a model has at least 1")
        if self.gpus > MOST:
            raise ConfigError(f"gpus is {self.gpus:g}; nobody has more than {MOST:g}")
        if not SELDOMEST < self.faults_s < OFTENEST:
            name = "mtbf" if self.mtbf else "rate"
            often = "less than a millisecond" if self.faults_s >= OFTENEST else "more than 10,000 years"
            raise ConfigError(
                f"{name} is {getattr(self, name):g}{' s' if self.mtbf else ''}: that is {often} from one fault of the whole job to "
                f"the next, which nothing can be planned for; {'3h' if self.mtbf else '0.47'} would be usual"
            )
        if self.device_state > LARGEST:
            raise ConfigError(
                f"params is {self.params:g}: that is {self.device_state / 1e12:.3g} TB on each of {self.gpus:g} gpus, which no "
                "device holds; more gpus or fewer params are needed"
            )
        if 0 < self.length < self.step:
            raise ConfigError(f"length is {duration(self.length)}, but a step takes {duration(self.step)}")
        if self.per_node > self.gpus:
            raise ConfigError(f"per_node is {self.per_node:g}, but there are only {self.gpus:g} gpus")
        if self.replicas > self.gpus:
            raise ConfigError(f"replicas is {self.replicas:g}, but there are only {self.gpus:g} gpus to hold them")
        if self.node_share + self.job_share > 1:
            raise ConfigError(
                f"node_share is {self.node_share:g} and job_share {self.job_share:g}: together they are shares of all "
                "faults, and cannot be more than 1"
            )

    def doubts(self) -> tuple[str, ...]:
        """What can be planned for, and is hardly meant."""
        if self.device_state <= ROOMY:
            return ()
        least = math.ceil(self.state * self.replicas / ROOMY)
        return (
            f"params is {self.params:g}: that is {size(self.device_state)} on each of {self.gpus:,.0f} devices, more than "
            f"any has today; {least:,} devices would hold {size(ROOMY)} each",
        )


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What `rerail plan` shows."""

    faults_per_day: float
    planned: Planned
    spares: Spares
    standbys: Standbys
    goodput: float
    """All of it: without what is saved, lost and waited for."""
    usually: float
    """The goodput of the same job with what follows."""
    founding: Waste
    """The same faults met with hourly checkpoints that the training waits for, and a restart of all."""
    verdict: str = ""
    """Why none of this is worth it, or nothing."""
    warnings: tuple[str, ...] = ()
    """What is hard to believe of the sizes that were given."""


def problem_of(job: Job) -> Problem:
    """Hazards and tiers of rerail."""
    faults, node_state, write, read = job.faults_s, job.node_state, job.write_speed, job.read_speed
    copy_s = job.device_state / job.copy
    stall_s = job.stall_share * copy_s
    has_replica = 0.0 if job.replicas > 1 else 1.0
    memory = Tier(
        name="memory", stall_s=stall_s, save_s=copy_s, restore_s=copy_s, survives="process", shortest_s=job.step
    )
    moving_s = node_state / job.net
    buddy = Tier(
        name="buddy",
        of="memory",
        stall_s=job.noise_share * moving_s,
        save_s=copy_s + moving_s,
        restore_s=copy_s + moving_s,
        survives="node",
        shortest_s=job.step,
    )
    store = Tier(
        name="store",
        of="memory",
        stall_s=job.noise_share * job.state / write,
        save_s=copy_s + job.state / write,
        restore_s=job.state / read,
        survives="job",
        shortest_s=job.step,
    )
    process = 1 - job.node_share - job.job_share
    return Problem(
        tiers=tuple(
            tier for tier in (memory, buddy if job.nodes > 1 else None, store, _start(job)) if tier is not None
        ),
        hazards=(
            Hazard(
                name="process or device",
                rate=faults * process,
                scope="process",
                down_s=job.process_down,
                rho=has_replica,
            ),
            Hazard(name="node", rate=faults * job.node_share, scope="node", down_s=job.node_down, rho=has_replica),
            Hazard(name="everything", rate=faults * job.job_share, scope="job", down_s=job.job_down),
        ),
    )


def _start(job: Job) -> Tier | None:
    """Beginning anew, where it is known how long that takes: a place to go back to that costs nothing, and all that was done."""
    if not job.length:
        return None
    return Tier(name=START, stall_s=0.0, save_s=0.0, restore_s=0.0, survives="job", shortest_s=job.length)


def founding(job: Job, interval_s: float = HOUR_S) -> Waste:
    """What is lost by hourly checkpoints, written while the training waits, and a restart of all at every fault."""
    save_s = job.state / job.write_speed
    if 0 < job.length < interval_s:  # it ends before its first save
        lost = job.faults_s * (job.length / 2 + FOUND_S + job.job_down)
        return Waste(again={"any": lost / (1 + lost)}, source={"any": START}, total=lost / (1 + lost))
    store = Tier(name="store", stall_s=save_s, save_s=0.0, restore_s=job.state / job.read_speed, survives="job")
    fault = Hazard(name="any", rate=job.faults_s, scope="job", down_s=FOUND_S + job.job_down)
    return waste(Problem(tiers=(store,), hazards=(fault,)), {"store": max(interval_s, save_s)})


FOUND_S = 600.0
"""Seconds until a fault is found where nobody looks: the usual timeout of collectives."""


def answer(job: Job) -> Answer:
    """The whole plan."""
    job.check()
    planned, before = best(problem_of(job)), founding(job)
    taken = job.faults_s * job.node_share
    spares = worth(job.nodes, taken, job.repair, elastic=job.elastic, length_s=job.length)
    usually = before.goodput * (1 - spares.short)
    ranks_lost = job.faults_s * (1 - job.node_share - job.job_share)
    return Answer(
        faults_per_day=job.faults_s * DAY_S,
        planned=planned,
        spares=spares,
        goodput=planned.waste.goodput * (1 - spares.short),
        standbys=standbys(job.nodes, ranks_lost, job.warm, job.standby_share),
        usually=usually,
        founding=before,
        verdict=_verdict(job, planned.waste, 1 - usually),
        warnings=job.doubts(),
    )


def _verdict(job: Job, lost: Waste, before: float) -> str:
    """`before`: what hourly checkpoints lose, waiting for nodes included."""
    if lost.total >= 1:
        return (
            "no interval keeps up with these faults: the job would lose more than it trains; it needs faster stores, fewer "
            "faults, or to be smaller"
        )
    expected = job.faults_s * job.length
    if not job.length or before > NOT_WORTH:
        return ""
    if expected < (1 if job.length <= SHORT_S else 0.05):
        return (
            f"none of this is worth it: {expected:.2g} faults are expected in the whole job, and "
            + ("starting it anew" if job.length < HOUR_S else "even hourly checkpoints and restarts")
            + f" would cost {before:.2%} of it"
        )
    return ""


ASSUMED = {
    "rate": "419 unplanned interruptions in 54 days of 16,384 devices (Llama 3)",
    "node_share": "88 of those 419 were of hosts, network, power and storage of a node",
    "job_share": "assumed: power, storage or scheduler of the whole cluster",
    "process_down": "assumed: ten times what rerail needs on small jobs (docs/benchmarks.md)",
    "node_down": "assumed: three times what rerail needs in its soak over three nodes",
    "job_down": "the founding reference needs 35 s to find and handle a fault and 70 to 210 s to start again",
    "copy": "PCIe 5; measured on one H200: 54 GB/s",
    "net": "200 Gbit/s a node",
    "write": "1 GB/s a node",
    "read": "twice as fast as writing",
    "bytes_per_param": "bf16 weights, fp32 copy and Adam's two moments",
    "stall_share": "measured on one H200: 0.21 % with a copy of 0.66 s every ten steps of 0.56 s",
    "noise_share": "assumed: it uses the network and the host's memory, not the devices",
    "warm": "a cold start takes 10.8 s on one H200, a rank that a standby replaces 1.3 s (docs/benchmarks.md)",
    "standby_share": "assumed: it sleeps in memory of the host that is mostly free",
    "step": "assumed",
    "repair": "assumed",
    "replicas": "state is sharded and nobody holds a copy",
    "per_node": "usual",
}
"""Where the defaults come from."""
