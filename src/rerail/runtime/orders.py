"""Messages between controller and agents; those between agents and ranks are in `runtime.wire`.

    controller <-- WebSocket, one msgpack message per frame --> agent

Called by `runtime.controller`, `runtime.agent` and whoever drives them; needs msgspec and nothing else.
"""

from __future__ import annotations

import msgspec

from rerail.flow import Signal
from rerail.runtime.clock import Metric, Took
from rerail.runtime.plans import Plan
from rerail.runtime.wire import Assign, FromRank, Inject, Interrupt, Message, Parked

# --- agent -> controller ---------------------------------------------------------------------------------------


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent knows of one of its ranks; sent on every (re)connect."""

    rank: int
    local_rank: int
    pid: int
    generation: int
    state: str
    """One of `runtime.fleet.RankState`."""
    joined: bool
    replaceable: bool
    version: int
    parked: Parked | None = None


class AgentHello(Message, frozen=True, kw_only=True):
    """First message of every connection. `ranks` is empty at the start of a job."""

    job: str
    token: str
    node: str
    address: str
    """Where other nodes reach this one."""
    slots: int
    """Ranks this node runs (--nproc-per-node)."""
    devices: int = 0
    """Places for ranks, spare ones included; 0: as many as slots."""
    node_rank: int = -1
    """As asked for by --node-rank, or -1."""
    incarnation: str
    """Changes when the agent process is a new one: then its old ranks are gone."""
    ranks: tuple[RankStatus, ...] = ()
    standbys_ready: int = 0
    accelerators: tuple[str, ...] = ()
    """PCI addresses of its devices, by their number, as far as they are known."""
    resets: bool = False
    """A command is known that resets its devices."""
    depot_port: int = 0
    """Where this node keeps checkpoints for the others; 0: it does not."""


class Kept(Message, frozen=True, kw_only=True):
    """Part of what a rank leaves in its step clock page: a small state, or what it heard while it was built."""

    rank: int
    version: int = -1
    body: bytes = b""
    rest: bytes | None = None
    """None: the same as with the version before."""
    heard: list[bytes] | None = None


class PortPicked(Message, frozen=True, kw_only=True):
    """Answer to PickPort."""

    generation: int
    port: int


class Observed(Message, frozen=True, kw_only=True):
    """A detector on the node saw something."""

    signal: Signal
    age_s: float = 0.0
    """Seconds between the fault itself and this message, as far as the detector can tell."""


class Relayed(Message, frozen=True, kw_only=True):
    """A message of one of the agent's ranks, or of a newcomer beside it."""

    rank: int
    message: FromRank
    beside: bool = False


class RankExited(Message, frozen=True, kw_only=True):
    """A rank ended with exit code 0. Any other end is an Observed signal `process.exit`; that of a newcomer beside it is not."""

    rank: int
    generation: int
    beside: bool = False


class ChoreDone(Message, frozen=True, kw_only=True):
    """How a Chore went."""

    id: str
    ok: bool
    text: str = ""
    """What its command said."""

    @property
    def last_line(self) -> str:
        return self.text.splitlines()[-1] if self.text else ""


class Standbys(Message, frozen=True, kw_only=True):
    """How many standbys are warm, and how many are on their way."""

    ready: int
    warming: int


class Beat(Message, frozen=True, kw_only=True):
    """The agent is alive; carries the newest version of each of its ranks, and the process it is."""

    versions: dict[int, int]
    pids: dict[int, int] = {}
    took: dict[int, list[Took]] = {}
    """By rank: where the time of some of the newest steps went. All ranks tell of the same steps."""
    metrics: dict[int, dict[str, Metric]] = {}
    number: int = 0
    """Answered by a Heard of the same number, unless it is 0."""


class LeaveJob(Message, frozen=True, kw_only=True):
    """The user asked this agent to stop (Ctrl-C, SIGTERM): the job ends."""

    reason: str
    exit_code: int = 1


# --- controller -> agent ---------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, kw_only=True):
    """The agent is admitted."""

    node_rank: int


class Heard(Message, frozen=True, kw_only=True):
    """Answer to a Beat: from its sending on, the node is not given up for `agent_lost_s` (see `runtime.lease`)."""

    number: int


class Rejected(Message, frozen=True, kw_only=True):
    """The agent may not take part; it must end its ranks (a stale or foreign agent)."""

    reason: str


class PickPort(Message, frozen=True, kw_only=True):
    """Pick a free port for MASTER_PORT of this generation."""

    generation: int


class Start(Message, frozen=True, kw_only=True):
    """Start all local ranks afresh: end the ones of older generations, then assign these."""

    generation: int
    assignments: tuple[Assign, ...]
    grace_s: float = 0.0
    """How long old ranks may take to end after SIGTERM; 0 means SIGKILL at once."""


class Promote(Message, frozen=True, kw_only=True):
    """End what is left of `assignment.rank` and give its place to a standby, warm if there is one."""

    assignment: Assign
    kept: list[Kept] = []
    """What the rank left on another node."""
    beside: bool = False
    """The rank itself stays until the newcomer is ready."""


class Vacate(Message, frozen=True, kw_only=True):
    """End what is left of these local ranks, or of all but those in `keep`: their places are elsewhere now."""

    generation: int
    ranks: tuple[int, ...] = ()
    keep: tuple[int, ...] | None = None
    beside: bool = False
    """Not the ranks themselves, but newcomers that are made ready beside them."""


CHECK, RESET = "check", "reset"
"""Kinds of Chore."""


class Chore(Message, frozen=True, kw_only=True):
    """Run a command on this node: `reset` one of its devices, or `check` the machine. Answered by ChoreDone."""

    id: str
    kind: str
    device: int = -1


class InterruptAll(Message, frozen=True, kw_only=True):
    """Pass an Interrupt to the named local ranks."""

    interrupt: Interrupt
    ranks: tuple[int, ...]


class FormAll(Message, frozen=True, kw_only=True):
    """Pass a Form to all local ranks."""

    plan: Plan
    kept: list[Kept] = []
    """What newcomers' predecessors left elsewhere since they were made ready."""


class DismissAll(Message, frozen=True, kw_only=True):
    """Pass a Dismiss to all local ranks: every rank of the job has sent Finished."""


class Shutdown(Message, frozen=True, kw_only=True):
    """The job ends: end every process and exit with this code."""

    exit_code: int
    reason: str
    culprit: int = -1
    """The rank whose traceback is the one to show, or -1."""
    grace_s: float = 5.0


ToController = AgentHello | ChoreDone | Kept | PortPicked | Observed | Relayed | RankExited | Standbys | Beat | LeaveJob
ToAgent = (
    Welcome
    | Heard
    | Rejected
    | PickPort
    | Start
    | Promote
    | Vacate
    | Chore
    | InterruptAll
    | FormAll
    | DismissAll
    | Shutdown
    | Inject
)
