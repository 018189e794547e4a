"""Turns log lines into faults: all patterns of the catalogue at once, at more than a hundred megabytes a second.

Every pattern has words that must be in its lines (`faults.anchors`). One automaton looks for all of these words; only a
line that has one is looked at closer. Patterns whose words are in every healthy log ("loss", "exit") are part of the
automaton themselves. All of it is RE2's: linear in the length of the input, whatever the input and the pattern.
Called by `detect.logs`, `detect.monitor` and `diagnose.classify`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence

import re2

from rerail.errors import ConfigError
from rerail.faults.anchors import MIN_LENGTH, compiled, is_certain, is_telling
from rerail.faults.catalog import Fault
from rerail.flow import Role

MAX_LINE = 8192
"""Bytes of a line that are looked at, around the word that was found."""
SHARED = 1024
"""Bytes that two looks at a longer line have in common: what lies across the cut is seen by one of them."""
MEMORY = 256 << 20
"""The most that the automaton may grow to; a few megabytes are usual."""
NEWLINE = 10
KEPT = 4096
"""Lines whose faults are remembered: the same ones come again and again."""
_BEGINNING = r"""(?:^|[\s:;|>\])}"])"""
_END = r"""(?:$|[\s"\\])"""
"""Where a message may begin and end for the automaton, which sees lines with their prefixes, perhaps wrapped in JSON."""
_WRAPPED = {'"': r'\\?"', "<": r"(?:<|\\u003c)", ">": r"(?:>|\\u003e)", "&": r"(?:&|\\u0026)"}
"""How JSON writes what a pattern asks for."""
_CONTROLS = re.compile(rb"\x1b(?:\[[0-9;:?<=>]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[()][0-9A-Za-z]|[=>78])")
"""Colours and other orders to a terminal."""


class Matcher:
    """The text side of a catalogue."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(fault for fault in faults if fault.pattern)
        self._by_head: dict[str, list[tuple[str, list[int]]]] = {}
        words: dict[str, list[int]] = {}
        whole: dict[str, None] = {}
        for index, fault in enumerate(self.faults):
            if not is_certain(fault.words):
                raise ConfigError(
                    f"fault {fault.code} ({fault.origin}): its pattern has no fixed word of {MIN_LENGTH} or more "
                    "characters that every match must contain; add one"
                )
            for word in fault.words[0]:
                words.setdefault(word, []).append(index)
            if is_telling(fault.words):
                whole.update(dict.fromkeys(f"(?i:{re2.escape(word)})" for word in fault.words[0]))
            else:
                whole[f"(?m:{unanchored(fault.pattern)})"] = None
        for word, users in words.items():
            self._by_head.setdefault(word[:MIN_LENGTH], []).append((word, users))
        options = re2.Options()
        options.max_mem, options.never_capture = MEMORY, True
        options.never_nl = True  # what begins in one line ends there, or a flood of lines would be read again and again
        self._any = re2.compile("|".join(whole or ["\x00never"]).encode(), options)
        self.match = functools.lru_cache(KEPT)(self._match)

    def spans(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Where in `data` lines begin and end that may show something, each cut to MAX_LINE around what was found.

        `data` is as `plain` makes it. A carriage return ends a line, too: progress bars use it.
        """
        if b"\r" in data:
            data = data.replace(b"\r", b"\n")
        at, half = 0, MAX_LINE // 2
        while (found := self._any.search(data, at)) is not None:
            at = found.start()
            if data[at] == NEWLINE:  # a pattern may begin with white space
                at += 1
            start = max(data.rfind(b"\n", max(0, at - half), at) + 1, at - half, 0)
            end = data.find(b"\n", at, at + half)
            if end >= 0:
                at = end + 1
            else:
                end = min(len(data), at + half)
                at = end if end == len(data) else end - SHARED
            yield start, end

    def _match(self, line: str) -> tuple[Fault, ...]:
        """Faults that this line (without its prefix) shows; a benign one hides all others, a special one the general ones."""
        lower, heads = line.lower().replace("ſ", "s"), self._by_head
        candidates: set[int] = set()
        for at in range(len(lower) - MIN_LENGTH + 1):
            for word, users in heads.get(lower[at : at + MIN_LENGTH], ()):
                if lower.startswith(word, at):
                    candidates.update(users)
        found = tuple(
            fault
            for fault in (self.faults[index] for index in sorted(candidates))
            if all(any(word in lower for word in group) for group in fault.words[1:]) and fits(fault, line)
        )
        benign = tuple(fault for fault in found if fault.role is Role.BENIGN)[:1]
        return benign or tuple(fault for fault in found if not fault.general) or found


def plain(data: bytes) -> bytes:
    """The same lines as patterns expect them: valid UTF-8, without colours. A cut character stays a character."""
    if b"\x1b" in data:
        data = _CONTROLS.sub(b"", data)
    if data.isascii():
        return data
    return data.decode("utf-8", "replace").encode()


def unanchored(pattern: str) -> str:
    """The pattern for lines that still have their prefix: where it asks for the beginning, a likely one will do."""
    result, at = [], 0
    while at < len(pattern):
        if pattern[at] == "[":
            end = _end_of_class(pattern, at)
            one = pattern[at:end]
            result.append(r"\\?" + one if '"' in one else one)
        elif pattern[at] == "\\":
            end = at + 2
            result.append({r"\A": _BEGINNING, r"\z": _END}.get(pattern[at:end]) or _wrapped(pattern[at:end]))
        elif pattern.startswith("(?P<", at):
            end = pattern.find(">", at) + 1
            result.append(pattern[at:end])
        else:
            end = at + 1
            result.append({"^": _BEGINNING, "$": _END}.get(pattern[at]) or _wrapped(pattern[at]))
        at = end
    return "".join(result)


def _wrapped(char: str) -> str:
    return _WRAPPED.get(char.removeprefix("\\"), char)


def _end_of_class(pattern: str, at: int) -> int:
    """Behind the `]` of the class that begins at `at`; one that comes first is part of it."""
    at += 2 if pattern.startswith("[^", at) else 1
    first = at
    while at < len(pattern) and (pattern[at] != "]" or at == first):
        if pattern.startswith("[:", at) and (end := pattern.find(":]", at)) > 0:
            at = end + 2
        else:
            at += 2 if pattern[at] == "\\" else 1
    return at + 1


def fits(fault: Fault, line: str) -> bool:
    """Whether the pattern matches the line and the exception does not."""
    if not compiled(fault.pattern).search(line):
        return False
    return not fault.unless or not compiled(fault.unless).search(line)
