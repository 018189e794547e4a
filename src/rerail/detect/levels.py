"""What the user wants to be told: turns the settings `detectors_off`, `fault_levels` and `fault_files` into a changed catalogue.

Called by `detect.monitor`, `runtime.controller` and the commands. `fault_levels` is a list of `code=level`, codes with
wildcards, levels a severity, `off`, or a severity and a handling: `gpu.xid.63=off, nic.*=warning, gpu.ecc.*=error/drain_node`.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rerail.config import Settings, settings_of_rank
from rerail.errors import ConfigError
from rerail.faults.catalog import Catalog, Fault, load_catalog
from rerail.flow import Handling, Role, Severity
from rerail.texts import listed
from rerail.wording import guess

OFF = "off"


class Level(msgspec.Struct, frozen=True):
    """What a fault is to count for."""

    glob: str
    off: bool = False
    severity: Severity | None = None
    action: Handling | None = None


class Levels(msgspec.Struct, frozen=True, kw_only=True):
    """The user's wishes; without any, what the catalogue says."""

    levels: tuple[Level, ...] = ()
    detectors_off: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()

    @classmethod
    def of(cls, settings: Settings) -> Levels:
        """As set."""
        return cls(
            levels=parse(settings.fault_levels),
            detectors_off=tuple(listed(settings.detectors_off)),
            files=tuple(Path(file) for file in listed(settings.fault_files)),
        )

    @classmethod
    def from_environment(cls, env: Mapping[str, str] = os.environ) -> Levels:
        """As handed down by the agent."""
        return cls.of(settings_of_rank(env))

    def wants(self, detector: str) -> bool:
        """Whether this detector is to run."""
        return not any(fnmatch.fnmatchcase(detector, glob) for glob in self.detectors_off)

    def apply(self, fault: Fault) -> Fault | None:
        """The fault as the user sees it; None if they do not want to. The last level that names it wins."""
        level = next((one for one in reversed(self.levels) if fnmatch.fnmatchcase(fault.code, one.glob)), None)
        if level is None:
            return fault
        if level.off:
            return None
        # whoever raises a corrected error to an error wants to hear of it
        role = Role.ROOT if fault.role is Role.CONFIRMATION and level.severity in LOUD else fault.role
        return msgspec.structs.replace(
            fault, severity=level.severity or fault.severity, action=level.action or fault.action, role=role
        )

    def catalog(self) -> Catalog:
        """The catalogue as the user sees it."""
        whole = load_catalog(self.files)
        for level in self.levels:
            if not any(fnmatch.fnmatchcase(fault.code, level.glob) for fault in whole.faults):
                known = guess(level.glob, [fault.code for fault in whole.faults])
                raise ConfigError(f"setting fault_levels: there is no fault {level.glob!r}{known} (rerail faults list)")
        return Catalog(tuple(fault for fault in map(self.apply, whole.faults) if fault is not None))

    def switched_off(self) -> Catalog:
        """What the user does not want to hear of."""
        if not any(level.off for level in self.levels):
            return Catalog(())
        return Catalog(tuple(fault for fault in load_catalog(self.files).faults if self.apply(fault) is None))


LOUD = (Severity.DEGRADED, Severity.ERROR, Severity.CRITICAL)


def parse(text: str) -> tuple[Level, ...]:
    """`code=level, code=level/handling`."""
    found = []
    for item in listed(text):
        glob, given, wish = (part.strip() for part in item.partition("="))
        severity, _, action = wish.partition("/")
        known = severity in ("", OFF, *Severity) and bool(severity or action) and not (severity == OFF and action)
        if not glob or not given or not known:
            raise ConfigError(
                f"setting fault_levels: {item!r} is not understood; write code=level with one of "
                f"{', '.join((OFF, *Severity))}, and a handling behind it if wanted: gpu.xid.63=error/drain_node"
            )
        if action and action not in list(Handling):
            raise ConfigError(f"setting fault_levels: {action!r} is not one of {', '.join(Handling)}")
        found.append(
            Level(
                glob,
                severity == OFF,
                Severity(severity) if severity and severity != OFF else None,
                Handling(action) if action else None,
            )
        )
    return tuple(found)
