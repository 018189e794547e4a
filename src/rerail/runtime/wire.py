"""Messages between agents and ranks; those between controller and agents are in `runtime.orders` (how they travel: `runtime.frames`).

    controller <-- WebSocket, one msgpack message per frame --> agent <-- socketpair, length-prefixed --> rank

A rank's life in messages (agent to rank above the line, rank to agent below it):

    Assign              Form                Interrupt            Form
    ------------------------------------------------------------------------------->
    Warm     Joined, Parked   Formed, Resumed          Parked         Formed, Resumed     Finished

Every generation is formed the same way, the first one too: all ranks are parked, the controller sees who holds
which version, and one `Plan` says who gets its state from where. A newcomer parks after it has built its model alone.

Called by `runtime.agent`, `session.link` and all who look at what ranks say; needs msgspec and nothing else.
"""

from __future__ import annotations

import msgspec

from rerail.runtime.plans import Back, Plan


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the class name is the tag."""


# --- agent -> rank ---------------------------------------------------------------------------------------------


class Assign(Message, frozen=True, kw_only=True):
    """You are this rank from now on. Two file descriptors travel with it: step clock, snapshot arena."""

    generation: int
    rank: int
    world_size: int
    newcomer: bool
    """True where living survivors wait: build alone, rehearse, then park."""
    restored: bool = False
    """True when the arena of this rank may hold snapshots of an earlier process."""
    store_rank: int = 0
    """The rank that opens the store of this generation when it parks."""
    address: str = "127.0.0.1"
    """Of this rank's node: its groups listen there, and the store if this rank opens it."""
    env: dict[str, str] = {}
    """torchrun's variables for this rank."""
    back: Back = Back()


class Interrupt(Message, frozen=True, kw_only=True):
    """Generation `generation` is to be formed: leave the collectives of older ones, finish nothing, park."""

    generation: int
    store_rank: int
    trusted: int = -1
    """What is newer than this version is not to be gone on from, wherever it is kept; -1: there is no such limit."""


class Form(Message, frozen=True, kw_only=True):
    """All are parked: form this generation and go on."""

    plan: Plan


class Stop(Message, frozen=True, kw_only=True):
    """The job ends. The rank re-raises its own exception if it is the culprit, else it exits quietly."""

    reason: str
    culprit: bool = False


class Inject(Message, frozen=True, kw_only=True):
    """Break something on purpose (`rerail inject`); from the controller to an agent, and on to the rank that does it."""

    id: str
    kind: str
    """One of `runtime.injections.KINDS`."""
    rank: int
    """For a fault of a machine: the rank by which the node was found."""
    seed: int
    """Makes every choice that is left."""
    after_s: float = 0.0
    for_s: float = 0.0
    factor: float = 0.0
    line: str = ""
    folder: str = ""
    max_size: int = 0
    port: int = 0


# --- rank -> agent ---------------------------------------------------------------------------------------------


class Warm(Message, frozen=True, kw_only=True):
    """A standby is ready to be promoted."""

    at_join: bool
    """True: the script waits inside `rerail.join()`. False: torch is imported, the script has not begun."""


class Joined(Message, frozen=True, kw_only=True):
    """The script has called `rerail.join()`: it can be repaired in place."""

    rank: int
    generation: int
    replaceable: bool
    """False when the script made its own default process group before join()."""


class Parked(Message, frozen=True, kw_only=True):
    """Outside any step and waiting for `generation` to be formed."""

    rank: int
    generation: int
    version: int
    """Completed updates held in memory."""
    intact: bool
    """False when an optimizer step was begun and not ended, or nothing real is held yet (a newcomer)."""
    in_training: bool
    """False before the first step: nothing to lose, nothing to replay."""
    small_versions: tuple[int, ...] = ()
    """Versions whose RNG, cursor and schedule this rank can restore by itself."""
    snapshots: tuple[int, ...] = ()
    """Versions sealed in its arena, state tensors included."""
    shadows: tuple[int, ...] = ()
    """Where what is held is not whole: versions of which it can have the parameters in half precision (`checkpoint.shadow`)."""
    saved: tuple[int, ...] = ()
    """Where nothing of it is left here: versions of which there are checkpoints, the newest few, oldest first."""
    replicas: tuple[int, ...] = ()
    """Ranks that hold the very same state, itself included."""
    weights: tuple[int, ...] = ()
    """Ranks that hold the very same parameters, whatever else they hold."""
    logged: int = -1
    """From which version on it can tell others again what it has told them; -1: it cannot."""
    astray: bool = False
    """It has done steps again, and they were not those that had been done."""
    agreed: int = -1
    """Where replicas were found to differ: the newest version to be trusted, on whatever rank. -1: there is no such limit."""
    in_guard: bool = False
    """Inside `job.guard()`: a newcomer cannot join there, and ranks past it cannot go back."""
    guards: int = 0
    """Calls of `job.guard()` completed since the last update."""
    store_port: int = 0
    """Set by the rank that opened the store of `generation`."""
    elastic: bool = False
    """The script can go on with fewer ranks: see `job.deal()`."""
    loss: tuple[float, float] | None = None
    """Where its loss is and how much it scatters, where the script tells it (`job.metric`)."""
    straight: float = 1.0
    """What parameters that go on from two snapshots on a straight line are expected to cost, against those of the newer one."""
    guesses: dict[str, tuple[float, int]] = {}
    """The same for what predictors make of checkpoints, by name, and how many checkpoints each needs."""
    phases: dict[str, float] = {}
    """Seconds spent since the assignment or the interrupt: `build`, `rehearse`, `run_out`."""


class Formed(Message, frozen=True, kw_only=True):
    """Groups stand and state is loaded; the step is about to run."""

    rank: int
    generation: int
    version: int
    phases: dict[str, float] = {}
    """Seconds: `communication`, `load`."""


class Resumed(Message, frozen=True, kw_only=True):
    """The first step of the generation is complete."""

    rank: int
    generation: int
    version: int
    step_s: float
    usual_step_s: float = 0.0
    """Median of the steps before the fault, 0 where unknown."""
    elastic: bool = False


class Raised(Message, frozen=True, kw_only=True):
    """The user's code raised inside `job.step()`; the rank lives and waits for a verdict."""

    rank: int
    generation: int
    version: int
    exception: str
    """Type name, with module unless builtin."""
    text: str
    traceback: str


class CommFailed(Message, frozen=True, kw_only=True):
    """A collective failed without an interrupt: an echo of a fault elsewhere, or the only sign of one."""

    rank: int
    generation: int
    version: int
    text: str


class Finished(Message, frozen=True, kw_only=True):
    """`job.steps` has reached its end on this rank."""

    rank: int
    version: int


HEALED = "rehab.healed"
LEARNT = "rehab.learnt"
"""What guesses at lost parameters would be worth."""


class Noted(Message, frozen=True, kw_only=True):
    """Something worth writing down that is no fault: a checkpoint saved, given up or passed over."""

    rank: int
    source: str
    """`checkpoint.` with `saved`, `failed`, `passed_over`, `loaded`, `tier_out`, `tier_back` or `planned`; `data.skipped`; `rehab.` with `healed` or `learnt`."""
    version: int
    text: str
    figures: dict[str, float] = {}
    """What it was concluded from, by name."""


class Voted(Message, frozen=True, kw_only=True):
    """Ranks that must hold the same do not, or have computed again what they differed in. From the first of them."""

    generation: int
    version: int
    sums: dict[int, tuple[int, ...]]
    """By rank: checksums of its state."""
    back: int
    """A version on which they agreed; all ranks wait to be sent back to it. -1: there is none, they train on."""
    far: dict[int, float] = {}
    """By rank, after that: how far it was the first time from what all hold now, where they had differed. Squares."""


class Unsound(Message, frozen=True, kw_only=True):
    """The training has gone wrong on this rank, which waits to be sent back."""

    generation: int
    version: int
    """The step that went wrong began from here."""
    what: str
    """`loss`, `grad_norm` or `state` is not finite; `batch`: the script does not want this one; `healing`: it is no better yet;
    `source`: a shard that was restored looks no good, before anything was changed."""
    trusted: int
    text: str


class Injected(Message, frozen=True, kw_only=True):
    """What became of an Inject that was passed on to this rank."""

    order: str
    source: str
    """`inject`, `inject.over` or `inject.refused`."""
    text: str


class Dismiss(Message, frozen=True, kw_only=True):
    """All ranks have finished: leave the loop. Until then a finished rank stays to help repair the others."""


FromRank = (
    Warm | Joined | Parked | Formed | Resumed | Raised | CommFailed | Finished | Noted | Voted | Unsound | Injected
)
ToRank = Assign | Interrupt | Form | Dismiss | Stop | Inject
