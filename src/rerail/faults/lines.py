"""Takes the prefix off a log line: turns `[rank3]: 2026-11-02 10:00:01 ERROR RuntimeError: ...` into rank, time, level and message.

Pure. Called by `faults.sightings` for the few lines that may show a fault. Launchers, schedulers, kernels and loggers all put
something in front of what a program said, often several of them on top of each other; each is taken off in turn. Some
wrap the whole line in JSON, in colours, or write it behind a progress bar.
"""

from __future__ import annotations

import re
from calendar import timegm
from typing import Any

import msgspec

from rerail.faults.quotes import is_sample

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
_ZONE = r"(?P<zone>Z|\s?[+-]\d\d:?\d\d|\sUTC)"
_CODE = r"(?:py|cc|cpp|cu|go|rs|h)"

_PREFIXES = [
    (kind, re.compile(pattern, flags))
    for kind, pattern, flags in (
        ("kmsg", r"(?P<prio>\d{1,4}),\d{1,12},(?P<usec>\d{1,18}),[^;\s]{1,40};", 0),
        ("kernel", r"<(?P<prio>\d{1,3})>(?:1\s(?=\d{4}-\d\d-\d\dT))?", 0),
        ("kernel", r"\[\s*(?P<up>\d{1,8}\.\d{1,9})(?:[,\s][^\]]{0,24})?\](?:\[\s{0,8}[TC]\d{1,8}\])?\s?", 0),
        ("kernel", r"\[\s{0,8}[+.<]{1,3}\s{0,8}\d{1,8}\.\d{1,9}>?\]\s?", 0),
        ("kernel", rf"{_KERNEL_FACILITY}\s{{0,8}}:(?P<level>\w{{2,6}})\s{{0,4}}:\s", 0),
        ("kernel", r"kernel:\s?", 0),
        (
            "level",
            rf"\[NeMo\s(?P<level>[DIWEC])\s{_DATE}\s{_CLOCK}\s(?:rank[:_]?\s?(?P<rank>\d{{1,6}})[\s:])?[\w.]{{1,80}}:\d{{1,6}}\]\s?",
            0,
        ),
        ("time", rf"[\[(]?{_DATE}[T\s_-]{_CLOCK}(?:\.\d{{3}}\b)?{_ZONE}?[\])]?(?:\s?[:|-]|\s>>)?\s?", 0),
        ("time", r"\[\w{3}\s(?P<mon>\w{3})\s+(?P<d>\d{1,2})\s" + _CLOCK + r"\s(?P<y>\d{4})\]\s?", 0),
        ("time", r"\[(?P<mon>[A-Z][a-z]{2})\s+(?P<d>\d{1,2})\s(?P<y>\d{4})\s" + _CLOCK + r"\]\s?", 0),
        ("time", rf"(?P<mo>\d\d)-(?P<d>\d\d)\s{_CLOCK}\s", 0),
        ("time", rf"[\[(]?{_CLOCK}[\])]?\s(?:[|-]\s)?", 0),
        ("stream", r"std(?:out|err)\s[FP]\s", 0),
        ("pod", r"\[pod/[\w.-]{1,100}/[\w.-]{1,64}\]\s", 0),
        ("pod", r"[a-z][\w.-]{0,60}-\d{1,4}\s{1,40}\|\s", 0),
        ("syslog", r"(?P<mon>[A-Z][a-z]{2})\s+(?P<d>\d{1,2})\s" + _CLOCK + r"\s(?P<host>[\w.@-]{1,64})\s", 0),
        ("syslog", r"-?\s?\d{10}\s\d{4}\.\d\d\.\d\d\s(?P<host>[\w.@:-]{1,64})\s", 0),
        ("host", r"[\w.-]{1,64}@[\w.-]{1,64}\s(?=\w+(?:\[\d+\])?:)", 0),
        ("host", r"[\w.-]{1,64}\s(?=kernel:\s|[\w./@-]{2,48}\[\d{1,9}\]:\s)", 0),
        ("host", r"[\w.-]{1,64}\s(?P<program>[\w./-]{1,48})\s(?:\d{1,9}|-)\s[\w-]{1,32}\s-\s", 0),
        ("program", r"(?P<program>[\w./-]{2,32})\[\d{1,9}\]:\s", 0),
        ("rank", r"\[(?:rank|default|Rank|RANK|GPU|worker)[:\s_-]?\s?(?P<rank>\d{1,6})\](?::\s?|\s)?", 0),
        ("rank", r"\[(?:[\w.@-]{1,64}@)?\d{1,9},(?P<rank>\d{1,6})\]<std(?:err|out|diag)>:?\s?", 0),
        ("rank", r"(?:rank|Rank|RANK)[:\s_-]?\s?(?P<rank>\d{1,6})(?::\s?|\s\|\s)", 0),
        ("rank", r"\[(?P<rank>\d{1,6})\]:\s?", 0),
        ("rank", r"\s{0,4}(?P<rank>\d{1,5}):\s(?=\S)", 0),
        ("actor", r"\((?:[\w.<>]{1,64}\s)?pid=\d{1,9}(?:,\s?[\w]{1,8}=[\w.:-]{1,64}){0,3}\)\s?", 0),
        ("actor", r"\((?:raylet|autoscaler|gcs_server|dashboard)\)\s?", 0),
        ("grep", r"[\w./-]{1,200}\.(?:log|txt|out|err)[:-]\d{1,9}[:-]", 0),
        ("bar", r"[^|\n]{0,120}?\d{1,3}%\|[^|\n]{0,200}\|[^\[\n]{0,60}\[[^\]\n]{0,200}\]\s{0,200}(?=\S)", 0),
        ("frame", r"(?:[│┃║>]\s{1,8}){1,3}(?=\S)", 0),
        ("pod", r"(?:[a-z][\w.]{0,40}-[\w.-]{0,40}\d|(?:node|worker|host|gpu|dgx)[\w.]{0,40}\d):\s{1,8}(?=\S)", 0),
        ("pod", r"[a-z][\w.-]{0,62}\s{1,24}\|\s(?=\S)", 0),
        (
            "glog",
            rf"\[?(?P<level>[IWEF])(?P<mo>\d\d?)(?P<d>\d\d)(?:\s{_CLOCK})?(?:\s{{1,8}}\d{{1,15}})?\s[^\]\s]{{1,120}}:\d{{1,6}}\]\s?",
            0,
        ),
        ("glog", r"\[(?P<level>[IWEF])\s[\w.]{1,64}:\d{1,6}\]\s?", 0),
        ("glog", r"(?P<level>[IWEF])\s[\w./-]{1,160}:\d{1,6}\]\s", 0),
        ("level", rf"\[(?P<level>{_WORDS})\|[\w./-]{{1,100}}\.py:\d{{1,6}}\]\s?", 0),
        ("level", rf"\[?(?P<level>{_WORDS})\]?(?:\s{{0,8}}[:|-]|\s|$)(?:[\w.]{{1,120}}:(?=\S))?\s{{0,8}}", 0),
        ("level", r"\[(?P<level>[DIWEF])\]\s", 0),
        ("logger", rf"[\w.]{{1,80}}\s-\s(?=(?:{_WORDS})\s-\s)", 0),
        ("plog", r"[A-Z][A-Z_]{1,15}\(\d{1,9},[^)\s]{1,64}\):", 0),
        ("nccl", r"[\w.-]{1,64}:\d{1,9}:\d{1,9}\s\[-?\d{1,4}\]\s(?=\S)", 0),
        ("source", rf"\[[\w./-]{{1,100}}\.{_CODE}:\d{{1,6}}(?::\w{{1,64}})?\]\s{{0,4}}(?:>>\s)?", 0),
        ("source", r"[\w.<>]{1,100}:[\w<>]{1,64}:\d{1,6}\s-\s", 0),
        ("source", r"[\w./-]{1,100}\.(?:py|go):\d{1,6}(?::[\w<>]{1,64})?\s?[:|-]?\s", 0),
    )
]
_INNER_LEVEL = re.compile(
    rf"\bNCCL\s(?P<nccl>INFO|TRACE|WARN|ERROR)\b|\[(?P<tag>{_WORDS})\]|\s(?P<word>{_WORDS})\s?[:|\]]|\s-\s(?P<dash>{_WORDS})\s-\s"
)
_INNER_RANK = re.compile(
    r"\[(?:PG[^\]]{1,80}\s)?Rank\s(?P<a>\d{1,6})\]|\blocal_rank:\s?(?P<b>\d{1,6})|\brank[:=\s]\s?(?P<c>\d{1,6})\b"
)
_TOGETHER = re.compile(r"(?P<name>(?:\w+\.)*\w*(?:Error|Exception|Interrupt))(?P=name)+(?:: ?)*")
"""Two ranks wrote their exceptions into one line, word by word: `NameErrorNameError: : name ...`."""
MAX_PREFIXES = 10
_TERMINAL = re.compile(r"\x1b(?:\[[0-9;:?<=>]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][0-9A-Za-z]|[=>78])")
_MESSAGES = ("log", "message", "msg", "MESSAGE", "text", "body", "event")
_EXCEPTIONS = ("exc_info", "exc_text", "exception", "traceback", "stack_trace", "stack")
_STAMPS = ("time", "timestamp", "@timestamp", "ts", "asctime", "__REALTIME_TIMESTAMP")
_SAID_LEVELS = ("level", "levelname", "severity", "lvl", "log.level")
_SAID_RANKS = ("rank", "global_rank", "RANK")
_FULL, _NO_ZONE, _NO_YEAR, _NO_DATE = "utc", "date", "day", "hour"
_PRIORITIES = ("error",) * 4 + ("warning", "info", "info", "debug")


class Line(msgspec.Struct, frozen=True):
    """One line of a log, taken apart."""

    text: str
    """What the program said."""
    raw: str
    """All of it, without colours and what a carriage return has overwritten."""
    rank: int = -1
    level: str = ""
    """`debug`, `info`, `warning`, `error`, or nothing where the line does not say."""
    kernel: bool = False
    program: str = ""
    time: float = -1.0
    """Seconds since the epoch, or since whatever `clock` leaves open; -1 if the line has no time."""
    clock: str = ""
    """What `time` knows: `utc`, `date` (no zone), `day` (no year), `hour` (no date). Only times of one kind compare."""
    uptime: float = -1.0
    """Seconds since the machine started, if the line says so."""
    data: bool = False
    """A piece of data, in JSON: whatever it speaks of, no program says that."""


def take_apart(raw: str) -> Line:
    """Prefixes off, one after the other, in whatever order they stand."""
    return _take_apart(_visible(raw), depth=0)


def _visible(raw: str) -> str:
    """What a terminal would show in the end."""
    if "\x1b" in raw:
        raw = _TERMINAL.sub("", raw)
    raw = raw.removeprefix("\ufeff").rstrip("\r\n")
    return next((part for part in reversed(raw.split("\r")) if part.strip()), raw) if "\r" in raw else raw


def _take_apart(raw: str, depth: int) -> Line:
    at = 0
    rank, level, kernel, program, time, clock, uptime = -1, "", False, "", -1.0, "", -1.0
    used: set[str] = set()
    for _ in range(MAX_PREFIXES):
        found = _next_prefix(raw, at, used, ranked=rank >= 0)
        if found is None:
            break
        kind, at, words = found
        used.add(kind)
        kernel = kernel or kind in ("kernel", "kmsg")
        if words.get("rank"):
            rank = int(words["rank"])
        if words.get("level"):
            level = level or _LEVELS.get(words["level"].lower(), "")
        if words.get("prio"):
            level = level or _PRIORITIES[int(words["prio"]) & 7]
        program = words.get("program") or program
        if words.get("up"):
            uptime = float(words["up"])
        elif words.get("usec"):
            uptime = int(words["usec"]) / 1e6
        if words.get("h") and time < 0:
            time, clock = _seconds(words)
    text = raw[at:].rstrip()
    if (together := _TOGETHER.match(text)) is not None:
        text = f"{together['name']}: {text[together.end() :]}"
    if not level and (inner := _INNER_LEVEL.search(raw[: at + 80])) is not None:
        level = _LEVELS[next(word for word in inner.groups() if word).lower()]
    if rank < 0 and (named := _INNER_RANK.search(raw[:400])) is not None:
        rank = int(next(word for word in named.groups() if word))
    line = Line(text, raw, rank, level, kernel or program == "kernel", program, time, clock, uptime)
    return _unwrapped(line, depth) if text.startswith('{"') and text.endswith("}") and depth < 2 else line


def _next_prefix(raw: str, at: int, used: set[str], *, ranked: bool) -> tuple[str, int, dict[str, str]] | None:
    """What the next prefix is, where it ends, and what it says."""
    for kind, pattern in _PREFIXES:
        if kind in used and kind in ("program", "level", "host"):
            continue
        if kind == "host" and not used & {"time", "kernel"}:
            continue  # a word before a colon is a host only behind a time
        if at and kind == "rank" and ranked:
            continue
        found = pattern.match(raw, at)
        if found is not None and found.end() > at:
            return kind, found.end(), found.groupdict()
    return None


def _unwrapped(line: Line, depth: int) -> Line:
    """The message in a line of JSON as docker, fluentd, journald and structured loggers write it; else the line itself."""
    try:
        said = msgspec.json.decode(line.text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return line
    if is_sample(said):
        return msgspec.structs.replace(line, data=True)
    message = next((said[key] for key in _MESSAGES if isinstance(said.get(key), str)), None)
    if message is None:
        return line
    trace = next((said[key] for key in _EXCEPTIONS if isinstance(said.get(key), str) and said[key].strip()), "")
    # of several lines the last one says what it is about: that of a traceback
    last = next((part for part in reversed((trace or message).splitlines()) if part.strip()), "")
    inner = _take_apart(_visible(last), depth + 1)
    time, clock = (inner.time, inner.clock) if inner.time >= 0 else _stamp(said)
    kernel = inner.kernel or line.kernel or said.get("_TRANSPORT") == "kernel"
    return Line(
        inner.text,
        line.raw,
        next((rank for rank in (inner.rank, _whole(said, _SAID_RANKS), line.rank) if rank >= 0), -1),
        inner.level or _said_level(said) or line.level,
        kernel,
        inner.program or line.program,
        *((time, clock) if time >= 0 else (line.time, line.clock)),
        inner.uptime if inner.uptime >= 0 else line.uptime,
    )


def _said_level(said: dict[str, Any]) -> str:
    named = next((said[key] for key in _SAID_LEVELS if isinstance(said.get(key), str)), "")
    priority = str(said.get("PRIORITY", ""))
    return _LEVELS.get(named.lower(), "") or (_PRIORITIES[int(priority)] if re.fullmatch("[0-7]", priority) else "")


def _whole(said: dict[str, Any], keys: tuple[str, ...]) -> int:
    found = next((said[key] for key in keys if str(said.get(key, "")).isdecimal()), -1)
    return min(int(found), 999_999)


def _stamp(said: dict[str, Any]) -> tuple[float, str]:
    """A time in JSON: text, or a number of seconds, milliseconds, microseconds or nanoseconds."""
    given = next((said[key] for key in _STAMPS if isinstance(said.get(key), str | int | float)), "")
    if isinstance(given, str) and not re.fullmatch(r"\d{9,20}(?:\.\d{1,9})?", given):
        line = _take_apart(given + " ", depth=9)
        return line.time, line.clock
    number = float(given)
    while number > 1e11:
        number /= 1e3
    return (number, _FULL) if number > 1e8 else (-1.0, "")


def _seconds(words: dict[str, str]) -> tuple[float, str]:
    """Seconds, and what they leave open: a date without a year or a zone compares only with others of its kind."""
    month = int(words["mo"]) if words.get("mo") else _MONTHS.get((words.get("mon") or "").lower(), 1)
    year, day = int(words.get("y") or 1970), int(words.get("d") or 1)
    if not (1 <= month <= 12 and 1 <= day <= 31 and 1970 <= year <= 9999):
        return -1.0, ""
    whole = timegm((year, month, day, int(words["h"]), int(words["mi"]), int(words["s"]), 0, 0, 0))
    seconds = whole + float("0" + (words.get("f") or ".0").replace(",", "."))
    zone = (words.get("zone") or "").strip()
    if zone and words.get("y"):
        return max(seconds - _offset(zone), 0.0), _FULL
    return seconds, _NO_ZONE if words.get("y") else _NO_YEAR if words.get("d") else _NO_DATE


def _offset(zone: str) -> float:
    if zone in ("Z", "UTC"):
        return 0.0
    digits = zone[1:].replace(":", "")
    return (int(digits[:2]) * 3600 + int(digits[2:]) * 60) * (-1 if zone[0] == "-" else 1)
