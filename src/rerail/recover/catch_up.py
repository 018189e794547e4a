"""Only those who lost their state go back: turns what the parked ranks hold into a plan in which ranks begin at different versions. Pure.

    survivors       go on from what they have
    the lost        begin at their newest snapshot and do the steps since then again, by themselves: what others had told them they
                    are told once more (`session.hearing_again`)

Exact, and cheaper than having all go back, since the others need not compute anything. Possible where every rank that is further has
kept all that it told since the version that the last one begins at. Called by `recover.execute`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rerail.recover.plan import Choice, Infeasible, is_whole
from rerail.recover.rehabilitate import carried_on
from rerail.runtime.fleet import Fleet
from rerail.runtime.plans import Source
from rerail.runtime.wire import Parked

SLOWER = 4.0
"""Times the usual step: what one that is done again may take."""


def without_going_back(parked: Mapping[int, Parked], choice: Choice | Infeasible, fleet: Fleet) -> Choice | Infeasible:
    """The same, but with the survivors where they are, if that can be."""
    newest = max((p.version for p in parked.values() if is_whole(p)), default=-1)
    if newest < 0 or (isinstance(choice, Choice) and choice.version >= newest):
        return choice
    found = "" if fleet.back.trusted < 0 and not fleet.vacant() else "all have to go back"
    sources = found or caught_up(parked, newest)
    if isinstance(sources, str):
        if isinstance(choice, Infeasible):
            return choice
        return msgspec.structs.replace(choice, note=f"{choice.note}; not by the lost alone: {sources}")
    better = Choice(version=newest, sources=sources)
    return msgspec.structs.replace(better, healing=carried_on(fleet.healing, better, parked))


def caught_up(parked: Mapping[int, Parked], newest: int) -> dict[int, Source] | str:
    """Where each rank begins, so that all come to the newest version; else why not."""
    if any(p.agreed >= 0 or p.in_guard for p in parked.values()):
        return "what the ranks hold is not to be gone on from"
    if any(p.astray for p in parked.values()):
        return "steps that were done again were not those that had been done"
    lost = [rank for rank in sorted(parked) if not is_whole(parked[rank])]
    common = set.intersection(*(set(parked[rank].snapshots) for rank in lost)) if lost else set()
    common = {version for version in common if version <= newest}
    if lost and not common:
        return f"ranks {', '.join(map(str, lost))} have no snapshot in common"
    starts = {rank: p.version if is_whole(p) else max(common) for rank, p in sorted(parked.items())}
    first = min(starts.values())
    silent = [rank for rank, start in starts.items() if start > first and not 0 <= parked[rank].logged <= first]
    if silent:
        return f"ranks {', '.join(map(str, silent))} have not kept what they told since step {first}"
    return {
        rank: Source(kind="snapshot" if rank in lost else "own", at=start if start < newest else -1)
        for rank, start in starts.items()
    }


def longer_s(sources: Mapping[int, Source], newest: int, step_s: float) -> float:
    """What the steps that are done again may take."""
    behind = [newest - source.at for source in sources.values() if source.at >= 0]
    return max(behind, default=0) * SLOWER * step_s
