"""What is simulated: turns presets, files and `key=value` into a Scenario, every number of which has a unit, a range and a source.

The numbers and where they come from are data (`assumptions.toml`). Called by `cli.simulate`, `sim.sweep` and `sim.run`.
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from rerail.errors import ConfigError, UsageError
from rerail.planner.rates import DAY_S
from rerail.planner.units import KINDS as UNITS
from rerail.planner.units import as_float, quantity, shown
from rerail.wording import guess

SNAPSHOT_GB = 36.0
"""What `snapshot_stall_s` was measured with."""
GROUPS_OF = 16_384
"""What `groups_s` is for."""
_OF = {"s": ("duration", 1.0), "d": ("duration", DAY_S), "GB": ("size", 1e9), "GB/s": ("speed", 1e9)}
_UNITS = {
    unit: {name: factor / by for name, factor in UNITS[kind][0].items() if name} for unit, (kind, by) in _OF.items()
}
_UNITS["devices"] = {"k": 1e3, "K": 1e3}
"""What may stand behind a number, by the unit of its key."""
_VALUE = re.compile(r"([-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:inf|nan))\s*([A-Za-z%/]*)")


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster and one job. Units, ranges and sources of all of it: `assumptions.toml`."""

    gpus: int = 8
    per_node: int = 8
    spare_nodes: int = 0
    days: float = 1.0
    step_s: float = 1.0
    state_gb: float = 1.0
    shard_gb: float = 1.0
    replicas: int = 1
    elastic: bool = False
    faults: float = 0.4103
    software_per_day: float = 0.87
    start_faults: float = 0.02
    start_fault_s: float = 300.0
    planned_per_day: float = 0.0
    lemon_share: float = 0.012
    lemon_factor: float = 15.0
    batch_least: int = 8
    batch_most: int = 64
    silent_root: float = 0.11
    echoes: int = 16
    attempt_fails: float = 0.01
    reboot_s: float = 1800.0
    replace_s: float = 172_800.0
    outage_s: float = 1800.0
    requeue_s: float = 300.0
    person_s: float = 1800.0
    storage_gb_s: float = 2.0
    device_gb_s: float = 54.0
    network_gb_s: float = 50.0
    snapshot_stall_s: float = 0.012
    job_restart_s: float = 600.0
    process_restart_s: float = 150.0
    flash_s: float = 150.0
    build_s: float = 5.6
    standby_s: float = 1.84
    swap_s: float = 6.6
    doubling_s: float = 0.0225
    groups_s: float = 30.0
    rehearsals: int = 2
    repair_factor: float = 1.0
    retry_s: float = 0.59
    explicit_s: float = 5.0
    exit_s: float = 10.0
    watchdog_s: float = 600.0
    silent_s: float = 3600.0
    shadow_share: float = 0.1

    @property
    def nodes(self) -> int:
        """Nodes of the job; the spare ones come on top."""
        return self.gpus // self.per_node

    @property
    def wall_s(self) -> float:
        return self.days * DAY_S

    @property
    def load_s(self) -> float:
        """Read everything from the store, once."""
        return self.state_gb / self.storage_gb_s

    @property
    def copy_s(self) -> float:
        """One rank's state from the device into host memory."""
        return self.shard_gb / self.device_gb_s

    @property
    def transfer_s(self) -> float:
        """One rank's state from another node."""
        return self.shard_gb / self.network_gb_s

    @property
    def form_s(self) -> float:
        """Groups of all ranks."""
        return self.groups_s * self.gpus / GROUPS_OF

    @property
    def larger_s(self) -> float:
        """What a repair takes longer than with two ranks."""
        return self.doubling_s * max(0.0, math.log2(self.gpus / 2))


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of one number."""

    unit: str
    about: str
    source: str
    least: float = -math.inf
    most: float = math.inf


class Assumption(msgspec.Struct, frozen=True, kw_only=True):
    """One number as it is printed."""

    key: str
    value: float
    unit: str
    about: str
    source: str


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario by its name."""

    name: str
    about: str
    values: dict[str, Any]
    source: dict[str, str] = {}


class Book(msgspec.Struct, frozen=True, kw_only=True):
    """All of `assumptions.toml`."""

    keys: dict[str, Key]
    presets: dict[str, Preset]


@functools.cache
def book() -> Book:
    """The shipped table."""
    text = resources.files("rerail.sim").joinpath("assumptions.toml").read_text(encoding="utf-8")
    rows = tomllib.loads(text)
    presets = {
        name: Preset(
            name=name,
            about=row["about"],
            source=row.get("source", {}),
            values={key: value for key, value in row.items() if key not in ("about", "source")},
        )
        for name, row in rows["preset"].items()
    }
    return Book(keys={name: msgspec.convert(row, Key) for name, row in rows["key"].items()}, presets=presets)


def preset(name: str) -> Preset:
    """By its name, or an error that says which there are."""
    known = book().presets
    if name not in known:
        raise UsageError(f"there is no preset {name!r}{guess(name, known)}", hint=f"presets: {', '.join(known)}")
    return known[name]


def scenario(values: Mapping[str, Any], origin: str = "") -> Scenario:
    """From values by key; everything that is wrong is said with its key, its value and what would be right."""
    where = f"{origin}: " if origin else ""
    given = {key: checked(key, value, where) for key, value in values.items()}
    made = msgspec.convert(given, Scenario)
    _consistent(made, where)
    return made


def checked(key: str, value: Any, where: str = "") -> float | int | bool:
    """One value by its key, within its range."""
    known = book().keys
    if key not in known:
        raise ConfigError(
            f"{where}there is no assumption {key!r}{guess(key, known)}\n  rerail simulate --list shows all"
        )
    kind = next(field.type for field in msgspec.structs.fields(Scenario) if field.name == key)
    if kind is bool:
        return _switch(key, value, where)
    number = _number(key, value, where)
    unit, least, most = known[key].unit, known[key].least, known[key].most
    if not least <= number <= most:
        raise ConfigError(f"{where}{key} is {_told(value)}, but has to be between {least:g} and {most:g} ({unit})")
    if kind is int and number != int(number):
        raise ConfigError(f"{where}{key} is {_told(value)}, but has to be a whole number ({unit})")
    return int(number) if kind is int else number


def _switch(key: str, value: Any, where: str) -> bool:
    words = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
    found = words.get(str(value).lower())
    if found is None:
        raise ConfigError(f"{where}{key} is {shown(value)}, but has to be yes or no")
    return found


def _number(key: str, value: Any, where: str) -> float:
    unit = book().keys[key].unit
    factors = _UNITS.get(unit, {})
    if isinstance(value, int | float) and not isinstance(value, bool):
        return as_float(value)
    text = str(value).strip()
    found = _VALUE.fullmatch(text)
    if found is None and _OF.get(unit, ("",))[0] == "duration" and re.match(r"\d", text):
        return quantity(f"{where}{key}", text, "duration") / _OF[unit][1]  # 1h30m
    if found is None:
        raise ConfigError(f"{where}{key} is {shown(value)}, which is not a number ({unit})")
    number, given = as_float(found[1].replace("_", "")), found[2]
    if given and given not in factors:
        units = ", ".join(factors) or f"none: it is counted in {unit}"
        raise ConfigError(f"{where}{key} is {shown(value)}: unit {given!r} is not known here (units: {units})")
    return number * factors.get(given, 1.0)


def _told(value: Any) -> str:
    """As it was given, without quotes."""
    return shown(value).strip("'")


def _consistent(one: Scenario, where: str) -> None:
    """Sizes that contradict each other."""
    if one.gpus % one.per_node:
        more = math.ceil(one.gpus / one.per_node) * one.per_node
        raise ConfigError(
            f"{where}gpus is {one.gpus}, which is no multiple of per_node ({one.per_node}); {more} would be"
        )
    if one.batch_least > one.batch_most:
        raise ConfigError(
            f"{where}batch_least is {one.batch_least}, which is more than batch_most ({one.batch_most}); exchange them"
        )
    if one.replicas > one.gpus:
        raise ConfigError(
            f"{where}replicas is {one.replicas}, but there are only {one.gpus} ranks; at most {one.gpus} can be"
        )
    if one.gpus % one.replicas:
        fewer = max(n for n in range(1, one.replicas) if one.gpus % n == 0)
        raise ConfigError(
            f"{where}replicas is {one.replicas}, but {one.gpus} ranks cannot be parted into so many equal copies; {fewer} would do"
        )
    if one.shard_gb > one.state_gb:
        raise ConfigError(
            f"{where}shard_gb is {one.shard_gb:g}, which is more than the whole state ({one.state_gb:g} GB in state_gb)"
        )
    if one.shard_gb * one.gpus < one.state_gb:
        raise ConfigError(
            f"{where}gpus is {one.gpus}: shards of {one.shard_gb:g} GB (shard_gb) do not hold the {one.state_gb:g} GB of state_gb; "
            f"{_holding(one)} would, or shard_gb={_up(one.state_gb / one.gpus)}"
        )


def _holding(one: Scenario) -> int:
    """Devices whose shards hold all of the state, in whole nodes and equal copies."""
    many = math.lcm(one.per_node, one.replicas)
    return math.ceil(one.state_gb / one.shard_gb / many) * many


def _up(value: float) -> str:
    """Three digits, and not less."""
    digits = 2 - math.floor(math.log10(value))
    return f"{math.ceil(value * 10**digits - 1e-9) / 10**digits:g}"


def parsed(pairs: list[str]) -> dict[str, str]:
    """`key=value` of the command line."""
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (equals and key and value):
            raise UsageError(f"--set {pair!r} is not KEY=VALUE", hint="for example --set repair_factor=10")
        found[key.strip()] = value.strip()
    return found


def read_file(path: Path) -> dict[str, Any]:
    """Values from a TOML file: `preset = "NAME"` and keys, nothing else."""
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"--config {path}: no such file") from error
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8, a number of thousands of digits
        raise UsageError(f"--config {path} is not TOML: {error}") from error
    return rows


def assumptions(one: Scenario, base: Preset | None, given: Mapping[str, Any]) -> list[Assumption]:
    """All numbers of a scenario, with where each comes from."""
    sources = base.source if base is not None else {}
    return [
        Assumption(
            key=name,
            value=float(getattr(one, name)),
            unit=key.unit,
            about=key.about,
            source="given by hand" if name in given else sources.get(name, key.source),
        )
        for name, key in book().keys.items()
    ]
