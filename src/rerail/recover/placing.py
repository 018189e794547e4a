"""Where all ranks go when they are started anew: by spares where there are any, else on the nodes that are there. Pure.

Called by `recover.execute`, again and again until it is settled.
"""

from __future__ import annotations

from rerail.config import JobSpec
from rerail.flow import Place
from rerail.runtime.fleet import Fleet, Rank


class Waiting(Exception):
    """Not everybody has a place yet, and it is too early to do without."""


class Homeless(Exception):
    """There is no way to place the ranks; says why."""


def settle(fleet: Fleet, spec: JobSpec, waited_s: float, limit_s: float) -> dict[int, Place]:
    """Ranks that get another place. After `limit_s` the ranks are placed anew on the nodes that are there."""
    unplaced = [rank for rank in fleet.ranks.values() if fleet.bar(rank.rank) or not _is_here(fleet, rank)]
    if unplaced and fleet.away:
        raise Waiting  # its ranks may still run: nobody else gets their places before it is lost
    free = fleet.free()
    if len(free) >= len(unplaced):
        return dict(zip((rank.rank for rank in unplaced), free, strict=False))
    if waited_s < limit_s:
        raise Waiting
    able = fleet.fit(spec.max_nodes)
    if len(able) < spec.min_nodes:
        gone = sorted({rank.node for rank in unplaced})
        raise Homeless(f"node {', '.join(gone)} did not come back within {limit_s:.0f} s")
    fleet.place(able[: spec.max_nodes])
    return {}


def _is_here(fleet: Fleet, rank: Rank) -> bool:
    return rank.node in fleet.agents and fleet.agents[rank.node].connected
