"""The plan of a generation: who takes part, and where each rank's state comes from.

Made by `recover.execute`, sent in `runtime.wire.Form`, carried out by `session.restore`.
"""

from __future__ import annotations

import msgspec


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank's state at the plan's version comes from."""

    kind: str
    """`own` (it holds it), `replica` (from living rank `rank`), `snapshot` (its arena), `initial` (as constructed)."""
    rank: int = -1


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
    sources: dict[int, Source]
