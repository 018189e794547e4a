"""The plan of a generation: who takes part, and where each rank's state comes from.

Made by `recover.execute`, sent in `runtime.wire.Form`, carried out by `session.restore`.
"""

from __future__ import annotations

import msgspec

from rerail.planner.outlook import Outlook

KEPT, SHADOW, REPLICA, LINE = "kept", "shadow", "replica", "linear"
"""Where the parameters of a lost shard come from; any other word is the name of a predictor."""


class Stale(msgspec.Struct, frozen=True, kw_only=True):
    """How a lost shard is put together, not exactly: all of it from what was kept last, its parameters from something newer."""

    at: int
    """The version that everything comes from."""
    saved: bool = False
    """That is a checkpoint; else a snapshot in the rank's arena."""
    way: str = KEPT
    """Where parameters come from: `kept` (from there, too), the rank's `shadow`, a `replica` of them, or the name of a predictor."""
    version: int = -1
    """With `shadow`: its version."""
    before: int = -1
    """Parameters go on on a straight line from the snapshot or the shadow of this version through the other one; -1: they do not."""
    rank: int = -1
    """With `replica`: who holds the same parameters. With a predictor that has to learn: who has taught it."""
    schedule: int = -1
    """Who tells learning rates and the like, where this rank was left those of one step before; -1: it has its own."""
    expected: float = 1.0
    """What this is expected to cost in the end, as a share of the steps since `at`."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank's state at the plan's version comes from."""

    kind: str
    """`own` (it holds it), `replica` (from living rank `rank`), `snapshot` (its arena), `initial` (as constructed). Not exact:
    `stale` (tensors as `stale` says, all else of the plan's version), `behind` (its own of one version before)."""
    rank: int = -1
    at: int = -1
    """With `own` and `snapshot`: the version that this rank goes on from, where it is not the plan's: it does the steps in between
    again, with what the others have told its predecessor. -1: the plan's."""
    stale: Stale | None = None
    small: bool = False
    """With `replica`: random state aside, the small state comes from there, too, since nobody has kept this rank's."""


class Back(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from faults of the training: where not to go on from, and which data to leave out."""

    trusted: int = -1
    """The newest version to go on from; -1: there is no such limit."""
    watch: int = -1
    """Up to this version the state is looked at before every step: who was wrong first shows."""
    exact: bool = False
    """From now on repairs have to be exact: one that was not did not heal."""
    skips: dict[int, int] = {}
    """By version: how many batches are passed over before its own is taken. All there ever were in this job."""


MARGIN = 0.95
"""A guess at lost parameters has to be expected to cost less than this, against those that were kept, to be preferred to them."""
WINDOW = 8
"""Losses that say where the loss is, and so the fewest steps that it is given to come back."""


class Healing(msgspec.Struct, frozen=True, kw_only=True):
    """A lost shard was not restored exactly: by when the training has to be as good as it was, or all go back."""

    judge: int
    """The rank that looks at its loss."""
    loss: float
    """What it was before."""
    spread: float
    target: int
    """The version to go back to; its snapshots are kept until then."""
    saved: bool = False
    """That is a checkpoint: none is deleted until then."""
    since: int = -1
    """The version that all went on from."""
    until: int
    ways: dict[int, str] = {}
    """By lost rank: where its parameters came from (`Stale.way`)."""
    expected: float = 0.0
    """Steps that this is expected to cost in the end."""
    tellers: tuple[int, ...] = ()
    """Ranks that tell their loss: before the first update all wait for their word on it."""
    refused: tuple[str, ...] = ()
    """Ways that were tried at this version, and looked no good at once."""

    def all_refused(self) -> Healing:
        """Before its first update what was restored looked no good: none of these ways is tried again at this version."""
        return msgspec.structs.replace(self, refused=tuple(sorted({*self.refused, *self.ways.values()})))


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Generation `generation`: who takes part, where its store lives, which version all resume from."""

    generation: int
    world_size: int
    store_host: str
    store_port: int
    store_rank: int
    """The rank whose process serves the store; chosen among survivors, so that no node is special."""
    version: int
    """Completed updates to resume from; 0 in a new job."""
    depots: str = ""
    """Where every node keeps checkpoints for the others (`config.DEPOTS`): a node that is back may have moved."""
    back: Back = Back()
    leaving: bool = False
    """The job is about to end: this very version is kept in memory, to be saved from there."""
    healing: Healing | None = None
    nodes: tuple[int, ...] = ()
    """The number of each rank's node, by rank; empty: there is one."""
    members: tuple[int, ...] = ()
    """Seats that are taken, lowest first; empty: all of them. The world keeps its size."""
    outlook: Outlook = Outlook()
    """How often faults are to be expected: by this the ranks plan their snapshots and checkpoints."""
    sources: dict[int, Source]

    def starts(self) -> dict[int, int]:
        """The version that each rank goes on from."""
        ways = ("own", "snapshot")
        return {
            rank: source.at if source.kind in ways and source.at >= 0 else self.version
            for rank, source in self.sources.items()
        }
