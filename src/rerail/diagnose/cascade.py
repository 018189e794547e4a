"""Finds the root among everything a log shows: turns sightings into one Verdict. Pure. Called by `cli.diagnose` and `diagnose.classify`.

A failing job says a hundred things, nearly all of them consequences. The root is what nothing else that was seen explains:

1. benign lines and faults that were over again do not count, warnings (`confirmation`) only where something needs them;
2. a sighting is an echo if its fault says that another fault that was seen causes it, or if it is a mere symptom and a cause was seen;
3. of what is left, causes go before symptoms, serious ones before slight ones, earlier ones before later ones.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

import msgspec

from rerail.faults.catalog import Fault
from rerail.faults.sightings import Sighting
from rerail.flow import Handling, Role

STORM_S = 30.0
"""The same code on several devices within so many seconds is software, whatever the code says."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """All sightings of one fault, the first in front."""

    first: Sighting
    count: int = 1
    ranks: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    last_order: int = 0

    @property
    def fault(self) -> Fault:
        return self.first.fault


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What happened, or nothing."""

    root: Group | None = None
    echoes: tuple[Group, ...] = ()
    """Everything else that was seen and matters, in order."""
    action: Handling = Handling.IGNORE
    confidence: str = "high"
    why: str = ""
    """How the root was found, for people."""
    hardware: bool = False
    storm: bool = False
    """The same hardware fault on several devices at once: taken for software."""


def judge(sightings: Iterable[Sighting]) -> Verdict:
    """The root cause of all that was seen."""
    groups, over = _standing(_fold(sightings))
    needed = [group for group in groups if group.fault.matters or _explains_any(group, groups)]
    if not any(group.fault.matters for group in needed):
        needed = [group for group in over if group.fault.matters]  # better than nothing: it came and went
    if not needed:
        return Verdict(why="nothing that was seen is a fault")
    free = _unexplained(needed)
    root = min(free, key=_precedence)
    others = tuple(group for group in needed if group is not root)
    rivals = [g for g in free if g is not root and g.fault.role is root.fault.role and g.fault.serious]
    storm = _is_storm(root)
    return Verdict(
        root=root,
        echoes=others,
        action=_handling(root, storm=storm),
        confidence=_confidence(root, rivals),
        why=_why(root, others, rivals),
        hardware=root.fault.hardware and not storm,
        storm=storm,
    )


def _fold(sightings: Iterable[Sighting]) -> list[Group]:
    folded: dict[str, list[Sighting]] = {}
    for sighting in sightings:
        if sighting.fault.role is not Role.BENIGN:
            folded.setdefault(sighting.fault.code, []).append(sighting)
    groups = []
    for same in folded.values():
        first = min(same, key=_when)
        groups.append(
            Group(
                first=first,
                count=len(same),
                ranks=tuple(sorted({one.rank for one in same if one.rank >= 0})),
                devices=tuple(sorted({one.device for one in _burst(same, first) if one.device})),
                last_order=max(one.order for one in same),
            )
        )
    return sorted(groups, key=lambda group: _when(group.first))


def _burst(same: Sequence[Sighting], first: Sighting) -> list[Sighting]:
    if first.time < 0:
        return list(same)
    return [one for one in same if one.time < 0 or one.time - first.time <= STORM_S]


def _when(sighting: Sighting) -> tuple[int, float]:
    """By the clock where both have one, else by the place in the log; a line without a time stands where it was found."""
    return (0, float(sighting.order))


def _standing(groups: list[Group]) -> tuple[list[Group], list[Group]]:
    """What counts, and what was over again before the log ends. What was seen too seldom counts only as an explanation."""
    clears = [group for group in groups if group.fault.role is Role.CLEAR]
    standing, over = [], []
    for group in groups:
        if group.fault.role is Role.CLEAR:
            continue
        ended = any(c.last_order > group.last_order and _named(group.fault.code, c.fault.clears) for c in clears)
        wanted = any(one.fault.role is Role.SYMPTOM and one.fault.is_caused_by(group.fault.code) for one in groups)
        if wanted or not (ended or group.count < group.fault.times):
            standing.append(group)
        elif ended:
            over.append(group)
    return standing, over


def _named(code: str, globs: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(code, glob) for glob in globs)


def _explains_any(group: Group, groups: Sequence[Group]) -> bool:
    return any(other.fault.matters and other.fault.is_caused_by(group.fault.code) for other in groups)


def _unexplained(groups: Sequence[Group]) -> list[Group]:
    """Those that no other explains. Faults that explain each other in a circle stand for one another."""
    behind = {group.fault.code: set(_causes(group, groups)) for group in groups}
    for _ in groups:  # causes of causes, until there are no more
        grown = {code: causes.union(*(behind[cause] for cause in causes)) for code, causes in behind.items()}
        if grown == behind:
            break
        behind = grown
    return [g for g in groups if all(g.fault.code in behind[cause] for cause in behind[g.fault.code])]


def _causes(group: Group, groups: Sequence[Group]) -> list[str]:
    """Codes of what was seen and explains this one."""
    named = [other.fault.code for other in groups if group.fault.is_caused_by(other.fault.code)]
    if group.fault.role is Role.SYMPTOM:
        named += [other.fault.code for other in groups if other.fault.role is Role.ROOT and other.fault.serious]
    return [code for code in named if code != group.fault.code]


def _precedence(group: Group) -> tuple[int, int, tuple[int, float]]:
    role = {Role.ROOT: 0, Role.CONFIRMATION: 0, Role.SYMPTOM: 1}.get(group.fault.role, 2)
    return role, 0 if group.fault.serious or group.fault.role is Role.CONFIRMATION else 1, _when(group.first)


def _is_storm(root: Group) -> bool:
    return root.fault.hardware and root.fault.scope == "device" and len(root.devices) > 1


def _handling(root: Group, *, storm: bool) -> Handling:
    if storm and root.fault.action in (Handling.RESET_DEVICE, Handling.ISOLATE_DEVICE):
        return Handling.RESTART_PROCESS
    if root.fault.then is not None and root.fault.action is Handling.IGNORE and root.count > 1:
        return root.fault.then
    return root.fault.action


def _confidence(root: Group, rivals: Sequence[Group]) -> str:
    if root.fault.role is Role.SYMPTOM:
        return "low"
    return "medium" if rivals or not root.fault.serious else "high"


def _why(root: Group, others: Sequence[Group], rivals: Sequence[Group]) -> str:
    if root.fault.role is Role.SYMPTOM:
        return "only consequences were seen; this one is the first of them, and its cause is not in these lines"
    if not others:
        return "nothing else was seen"
    echoes = [other for other in others if other not in rivals]
    named = sum(other.fault.is_caused_by(root.fault.code) for other in echoes)
    if rivals:
        return f"the first of {len(rivals) + 1} causes that do not explain each other"
    if named:
        return f"it explains {'the other' if len(echoes) == 1 else f'{named} of the {len(echoes)} others'}"
    return "the only cause; the rest are consequences"
