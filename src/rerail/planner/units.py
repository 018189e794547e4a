"""Turns what people write (`2.7GB/s`, `3 h`, `70B`) into numbers in seconds, bytes and pieces, and back. Pure.

Called by `rerail plan` and `rerail simulate`. What cannot be read is refused with the field, the value and what would be right.
"""

from __future__ import annotations

import math
import re

from rerail.errors import ConfigError
from rerail.wording import guess

_SECONDS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "day": 86_400.0}
_SECONDS |= {"days": 86_400.0, "hours": 3600.0, "hour": 3600.0, "week": 604_800.0, "weeks": 604_800.0}
_BYTES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}
_BYTES |= {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40, "PiB": 2.0**50}
_BYTES |= {"kB": 1e3}
_PIECES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z/%]*)\s*")

PLAIN = 1e6
"""A speed without a unit is in bytes a second, but nobody means less than this."""
KINDS = {
    "duration": ({"": 1.0, **_SECONDS}, "a time such as 90 s, 15 min, 3 h or 2 d"),
    "speed": (
        {**{f"{u}/s": f for u, f in _BYTES.items()}, "Gb/s": 1e9 / 8, "Gbit/s": 1e9 / 8},
        "a speed such as 2.7GB/s",
    ),
    "size": (_BYTES, "a size such as 42GB"),
    "count": (_PIECES, "a number such as 405e9, 70B or 16384"),
    "rate": ({"": 1.0}, "a number such as 0.47"),
    "share": ({"": 1.0, "%": 0.01}, "a share such as 0.2"),
}
"""By kind: the factors of its units, and what one looks like."""


def quantity(field: str, text: str | float, kind: str, *, zero: bool = False) -> float:
    """The number that stands there; positive, or 0 where that makes sense."""
    units, wanted = KINDS[kind]
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise ConfigError(f"{field} is {text!r}; {wanted} is needed")
    found = _NUMBER.fullmatch(text) if isinstance(text, str) else None
    if isinstance(text, str) and found is None:
        raise ConfigError(f"{field} is {text!r}; {wanted} is needed")
    number, unit = (float(found[1]), found[2]) if found is not None else (float(text), "")
    if kind == "speed" and not unit and number >= PLAIN:
        unit = "B/s"
    if unit not in units:
        known = [name for name in units if name]
        alike = next((f"; did you mean {one}?" for one in known if one.lower() == unit.lower()), guess(unit, known))
        lacking = f"{unit!r} is no unit here{alike}" if unit else "its unit is missing"
        raise ConfigError(f"{field} is {text!r}: {lacking}; known are {', '.join(known)}")
    value = number * units[unit]
    if math.isinf(value):
        raise ConfigError(f"{field} is {text!r}, which is too large: {wanted}")
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ConfigError(f"{field} is {text!r}; it has to be {'0 or more' if zero else 'more than 0'}: {wanted}")
    if kind == "share" and value > 1:
        raise ConfigError(f"{field} is {text!r}; it has to be 1 or less: {wanted}")
    return value


def duration(seconds: float) -> str:
    """As a person would write it: `0.4 s`, `38 s`, `12 min`, `3.1 h`, `54 d`."""
    if not math.isfinite(seconds):
        return "never"
    for limit, unit, name in ((100.0, 1.0, "s"), (6000.0, 60.0, "min"), (172_800.0, 3600.0, "h")):
        if seconds < limit:
            return f"{_short(seconds / unit)} {name}"
    return f"{_short(seconds / 86_400)} d"


def size(value: float) -> str:
    """Bytes: `42 GB`."""
    for name in ("PB", "TB", "GB", "MB", "KB"):
        if value >= _BYTES[name]:
            return f"{_short(value / _BYTES[name])} {name}"
    return f"{value:.0f} B"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
