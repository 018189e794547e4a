"""When faults that come often, or last, count for more: turns `escalation.toml` and the user's tables into a rule book. Pure.

The book is read by `decide.escalate`, which does the counting. Called by `runtime.handling` and `cli.policy`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rerail.config import Settings
from rerail.decide.axes import AXES, Admission, Axes, Repair, Running
from rerail.decide.tables import Row, Shape, fit, rules_in
from rerail.errors import ConfigError
from rerail.faults.catalog import SCOPES
from rerail.flow import Severity
from rerail.texts import limits_of

TIMES_MAX = 100
WITHIN_MAX_S = 864_000.0
"""Ten days, MindCluster's limit too; nothing older is kept."""
LASTS_MAX_S = 86_400.0
GONE_S = 60.0
"""A fault that comes again within this time is the same one still, unless a rule says otherwise."""
STORM_S = 30.0
STORM_SUBJECTS = 2
"""The same code on this many devices of a job within `STORM_S` is no hardware that breaks: software does that."""
RESET_WINDOW_S = 21_600.0


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One sighting of a fault, with what the policy says about it."""

    code: str
    subject: str
    """Of what, as in `decide.subjects`."""
    kind: str = ""
    scope: str = ""
    severity: Severity = Severity.ERROR
    hardware: bool = True
    axes: Axes = Axes()
    again: Axes = Axes()
    """What is asked for when it comes again (the catalogue's `then`)."""
    mute_s: float = 0.0
    over: bool = False
    """It has ended."""
    once: bool = False
    """A line of a log: nobody will tell when it is over."""
    evidence: str = ""


class Escalation(Row, frozen=True, kw_only=True):
    """One `[[escalation]]` table: which faults, how often or how long, and what then."""

    code: tuple[str, ...] = ()
    """With wildcards. Empty here and below: any."""
    kind: tuple[str, ...] = msgspec.field(default=(), name="class")
    scope: tuple[str, ...] = ()
    severity: tuple[Severity, ...] = ()
    hardware: bool | None = None
    repair: tuple[Repair, ...] = ()
    """What the policy says repairs it."""
    running: tuple[Running, ...] = ()
    """What the policy says the running job must do."""
    together: bool = False
    """All faults that fit are counted together; otherwise each code on its own."""
    lasts_s: float = 0.0
    """It counts only when it has stood for this long."""
    gone_s: float = GONE_S
    """It is over only when it has been gone for this long; only then can it be counted again."""
    times: int = 0
    """How often within `within_s`; 0: it is not counted."""
    within_s: float = 86_400.0
    quarantine: bool = False
    release_s: float = 0.0
    """After this long without a fault the quarantine turns into probation; 0: it ends by hand only."""
    admission: Admission | None = None
    """Counts for this much at once when it has lasted `lasts_s`, where that is set; else when it has come often enough."""
    then: bool = False
    """What the catalogue asks for when the fault comes again holds from the second time on."""

    def fits(self, seen: Seen) -> bool:
        """Whether it is about this fault."""
        return (
            fit((self.code, seen.code), (self.kind, seen.kind), (self.scope, seen.scope))
            and (not self.severity or seen.severity in self.severity)
            and (self.hardware is None or seen.hardware is self.hardware)
            and (not self.repair or seen.axes.repair in self.repair)
            and (not self.running or seen.axes.running in self.running)
        )


AT_ONCE = Escalation(id="policy", times=1, quarantine=True, release_s=172_800.0)
"""Of a fault that takes its device out of use the first time; probation as for those that come often."""
BY_VOTE = Escalation(id="vote", times=1, quarantine=True, release_s=172_800.0)
"""The same of a device that only its results speak against: it is used all the same where there is no other."""


class Book(msgspec.Struct, frozen=True, kw_only=True):
    """All rules of escalation, the user's first, and the limits on restarts and resets."""

    rules: tuple[Escalation, ...] = ()
    restarts: dict[str, int] = {}
    restart_window_s: float = 3600.0
    resets: int = 3
    reset_window_s: float = RESET_WINDOW_S
    storm_s: float = STORM_S

    def rules_for(self, seen: Seen) -> list[Escalation]:
        """The rule that counts its code, and the one that counts it among others; either may be missing."""
        own = next((rule for rule in self.rules if not rule.together and rule.fits(seen)), None)
        shared = next((rule for rule in self.rules if rule.together and rule.fits(seen)), None)
        return [rule for rule in (own, shared) if rule is not None]

    def lasts_s(self, seen: Seen) -> float:
        """How long it has to stand before it counts."""
        own = next((rule for rule in self.rules_for(seen) if not rule.together), None)
        return max(own.lasts_s if own is not None else 0.0, seen.mute_s)

    def gone_s(self, seen: Seen) -> float:
        """How long it has to be gone before it is over."""
        own = next((rule for rule in self.rules_for(seen) if not rule.together), None)
        return own.gone_s if own is not None else GONE_S


def book_of(settings: Settings, shipped: str, origin: str = "rerail.toml") -> Book:
    """The user's rules before the shipped ones, which come in as the text of `escalation.toml`."""
    own = escalations_of(settings.escalation, origin)
    rows = tomllib.loads(shipped).get("escalation", [])
    return Book(
        rules=(*own, *escalations_of(rows, "escalation.toml")),
        restarts=limits_of(settings.restart_limits),
        restart_window_s=settings.restart_window_s,
        resets=settings.reset_limit,
    )


_SHAPE = Shape(
    name="escalation",
    lists=("code", "class", "scope", "severity", "repair", "running"),
    choices={**{name: list(kind) for name, kind in AXES.items()}, "severity": list(Severity), "scope": SCOPES},
)
_RANGES = {
    "times": TIMES_MAX,
    "within_s": WITHIN_MAX_S,
    "lasts_s": LASTS_MAX_S,
    "gone_s": LASTS_MAX_S,
    "release_s": 10 * WITHIN_MAX_S,
}


def escalations_of(tables: Sequence[Mapping[str, Any]], origin: str) -> tuple[Escalation, ...]:
    """Rules from their tables."""
    return rules_in(tables, Escalation, _SHAPE, origin, _checked)


def _checked(rule: Escalation, where: str) -> Escalation:
    for key, most in _RANGES.items():
        if not 0 <= getattr(rule, key) <= most:
            raise ConfigError(f"{where}: {key} is {getattr(rule, key):g}, but 0 to {most:g} is needed")
    if rule.times and not rule.within_s:
        raise ConfigError(
            f"{where}: within_s is 0, so nothing could come {rule.times} times within it; give it seconds"
        )
    if rule.times and not (rule.quarantine or rule.admission or rule.then):
        raise ConfigError(
            f"{where}: nothing follows when it has come {rule.times} times; add quarantine = true, admission or then = true"
        )
    if rule.quarantine and not rule.times:
        raise ConfigError(f"{where}: quarantine = true needs times, how often within within_s")
    return rule


def escalation_problems(book: Book, codes: Sequence[str], unmatched: Sequence[str], own: int, origin: str) -> list[str]:
    """Sentences about the user's rules as a whole: those that mean no fault, and those that an earlier one covers."""
    found = list(unmatched)
    for number, rule in enumerate(book.rules[:own]):
        for earlier in range(number):
            other = book.rules[earlier]
            if other.together is rule.together and _covers(other, rule, codes):
                found.append(
                    f"{origin}, escalation {number + 1} never has a say: escalation {earlier + 1} before it covers it; remove it, or put it first"
                )
                break
    return found


def _covers(wide: Escalation, narrow: Escalation, codes: Sequence[str]) -> bool:
    def matching(rule: Escalation) -> set[str]:
        return {code for code in codes if fit((rule.code, code))}

    rest = all(
        not getattr(wide, name)
        or (set(getattr(narrow, name)) and set(getattr(narrow, name)) <= set(getattr(wide, name)))
        for name in ("kind", "scope", "severity", "repair", "running")
    )
    return rest and wide.hardware in (None, narrow.hardware) and matching(narrow) <= matching(wide)
