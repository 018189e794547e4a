"""The fault catalogue: turns `faults/*.toml` into typed entries. What a fault looks like and what it means is data.

Read by `faults.matcher` (log lines), `detect.judge` (readings) and `diagnose.classify` (rerail's own signals).
"""

from __future__ import annotations

import fnmatch
import os
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from rerail.errors import ConfigError
from rerail.faults.anchors import Words, compiled, words_of
from rerail.flow import Handling, Role, Severity
from rerail.wording import guess

CLASSES = [
    "gpu",
    "npu",
    "link",
    "nic",
    "pcie",
    "cpu",
    "memory",
    "storage",
    "power",
    "node",
    "collective",
    "framework",
    "programming",
    "os",
    "process",
    "scheduler",
    "data",
    "checkpoint",
    "filesystem",
    "numerics",
    "rerail",
]
SCOPES = ("process", "device", "link", "node", "job")
PLACES = ("kernel", "script", "fabric", "vendor", "bmc", "scheduler", "reading", "exit", "test", "notice")
_CHOICES: dict[str, type[Role] | type[Severity] | type[Handling]] = {
    "role": Role,
    "severity": Severity,
    "action": Handling,
    "then": Handling,
}

Payload = Mapping[str, str | int | float | bool]
Value = int | float | str


class Condition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """When a reading is a fault: exactly one comparison, and how long it has to hold."""

    name: str
    above: float | None = None
    below: float | None = None
    is_: Value | None = msgspec.field(default=None, name="is")
    is_not: Value | None = None
    rises: float | None = None
    """By at least this much within `within_s`."""
    within_s: float = 3600.0
    for_s: float = 0.0


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A sighting that is not a log line: successive values of a reading, or a signal of rerail's own."""

    values: tuple[Value, ...] = ()
    source: str = ""
    payload: dict[str, str | int | float | bool] = {}


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One kind of fault: how it is seen, what it means, what to do."""

    code: str
    """`area.name`, stable for good: reports and rules refer to it."""
    title: str
    kind: str = msgspec.field(name="class")
    hardware: bool = False
    scope: str = "process"
    role: Role = Role.ROOT
    severity: Severity = Severity.ERROR
    action: Handling = Handling.RESTART_PROCESS
    then: Handling | None = None
    """When it comes again."""
    seen: tuple[str, ...] = ()
    pattern: str = ""
    """RE2, searched in one log line without its prefix."""
    general: bool = False
    """Gives way to any other fault that the same line shows: "some exception", "some CUDA error"."""
    unless: str = ""
    """RE2; a line that matches it is not this fault."""
    reading: Condition | None = None
    caused_by: tuple[str, ...] = ()
    """Globs of codes: when one of them is seen too, this is an echo of it."""
    clears: tuple[str, ...] = ()
    times: int = 1
    """Only a fault when seen this often within `within_s`."""
    within_s: float = 0.0
    sources: tuple[str, ...] = ()
    """Signals of rerail's own that show it: `step.hang`, `agent.lost`."""
    signals: tuple[str, ...] = ()
    """Unix signals a process may have ended by; empty: any end."""
    raised: bool = False
    """Only where an exception is known."""
    states: tuple[str, ...] = ()
    """Which of several things the source tells: the process state of a hang, the kind of a training fault."""
    transient: bool | None = None
    """Whether the same work may well succeed when done again; by default what `action` says."""
    message: str = ""
    """One line for people when it is seen live; {rank}, {node}, {signal}, {exit_code}, {exception}, {message}, {stalled_s} are filled in."""
    advice: str = ""
    references: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    """Ids of the same fault in other catalogues."""
    samples: tuple[str | Sample, ...] = ()
    near_misses: tuple[str | Sample, ...] = ()
    origin: str = ""
    """The file it comes from."""
    words: Words = ()
    """What must be in a line that `pattern` matches; made from it."""

    @property
    def may_pass(self) -> bool:
        """Whether the same work may well succeed when done again."""
        return self.transient if self.transient is not None else self.action is not Handling.STOP_JOB

    @property
    def matters(self) -> bool:
        """Whether it is worth an alarm when seen alone."""
        return self.role in (Role.ROOT, Role.SYMPTOM)

    @property
    def serious(self) -> bool:
        return self.severity in (Severity.ERROR, Severity.CRITICAL)

    def is_caused_by(self, code: str) -> bool:
        return code != self.code and any(fnmatch.fnmatchcase(code, glob) for glob in self.caused_by)


_faults = msgspec.msgpack.Decoder(list[Fault])


_FIELDS = frozenset(field.encode_name for field in msgspec.structs.fields(Fault))


class Catalog:
    """All faults."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        self._by_code = {fault.code: fault for fault in faults}
        # several entries may stand for what others call one fault: the one of the same name, else the best described one
        known = sorted(faults, key=lambda fault: len(fault.samples) if fault.matters else 0)
        self._by_alias = {alias.upper(): fault for fault in known for alias in fault.aliases}
        for fault in faults:
            self._by_alias |= {a.upper(): fault for a in fault.aliases if a.lower().replace("-", ".") == fault.code}

    def get(self, code: str) -> Fault | None:
        return self._by_code.get(code)

    @property
    def unknown(self) -> Fault:
        """What a signal shows that nothing else fits."""
        return self._by_code["unknown"]

    def find(self, word: str) -> Fault | None:
        """By code, by what another catalogue calls it, or by the vendor's bare id (80E01801) where only one has it."""
        found = self._by_code.get(word.lower()) or self._by_alias.get(word.upper())
        if found is not None or not any(letter.isdigit() for letter in word):
            return found
        bare = [fault for fault in self.faults if fault.code.rpartition(".")[2] == word.lower()]
        return bare[0] if len(bare) == 1 else None

    def with_text(self) -> list[Fault]:
        return [fault for fault in self.faults if fault.pattern]

    def with_readings(self) -> list[Fault]:
        return [fault for fault in self.faults if fault.reading is not None]


def load_catalog(extra: Iterable[Path] = ()) -> Catalog:
    """The catalogue shipped with rerail, and the user's own files; a code given again replaces the shipped entry."""
    faults, added = {fault.code: fault for fault in shipped()}, list[Fault]()
    for path in extra:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"fault file {path} cannot be read: {error}") from error
        own = parse(text, path.name)
        for fault in own:
            _try(fault)
        faults |= {fault.code: fault for fault in own}
        added += own
    for fault, text in unknown_causes(added, faults):
        raise ConfigError(f"fault catalogue {fault.origin}, entry {fault.code}: {text}")
    return Catalog(tuple(faults.values()))


def _try(fault: Fault) -> None:
    """A word that nobody knows and a pattern that does not work are told now, not when a line has its words."""
    for text in unknown_words(fault):
        raise ConfigError(f"fault catalogue {fault.origin}, entry {fault.code}: {text}")
    try:
        compiled(fault.pattern)
        compiled(fault.unless)
    except ConfigError as error:
        raise ConfigError(f"fault catalogue {fault.origin}, entry {fault.code}: {error}") from error


def unknown_words(fault: Fault) -> list[str]:
    """What is wrong with its class, scope and places, as sentences."""
    given = [("class", fault.kind, CLASSES), ("scope", fault.scope, SCOPES)]
    given += [("seen", place, PLACES) for place in fault.seen]
    return [_choice(name, word, known) for name, word, known in given if word not in known]


def unknown_causes(faults: Iterable[Fault], codes: Collection[str]) -> list[tuple[Fault, str]]:
    """Entries that name causes or ends that do not exist, with a sentence about each, if `codes` are all there are."""
    return [
        (fault, f"{name} {glob!r} names no fault that is known{guess(glob, codes) or ' (rerail faults list)'}")
        for fault in faults
        for name, globs in (("caused_by", fault.caused_by), ("clears", fault.clears))
        for glob in globs
        if glob not in codes and not fnmatch.filter(codes, glob)
    ]


def _choice(name: str, word: object, known: Iterable[str]) -> str:
    return f"{name} {word!r} is not one of {' '.join(known)}{guess(str(word), known)}"


def shipped() -> list[Fault]:
    """All entries of the shipped files. Parsing thousands of them takes half a second, so the result is kept for the next process."""
    files = [file for file in resources.files("rerail.faults").iterdir() if file.name.endswith(".toml")]
    texts = {file.name: file.read_bytes() for file in sorted(files, key=lambda file: file.name)}
    digest = xxhash.xxh3_128(_FORMAT)
    for name, text in texts.items():
        digest.update(name.encode() + text)
    kept = _cache_folder() / f"faults-{digest.hexdigest()}.msgpack"
    try:
        return _faults.decode(kept.read_bytes())
    except (OSError, msgspec.MsgspecError):
        pass
    faults = [fault for name, text in texts.items() for fault in parse(text.decode(), name)]
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        scratch = kept.with_suffix(f".{os.getpid()}")
        scratch.write_bytes(msgspec.msgpack.encode(faults))
        scratch.replace(kept)
        for old in kept.parent.glob("faults-*.msgpack"):
            if old != kept:
                old.unlink(missing_ok=True)
    except OSError:
        pass  # the next process parses again
    return faults


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rerail"


class _File(msgspec.Struct, forbid_unknown_fields=True):
    fault: list[dict[str, Any]] = []
    family: dict[str, dict[str, Any]] = {}


def parse(text: str, origin: str) -> list[Fault]:
    """Entries of one TOML file; an unknown field or a wrong type is an error that names file and entry."""
    try:
        file = msgspec.convert(tomllib.loads(text), _File)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"fault catalogue {origin}: {error}") from error
    return [_entry(row, file.family, origin) for row in file.fault]


def _entry(row: dict[str, Any], families: dict[str, dict[str, Any]], origin: str) -> Fault:
    where = f"fault catalogue {origin}, entry {row.get('code', '?')}"
    family = row.pop("family", None)
    if family is not None:
        if family not in families:
            raise ConfigError(f"{where}: there is no family {family!r} in this file")
        row = _of_family(row, dict(families[family]))
    for name, known in _CHOICES.items():
        if isinstance(row.get(name), str) and row[name] not in list(known):
            raise ConfigError(f"{where}: {_choice(name, row[name], list(known))}")
    for name in row:
        if name not in _FIELDS:
            raise ConfigError(f"{where}: there is no field {name!r}{guess(name, _FIELDS)}")
    try:
        return msgspec.convert({**row, "origin": origin, "words": words_of(row.get("pattern", ""))}, Fault)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _of_family(row: dict[str, Any], family: dict[str, Any]) -> dict[str, Any]:
    """A row of a table: its family's fields, with `{name}` filled in from the row's `fill`."""
    fill = {**{key: str(value) for key, value in row.pop("fill", {}).items()}, "title": str(row.get("title", ""))}
    sample, near_miss = family.pop("sample", ""), family.pop("near_miss", "")
    if sample:
        family["samples"] = [sample]
    if near_miss:
        family["near_misses"] = [near_miss]
    filled = {key: _fill(value, fill, escape=key in ("pattern", "unless")) for key, value in family.items()}
    if sample and any(isinstance(one, dict) for one in row.get("samples", ())):
        row = {**row, "samples": [*filled["samples"], *row["samples"]]}
    return {**filled, **row}


def _fill(value: Any, words: Mapping[str, str], *, escape: bool) -> Any:
    if isinstance(value, str):
        for name, word in words.items():
            value = value.replace(f"{{{name}}}", _escaped(word) if escape else word)
        return value
    if isinstance(value, list):
        return [_fill(one, words, escape=escape) for one in value]
    if isinstance(value, dict):
        return {key: _fill(one, words, escape=escape) for key, one in value.items()}
    return value


def _escaped(word: str) -> str:
    return "".join(char if char.isalnum() or char in "_ " else f"\\{char}" for char in word)


_FORMAT = b"6"
"""Raised when `Fault` or what `faults.anchors` makes of a pattern changes, so that what an older rerail has kept is not taken for today's."""
