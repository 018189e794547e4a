"""Small words of messages for people: counts, and guesses at what was meant. Called everywhere; imports nothing of rerail."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def counted(number: int, what: str) -> str:
    """`1 fault`, `2 faults`, `20,000 faults`."""
    return f"{number if number < 10_000 else f'{number:,}'} {what}{'' if number == 1 else 's'}"


def guess(word: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` where one of those that are known is much like it, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
