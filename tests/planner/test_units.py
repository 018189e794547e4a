"""Quantities as people write them."""

from __future__ import annotations

import pytest

from rerail.errors import ConfigError
from rerail.planner.units import duration, quantity, size


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("2.7GB/s", "speed", 2.7e9),
        ("200 Gbit/s", "speed", 25e9),
        ("4e9", "speed", 4e9),
        ("90s", "duration", 90.0),
        ("1h30m", "duration", 5400.0),
        ("2 d 12 hrs", "duration", 216_000.0),
        ("5 minutes", "duration", 300.0),
        ("2 mins", "duration", 120.0),
        ("3 hrs", "duration", 10_800.0),
        ("1w", "duration", 604_800.0),
        ("1y", "duration", 31_557_600.0),
        ("800 Mbit/s", "speed", 1e8),
        ("14B", "bytes", 14.0),
        ("3.1h", "duration", 11_160.0),
        ("15 min", "duration", 900.0),
        ("54d", "duration", 54 * 86_400.0),
        ("405e9", "count", 405e9),
        ("70B", "count", 70e9),
        ("16k", "count", 16e3),
        ("800 kB/s", "speed", 8e5),
        (16384, "count", 16_384.0),
        ("1.5 GiB", "size", 1.5 * 2**30),
        ("0.2", "share", 0.2),
        ("20%", "share", 0.2),
    ],
)
def test_quantities(text: str | float, kind: str, value: float) -> None:
    assert quantity("x", text, kind) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("fast", "speed", "write is 'fast'; a speed such as 2.7GB/s or 200Gbit/s is needed"),
        ("2.7GBs", "speed", "'GBs' is no unit here; did you mean GB/s?"),
        ("3 parsecs", "duration", "'parsecs' is no unit here"),
        ("-3h", "duration", "it has to be more than 0"),
        ("0 GB/s", "speed", "it has to be more than 0"),
        ("2.7", "speed", "its unit is missing; known are B/s"),
        ("2.7 gb/s", "speed", "'gb/s' is no unit here; did you mean GB/s?"),
        ("1.2", "share", "it has to be 1 or less"),
        ("120 %", "share", "it has to be 1 or less"),
        ("inf", "count", "a number such as 405e9"),
        ("nan", "count", "a number such as 405e9"),
        ("1e999", "count", "which is too large"),
        (float("nan"), "count", "it has to be more than 0"),
        (True, "count", "is True"),
        ([1], "count", r"is \[1\]"),
        ("", "count", "is ''"),
        ("5", "duration", "its unit is missing; known are ms, s"),
        (5, "duration", "its unit is missing"),
        ("0", "speed", "it has to be more than 0"),
        (0, "duration", "it has to be more than 0"),
        (10**400, "count", "which is too large"),
        ("9" * 400, "count", r"… \(402 characters\), which is too large"),
        ("1h30", "duration", "a time such as"),
        ("1h30x", "duration", "'x' is no unit here"),
    ],
)
def test_what_is_none_is_refused_with_what_would_be_right(text: str, kind: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        quantity("write", text, kind)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0137, "14 ms"),
        (0.4, "0.4 s"),
        (38, "38 s"),
        (720, "12 min"),
        (11_160, "3.1 h"),
        (54 * 86_400, "54 d"),
        (1064 * 86_400, "2.9 years"),
        (1e300, "more than 10,000 years"),
        (0, "0 s"),
        (float("inf"), "never"),
    ],
)
def test_times_as_a_person_would_write_them(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_sizes_as_a_person_would_write_them() -> None:
    assert [size(value) for value in (12, 346e6, 5.67e12)] == ["12 B", "346 MB", "5.7 TB"]


def test_a_number_too_long_to_be_shown_is_refused_without_it() -> None:
    with pytest.raises(ConfigError, match="a number of thousands of digits, which is too large"):
        quantity("params", 10**5000, "count")
