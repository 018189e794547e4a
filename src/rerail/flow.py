"""The seven records that every fault passes through, from what was seen to what it cost.

    detect          diagnose         decide          recover             report
    Signal -> Event -------> Diagnosis -----> Decision -----> Action, Recovery ----> Report

Every stage makes its record here, the journal stores it, and `cause_id` links it to the record it came from,
so a report can be walked back to the first thing anybody saw. Called by everyone; imports nothing of rerail.
"""

from __future__ import annotations

import uuid
from enum import StrEnum

import msgspec

SCHEMA = 1
"""Version of these records as stored; raised when a field changes its meaning."""


def new_id(prefix: str) -> str:
    """A short id, unique in practice, that tells by its prefix which record it names."""
    return f"{prefix}-{uuid.uuid4().hex[:10]}"


class Severity(StrEnum):
    """How much an event matters to the running job."""

    INFO = "info"
    WARNING = "warning"
    DEGRADED = "degraded"
    ERROR = "error"
    CRITICAL = "critical"


class Role(StrEnum):
    """Where a fault stands in the chain of cause and effect."""

    ROOT = "root"
    """A cause in itself."""
    SYMPTOM = "symptom"
    """The consequence of something elsewhere or earlier."""
    CONFIRMATION = "confirmation"
    """No alarm by itself; with a symptom that it explains it is the root."""
    CLEAR = "clear"
    """Something is over."""
    BENIGN = "benign"
    """Looks like a fault and is none."""


class Handling(StrEnum):
    """What a fault asks for first, from nothing to a person."""

    IGNORE = "ignore"
    RETRY_IN_PLACE = "retry_in_place"
    RESTART_PROCESS = "restart_process"
    RESET_DEVICE = "reset_device"
    ISOLATE_DEVICE = "isolate_device"
    DRAIN_NODE = "drain_node"
    STOP_JOB = "stop_job"
    HUMAN = "human"


class Rung(StrEnum):
    """The recovery ladder, finest first. What each does, costs and needs: `decide.ladder`."""

    RETRY_STEP = "retry_step"
    ROLL_BACK = "roll_back"
    """To a version from before a fault of the training itself; for nothing else."""
    HOT_SWITCH = "hot_switch"
    """A spare is made ready first, then takes the place of a rank that still works."""
    REPLACE_RANK = "replace_rank"
    """In its own place."""
    RESET_DEVICE = "reset_device"
    """The same, once its device was reset."""
    SWAP_DEVICE = "swap_device"
    """In another place of the same node."""
    SWAP_NODE = "swap_node"
    """On another node."""
    GROW = "grow"
    """Empty seats are filled again."""
    SHRINK = "shrink"
    """The seats of lost ranks stay empty, and the others share their work."""
    RESTART_ALL = "restart_all"
    STOP = "stop"


class OutcomeKind(StrEnum):
    """How an action ended: done, worth another try, or never going to work."""

    OK = "ok"
    TEMPORARY = "temporary"
    PERMANENT = "permanent"


class Fidelity(StrEnum):
    """Whether the resumed run equals the undisturbed one bit for bit."""

    EXACT = "exact"
    APPROXIMATE = "approximate"


class Place(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Where a rank runs: a node, and the number of a device there, which is the rank's LOCAL_RANK."""

    node: str
    device: int

    def __str__(self) -> str:
        return f"{self.node}/{self.device}"


class Record(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What all seven records share."""

    id: str
    job: str
    at: float
    """Wall clock, seconds since the epoch. For people; durations are never computed from it."""
    cause_id: str = ""
    """The record this one came from; empty for a signal."""


class Signal(Record, frozen=True, kw_only=True, tag="signal"):
    """I saw this. Made by a detector, before anyone knows what it means."""

    source: str
    """The detector: `process.exit`, `step.raised`, `step.hang`, `collective.failed`, `agent.lost`, `controller.lost`, ..."""
    node: str
    rank: int = -1
    """The rank concerned, or -1."""
    generation: int = 0
    step: int = -1
    """Completed updates of that rank when it was seen, or -1."""
    payload: dict[str, str | int | float | bool] = {}
    """What the detector knows, flat: `signal`, `exit_code`, `exception`, `message`, `traceback`, `evidence`, `stalled_s`."""


class Event(Record, frozen=True, kw_only=True, tag="event"):
    """This is fault `code`. A signal matched against the catalogue."""

    code: str
    node: str
    rank: int = -1
    generation: int = 0
    step: int = -1
    severity: Severity = Severity.ERROR
    role: Role = Role.ROOT
    transient: bool = True
    """Whether the same work may well succeed when done again."""
    message: str = ""
    """One line for people, made from the catalogue and the payload."""
    evidence: str = ""
    """The raw text behind it: a log line, a traceback, a status."""
    first_seen: float = 0.0
    last_seen: float = 0.0
    count: int = 1
    trusted: int = -1
    """Where the state itself may be wrong: the newest version from before that. -1: it is not."""


class Diagnosis(Record, frozen=True, kw_only=True, tag="diagnosis"):
    """This is the root cause; those are its echoes."""

    code: str
    root: str
    """Id of the root event."""
    node: str
    ranks: tuple[int, ...] = ()
    """Ranks that are broken, not the ones that merely noticed."""
    lost: tuple[int, ...] = ()
    """Those of them whose process is gone or must go."""
    step: int = -1
    echoes: tuple[str, ...] = ()
    """Ids of events that follow from the root."""
    hardware: bool = False
    transient: bool = True
    confidence: str = "high"
    rule: str = ""
    """The rule that named the root."""
    summary: str = ""
    evidence: tuple[str, ...] = ()
    trusted: int = -1
    """The lowest of its events': nothing newer is to be gone on from."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of an interruption, by where they go. Expected in a Decision, measured in a Report."""

    detect: float = 0.0
    """From the fault to the first signal of it."""
    t0: float = 0.0
    """Lost work: what had been computed since the version resumed from, and is computed again."""
    t1: float = 0.0
    """Reschedule: decide, free the survivors, start and build the newcomer."""
    t2: float = 0.0
    """Communication: form the groups of the new generation."""
    t3: float = 0.0
    """Load: bring every rank's state to the resumed version."""
    t4: float = 0.0
    """Compile and warm-up: what the first replayed step took beyond a usual one."""

    @property
    def total(self) -> float:
        return self.detect + self.t0 + self.t1 + self.t2 + self.t3 + self.t4


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One rung that was considered, with its price or the reason it is out."""

    rung: Rung
    feasible: bool
    why: str
    expected: Cost = Cost()
    odds: float = 1.0
    """How likely it is to succeed, by what was seen in this job."""

    @property
    def price(self) -> float:
        """What it costs until it has succeeded: by this the rungs are compared."""
        return self.expected.total / self.odds


class Decision(Record, frozen=True, kw_only=True, tag="decision"):
    """This rung of the ladder, by this rule."""

    rung: Rung
    fallbacks: tuple[Rung, ...] = ()
    rule: str = ""
    why: str = ""
    ranks: tuple[int, ...] = ()
    """Ranks to be replaced, empty where every process stays."""
    moves: dict[int, Place] = {}
    """Those of them that get another place."""
    candidates: tuple[Candidate, ...] = ()
    budget_left: int = 0
    skips: dict[int, int] = {}
    """Batches that are left out from now on: how many before the step that begins from this version."""
    exit_code: int = 0
    """What the job exits with when the rung is STOP: 1 may be requeued, 93 must not."""


class Action(Record, frozen=True, kw_only=True, tag="action"):
    """One idempotent effect with a deadline."""

    verb: str
    """`interrupt`, `kill`, `promote`, `form`, `stop`."""
    target: str
    """`rank 3`, `node n1`, `all`."""
    generation: int
    attempt: int = 1
    deadline_s: float = 0.0
    outcome: OutcomeKind = OutcomeKind.OK
    detail: str = ""


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of a recovery, in seconds since its first signal."""

    name: str
    start: float
    end: float


class Recovery(Record, frozen=True, kw_only=True, tag="recovery"):
    """The run of actions that brought the job back, or did not."""

    rung: Rung
    generation: int
    ok: bool
    attempts: int = 1
    """Generations used for this one fault; 1 is what we want."""
    resumed_step: int = -1
    sources: dict[int, str] = {}
    """State source of each rank: `own`, `replica 2`, `snapshot`, `initial`."""
    phases: tuple[Phase, ...] = ()
    fidelity: Fidelity = Fidelity.EXACT
    detail: str = ""


class Report(Record, frozen=True, kw_only=True, tag="report"):
    """What it cost and why, with links to all of the above."""

    incident: int
    """Number of this incident in its job, from 1."""
    code: str
    summary: str
    rung: Rung
    ok: bool
    cost: Cost
    lost_steps: int = 0
    resumed_step: int = -1
    fidelity: Fidelity = Fidelity.EXACT
    attempts: int = 1
    ranks: tuple[int, ...] = ()
    node: str = ""
    moves: dict[int, Place] = {}
    """Ranks that have another place now."""
    links: tuple[str, ...] = ()
    """Ids of the signals, events, diagnosis, decision, actions and recovery of this incident."""


AnyRecord = Signal | Event | Diagnosis | Decision | Action | Recovery | Report
