"""The plan of a generation: who takes part, and where each rank's state comes from.

Made by `recover.execute`, sent in `runtime.wire.Form`, carried out by `session.restore`.
"""

from __future__ import annotations

import msgspec

from rerail.planner.outlook import Outlook


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank's state at the plan's version comes from."""

    kind: str
    """`own` (it holds it), `replica` (from living rank `rank`), `snapshot` (its arena), `initial` (as constructed). Not exact:
    `stale` (tensors of the snapshot `at` in its arena, all else of the plan's version), `behind` (its own of one version before)."""
    rank: int = -1
    at: int = -1
    """With `stale`: the version of the snapshot. With `own` and `snapshot`: the version that this rank goes on from, where it is not
    the plan's: it does the steps in between again, with what the others have told its predecessor. -1: the plan's."""
    before: int = -1
    """With `stale`: parameters go on on a straight line from the snapshot of this version through that `at`, or from the shadow of
    this version through that of version `shadow`; -1: they do not."""
    shadow: int = -1
    """With `stale`: parameters come from the shadow of this version, which is newer than the snapshot; -1: there is none."""
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
    since: int = -1
    """The version that all went on from."""
    until: int


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
