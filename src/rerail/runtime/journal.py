"""The journal: turns records and counters into one SQLite file that outlives the controller, and back.

Written by `runtime.controller` only, one transaction per turn of its loop; read by a new controller that takes over and,
read-only while the job runs, by `cli.report`, `cli.incidents` and `report.summary`.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rerail.errors import JournalError
from rerail.flow import SCHEMA, AnyRecord
from rerail.runtime import samples as table
from rerail.runtime.samples import Mark, Sample

FILE_NAME = "journal.sqlite"
KEPT_SAMPLES = 1000
"""As many are tried again when the disk is full; the rest of that time is not known then."""
_APPLICATION = 0x72726C31
"""Stamped into the file, so that a foreign database is not taken for a journal."""

_TABLES = """
CREATE TABLE records (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    at REAL NOT NULL,
    incident INTEGER NOT NULL,
    cause_id TEXT NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX records_by_incident ON records (incident, seq);
CREATE INDEX records_by_kind ON records (kind, seq);
CREATE TABLE state (key TEXT PRIMARY KEY, value BLOB NOT NULL);
"""

_encode = msgspec.json.encode
_records = msgspec.json.Decoder(AnyRecord)


class Journal:
    """One job's journal. `append` is a single transaction; a crash leaves it whole or without the last turn."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self._backlog: list[tuple[int, AnyRecord]] = []
        self._pending: dict[str, Any] = {}
        self._samples: list[Sample] = []
        self._marks: list[Mark] = []
        try:
            self._db = _open(path, read_only)
            self._check_origin(read_only)
        except sqlite3.Error as error:
            raise JournalError(_advice(path, error)) from error

    def close(self) -> None:
        self._db.close()

    def append(
        self,
        entries: Sequence[tuple[int, AnyRecord]],
        state: Mapping[str, Any] | None = None,
        samples: Sequence[Sample] = (),
        marks: Sequence[Mark] = (),
    ) -> bool:
        """Write (incident number, record) pairs and new values of `state`, all or nothing; then samples and marks.

        A full disk must not end the training it is there to protect: what cannot be written is kept and tried again
        with the next call. False says that this is so.
        """
        self._backlog.extend(entries)
        self._pending.update(state or {})
        self._samples = [*self._samples, *samples][-KEPT_SAMPLES:]
        self._marks.extend(marks)
        if not (self._backlog or self._pending or self._samples or self._marks):
            return True
        rows = [(r.id, _kind(r), r.at, incident, r.cause_id, _encode(r)) for incident, r in self._backlog]
        values = [(key, _encode(value)) for key, value in self._pending.items()]
        try:
            with self._db:
                self._db.executemany(
                    "INSERT OR IGNORE INTO records (id, kind, at, incident, cause_id, body) VALUES (?, ?, ?, ?, ?, ?)",
                    rows,
                )
                self._db.executemany("INSERT OR REPLACE INTO state (key, value) VALUES (?, ?)", values)
        except sqlite3.Error:
            return False
        self._backlog.clear()
        self._pending.clear()
        return self._write_samples()

    def _write_samples(self) -> bool:
        """Apart from the rest: whatever is wrong with a sample, records and state are written."""
        try:
            with self._db:
                table.write(self._db, self._samples, self._marks)
        except (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError):
            pass  # it never could be written: a time that nobody knows
        except sqlite3.Error:
            return False
        self._samples.clear()
        self._marks.clear()
        return True

    def state(self) -> dict[str, Any]:
        """All counters as they were last written."""
        with self._reading():
            rows = self._db.execute("SELECT key, value FROM state").fetchall()
        return {key: msgspec.json.decode(value) for key, value in rows}

    def history(self) -> tuple[list[Sample], list[Mark]]:
        """How the job spent its time, and the moments it began and ended; nothing where an older rerail wrote the journal."""
        with self._reading():
            return table.read(self._db)

    def openings(self) -> dict[int, float]:
        """When the first record of each incident was made."""
        firsts = "SELECT min(seq) FROM records WHERE incident > 0 GROUP BY incident"
        with self._reading():
            return dict(self._db.execute(f"SELECT incident, at FROM records WHERE seq IN ({firsts})").fetchall())

    def ends(self) -> tuple[float, float] | None:
        """When the first and the last record was made; None: there is none."""
        query = "SELECT at FROM records ORDER BY seq {} LIMIT 1"
        with self._reading():
            rows = [self._db.execute(query.format(order)).fetchone() for order in ("ASC", "DESC")]
        return (rows[0][0], rows[1][0]) if rows[0] is not None else None

    def records(self, *, kind: str = "", incident: int = -1) -> list[AnyRecord]:
        """Records in the order they were written: all, or of one kind or incident."""
        query = "SELECT body FROM records WHERE 1"
        wanted: list[str | int] = []
        if kind:
            query, wanted = f"{query} AND kind = ?", [*wanted, kind]
        if incident >= 0:
            query, wanted = f"{query} AND incident = ?", [*wanted, incident]
        with self._reading():
            rows = self._db.execute(f"{query} ORDER BY seq", wanted).fetchall()
            return [_records.decode(body) for (body,) in rows]

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise JournalError(_advice(self.path, error)) from error

    def _check_origin(self, read_only: bool) -> None:
        (application,) = self._db.execute("PRAGMA application_id").fetchone()
        (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables == 0 and application == 0 and not read_only:
            self._db.executescript(
                f"BEGIN; PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {SCHEMA}; {_TABLES} {table.TABLES} COMMIT;"
            )
            return
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if application != _APPLICATION:
            raise JournalError(
                f"{self.path} is not a rerail journal\n  choose another --run-dir, or move the file away"
            )
        if version != SCHEMA:
            raise JournalError(
                f"{self.path} was written by another version of rerail (schema {version}, this one reads {SCHEMA})\n"
                "  choose another --run-dir"
            )
        if not read_only:  # older journals have neither
            self._db.executescript(table.TABLES)


def _open(path: Path, read_only: bool) -> sqlite3.Connection:
    if read_only:
        if not path.is_file():
            raise JournalError(f"{path} does not exist\n  the job never started, or its run directory was removed")
        return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=2.0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JournalError(
            f"run directory {path.parent} cannot be made: {error.strerror}\n  choose another with --run-dir"
        ) from error
    db = sqlite3.connect(path, timeout=2.0)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    return db


def _kind(record: AnyRecord) -> str:
    return type(record).__name__.lower()


def _advice(path: Path, error: Exception) -> str:
    text = str(error)
    if "not a database" in text or "malformed" in text:
        return f"{path} is damaged or not a rerail journal ({text})\n  choose another --run-dir, or move the file away"
    if "unable to open" in text or "readonly" in text:
        return f"journal {path} cannot be written ({text})\n  choose a writable --run-dir"
    return f"journal {path} cannot be used: {text}\n  check the disk, or choose another --run-dir"
