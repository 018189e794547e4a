"""Small words of messages for people: counts, ranks, and guesses at what was meant. Called everywhere; imports nothing of rerail."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence


def counted(number: int, what: str) -> str:
    """`1 fault`, `2 faults`, `20,000 faults`."""
    return f"{number if number < 10_000 else f'{number:,}'} {what}{'' if number == 1 else 's'}"


def ranks(numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1`."""
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


def closest(word: str, known: Iterable[str]) -> str:
    """The one of those that are known that is much like it; empty where none is."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), "")


def guess(word: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` where one of those that are known is much like it, else nothing."""
    close = closest(word, known)
    return f"; did you mean {close}?" if close else ""


_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text in quotes",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
}
_MISTYPED = re.compile(r"^Expected `([^`]+)`, got `([^`]+)`(?: - at `\$\.?([^`]*)`)?$")


def mistyped(error: Exception) -> str:
    """What msgspec says of a value of the wrong type, in words that a person who writes settings knows."""
    found = _MISTYPED.match(str(error))
    if found is None:
        return str(error)
    wanted, given, where = found.groups()
    wanted = " or ".join(_TYPES.get(one.strip(), one.strip()) for one in wanted.split("|"))
    return f"{f'{where}: ' if where else ''}{wanted} is expected here, not {_TYPES.get(given, given)}"
