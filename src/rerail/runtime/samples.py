"""What the journal keeps of a job's whole life besides its incidents: turns samples and marks into rows of two tables, and back.

Called by `runtime.journal`, in its transactions. However long a job lasts there are at most `MOST` samples: when they are more,
each two neighbours become one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from enum import StrEnum

import msgspec

MOST = 10_000
TABLES = """
CREATE TABLE IF NOT EXISTS samples (
    at REAL NOT NULL, span_s REAL NOT NULL, step INTEGER NOT NULL, steps INTEGER NOT NULL, moved REAL NOT NULL, loss REAL,
    data REAL NOT NULL, compute REAL NOT NULL, communication REAL NOT NULL, checkpoint REAL NOT NULL, told INTEGER NOT NULL,
    standbys REAL NOT NULL, spares REAL NOT NULL, joined INTEGER NOT NULL, saves INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS marks (at REAL NOT NULL, kind TEXT NOT NULL, detail TEXT NOT NULL);
"""


class MarkKind(StrEnum):
    """What happens once in the life of a controller."""

    BEGIN = "begin"
    """It starts a job."""
    TAKEOVER = "takeover"
    """It goes on with the job of a controller that was lost."""
    TRAINED = "trained"
    """The first step that was completed under it began."""
    END = "end"
    """The job is over; the detail is its exit code. The agents end their ranks now."""
    LEFT = "left"
    """It leaves in good order, after the last agent. A controller that was killed has no such mark."""


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """One such moment, by the wall clock."""

    at: float
    kind: MarkKind
    detail: str = ""


class Sample(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a stretch of time was used for. The fields are the columns, in this order."""

    at: float
    """Wall clock at its end."""
    span_s: float
    step: int
    """The highest version completed so far; -1: none was told."""
    steps: int
    """By how much it rose. Steps that are computed again do not count."""
    moved: float = 0.0
    """Wall clock when it last rose; 0: it did not."""
    loss: float | None = None
    data: float = 0.0
    """Seconds of a step, as all four: means over `told` steps of the rank that the others waited for."""
    compute: float = 0.0
    communication: float = 0.0
    checkpoint: float = 0.0
    told: int = 0
    standbys: float = 0.0
    """Warm processes without a place."""
    spares: float = 0.0
    """Places for ranks that none has."""
    joined: int = 0
    """Ranks that have called `rerail.join()`; 0 in a script that tells nothing of its steps."""
    saves: int = 0
    """Versions of which a checkpoint was committed."""


def write(db: sqlite3.Connection, samples: Sequence[Sample], marks: Sequence[Mark]) -> None:
    """Add rows; part of the caller's transaction."""
    places = ", ".join("?" for _ in Sample.__struct_fields__)
    db.executemany(f"INSERT INTO samples VALUES ({places})", map(msgspec.structs.astuple, samples))
    db.executemany("INSERT INTO marks VALUES (?, ?, ?)", [(one.at, one.kind.value, one.detail) for one in marks])
    if samples and db.execute("SELECT count(*) FROM samples").fetchone()[0] > MOST:
        _halve(db)


def read(db: sqlite3.Connection) -> tuple[list[Sample], list[Mark]]:
    """All of them in the order they were written; nothing of a journal from before there were any."""
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master WHERE name IN ('samples', 'marks')").fetchone()
    if tables < 2:
        return [], []
    marks = db.execute("SELECT at, kind, detail FROM marks ORDER BY rowid").fetchall()
    return _samples(db), msgspec.convert(marks, list[Mark])


def merged(first: Sample, second: Sample) -> Sample:
    """Two neighbours as one."""
    told, span = first.told + second.told, first.span_s + second.span_s

    def by_steps(name: str) -> float:
        return float(getattr(first, name) * first.told + getattr(second, name) * second.told) / told if told else 0.0

    def by_time(name: str) -> float:
        return (
            float(getattr(first, name) * first.span_s + getattr(second, name) * second.span_s) / span if span else 0.0
        )

    return Sample(
        at=second.at,
        span_s=span,
        step=max(first.step, second.step),
        steps=first.steps + second.steps,
        moved=second.moved or first.moved,
        loss=second.loss if second.loss is not None else first.loss,
        data=by_steps("data"),
        compute=by_steps("compute"),
        communication=by_steps("communication"),
        checkpoint=by_steps("checkpoint"),
        told=told,
        standbys=by_time("standbys"),
        spares=by_time("spares"),
        joined=max(first.joined, second.joined),
        saves=first.saves + second.saves,
    )


def _samples(db: sqlite3.Connection) -> list[Sample]:
    columns = ", ".join(Sample.__struct_fields__)
    return msgspec.convert(db.execute(f"SELECT {columns} FROM samples ORDER BY rowid").fetchall(), list[Sample])


def _halve(db: sqlite3.Connection) -> None:
    rows = _samples(db)
    pairs = [merged(*two) for two in zip(rows[::2], rows[1::2], strict=False)]
    db.execute("DELETE FROM samples")
    write(db, pairs + rows[len(pairs) * 2 :], ())
