"""What is to be done about a fault: turns rules of the user and the shipped mapping into a Verdict.

Pure. Rules stand in `rerail.toml` as `[[policy]]` tables (`config.Settings.policy`); `decide.policy_check` says what is
wrong with them. Called by `runtime.handling` and `cli.policy`.

Each axis, the ladder and the mute window are answered on their own, by the first rule that fits and answers them; what no
rule answers, the mapping does (`decide.axes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rerail.checks import HANDLINGS
from rerail.config import Settings
from rerail.decide.axes import AXES, Admission, Axes, Levels, Repair, Running, worst_of
from rerail.decide.tables import Row, Shape, fit, rules_in, there_are
from rerail.errors import ConfigError
from rerail.faults.catalog import SCOPES, Fault
from rerail.flow import Handling, Rung, Severity
from rerail.texts import listed
from rerail.wording import guess

MUTE_MAX_S = 86_400.0
"""A fault that is not heard of for longer than a day is better switched off (setting `fault_levels`)."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a fault when one asks what to do about it."""

    code: str
    kind: str = ""
    """Its class in the catalogue; empty for a fault that is not in it."""
    scope: str = "process"
    severity: Severity = Severity.ERROR
    action: Handling | None = None
    """What the catalogue asks for; None where the fault is not in it."""
    then: Handling | None = None
    hardware: bool = False
    job: str = ""
    node: str = ""

    @classmethod
    def of(cls, fault: Fault, *, job: str = "", node: str = "") -> About:
        """A fault of the catalogue, here."""
        return cls(
            code=fault.code,
            kind=fault.kind,
            scope=fault.scope,
            severity=fault.severity,
            action=fault.action,
            then=fault.then,
            hardware=fault.hardware,
            job=job,
            node=node,
        )


class Rule(Row, frozen=True, kw_only=True):
    """One `[[policy]]` table: which faults, and what to do about them."""

    code: tuple[str, ...] = ()
    """Codes, with wildcards; one of them has to fit. Empty here and below: any."""
    kind: tuple[str, ...] = msgspec.field(default=(), name="class")
    scope: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    level: tuple[str, ...] = ()
    """Levels of other systems that stand for all three axes: `RestartNPU`, `nvidia.RESET_GPU`; the worst of each axis counts."""
    admission: Admission | None = None
    running: Running | None = None
    repair: Repair | None = None
    ladder: tuple[Rung, ...] | None = None
    """Rungs that may be taken."""
    mute_s: float | None = None
    """The fault counts only if it still stands after this many seconds."""

    def fits(self, about: About) -> bool:
        """Whether everything it asks for holds."""
        return fit(
            (self.code, about.code),
            (self.kind, about.kind),
            (self.scope, about.scope),
            (self.job, about.job),
            (self.node, about.node),
        )

    def answers(self) -> dict[str, Any]:
        """What it says, by what is asked."""
        given = {name: getattr(self, name) for name in (*AXES, "ladder", "mute_s")}
        return {name: value for name, value in given.items() if value is not None}


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done about one fault."""

    axes: Axes
    rungs: tuple[Rung, ...]
    """Rungs that may be taken, those to be tried first at the front. The job may always be stopped when nothing else is left."""
    unfit: dict[Rung, str] = {}
    """Rungs of those that do not repair this fault, with the reason."""
    mute_s: float = 0.0
    rule: str = ""
    """The rules that had a say, the first first; `mapping` when none had."""
    why: str = ""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Rules, presets and the shipped mapping."""

    levels: Levels
    rules: tuple[Rule, ...] = ()
    handling: str = HANDLINGS[0]
    rungs: tuple[Rung, ...] = tuple(Rung)
    restarts: int = 1
    """How often all ranks may be started again."""
    resets: int = 1
    """How often a device may be reset within a while."""

    @classmethod
    def of(cls, settings: Settings, levels: Levels, origin: str = "rerail.toml") -> Policy:
        """As set; what is wrong with a rule is said with its number and where it stands."""
        return cls(
            levels=levels,
            rules=rules_of(settings.policy, levels, origin),
            handling=settings.handling,
            rungs=rungs_of(settings.rungs),
            restarts=settings.max_restarts,
            resets=settings.reset_limit,
        )

    def mapped(self, about: About) -> Axes:
        """What the shipped mapping says."""
        if about.action is None:
            axes = self.levels.unknown[about.severity]
            located = about.scope in ("device", "link", "node")
            return axes if located else msgspec.structs.replace(axes, admission=Admission.YES)
        return self.levels.of_handling(about.action, about.severity, about.scope)

    def again(self, about: About) -> Axes:
        """What the catalogue asks for when the fault comes again, as something that must be acted on."""
        if about.then is None:
            return Axes()
        severity = about.severity if about.severity is Severity.CRITICAL else Severity.ERROR
        return self.levels.of_handling(about.then, severity, about.scope)

    def verdict(self, about: About) -> Verdict:
        """What is to be done about it here."""
        found: dict[str, Any] = {}
        by: dict[str, str] = {}
        for rule in self.rules:
            if rule.fits(about):
                for name, value in rule.answers().items():
                    if name not in found:
                        found[name], by[name] = value, rule.id
        mapped = self.mapped(about)
        axes = Axes(**{name: found.get(name, getattr(mapped, name)) for name in AXES})
        allowed = [rung for rung in self.ordered() if rung in found.get("ladder", self.rungs)]
        return Verdict(
            axes=axes,
            rungs=tuple(allowed),
            unfit={rung: why for rung in allowed if (why := unfit(rung, axes))},
            mute_s=float(found.get("mute_s", 0.0)),
            rule=", ".join(dict.fromkeys(by.values())) or "mapping",
            why=self._why(about, by),
        )

    def ordered(self) -> list[Rung]:
        """The ladder in the order of the preset: a reset of the faulty device stands before or after a move to another."""
        rungs = list(self.rungs)
        resets = [rung for rung in rungs if rung.startswith("reset")]
        moves = [rung for rung in rungs if rung.startswith("swap")]
        if not resets or not moves:
            return rungs
        rest = [rung for rung in rungs if rung not in (*resets, *moves)]
        first, then = (resets, moves) if self.handling == GRACEFUL else (moves, resets)
        at = sum(rungs.index(rung) < min(rungs.index(one) for one in (*resets, *moves)) for rung in rest)
        return [*rest[:at], *first, *then, *rest[at:]]

    def _why(self, about: About, by: Mapping[str, str]) -> str:
        said = [f"{name} by rule {rule}" for name, rule in by.items()]
        rest = [name for name in AXES if name not in by]
        if rest:
            words = (
                f"{about.action}, {about.severity}, scope {about.scope}"
                if about.action
                else f"unknown fault, {about.severity}"
            )
            said.append(f"{', '.join(rest)} by the shipped mapping of {words}")
        return "; ".join(said)


GRACEFUL = HANDLINGS[1]


_REPAIRS = {
    Rung.RETRY_STEP: (Repair.RETRY, "a step done again repairs nothing"),
    Rung.REPLACE_RANK: (Repair.RESTART_PROCESS, "a new process would get the same device"),
    Rung.RESTART_ALL: (Repair.RESTART_PROCESS, "all ranks would get the same devices"),
    Rung.RESET_DEVICE: (Repair.RESET_DEVICE, "a reset is not enough"),
}
"""The most that a rung repairs, and what is to be said where a fault asks for more."""


def unfit(rung: Rung, axes: Axes) -> str:
    """Why this rung leaves the fault as it is, or nothing. Whether it can be taken at all is another question."""
    enough, why = _REPAIRS.get(rung, (axes.repair, ""))
    order = list(Repair)
    return f"the fault asks for {axes.repair}, and {why}" if order.index(axes.repair) > order.index(enough) else ""


def rungs_of(text: str) -> tuple[Rung, ...]:
    """The setting `rungs`: those allowed, in the order of the ladder; all when it is empty."""
    given = listed(text)
    for name in given:
        if name not in list(Rung):
            raise ConfigError(f"setting rungs: there is no rung {name!r}{guess(name, Rung) or there_are(list(Rung))}")
    return tuple(rung for rung in Rung if not given or rung in given)


def rules_of(tables: Sequence[Mapping[str, Any]], levels: Levels, origin: str) -> tuple[Rule, ...]:
    """Rules from their tables."""
    return rules_in(tables, Rule, _SHAPE, origin, lambda rule, where: _with_level(_checked(rule, where), levels, where))


_SHAPE = Shape(
    name="policy",
    lists=("code", "class", "scope", "job", "node", "level", "ladder"),
    choices={**{name: list(kind) for name, kind in AXES.items()}, "ladder": list(Rung), "scope": SCOPES},
    wild=("scope",),
)


def _checked(rule: Rule, where: str) -> Rule:
    if rule.mute_s is not None and not 0 <= rule.mute_s <= MUTE_MAX_S:
        raise ConfigError(f"{where}: mute_s is {rule.mute_s:g}, but 0 to {MUTE_MAX_S:g} seconds are needed")
    if rule.ladder == ():
        raise ConfigError(f"{where}: ladder is empty; name rungs ({' '.join(Rung)}), or leave it out to allow all")
    return rule


def _with_level(rule: Rule, levels: Levels, where: str) -> Rule:
    """A level answers the axes that the rule itself leaves open."""
    try:
        axes = worst_of(map(levels.of_level, rule.level))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if rule.level:
        own = {name: getattr(rule, name) or getattr(axes, name) for name in AXES}
        rule = msgspec.structs.replace(rule, **own)
    if not rule.answers():
        raise ConfigError(f"{where}: it says nothing; add one of {' '.join((*AXES, 'level', 'ladder', 'mute_s'))}")
    return rule
