"""Turns log lines into faults: all patterns of the catalogue at once, at more than a hundred megabytes a second.

Every pattern has words that must be in its lines (`faults.anchors`). One automaton looks for all of these words; only a
line that has one is looked at closer. Patterns whose words are in every healthy log ("loss", "exit") are part of the
automaton themselves. All of it is RE2's: linear in the length of the input, whatever the input and the pattern.
Called by `detect.logs`, `detect.monitor` and `diagnose.classify`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import re2

from rerail.errors import ConfigError
from rerail.faults.anchors import MIN_LENGTH, is_certain, is_telling
from rerail.faults.catalog import Fault
from rerail.flow import Role

MAX_LINE = 8192
"""Bytes of a line that are looked at, around the word that was found."""
MEMORY = 256 << 20
"""The most that the automaton may grow to; a few megabytes are usual."""
KEPT = 4096
"""Lines whose faults are remembered: the same ones come again and again."""
NEWLINE = 10
_OPTIONS = re2.Options()
_OPTIONS.log_errors = False
_BEGINNING = r"(?:^|[\s:;|>\])}])"
"""Where a message may begin for the automaton, which sees lines with their prefixes."""


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
        self._any = re2.compile("|".join(whole or ["\x00never"]).encode(), options)
        self.match = functools.lru_cache(KEPT)(self._match)

    def spans(self, data: bytes) -> Iterator[tuple[int, int]]:
        """Where in `data` lines begin and end that may show something, each cut to MAX_LINE around what was found."""
        done = 0
        for found in self._any.finditer(data):
            at, last = found.span()
            # what matched may reach over the end of a line: then each of the lines is looked at
            while at < last:
                if at < done or data[at] == NEWLINE:
                    at += 1
                    continue
                start = max(data.rfind(b"\n", max(done, at - MAX_LINE // 2), at) + 1, done, at - MAX_LINE // 2)
                end = data.find(b"\n", at, at + MAX_LINE // 2)
                if end < 0:
                    end = min(len(data), at + MAX_LINE // 2)
                done = at = end
                yield start, end

    def _match(self, line: str) -> tuple[Fault, ...]:
        """Faults that this line (without its prefix) shows; a benign one hides all others, a special one the general ones."""
        lower, heads = line.lower(), self._by_head
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


def unanchored(pattern: str) -> str:
    """The pattern for lines that still have their prefix: where it asks for the beginning, a likely one will do."""
    result, in_class, at = [], False, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            result.append(pattern[at : at + 2])
            at += 2
            continue
        if char == "[" and not in_class:
            in_class = True
            result.append(char)
            at += 1
            if pattern[at : at + 1] == "^":
                result.append("^")
                at += 1
            if pattern[at : at + 1] == "]":
                result.append("]")
                at += 1
            continue
        if char == "]":
            in_class = False
        result.append(_BEGINNING if char == "^" and not in_class else char)
        at += 1
    return "".join(result)


def fits(fault: Fault, line: str) -> bool:
    """Whether the pattern matches the line and the exception does not."""
    if not compiled(fault.pattern).search(line):
        return False
    return not fault.unless or not compiled(fault.unless).search(line)


@functools.cache
def compiled(pattern: str) -> re2._Regexp[str]:
    """The pattern, ready for use."""
    try:
        return re2.compile(pattern, _OPTIONS)
    except re2.error as error:
        raise ConfigError(f"pattern {pattern!r} is not understood: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    text = error.args[0] if error.args else ""
    return text.decode(errors="replace") if isinstance(text, bytes) else str(text)
