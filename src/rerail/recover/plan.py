"""Turns what the parked ranks hold into the version all resume from and the source of each rank's state. Pure.

Called by `recover.execute` once every rank of a generation is parked. A choice is made only if it is exact for every
rank; otherwise the reason is returned and the ladder's next rung is taken.

    1. the newest version that every rank holds intact, or can take from an intact replica while it restores its own RNG,
       cursor and schedule of that version
    2. else the newest snapshot that every rank, or a replica of it, has sealed: all go back to it
    3. else, where nobody has trained yet and nobody was replaced: as constructed

Empty seats take no part, which is possible where a rank that is there holds the same state. A seat that is filled again has
no small state of its own: where the data are dealt, that of the replica will do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from rerail.runtime.plans import Healing, Source
from rerail.runtime.wire import Parked


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One way to resume; exact, unless it has to heal."""

    version: int
    sources: dict[int, Source]
    healing: Healing | None = None
    note: str = ""
    """Why all have to go back, though that need not be exact."""


class Infeasible(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is none."""

    reason: str


def choose_sources(
    parked: Mapping[int, Parked], newcomers: frozenset[int], vacant: frozenset[int] = frozenset()
) -> Choice | Infeasible:
    """The best way to resume from what these ranks hold; exact, but for the seats in `vacant`, that are left empty."""
    if obstacle := _needed(parked, vacant):
        return Infeasible(reason=obstacle)
    if any(p.in_guard for p in parked.values()) and not _at_one_spot(parked):
        return Infeasible(reason="the fault hit inside job.guard(), and not every rank is in the same one")
    parked = _trusted(parked)
    held = sorted({p.version for p in parked.values() if is_whole(p)}, reverse=True)
    newest_snapshot = _from_snapshots(parked)
    for version in held:
        if newest_snapshot is not None and newest_snapshot.version > version:
            break
        choice = _from_memory(parked, version)
        if choice is not None:
            return choice
    if newest_snapshot is not None:
        return newest_snapshot
    if not newcomers and not any(p.in_training for p in parked.values()):
        return Choice(version=0, sources={rank: Source(kind="initial") for rank in parked})
    return Infeasible(reason=_why_not(parked, held))


def _elastic(parked: Mapping[int, Parked]) -> bool:
    """Every rank's place in the data is the same one."""
    return all(p.elastic for p in parked.values())


def _needed(parked: Mapping[int, Parked], vacant: frozenset[int]) -> str:
    """Why these seats cannot be left empty, or nothing."""
    if vacant and not _elastic(parked):
        return "the script does not share its data by job.deal() and job.weight, so no rank can be done without"
    alone = [rank for rank in sorted(vacant) if not any(rank in p.replicas for p in parked.values())]
    return f"nobody else holds the state of ranks {', '.join(map(str, alone))}" if alone else ""


def _trusted(parked: Mapping[int, Parked]) -> Mapping[int, Parked]:
    """Where replicas were found to differ: only snapshots on which they agreed. Not every rank may have heard of it."""
    limit = min((p.agreed for p in parked.values() if p.agreed >= 0), default=-1)
    if limit < 0:
        return parked
    return {
        rank: msgspec.structs.replace(p, intact=False, snapshots=tuple(v for v in p.snapshots if v <= limit))
        for rank, p in parked.items()
    }


def _at_one_spot(parked: Mapping[int, Parked]) -> bool:
    """A rank past a guard cannot go back into it, and a newcomer begins at a step."""
    return len({(p.version, p.guards, p.in_guard) for p in parked.values()}) == 1


def is_whole(p: Parked) -> bool:
    """Whether what it holds can be gone on from."""
    return p.intact and p.in_training


def _replicas(parked: Mapping[int, Parked], rank: int) -> list[int]:
    """Ranks with the same state as `rank`, by its own word or by theirs: a newcomer may not know all of them yet."""
    own = parked[rank].replicas
    return [other for other in sorted(parked) if other != rank and (other in own or rank in parked[other].replicas)]


def _from_memory(parked: Mapping[int, Parked], version: int) -> Choice | None:
    holders = {rank for rank, p in parked.items() if is_whole(p) and p.version == version}
    sources: dict[int, Source] = {rank: Source(kind="own") for rank in holders}
    serving: Counter[int] = Counter()
    for rank in sorted(set(parked) - holders):
        givers = [other for other in _replicas(parked, rank) if other in holders]
        small = version not in parked[rank].small_versions
        if not givers or (small and not _elastic(parked)):
            return None
        # the giver with the fewest takers, so that two newcomers load at the same time
        giver = min(givers, key=lambda other: (serving[other], other))
        serving[giver] += 1
        sources[rank] = Source(kind="replica", rank=giver, small=small)
    return Choice(version=version, sources=dict(sorted(sources.items())))


def _from_snapshots(parked: Mapping[int, Parked]) -> Choice | None:
    versions = {version for p in parked.values() for version in p.snapshots}
    for version in sorted(versions, reverse=True):
        sources: dict[int, Source] = {}
        for rank in sorted(parked):
            source = _snapshot_source(parked, rank, version)
            if source is None:
                break
            sources[rank] = source
        else:
            return Choice(version=version, sources=sources)
    return None


def _snapshot_source(parked: Mapping[int, Parked], rank: int, version: int) -> Source | None:
    if version in parked[rank].snapshots:
        return Source(kind="snapshot")
    small = version not in parked[rank].small_versions
    if small and not _elastic(parked):
        return None
    giver = next((other for other in _replicas(parked, rank) if version in parked[other].snapshots), None)
    return None if giver is None else Source(kind="replica", rank=giver, small=small)


def _why_not(parked: Mapping[int, Parked], held: list[int]) -> str:
    if not held:
        return "no rank holds intact training state, and there is no snapshot that all ranks share"
    version = held[0]
    without = [rank for rank, p in sorted(parked.items()) if not (is_whole(p) and p.version == version)]
    names = ", ".join(str(rank) for rank in without)
    return (
        f"ranks {names} cannot get the state of step {version}: no replica holds it, and no snapshot is shared by all"
    )
