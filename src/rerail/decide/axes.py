"""Three questions about a fault, each with its own answer: may new work land here, must the running job act, what repairs it.

Turns a fault's handling, severity and scope, or a level of another system, into those answers, by the table `levels.toml`.
Pure: the table comes in as text. Called by `decide.policy` and `decide.escalation`.

One scale from harmless to broken would mix the three: a device that is to get no new work but may finish what it does
(`PreSeparate`) and one that needs a reset now cannot be put into one order. So a fault with several levels takes the
worst of each answer on its own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from rerail.errors import ConfigError
from rerail.flow import Handling, Severity
from rerail.wording import guess


class Admission(StrEnum):
    """Whether new work may land here; in rising order."""

    YES = "yes"
    NOT_NOW = "not_now"
    """Not as long as the fault stands."""
    NO = "no"
    """Not before somebody has seen to it."""


class Running(StrEnum):
    """Whether the running job must act; in rising order."""

    NO = "no"
    BOUNDARY = "boundary"
    """At the next step boundary: nothing is lost yet."""
    NOW = "now"


class Repair(StrEnum):
    """What makes it whole again; in rising order."""

    NOTHING = "nothing"
    RETRY = "retry"
    RESTART_PROCESS = "restart_process"
    RESET_DEVICE = "reset_device"
    REBOOT = "reboot"
    REPLACE = "replace"


_E = TypeVar("_E", bound=StrEnum)


class Axes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The three answers for one fault."""

    admission: Admission = Admission.YES
    running: Running = Running.NO
    repair: Repair = Repair.NOTHING

    def worst(self, other: Axes) -> Axes:
        """Of each answer the worse one."""
        return Axes(
            admission=_worse(self.admission, other.admission),
            running=_worse(self.running, other.running),
            repair=_worse(self.repair, other.repair),
        )

    def __str__(self) -> str:
        return f"admission {self.admission}, running {self.running}, repair {self.repair}"


AXES: dict[str, type[Admission] | type[Running] | type[Repair]] = {
    "admission": Admission,
    "running": Running,
    "repair": Repair,
}


def _worse(one: _E, other: _E) -> _E:
    order = list(type(one))
    return max(one, other, key=order.index)


def worst_of(found: Iterable[Axes]) -> Axes:
    """Of each answer the worst one among all; harmless without any."""
    result = Axes()
    for one in found:
        result = result.worst(one)
    return result


class HandlingRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of the mapping of the catalogue's words."""

    action: Handling
    severity: tuple[Severity, ...] = ()
    """Empty: any."""
    scope: tuple[str, ...] = ()
    axes: Axes

    def fits(self, action: Handling, severity: Severity, scope: str) -> bool:
        return (
            action is self.action
            and (not self.severity or severity in self.severity)
            and (not self.scope or scope in self.scope)
        )


class Levels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shipped mapping."""

    handling: tuple[HandlingRow, ...]
    """Of the catalogue's own words; the first row that fits counts."""
    unknown: dict[Severity, Axes]
    """Of faults nobody knows, by how grave whoever told of them says they are."""
    scheme: dict[str, dict[str, Axes]]
    """Of the levels of other systems: `mindcluster`, `nvidia`, ..."""

    def of_handling(self, action: Handling, severity: Severity, scope: str) -> Axes:
        """What the catalogue's words for a fault come to."""
        row = next((one for one in self.handling if one.fits(action, severity, scope)), None)
        return row.axes if row is not None else self.unknown[severity]

    def names(self) -> list[str]:
        """Every level that can be named, with its scheme."""
        return [f"{scheme}.{level}" for scheme, levels in self.scheme.items() for level in levels]

    def of_level(self, name: str) -> Axes:
        """What a level of another system comes to: `RestartNPU`, `nvidia.RESET_GPU`. Case does not matter."""
        wanted = name.lower()
        found = {
            f"{scheme}.{level}": axes
            for scheme, levels in self.scheme.items()
            for level, axes in levels.items()
            if wanted in (level.lower(), f"{scheme}.{level}".lower())
        }
        if not found:
            bare = [one.partition(".")[2] for one in self.names()]
            known = guess(name, [*self.names(), *bare]) or f" (there are: {' '.join(self.names())})"
            raise ConfigError(f"there is no level {name!r}{known}")
        if len(set(map(str, found.values()))) > 1:
            raise ConfigError(f"level {name!r} is one of several: write {' or '.join(found)}")
        return next(iter(found.values()))


def parse_levels(text: str) -> Levels:
    """The mapping from the text of `levels.toml`."""
    try:
        rows = tomllib.loads(text)
        return msgspec.convert({**rows, "handling": [_row(row) for row in rows.get("handling", [])]}, Levels)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"the mapping of levels cannot be read: {error}") from error


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Axes stand beside the matchers in the file."""
    return {
        **{key: value for key, value in row.items() if key not in AXES},
        "axes": {key: value for key, value in row.items() if key in AXES},
    }
