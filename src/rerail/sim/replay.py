"""Faults that have happened: turns a trace, or the journal of a rerail job, into faults of the simulated cluster.

A trace is CSV with a header, or JSON lines, with the fields `at`, `node`, `device` and `code`. `at` is seconds since the job began, or
a date and time (then the first row is the beginning). `node` is a number or a name, `device` a number, `code` one of the catalogue.
Called by `cli.simulate`.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rerail.errors import JournalError, UsageError
from rerail.flow import Diagnosis, Severity
from rerail.planner.rates import DAY_S
from rerail.planner.units import as_float, duration, shown
from rerail.report.accounts import accounts
from rerail.runtime.journal import FILE_NAME, Journal
from rerail.sim.faults import Fault
from rerail.sim.kinds import classifier, shape_of
from rerail.sim.scenario import Scenario, book
from rerail.wording import counted

FIELDS = ("at", "node", "device", "code")
NO_FAULTS = ("node.returned", "controller.lost")
"""Diagnoses in a journal that nothing broke for."""
SQLITE = b"SQLite format 3\x00"


class Row(NamedTuple):
    """One line of a trace, with where it stands."""

    where: str
    values: Mapping[str, Any]


def faults_of(path: Path, scenario: Scenario) -> list[Fault]:
    """All faults of a trace, in order of time; whatever is wrong is said with its line, field and value."""
    rows = list(_rows(path, scenario))
    if not rows:
        raise UsageError(f"--trace {path} holds no faults", hint=f"each line has {', '.join(FIELDS)}")
    begin = _begin(rows)
    nodes: dict[str, int] = {}
    found = [_fault(row, begin, nodes, scenario) for row in rows]
    ordered = sorted(found, key=lambda fault: fault.at)
    return [msgspec.structs.replace(fault, number=number) for number, fault in enumerate(ordered)]


# --- reading ---


def _rows(path: Path, scenario: Scenario) -> Iterator[Row]:
    if path.is_dir():
        path = path / FILE_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise UsageError(f"--trace {path}: no such file") from error
    except OSError as error:
        raise UsageError(f"--trace {path} cannot be read: {error.strerror}") from error
    if data.startswith(SQLITE):
        return _of_journal(path, scenario)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--trace {path} is neither text nor a journal (byte {error.start} is not UTF-8)",
            hint=f"a trace is CSV or JSON lines; a journal is the {FILE_NAME} of a run directory",
        ) from error
    return _of_json(path, text) if text.lstrip().startswith("{") else _of_csv(path, text)


def _of_csv(path: Path, text: str) -> Iterator[Row]:
    reader = csv.reader(io.StringIO(text))
    try:
        header = [name.strip() for name in next(reader, [])]
    except csv.Error as error:
        raise UsageError(f"--trace {path}, line 1 is not CSV: {error}") from error
    missing = [name for name in FIELDS if name not in header]
    if missing:
        raise UsageError(
            f"--trace {path}, line 1: column {missing[0]!r} is missing (there are: {', '.join(header)[:200] or 'none'})",
            hint=f"the header of a trace is {','.join(FIELDS)}",
        )
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise UsageError(f"--trace {path}, line {reader.line_num} is not CSV: {error}") from error
        where = f"--trace {path}, line {reader.line_num}"
        if cells is None:
            return
        if cells and len(cells) != len(header):
            why = "is the file cut off?" if len(cells) < len(header) else "a field with a comma in it stands in quotes"
            raise UsageError(f"{where} has {len(cells)} fields, the header {len(header)}", hint=why)
        if cells:
            yield Row(where, dict(zip(header, cells, strict=True)))


def _of_json(path: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.splitlines(), 1):
        where = f"--trace {path}, line {number}"
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"{where} is not JSON: {error.msg}", hint="is the file cut off?") from error
        except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
            raise UsageError(f"{where} cannot be read: {error}", hint=f"each line has {', '.join(FIELDS)}") from error
        missing = [name for name in FIELDS if name not in values] if isinstance(values, dict) else FIELDS
        if missing:
            raise UsageError(f"{where}: field {missing[0]!r} is missing", hint=f"each line has {', '.join(FIELDS)}")
        yield Row(where, values)


def _of_journal(path: Path, scenario: Scenario) -> Iterator[Row]:
    with _opened(path) as journal:
        records, whole = journal.records(), accounts(journal, path.parent.name)
    begin = min((record.at for record in records), default=0.0)
    begin = min(begin, whole.begin) if whole is not None else begin
    for number, record in enumerate(one for one in records if isinstance(one, Diagnosis)):
        if record.code not in NO_FAULTS:
            device = max(record.ranks[0], 0) % scenario.per_node if record.ranks else 0
            values = {"at": record.at - begin, "node": record.node, "device": device, "code": record.code}
            yield Row(f"--trace {path}, diagnosis {number + 1}", values)


def is_journal(path: Path) -> bool:
    """Whether it is the journal of a job or its run directory, and no text."""
    path = path / FILE_NAME if path.is_dir() else path
    try:
        with path.open("rb") as file:
            return file.read(len(SQLITE)) == SQLITE
    except OSError:
        return False


def cluster_of(path: Path) -> dict[str, Any]:
    """What the journal of a job says of its size and length, by key of a Scenario."""
    path = path / FILE_NAME if path.is_dir() else path
    with _opened(path) as journal:
        whole = accounts(journal, path.parent.name)
        nodes = Counter(str(place[0]) for place in journal.state().get("placement") or ())
        told = {one.node for one in journal.records(kind="diagnosis") if isinstance(one, Diagnosis) and one.node}
    found: dict[str, Any] = {}
    if nodes:
        per_node = max(nodes.values())
        found |= {"gpus": len(nodes) * per_node, "per_node": per_node, "spare_nodes": len(told - set(nodes))}
    if whole is not None and whole.wall_s > 0:
        found["days"] = (whole.wall_s + 1.0) / DAY_S  # a fault of the last moment is within it
        found |= {"step_s": whole.step_s} if whole.step_s else {}
    return found


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Journal]:
    """For reading; what is damaged or foreign is said by the name of the option."""
    try:
        journal = Journal(path, read_only=True)
        try:
            yield journal
        finally:
            journal.close()
    except JournalError as error:
        hint = f"a journal is the {FILE_NAME} in the run directory of a job"
        raise UsageError(f"--trace {str(error).splitlines()[0]}", hint=hint) from error


def unfelt(faults: Sequence[Fault]) -> list[str]:
    """Which faults of a trace interrupt nothing, so that no policy loses anything by them."""
    known = classifier().catalog
    codes = Counter(one.code for one in faults if (entry := known.get(one.code)) and entry.severity in _MILD)
    if not codes:
        return []
    named = ", ".join(f"{count} x {code}" for code, count in codes.most_common(5))
    return [f"{codes.total()} of {counted(len(faults), 'fault')} only slow a job down, which is not simulated: {named}"]


_MILD = (Severity.INFO, Severity.DEGRADED)


# --- one row ---


def _begin(rows: list[Row]) -> datetime.datetime | None:
    """The first date and time; None where seconds are counted."""
    dates = [date for row in rows if (date := _date(row.values["at"])) is not None]
    if dates and len(dates) < len(rows):
        odd = next(row for row in rows if _date(row.values["at"]) is None)
        raise UsageError(
            f"{odd.where}: at is {shown(odd.values['at'])}, but other lines have a date and time",
            hint="use one of the two",
        )
    return min(dates, default=None)


def _date(value: Any) -> datetime.datetime | None:
    if not isinstance(value, str) or "-" not in value[1:]:
        return None
    try:
        found = datetime.datetime.fromisoformat(value.strip())
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=datetime.UTC)


def _fault(row: Row, begin: datetime.datetime | None, nodes: dict[str, int], scenario: Scenario) -> Fault:
    date = _date(row.values["at"])
    at = (date - begin).total_seconds() if date is not None and begin is not None else _second(row)
    if not 0 <= at < scenario.wall_s:
        raise UsageError(
            f"{row.where}: at is {shown(row.values['at'])}, which is not within the run of {duration(scenario.wall_s)}",
            hint=_fitting(at),
        )
    code = _text(row, "code")
    shape = shape_of(code, f"{row.where}: ")
    means = {"reboot": scenario.reboot_s, "replace": scenario.replace_s, "outage": scenario.outage_s}
    return Fault(
        number=0,
        at=at,
        code=code,
        node=_node(row, nodes, scenario),
        device=_device(row, scenario),
        repair_s=means.get(shape.needs, 0.0),
        **msgspec.structs.asdict(shape),
    )


def _fitting(at: float) -> str:
    """What to do about a fault outside of the run."""
    days, most = at / DAY_S + 1, book().keys["days"].most
    if not at > 0:
        return "use seconds since the job began, 0 or more"
    return f"use --days {days:.0f}" if days <= most else f"at is in seconds, and a run has {most:g} days at most"


def _second(row: Row) -> float:
    try:
        return as_float(row.values["at"])
    except (TypeError, ValueError):
        raise UsageError(
            f"{row.where}: at is {shown(row.values['at'])}",
            hint="it has to be seconds since the job began, or a date and time such as 2026-11-16T08:12:03",
        ) from None


def _text(row: Row, field: str) -> str:
    try:
        return str(row.values[field]).strip()
    except ValueError:  # a number of thousands of digits
        raise UsageError(f"{row.where}: {field} is {shown(row.values[field])}") from None


def _device(row: Row, scenario: Scenario) -> int:
    text = _text(row, "device")
    if not text.isdecimal() or as_float(text) >= scenario.per_node:
        raise UsageError(
            f"{row.where}: device is {shown(text)}, but has to be a number from 0 to {scenario.per_node - 1}",
            hint=f"nodes have {scenario.per_node} devices here (--set per_node=N)",
        )
    return int(text)


def _node(row: Row, nodes: dict[str, int], scenario: Scenario) -> int:
    """Numbers as they are; names in the order in which they come."""
    name, count = _text(row, "node"), scenario.nodes + scenario.spare_nodes
    number = as_float(name) if name.isdecimal() else nodes.setdefault(name, len(nodes))
    if not name or number >= count:
        raise UsageError(
            f"{row.where}: node is {shown(name)}, but the cluster has {count} nodes only, spare ones included",
            hint="use --gpus or --set spare_nodes=N for a larger one",
        )
    return int(number)
