"""Takes the prefix off a log line: turns `[rank3]: 2026-11-02 10:00:01 ERROR RuntimeError: ...` into rank, time, level and message.

Pure. Called by `faults.sightings` for the few lines that may show a fault. Launchers, schedulers, kernels and loggers all put
something in front of what a program said, often several of them on top of each other; each is taken off in turn.
"""

from __future__ import annotations

import re
from calendar import timegm

import msgspec

_LEVELS = {
    **dict.fromkeys(("trace", "debug", "dbg", "d", "v"), "debug"),
    **dict.fromkeys(("info", "inf", "i", "notice", "normal"), "info"),
    **dict.fromkeys(("warning", "warn", "w"), "warning"),
    **dict.fromkeys(("error", "err", "e", "critical", "crit", "fatal", "alert", "emerg", "severe", "f", "c"), "error"),
}
_MONTHS = {
    name: number
    for number, name in enumerate(
        ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"], 1
    )
}
_WORDS = "TRACE|DEBUG|INFO|NOTICE|WARNING|WARN|ERROR|CRITICAL|FATAL|SEVERE"
_KERNEL_FACILITY = r"(?:kern|user|mail|daemon|auth|syslog|lpr|news|uucp|cron|authpriv|local\d)"
_DATE = r"(?P<y>\d{4})[-/.](?P<mo>\d{1,2})[-/.](?P<d>\d{1,2})"
_CLOCK = r"(?P<h>\d{1,2}):(?P<mi>\d{2}):(?P<s>\d{2})(?P<f>[.,]\d{1,9})?"

_PREFIXES = [
    (kind, re.compile(pattern, flags))
    for kind, pattern, flags in (
        ("kmsg", r"(?P<prio>\d{1,4}),\d{1,12},(?P<usec>\d{1,18}),[^;\s]{1,40};", 0),
        ("kernel", r"<\d{1,3}>", 0),
        ("kernel", r"\[\s*(?P<up>\d{1,8}\.\d{1,9})(?:[,\s][^\]]{0,24})?\]\s?", 0),
        ("kernel", r"\[\s?[+.]{1,3}\s*\d{1,8}\.\d{1,9}\]\s?", 0),
        ("kernel", rf"{_KERNEL_FACILITY}\s{{0,8}}:(?P<level>\w{{2,6}})\s{{0,4}}:\s", 0),
        ("kernel", r"kernel:\s?", 0),
        ("time", rf"[\[(]?{_DATE}[T\s_-]{_CLOCK}(?:Z|\s?[+-]\d\d:?\d\d|\sUTC)?[\])]?(?:\s?[:|-])?\s?", 0),
        ("time", r"\[\w{3}\s(?P<mon>\w{3})\s+(?P<d>\d{1,2})\s" + _CLOCK + r"\s(?P<y>\d{4})\]\s?", 0),
        ("time", r"\[(?P<mon>[A-Z][a-z]{2})\s+(?P<d>\d{1,2})\s(?P<y>\d{4})\s" + _CLOCK + r"\]\s?", 0),
        ("time", rf"[\[(]?{_CLOCK}[\])]?\s(?:[|-]\s)?", 0),
        ("syslog", r"(?P<mon>[A-Z][a-z]{2})\s+(?P<d>\d{1,2})\s" + _CLOCK + r"\s(?P<host>[\w.@-]{1,64})\s", 0),
        ("syslog", r"-?\s?\d{10}\s\d{4}\.\d\d\.\d\d\s(?P<host>[\w.@:-]{1,64})\s", 0),
        ("host", r"[\w.-]{1,64}@[\w.-]{1,64}\s(?=\w+(?:\[\d+\])?:)", 0),
        ("program", r"(?P<program>[\w./-]{2,32})\[\d{1,9}\]:\s", 0),
        ("rank", r"\[(?:rank|default|Rank|RANK|GPU|worker)[:\s_-]?\s?(?P<rank>\d{1,6})\](?::\s?|\s)?", 0),
        ("rank", r"\[\d{1,4},(?P<rank>\d{1,6})\]<std(?:err|out|diag)>:?\s?", 0),
        ("rank", r"(?:rank|Rank|RANK)[:\s_-]?\s?(?P<rank>\d{1,6})(?::\s?|\s\|\s)", 0),
        ("rank", r"\[(?P<rank>\d{1,6})\]:\s?", 0),
        ("rank", r"\s{0,4}(?P<rank>\d{1,5}):\s(?=\S)", 0),
        ("actor", r"\((?:[\w.<>]{1,64}\s)?pid=\d{1,9}(?:,\s?[\w]{1,8}=[\w.:-]{1,64}){0,3}\)\s?", 0),
        ("actor", r"\((?:raylet|autoscaler|gcs_server|dashboard)\)\s?", 0),
        ("grep", r"[\w./-]{1,200}\.(?:log|txt|out|err)[:-]\d{1,9}[:-]", 0),
        (
            "glog",
            r"\[?(?P<level>[IWEF])\d{3,4}(?:\s\d\d:\d\d:\d\d(?:\.\d{1,9})?)?(?:\s\d{1,9})?\s[^\]\s]{1,120}:\d{1,6}\]\s?",
            0,
        ),
        ("glog", r"\[(?P<level>[IWEF])\s[\w.]{1,64}:\d{1,6}\]\s?", 0),
        ("level", rf"\[?(?P<level>{_WORDS})\]?(?:\s?[:|-]|\s|$)(?:[\w.]{{1,120}}:(?=\S))?\s{{0,8}}", 0),
        ("level", r"\[(?P<level>[DIWEF])\]\s", 0),
        ("source", r"\[[\w./-]{1,100}\.(?:py|cc|cpp|go|rs):\d{1,6}(?::\w{1,64})?\]\s{0,4}(?:>>\s)?", 0),
        ("source", r"[\w./-]{1,100}\.(?:py|go):\d{1,6}(?::[\w<>]{1,64})?\s?[:|-]?\s", 0),
    )
]
_INNER_LEVEL = re.compile(
    rf"\bNCCL\s(?P<nccl>INFO|TRACE|WARN|ERROR)\b|\[(?P<tag>{_WORDS})\]|\s(?P<word>{_WORDS})\s?[:|\]]|\s-\s(?P<dash>{_WORDS})\s-\s"
)
_INNER_RANK = re.compile(
    r"\[(?:PG[^\]]{1,80}\s)?Rank\s(?P<a>\d{1,6})\]|\blocal_rank:\s?(?P<b>\d{1,6})|\brank[:=\s]\s?(?P<c>\d{1,6})\b"
)
MAX_PREFIXES = 10


class Line(msgspec.Struct, frozen=True):
    """One line of a log, taken apart."""

    text: str
    """What the program said."""
    raw: str
    rank: int = -1
    level: str = ""
    """`debug`, `info`, `warning`, `error`, or nothing where the line does not say."""
    kernel: bool = False
    program: str = ""
    time: float = -1.0
    """Seconds since the epoch, if the line has a date; else -1."""
    uptime: float = -1.0
    """Seconds since the machine started, if the line says so."""


def take_apart(raw: str) -> Line:
    """Prefixes off, one after the other, in whatever order they stand."""
    text, at = raw, 0
    rank, level, kernel, program, time, uptime = -1, "", False, "", -1.0, -1.0
    used: set[str] = set()
    for _ in range(MAX_PREFIXES):
        for kind, pattern in _PREFIXES:
            if kind in used and kind in ("program", "level"):
                continue
            if at and kind == "rank" and rank >= 0:
                continue
            found = pattern.match(text, at)
            if found is None or found.end() == at:
                continue
            words = found.groupdict()
            kernel = kernel or kind in ("kernel", "kmsg")
            if words.get("rank"):
                rank = int(words["rank"])
            if words.get("level"):
                level = level or _LEVELS.get(words["level"].lower(), "")
            if words.get("program"):
                program = words["program"]
            if words.get("up"):
                uptime = float(words["up"])
            elif words.get("usec"):
                uptime = int(words["usec"]) / 1e6
            if words.get("h") and time < 0:
                time = _seconds(words)
            used.add(kind)
            at = found.end()
            break
        else:
            break
    text = text[at:].rstrip()
    if not level and (inner := _INNER_LEVEL.search(raw[: at + 80])) is not None:
        level = _LEVELS[next(word for word in inner.groups() if word).lower()]
    if rank < 0 and (named := _INNER_RANK.search(raw[:400])) is not None:
        rank = int(next(word for word in named.groups() if word))
    return Line(text, raw, rank, level, kernel or program == "kernel", program, time, uptime)


def _seconds(words: dict[str, str]) -> float:
    """Dates without a year or a zone are compared only with others of the same log, so year and zone do not matter."""
    month = int(words["mo"]) if words.get("mo") else _MONTHS.get((words.get("mon") or "").lower(), 1)
    year, day = int(words.get("y") or 1970), int(words.get("d") or 1)
    if not (1 <= month <= 12 and 1 <= day <= 31 and 1970 <= year <= 9999):
        return -1.0
    whole = timegm((year, month, day, int(words["h"]), int(words["mi"]), int(words["s"]), 0, 0, 0))
    return whole + float("0" + (words.get("f") or ".0").replace(",", "."))
