"""Turns a pattern into the words that must be in any line it matches, so that most lines need no pattern at all.

Called by `faults.catalog`, once per pattern. Uses the standard library's parser of regular expressions; of what it does not
understand it asks for less, never for more.
"""

from __future__ import annotations

import functools
import re
import re._constants as sre  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
from typing import Any

import re2

from rerail.errors import ConfigError

MIN_LENGTH = 4
MAX_LENGTH = 32
TELLING = 7
"""Shorter words are in every healthy log, too."""
COMMON = (
    "iteration",
    "training",
    "warning",
    "learning",
    "checkpoint",
    "message",
    "device",
    "process",
    "timeout",
    "connect",
)

Words = tuple[tuple[str, ...], ...]
"""Of each group, one word must be there, in lower case. The first group is the most telling one."""

_NAMED_CLASS = re.compile(r"\[:\^?\w+:\]")
"""`[[:digit:]]` is RE2's; Python reads it as something else."""
_ESCAPED = '"\\<>&'
"""What a line wrapped in JSON writes in another way; a word ends before it."""
_OPTIONS = re2.Options()
_OPTIONS.log_errors = False


def words_of(pattern: str) -> Words:
    """Groups of words, the most telling one first; empty if nothing is certain."""
    try:
        found = _required(parser.parse(_NAMED_CLASS.sub(r"\\w", pattern)))
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"pattern {pattern!r} is not understood: {error}") from error
    ranked = sorted(found, key=_worth, reverse=True)
    return tuple(tuple(sorted(word[:MAX_LENGTH] for word in group)) for group in ranked if all(group))


def is_certain(words: Words) -> bool:
    """Whether every match has a word that is long enough to look for."""
    return bool(words) and all(len(word) >= MIN_LENGTH for word in words[0])


def is_telling(words: Words) -> bool:
    """Whether these words are seldom in a healthy log."""
    return is_certain(words) and all(len(word.strip()) >= TELLING and word.strip() not in COMMON for word in words[0])


def _required(items: Any) -> list[frozenset[str]]:
    """Every item of a sequence must match, so all their groups are required."""
    found: list[frozenset[str]] = []
    run = ""
    for kind, value in items:
        if kind is sre.LITERAL and 32 <= value < 127 and chr(value) not in _ESCAPED:
            run += chr(value).lower()
            continue
        if kind is sre.AT:
            continue  # a boundary takes no character
        if run:
            found.append(frozenset([run]))
        run = ""
        found += _of_item(kind, value)
    return [*found, frozenset([run])] if run else found


def _of_item(kind: Any, value: Any) -> list[frozenset[str]]:
    if kind is sre.SUBPATTERN:
        return _required(value[3])
    if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
        return _required(value[2]) if value[0] >= 1 else []
    if kind is sre.BRANCH:
        best = [max(_required(branch), key=_worth, default=frozenset()) for branch in value[1]]
        return [frozenset().union(*best)] if all(best) else []
    return []


def _worth(words: frozenset[str]) -> tuple[int, int]:
    """Long words are rare; few are better than many."""
    return min((min(len(word), 16) for word in words), default=0), -len(words)


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
