"""The journal: what is written comes back, also to another process, and bad files are named."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from rerail.errors import JournalError
from rerail.flow import Cost, Event, Report, Rung, Signal, new_id
from rerail.runtime.journal import FILE_NAME, Journal


def signal(rank: int = 1) -> Signal:
    return Signal(id=new_id("signal"), job="j", at=5.0, source="process.exit", node="n", rank=rank, payload={"a": 1.5})


def report(number: int) -> Report:
    cost = Cost(t1=0.25)
    return Report(
        id=new_id("report"), job="j", at=6.0, incident=number, code="c", summary="s", rung=Rung.RETRY_STEP, ok=True, cost=cost
    )  # fmt: skip


def test_records_and_state_come_back(tmp_path: Path) -> None:
    first, second = signal(), report(1)
    journal = Journal(tmp_path / "deep" / FILE_NAME)
    assert journal.append([(1, first), (1, second)], {"generation": 3, "open": 1})
    assert journal.append([(2, report(2))], {"open": 0})
    journal.close()
    again = Journal(tmp_path / "deep" / FILE_NAME)
    assert again.records(incident=1) == [first, second]
    assert again.records(kind="signal") == [first]
    assert again.records(kind="report", incident=1) == [second]
    assert again.state() == {"generation": 3, "open": 0}
    again.close()


def test_a_reader_follows_a_living_writer(tmp_path: Path) -> None:
    writer = Journal(tmp_path / FILE_NAME)
    reader = Journal(tmp_path / FILE_NAME, read_only=True)
    assert reader.records() == []
    writer.append([(1, signal())])
    assert len(reader.records()) == 1
    with pytest.raises(sqlite3.OperationalError):
        reader._db.execute("DELETE FROM records")
    reader.close()
    writer.close()


def test_what_a_killed_writer_committed_is_there(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from rerail.runtime.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1])); journal.append([], {'generation': 7}); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / FILE_NAME)], check=False)
    journal = Journal(tmp_path / FILE_NAME)
    assert journal.state() == {"generation": 7}
    journal.close()


def test_what_cannot_be_written_is_kept_and_written_later(tmp_path: Path) -> None:
    journal = Journal(tmp_path / FILE_NAME)
    journal._db.execute("PRAGMA busy_timeout = 0")
    blocker = sqlite3.connect(tmp_path / FILE_NAME)
    blocker.execute("BEGIN IMMEDIATE")
    assert not journal.append([(1, signal())], {"generation": 1})
    blocker.rollback()
    blocker.close()
    assert journal.append([(1, signal())], {"open": 1})
    assert len(journal.records()) == 2 and journal.state() == {"generation": 1, "open": 1}
    journal.close()


def test_writing_twice_is_writing_once(tmp_path: Path) -> None:
    journal, record = Journal(tmp_path / FILE_NAME), signal()
    journal.append([(1, record)])
    journal.append([(1, record)])
    assert journal.records() == [record]
    journal.close()


def test_a_file_in_the_way_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="--run-dir"):
        Journal(tmp_path / "file" / FILE_NAME)


def test_damaged_and_foreign_files_are_refused_and_left_alone(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.sqlite"
    damaged.write_bytes(b"not a database at all, but long enough to be looked at as one" * 40)
    with pytest.raises(JournalError, match="damaged or not a rerail journal"):
        Journal(damaged)
    foreign = tmp_path / "foreign.sqlite"
    db = sqlite3.connect(foreign)
    db.execute("CREATE TABLE other (x)")
    db.close()
    before = foreign.read_bytes()
    with pytest.raises(JournalError, match="not a rerail journal"):
        Journal(foreign, read_only=True)
    assert foreign.read_bytes() == before
    with pytest.raises(JournalError, match="never started"):
        Journal(tmp_path / "none.sqlite", read_only=True)


def test_every_kind_of_record_can_be_stored(tmp_path: Path) -> None:
    event = Event(id="e", job="j", at=1.0, cause_id="s", code="c", node="n")
    journal = Journal(tmp_path / FILE_NAME)
    journal.append([(1, event)])
    assert journal.records(kind="event") == [event]
    journal.close()
