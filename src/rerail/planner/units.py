"""Turns what people write (`2.7GB/s`, `3 h`, `70B`) into numbers in seconds, bytes and pieces, and back. Pure.

Called by `rerail plan` and `rerail simulate`. What cannot be read is refused with the field, the value and what would be right.
"""

from __future__ import annotations

import math
import re

from rerail.errors import ConfigError
from rerail.wording import guess

_DAY_S, _YEAR_S = 86_400.0, 365.25 * 86_400.0
_SECONDS = {"ms": 1e-3}
_SECONDS |= dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0)
_SECONDS |= dict.fromkeys(("min", "m", "mins", "minute", "minutes"), 60.0)
_SECONDS |= dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600.0)
_SECONDS |= dict.fromkeys(("d", "day", "days"), _DAY_S)
_SECONDS |= dict.fromkeys(("w", "week", "weeks"), 7 * _DAY_S)
_SECONDS |= dict.fromkeys(("y", "year", "years"), _YEAR_S)
_BYTES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}
_BYTES |= {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40, "PiB": 2.0**50}
_BYTES |= {"kB": 1e3}
_BITS = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SPEEDS = {f"{unit}/s": factor for unit, factor in _BYTES.items()}
_SPEEDS |= {f"{large}{bit}/s": factor / 8 for large, factor in _BITS.items() for bit in ("b", "bit")}
_PIECES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_FIGURE = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_NUMBER = re.compile(rf"\s*({_FIGURE})\s*([A-Za-z/%]*)\s*")
_PART = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([A-Za-z]+)")
_PARTS = re.compile(rf"(?:{_PART.pattern}){{2,8}}\s*")

PLAIN = 1e6
"""A speed without a unit is in bytes a second, but nobody means less than this."""
LONG = 40
"""Characters of a value that are shown where it is refused."""
KINDS = {
    "duration": (_SECONDS, "a time such as 90s, 15min, 1h30m, 3h or 2d"),
    "speed": (_SPEEDS, "a speed such as 2.7GB/s or 200Gbit/s"),
    "size": (_BYTES, "a size such as 42GB"),
    "bytes": (dict.fromkeys(("", "B", "byte", "bytes"), 1.0), "a number of bytes such as 14"),
    "count": (_PIECES, "a number such as 405e9, 70B or 16384"),
    "rate": ({"": 1.0}, "a number such as 0.47"),
    "share": ({"": 1.0, "%": 0.01}, "a share such as 0.2"),
}
"""By kind: the factors of its units, and what one looks like."""


def quantity(field: str, text: str | float, kind: str, *, zero: bool = False) -> float:
    """The number that stands there; positive, or 0 where that makes sense."""
    _, wanted = KINDS[kind]
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise ConfigError(f"{field} is {shown(text)}; {wanted} is needed")
    found = _NUMBER.fullmatch(text) if isinstance(text, str) else None
    if found is None and kind == "duration" and isinstance(text, str) and _PARTS.fullmatch(text):
        return sum(_product(field, text, kind, number, unit) for number, unit in _PART.findall(text))
    if isinstance(text, str) and found is None:
        raise ConfigError(f"{field} is {shown(text)}; {wanted} is needed")
    number, unit = (found[1], found[2]) if found is not None else (text, "")
    value = _product(field, text, kind, number, unit)
    if math.isinf(value):
        raise ConfigError(f"{field} is {shown(text)}, which is too large: {wanted}")
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ConfigError(f"{field} is {shown(text)}; it has to be {'0 or more' if zero else 'more than 0'}: {wanted}")
    if kind == "share" and value > 1:
        raise ConfigError(f"{field} is {shown(text)}; it has to be 1 or less: {wanted}")
    return value


def _product(field: str, text: str | float, kind: str, number: str | float, unit: str) -> float:
    """A number times its unit."""
    units, _ = KINDS[kind]
    value = as_float(number)
    if not unit and (value <= 0 or not math.isfinite(value)):
        return value  # it is refused for that, or is 0 of whatever unit
    if kind == "speed" and not unit and value >= PLAIN:
        unit = "B/s"
    if unit not in units:
        known = [name for name in units if name]
        alike = next((f"; did you mean {one}?" for one in known if one.lower() == unit.lower()), guess(unit, known))
        lacking = f"{unit!r} is no unit here{alike}" if unit else "its unit is missing"
        raise ConfigError(f"{field} is {shown(text)}: {lacking}; known are {', '.join(known) or 'none'}")
    return value * units[unit]


def as_float(number: str | float) -> float:
    """Infinite where it is too large to be one."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def shown(value: object) -> str:
    """A value that is refused, as it was given; of a long one the beginning."""
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= LONG else f"{text[: LONG - 1]}… ({len(text):,} characters)"


def duration(seconds: float) -> str:
    """As a person would write it: `14 ms`, `0.4 s`, `38 s`, `12 min`, `3.1 h`, `54 d`, `12 years`."""
    if not math.isfinite(seconds):
        return "never"
    if not seconds:
        return "0 s"
    for limit, unit, name in (
        (0.1, 1e-3, "ms"),
        (100.0, 1.0, "s"),
        (6000.0, 60.0, "min"),
        (172_800.0, 3600.0, "h"),
        (1000 * _DAY_S, _DAY_S, "d"),
        (1e4 * _YEAR_S, _YEAR_S, "years"),
    ):
        if seconds < limit:
            return f"{_short(seconds / unit)} {name}"
    return "more than 10,000 years"


def size(value: float) -> str:
    """Bytes: `42 GB`."""
    for name in ("PB", "TB", "GB", "MB", "KB"):
        if value >= _BYTES[name]:
            return f"{_short(value / _BYTES[name])} {name}"
    return f"{value:.0f} B"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.2g}" if value >= 1e-4 or not value else f"{value:.0e}"
