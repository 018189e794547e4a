"""Going on from now although a shard is lost: turns what the parked ranks hold into a choice that is not exact, or into why not. Pure.

    survivors       keep what they have
    the lost shard  comes from its newest snapshot that all share; where that is gone with its node, from the newest checkpoint. Place
                    in the data, schedule and random state are exact. Its parameters come from whatever is cheapest (`recover.ways`)
    the guard       one rank looks at its loss: what is worse at once is not gone on from, and the next way is tried. What is not
                    what it was after as many steps as going back would have cost takes all back to that snapshot or checkpoint,
                    and the run is exact again

Called by `recover.execute` where the policy says `fidelity = "fast"`, with the exact choice that it has to be better than.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from rerail.config import Settings
from rerail.recover.plan import Choice, Infeasible, is_whole
from rerail.recover.ways import Base, best, ways
from rerail.runtime.fleet import Fleet
from rerail.runtime.plans import WINDOW, Healing, Source
from rerail.runtime.wire import Parked

LEAST = 2
"""Steps that going back has to cost: one or two are sooner computed again."""


class Limits(NamedTuple):
    """What the policy allows."""

    share: float
    """Of the ranks, that may be restored like this at once."""
    first_step: int
    """Not before; a run in its warm-up changes too fast."""


def resumed(
    parked: Mapping[int, Parked], exact: Choice | Infeasible, fleet: Fleet, settings: Settings
) -> Choice | Infeasible:
    """How to go on: by the exact choice, or from now where that is allowed and cheaper."""
    if settings.fast and not (fleet.back.exact or fleet.back.trusted >= 0 or fleet.vacant()):
        found = rehabilitated(parked, exact, Limits(settings.rehab_share, settings.rehab_from), fleet.healing)
        if isinstance(found, Choice):
            return found
        if isinstance(exact, Infeasible):
            return Infeasible(reason=f"{exact.reason}; nor can all others go on from now: {found}")
        exact = msgspec.structs.replace(exact, note=f"; not from now: {found}")
    if isinstance(exact, Infeasible):
        return exact
    return msgspec.structs.replace(exact, healing=carried_on(fleet.healing, exact, parked))


def as_they_are(parked: Mapping[int, Parked], healing: Healing | None) -> dict[int, Parked]:
    """What the ranks hold, but for shards that were put together in a way that was refused: these are lost as before."""
    found = dict(parked)
    for rank, way in (healing.ways if healing is not None else {}).items():
        if healing is not None and way in healing.refused and rank in found and found[rank].version == healing.since:
            found[rank] = msgspec.structs.replace(found[rank], intact=False)
    return found


def given_up(fleet: Fleet) -> None:
    """All start anew in the middle of it: from where all was exact."""
    healing, fleet.healing = fleet.healing, None
    if healing is not None and fleet.newest_version() < healing.until:
        known = [limit for limit in (fleet.back.trusted, healing.target) if limit >= 0]
        fleet.back = msgspec.structs.replace(fleet.back, trusted=min(known))


def rehabilitated(
    parked: Mapping[int, Parked], exact: Choice | Infeasible, limits: Limits, before: Healing | None = None
) -> Choice | str:
    """Where nobody who lives has to go back; else why not. `before`: the guard of an earlier recovery."""
    whole = {rank: p for rank, p in parked.items() if is_whole(p)}
    version = max((p.version for p in whole.values()), default=-1)
    lost = [rank for rank in sorted(parked) if rank not in whole]
    bases = _bases(parked, lost, exact)
    if isinstance(bases, str):
        return bases
    newest = exact.version if isinstance(exact, Choice) else min(base.at for base in bases.values())
    target = _target(newest, version, before)
    if version - target < LEAST:
        return "going back costs next to nothing"
    if version < limits.first_step:
        return f"step {version} is before rehab_from, {limits.first_step}"
    if len(lost) > limits.share * len(parked):
        return f"{len(lost)} of {len(parked)} ranks are more than rehab_share, {limits.share:g}, of them"
    if any(p.agreed >= 0 or p.in_guard for p in parked.values()):
        return "what the ranks hold is not to be gone on from"
    vain = before.refused if before is not None and before.since == version else ()
    sources: dict[int, Source] = {}
    for rank, p in sorted(parked.items()):
        source = _kept(p, version) if rank in whole else _restored(p, whole, version, bases[rank], vain)
        if source is None:
            tried = f" in a way that has not been refused ({', '.join(vain)})" if vain and rank in lost else ""
            return f"rank {rank} cannot be brought to step {version}{tried}"
        sources[rank] = source
    judges = _judges(sources, parked)
    if not judges:
        return 'no rank tells its loss (job.metric("loss", ...)), so nobody could say whether it heals'
    judge, (level, spread) = next(iter(judges.items()))
    found = [source.stale for source in sources.values() if source.stale is not None]
    healing = Healing(
        judge=judge,
        loss=level,
        spread=spread,
        target=target,
        saved=isinstance(exact, Infeasible) or (target != newest and before is not None and before.saved),
        since=version,
        until=version + max(WINDOW, version - target),
        ways={rank: source.stale.way for rank, source in sources.items() if source.stale is not None},
        expected=max((one.expected * (version - one.at) for one in found), default=0.0),
        tellers=tuple(judges),
        refused=vain,
    )
    return Choice(version=version, sources=sources, healing=healing)


def _bases(parked: Mapping[int, Parked], lost: list[int], exact: Choice | Infeasible) -> dict[int, Base] | str:
    """Where each lost shard can come from: the snapshots that all could go back to, or checkpoints; else why not."""
    if isinstance(exact, Choice):
        return {rank: Base(exact.version, saved=False) for rank in lost}
    found = {}
    for rank in lost:
        if not parked[rank].saved:
            return f"there is no checkpoint for rank {rank}"
        found[rank] = Base(parked[rank].saved[-1], saved=True)
    return found or "nobody has lost anything"


def _target(newest: int, version: int, before: Healing | None) -> int:
    """Where all would go back to. What was kept while an earlier recovery had yet to heal is not exact."""
    unhealed = before is not None and before.target <= newest and version < before.until
    return before.target if unhealed and before is not None else newest


def _kept(p: Parked, version: int) -> Source | None:
    """Of a rank that keeps what it has."""
    if p.version == version:
        return Source(kind="own")
    return Source(kind="behind") if p.version == version - 1 and version in p.small_versions else None


def _restored(
    p: Parked, whole: Mapping[int, Parked], version: int, base: Base, refused: tuple[str, ...]
) -> Source | None:
    """Of a lost rank. One that could only run the step out does not know the schedule behind it, but the others do."""
    known = base.at in (p.saved if base.saved else p.snapshots)
    if not known or version not in p.small_versions or version > p.version + 1:
        return None
    found = best(ways(p, whole, version, base), refused)
    if found is None:
        return None
    tells = min(rank for rank, other in whole.items() if other.version == version) if version > p.version else -1
    return Source(kind="stale", stale=msgspec.structs.replace(found, schedule=tells))


def carried_on(healing: Healing | None, choice: Choice, parked: Mapping[int, Parked]) -> Healing | None:
    """The guard of an earlier recovery, in a generation that is formed for another reason; None: it has no say any more."""
    if healing is None or not healing.target < choice.version < healing.until:
        return None
    judges = _judges(choice.sources, parked)
    if healing.judge in judges or not judges:
        return healing
    return msgspec.structs.replace(healing, judge=next(iter(judges)))


def _judges(sources: Mapping[int, Source], parked: Mapping[int, Parked]) -> dict[int, tuple[float, float]]:
    """Ranks that keep what they have and tell their loss, with where it is."""
    told = {rank: parked[rank].loss for rank, source in sources.items() if source.kind == "own"}
    return {rank: loss for rank, loss in told.items() if loss is not None}
