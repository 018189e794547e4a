"""Going on from now although a shard is lost: turns what the parked ranks hold into a choice that is not exact, or into why not. Pure.

    survivors       keep what they have
    the lost shard  comes from its newest snapshot that all share; place in the data, schedule and random state are exact.
                    Its parameters come from its shadow where that is newer, and go on on a straight line through the last two.
                    Without a shadow they do so through the last two snapshots, where the survivors' own have shown that to pay
    the guard       one rank looks at its loss until it is what it was; if that takes longer than going back would have
                    cost, all go back to that snapshot, and the run is exact again

Called by `recover.execute` where the policy says `fidelity = "fast"`, with the exact choice that it has to be better than.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from rerail.config import FAST, Settings
from rerail.recover.plan import Choice, Infeasible, is_whole
from rerail.runtime.fleet import Fleet
from rerail.runtime.plans import MARGIN, WINDOW, Healing, Source
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
    if isinstance(exact, Infeasible):
        return exact
    if settings.fidelity == FAST and not (fleet.back.exact or fleet.back.trusted >= 0 or fleet.vacant()):
        found = rehabilitated(parked, exact, Limits(settings.rehab_share, settings.rehab_from))
        if isinstance(found, Choice):
            return found
        exact = msgspec.structs.replace(exact, note=f"; not from now: {found}")
    return msgspec.structs.replace(exact, healing=carried_on(fleet.healing, exact, parked))


def given_up(fleet: Fleet) -> None:
    """All start anew in the middle of it: from where all was exact."""
    healing, fleet.healing = fleet.healing, None
    if healing is not None and fleet.newest_version() < healing.until:
        known = [limit for limit in (fleet.back.trusted, healing.target) if limit >= 0]
        fleet.back = msgspec.structs.replace(fleet.back, trusted=min(known))


def rehabilitated(parked: Mapping[int, Parked], exact: Choice, limits: Limits) -> Choice | str:
    """Where nobody who lives has to go back; else why not."""
    whole = {rank: p for rank, p in parked.items() if is_whole(p)}
    version = max((p.version for p in whole.values()), default=-1)
    if version - exact.version < LEAST:
        return "going back costs next to nothing"
    if version < limits.first_step:
        return f"step {version} is before rehab_from, {limits.first_step}"
    lost = [rank for rank in sorted(parked) if rank not in whole]
    if len(lost) > limits.share * len(parked):
        return f"{len(lost)} of {len(parked)} ranks are more than rehab_share, {limits.share:g}, of them"
    if any(p.agreed >= 0 or p.in_guard for p in parked.values()):
        return "what the ranks hold is not to be gone on from"
    sources: dict[int, Source] = {}
    straight = median(p.straight for p in whole.values()) < MARGIN
    for rank, p in sorted(parked.items()):
        source = _source(p, rank in whole, version, exact.version, straight)
        if source is None:
            return f"rank {rank} cannot be brought to step {version}"
        sources[rank] = source
    judges = _judges(sources, parked)
    if not judges:
        return 'no rank tells its loss (job.metric("loss", ...)), so nobody could say whether it heals'
    judge, (level, spread) = next(iter(judges.items()))
    healing = Healing(
        judge=judge,
        loss=level,
        spread=spread,
        target=exact.version,
        since=version,
        until=version + max(WINDOW, version - exact.version),
    )
    return Choice(version=version, sources=sources, healing=healing)


def _source(p: Parked, whole: bool, version: int, at: int, straight: bool) -> Source | None:
    if whole and p.version == version:
        return Source(kind="own")
    if version not in p.small_versions:
        return None
    if whole:
        return Source(kind="behind") if p.version == version - 1 else None
    # one that could only run the step out does not know the schedule behind it
    if at not in p.snapshots or version > p.version:
        return None
    shadow = max((one for one in p.shadows if at < one <= version), default=-1)
    if shadow >= 0:
        return Source(kind="stale", at=at, shadow=shadow, before=_before(p.shadows, shadow, version))
    return Source(kind="stale", at=at, before=_before(p.snapshots, at, version) if straight else -1)


def _before(kept: Sequence[int], at: int, version: int) -> int:
    """Where a straight line through `at` to `version` begins; -1: further than it was seen to go, noise is all there is."""
    before = max((one for one in kept if one < at), default=-1)
    return before if before >= 0 and 0 < version - at <= at - before else -1


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
