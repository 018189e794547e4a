"""Finds the root among everything a log shows: turns sightings into one Verdict. Pure. Called by `cli.diagnose` and `diagnose.classify`.

A failing job says a hundred things, nearly all of them consequences. The root is what nothing else that was seen explains:

1. benign lines and faults that were over again do not count, warnings (`confirmation`) only where something needs them;
2. a sighting is an echo if its fault says that another fault that was seen causes it, or if it is a mere symptom and a cause was seen;
3. of what is left, causes go before symptoms, serious ones before slight ones, earlier ones before later ones.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from rerail.faults.catalog import Fault
from rerail.faults.sightings import Sighting
from rerail.flow import Handling, Role

STORM_S = 30.0
"""The same code on several devices within so many seconds is software, whatever the code says."""
_QUOTED = re.compile(r'(?:^|[\]:)|]\s)\s{0,200}(?:raise [\w.]{1,80}\(|File "[^"\n]{1,400}", line \d{1,7}\b)')
"""A line of a traceback that shows the program, not what it said."""
_DAY = 86400.0
_T = TypeVar("_T")
_SPREAD = {"utc": math.inf, "date": math.inf, "day": 183 * _DAY, "hour": _DAY / 2, "uptime": math.inf}
"""Times of a kind compare if they are no further apart: what knows no date may have passed midnight."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """All sightings of one fault, the first in front."""

    first: Sighting
    count: int = 1
    ranks: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    """Those that showed it at about the time of the first."""
    over: bool = False
    """It was over again before the log ends."""
    rare: bool = False
    """It was not seen as often as it takes to be a fault."""

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
    seen = _said(list(sightings))
    groups = _fold(seen)
    standing = [group for group in groups if not (group.over or group.rare) or _is_wanted(group, groups)]
    needed = [group for group in standing if group.fault.matters or _explains_any(group, standing)]
    if not any(group.fault.matters for group in needed):
        came_and_went = [group for group in groups if group.over and not group.rare and group.fault.serious]
        needed = [group for group in came_and_went if group.fault.matters]  # better than nothing
    if not needed:
        return Verdict(why="nothing that was seen is a fault")
    free = _unexplained(needed)
    best = min(map(_rank, free))
    found = _in_order([group for group in free if _rank(group) == best], lambda group: group.first)[0]
    others = tuple(group for group in needed if group is not found)
    rivals = [g for g in free if g is not found and g.fault.role is found.fault.role and g.fault.serious]
    root = _blamed(found, seen)
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


def _said(sightings: list[Sighting]) -> list[Sighting]:
    """Without the program text that a traceback quotes, where something was said as well."""
    said = [one for one in sightings if not _QUOTED.search(one.text)]
    return said if any(one.fault.matters and not one.fault.general for one in said) else sightings


def _fold(sightings: Iterable[Sighting]) -> list[Group]:
    folded: dict[str, list[Sighting]] = {}
    clears: list[Sighting] = []
    for sighting in sightings:
        if sighting.fault.role is Role.CLEAR:
            clears.append(sighting)
        elif sighting.fault.role is not Role.BENIGN:
            folded.setdefault(sighting.fault.code, []).append(sighting)
    groups = [_group(same, [c for c in clears if _named(code, c.fault.clears)]) for code, same in folded.items()]
    return _in_order(groups, lambda group: group.first)


def _group(same: Sequence[Sighting], clears: Sequence[Sighting]) -> Group:
    by_file: dict[str, list[Sighting]] = {}
    for clear in clears:
        by_file.setdefault(clear.file, []).append(clear)
    left = [one for one in same if not any(_ends(clear, one) for clear in by_file.get(one.file, ()))]
    counted = _in_order(left or same, lambda one: one)
    global_ranks = [one for one in same if not _of_launcher(one)] if any(one.summary for one in same) else same
    return Group(
        first=_named_first(counted),
        count=len(same),
        ranks=tuple(sorted({one.rank for one in global_ranks if one.rank >= 0})),
        devices=tuple(sorted({one.device for one in counted if one.device and _is_near(one, counted[0])})),
        over=not left,
        rare=not _is_often_enough(counted),
    )


def _named_first(counted: Sequence[Sighting]) -> Sighting:
    """The first, with the rank that a launcher's summary calls the root where only the launcher names ranks."""
    first = counted[0]
    root = next((one for one in counted if one.summary == "root" and one.file == first.file), None)
    if root is None or (first.rank >= 0 and not first.summary and not _of_launcher(first)):
        return first
    return root if first.summary else msgspec.structs.replace(first, rank=root.rank)


def _of_launcher(one: Sighting) -> bool:
    """Whether a launcher tells how a process ended; it counts those of its own node."""
    return "local_rank:" in one.text and not one.summary


def _blamed(root: Group, sightings: Iterable[Sighting]) -> Group:
    """The root with the rank that the launcher's summary behind it names, where nothing else says whose it is."""
    first = root.first
    if first.rank >= 0 or first.fault.hardware or first.fault.scope != "process":
        return root
    named = (one for one in sightings if one.summary == "root" and one.file == first.file and one.order > first.order)
    rank = next((one.rank for one in named), -1)
    return (
        root
        if rank < 0
        else msgspec.structs.replace(root, first=msgspec.structs.replace(first, rank=rank), ranks=(rank,))
    )


def _ends(clear: Sighting, one: Sighting) -> bool:
    """Both are of one file: another machine's log says nothing about this one, nor does another device's word."""
    elsewhere = clear.device and one.device and clear.device != one.device
    return clear.order > one.order and not elsewhere


def _is_often_enough(same: Sequence[Sighting]) -> bool:
    times, within_s = same[0].fault.times, same[0].fault.within_s
    if len(same) < times or times <= 1 or not within_s or not _compare(same):
        return len(same) >= times
    pairs = zip(same, same[times - 1 :], strict=False)
    return any(last.time - first.time <= within_s for first, last in pairs)


def _is_near(one: Sighting, first: Sighting) -> bool:
    return not _compare((one, first)) or abs(one.time - first.time) <= STORM_S


def _in_order(items: Sequence[_T], sighting: Callable[[_T], Sighting]) -> list[_T]:
    """By the clock where all have one of the same kind, else by the place in what was read."""
    by_clock = _compare([sighting(item) for item in items])
    return sorted(items, key=lambda item: (sighting(item).time if by_clock else 0.0, sighting(item).order))


def _compare(sightings: Sequence[Sighting]) -> bool:
    """Whether these times can be compared. Uptimes are of one machine, so of one file."""
    kinds = {one.clock for one in sightings}
    if len(kinds) != 1 or not (kind := kinds.pop()):
        return False
    if kind == "uptime" and len({one.file for one in sightings}) > 1:
        return False
    times = [one.time for one in sightings]
    return max(times) - min(times) <= _SPREAD.get(kind, 0.0)


def _named(code: str, globs: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(code, glob) for glob in globs)


def _is_wanted(group: Group, groups: Sequence[Group]) -> bool:
    """Whether it explains a symptom: then it counts however short and seldom it was."""
    return any(one.fault.role is Role.SYMPTOM and one.fault.is_caused_by(group.fault.code) for one in groups)


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


def _rank(group: Group) -> tuple[int, int]:
    """Causes go before symptoms, serious ones before slight ones."""
    role = {Role.ROOT: 0, Role.CONFIRMATION: 0, Role.SYMPTOM: 1}.get(group.fault.role, 2)
    return role, 0 if group.fault.serious or group.fault.role is Role.CONFIRMATION else 1


def _is_storm(root: Group) -> bool:
    """A card reports itself: several cards with the same code at once is their program. A bus error names every bridge above it."""
    accelerator = root.fault.kind in ("gpu", "npu")
    return root.fault.hardware and accelerator and root.fault.scope == "device" and len(root.devices) > 1


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
