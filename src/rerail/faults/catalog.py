"""The fault catalogue: turns `faults/*.toml` into typed entries and finds the one a signal shows.

Read by `detect.classify` for every signal. What a fault looks like is data;
this module only knows how to compare. Entries are tried in the order of the file and the first that fits wins, so
special ones stand before general ones.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib import resources

import msgspec

from rerail.errors import ConfigError
from rerail.flow import Role, Severity, Signal

Payload = Mapping[str, str | int | float | bool]


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A real sighting of the fault; the catalogue's own test vector."""

    source: str
    payload: dict[str, str | int | float | bool] = {}


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of fault: how it is seen and what it means."""

    code: str
    """`area.name`, stable for good: reports and rules refer to it."""
    title: str
    kind: str
    """`process`, `programming`, `memory`, `data`, `checkpoint`, `collective`, `network`, `storage`, `node`, `rerail`."""
    sources: tuple[str, ...]
    """Detectors that can show it."""
    signals: tuple[str, ...] = ()
    """Signal names it may end with; empty: any end."""
    exit_codes: tuple[int, ...] = ()
    exceptions: tuple[str, ...] = ()
    """Exception type names, without module; "*" is any exception."""
    states: tuple[str, ...] = ()
    """Process state letters of a hang."""
    pattern: str = ""
    """Regular expression searched in the exception's text and the evidence."""
    role: Role = Role.ROOT
    severity: Severity = Severity.FATAL
    transient: bool = True
    message: str
    """One line for people; {rank}, {node}, {signal}, {exit_code}, {exception}, {message}, {stalled_s} are filled in."""
    advice: str = ""
    samples: tuple[Sample, ...] = ()

    def fits(self, signal: Signal) -> bool:
        """Whether the signal shows this fault: everything the entry asks for must hold."""
        payload = signal.payload
        if signal.source not in self.sources:
            return False
        if self.signals and payload.get("signal") not in self.signals:
            return False
        if self.exit_codes and payload.get("exit_code") not in self.exit_codes:
            return False
        if self.states and str(payload.get("state", "")) not in self.states:
            return False
        name = str(payload.get("exception", "")).rpartition(".")[2]
        if self.exceptions and name not in self.exceptions and not (name and "*" in self.exceptions):
            return False
        return not self.pattern or bool(_compiled(self.pattern).search(searchable(payload)))


class Catalog:
    """All faults in order of precedence."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self.faults = faults
        self._by_code = {fault.code: fault for fault in faults}

    def match(self, signal: Signal) -> Fault:
        """The first fault that fits. The last entry of the catalogue fits everything, so there is always one."""
        return next((fault for fault in self.faults if fault.fits(signal)), self.faults[-1])

    def get(self, code: str) -> Fault | None:
        return self._by_code.get(code)


def searchable(payload: Payload) -> str:
    """The text patterns are searched in: the exception if there is one, else the last lines the process wrote.

    Not both: the last lines may speak of faults long repaired, the exception speaks of this one.
    """
    exception, message = str(payload.get("exception", "")), str(payload.get("message", ""))
    return f"{exception}: {message}" if exception or message else str(payload.get("evidence", ""))


def load_catalog() -> Catalog:
    """The catalogue shipped with rerail: every TOML file beside this module."""
    faults: list[Fault] = []
    for file in sorted(resources.files("rerail.faults").iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".toml"):
            faults.extend(parse(file.read_text(encoding="utf-8"), file.name))
    return Catalog(tuple(faults))


def parse(text: str, origin: str) -> list[Fault]:
    """Entries of one TOML file; an unknown field or a bad pattern is an error that names the file."""
    try:
        entries = msgspec.toml.decode(text, type=dict[str, list[Fault]])["fault"]
        for entry in entries:
            _compiled(entry.pattern)
    except (msgspec.MsgspecError, KeyError, re.error) as error:
        raise ConfigError(f"fault catalogue {origin}: {error}") from error
    return entries


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.MULTILINE)
