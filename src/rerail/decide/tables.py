"""Reads rules from the tables of a settings file: turns `[[policy]]` and `[[escalation]]` rows into structs, or into an error. Pure.

An error names the file, the number of the rule, and what was probably meant. Called by `decide.policy` and `decide.escalation`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from rerail.errors import ConfigError
from rerail.wording import guess, mistyped


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What every rule has."""

    id: str = ""
    """Its name in reports; `policy 1` and so on when not given."""
    note: str = ""
    """Shown where the rule is."""


R = TypeVar("R", bound=Row)


class Shape(NamedTuple):
    """What rows of one kind of table may hold."""

    name: str
    """Of the table."""
    lists: Collection[str]
    """Keys that hold several words; one alone may stand without brackets."""
    choices: Mapping[str, Sequence[str]]
    """Keys whose words are known."""
    wild: Collection[str] = ()
    """Those of them that take wildcards, too."""


def rules_in(
    tables: Sequence[Mapping[str, Any]], kind: type[R], shape: Shape, origin: str, finish: Callable[[R, str], R]
) -> tuple[R, ...]:
    """All rules, each under a name of its own. `finish` checks what the shape cannot, and completes the rule.

    ConfigError with a line for each rule that cannot be read.
    """
    found: list[R] = []
    wrong: list[str] = []
    for number, table in enumerate(tables, 1):
        name = f"{shape.name} {number}"
        where = f"{origin}, {name}"
        try:
            rule = finish(_converted(table, kind, shape, where, name), where)
        except ConfigError as error:
            wrong.append(str(error))
            continue
        if any(rule.id == other.id for other in found):
            wrong.append(f"{where}: another rule is called {rule.id!r}, too; give it an id of its own")
        found.append(rule)
    if wrong:
        raise ConfigError("\n".join(wrong))
    return tuple(found)


def _converted(table: Mapping[str, Any], kind: type[R], shape: Shape, where: str, name: str) -> R:
    fields = [field.encode_name for field in msgspec.structs.fields(kind)]
    for key in table:
        if key not in fields:
            raise ConfigError(f"{where}: there is no key {key!r}{guess(key, fields) or there_are(fields)}")
    row = {key: [value] if key in shape.lists and isinstance(value, str) else value for key, value in table.items()}
    for key in shape.lists:
        if key in row and not isinstance(row[key], list):
            raise ConfigError(f"{where}: {key}: a word in quotes or a list of words is expected here, not {row[key]}")
        if row.get(key) == []:
            raise ConfigError(f"{where}: {key} is empty, which would mean any; name some, or leave it out")
    for key, known in shape.choices.items():
        given = row.get(key, [])
        for word in given if isinstance(given, list) else [given]:
            wild = key in shape.wild and isinstance(word, str) and bool(fnmatch.filter(known, word))
            if word not in known and not wild:
                raise ConfigError(f"{where}: {key} {word!r} is not one of {' '.join(known)}{guess(str(word), known)}")
    try:
        return msgspec.convert({"id": name, **row}, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {mistyped(error)}") from error


def fit(*given: tuple[Sequence[str], str]) -> bool:
    """Whether each word is meant by one of its wildcards, where there are any."""
    return all(not globs or any(fnmatch.fnmatchcase(word, glob) for glob in globs) for globs, word in given)


def there_are(known: Collection[str]) -> str:
    """For the end of a message."""
    return f" (there are: {' '.join(known)})"
