"""Samples of a job's time: taken from beats at a bounded rate, kept in the journal, and never more than so many."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from rerail.errors import JournalError
from rerail.flow import Signal
from rerail.runtime import samples as table
from rerail.runtime.clock import Metric, Took
from rerail.runtime.fleet import Agent, Fleet
from rerail.runtime.journal import FILE_NAME, Journal
from rerail.runtime.orders import Beat
from rerail.runtime.samples import Mark, MarkKind, Sample, merged
from rerail.runtime.sampling import PERIOD_S, Sampler


def beat(version: int, *took: Took, rank: int = 0, loss: float | None = None) -> Beat:
    metrics = {rank: {"loss": Metric(version, loss, 0)}} if loss is not None else {}
    return Beat(versions={rank: version}, took={rank: list(took)} if took else {}, metrics=metrics)


def step(version: int, data: float = 0.1, communication: float = 0.2) -> Took:
    return Took(version, data, 0.5, communication, 0.2)


def test_a_job_begins_trains_and_ends() -> None:
    sampler = Sampler(Fleet())
    assert sampler.tick(0.0, 1000.0, None) == ([], [Mark(1000.0, MarkKind.BEGIN)])
    sampler.hear(beat(0), 1000.5)
    assert sampler.tick(0.5, 1000.5, None) == ([], []), "no more than one in a second"
    sampler.hear(beat(2, step(1), step(2), loss=3.5), 1004.0)
    ((sample,), marks) = sampler.tick(4.0, 1004.0, None)
    assert marks == [Mark(1002.0, MarkKind.TRAINED, "0")], "two steps of a second each"
    assert (sample.step, sample.steps, sample.moved, sample.loss, sample.told) == (2, 2, 1004.0, 3.5, 2)
    assert (sample.at, sample.span_s) == (1004.0, 4.0)
    ((last,), marks) = sampler.tick(4.5, 1004.5, 93)
    assert (last.steps, last.loss, last.told) == (0, None, 0) and marks == [Mark(1004.5, MarkKind.END, "93")]


def test_a_checkpoint_that_is_loaded_is_no_progress_and_what_is_computed_again_neither() -> None:
    sampler = Sampler(Fleet())
    sampler.tick(0.0, 0.0, None)
    sampler.hear(beat(0), 1.0)
    sampler.hear(beat(500), 2.0)
    sampler.hear(beat(502, step(501), step(502)), 3.0)
    ((first,), _) = sampler.tick(3.0, 3.0, None)
    sampler.hear(beat(499, step(499)), 4.0)
    sampler.hear(beat(503, step(502), step(503)), 6.0)
    ((second,), _) = sampler.tick(6.0, 6.0, None)
    assert (first.steps, second.steps, second.told) == (2, 1, 1)


def test_the_rank_that_the_others_waited_for_tells_where_the_time_went() -> None:
    sampler = Sampler(Fleet())
    sampler.tick(0.0, 0.0, None)
    sampler.hear(beat(1, step(1, data=0.1, communication=0.6), rank=0), 1.0)
    sampler.hear(beat(1, step(1, data=0.6, communication=0.1), rank=1), 1.0)
    ((sample,), _) = sampler.tick(1.0, 1.0, None)
    assert (sample.data, sample.communication) == (0.6, 0.1)


def test_standbys_and_spare_places_are_counted(tmp_path: Path) -> None:
    class Wire:
        def send(self, message: object) -> None: ...
        def close(self) -> None: ...

    fleet = Fleet()
    agent = Agent("n0", "", 2, -1, "i", 0.0, link=Wire(), devices=3, ready=4)
    fleet.agents["n0"] = agent
    fleet.place([agent])
    sampler = Sampler(fleet)
    sampler.tick(0.0, 0.0, None)
    ((sample,), _) = sampler.tick(9.0, 9.0, None)
    assert (sample.standbys, sample.spares, sample.joined) == (4, 1, 0)


def test_a_checkpoint_counts_once_however_many_tell_of_it() -> None:
    sampler = Sampler(Fleet())
    sampler.tick(0.0, 0.0, None)
    for source, version in (
        ("checkpoint.saved", 5),
        ("checkpoint.saved", 5),
        ("checkpoint.loaded", 6),
        ("checkpoint.saved", 9),
    ):
        sampler.note(Signal(id="s", job="j", at=0.0, source=source, node="n", step=version))
    assert [sampler.tick(at, at, None)[0][0].saves for at in (2.0, 4.0)] == [2, 0]


def test_a_controller_that_takes_over_goes_on_where_the_other_was(tmp_path: Path) -> None:
    journal = Journal(tmp_path / FILE_NAME)
    journal.append([], {}, [Sample(at=5.0, span_s=PERIOD_S * 4, step=70, steps=70)], [Mark(1.0, MarkKind.BEGIN)])
    sampler = Sampler.of(Fleet(), journal, True)
    assert sampler.tick(0.0, 9.0, None) == ([], [Mark(9.0, MarkKind.TAKEOVER)])
    sampler.hear(beat(75, step(74), step(75)), 10.0)
    assert sampler.tick(3.0, 10.0, None)[0] == [], "as rare as those it found"
    ((sample,), marks) = sampler.tick(4.0, 13.0, None)
    assert (sample.step, sample.steps, marks) == (75, 5, [])
    journal.close()


def test_the_journal_keeps_them_in_order_and_never_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MOST", 100)
    journal = Journal(tmp_path / FILE_NAME)
    for n in range(1, 1001):
        journal.append([], {}, [Sample(at=float(n), span_s=1.0, step=n, steps=1, moved=float(n), data=n % 2, told=1)])
    found, _ = journal.history()
    assert len(found) <= 100 and sum(one.steps for one in found) == 1000 and sum(one.span_s for one in found) == 1000
    assert [one.at for one in found] == sorted(one.at for one in found) and found[-1].step == 1000
    assert abs(sum(one.data * one.told for one in found) - 500) < 1e-6
    journal.close()


def test_two_samples_become_one_by_their_weights() -> None:
    first = Sample(
        at=1.0, span_s=1.0, step=5, steps=5, moved=0.9, loss=2.0, compute=1.0, told=1, standbys=2.0, joined=2
    )
    second = Sample(at=4.0, span_s=3.0, step=5, steps=0, compute=4.0, told=2, standbys=0.0)
    both = merged(first, second)
    assert (both.at, both.span_s, both.steps, both.moved, both.loss) == (4.0, 4.0, 5, 0.9, 2.0)
    assert (both.compute, both.standbys, both.told, both.joined) == (3.0, 0.5, 3, 2)


def test_a_journal_from_before_there_were_samples_is_read_and_gets_them_when_written(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    Journal(path).close()
    db = sqlite3.connect(path)
    db.executescript("DROP TABLE samples; DROP TABLE marks;")
    db.close()
    old = Journal(path, read_only=True)
    assert old.history() == ([], []) and old.ends() is None and old.openings() == {}
    old.close()
    again = Journal(path)
    assert again.append([], {}, [Sample(at=1.0, span_s=1.0, step=1, steps=1)], [Mark(1.0, MarkKind.BEGIN)])
    assert len(again.history()[0]) == 1
    again.close()


def test_tables_that_are_not_ours_are_refused(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    journal = Journal(path)
    journal._db.executescript("DROP TABLE samples; CREATE TABLE samples (other TEXT)")
    with pytest.raises(JournalError, match="cannot be used"):
        journal.history()
    journal.close()


def test_what_a_full_disk_refused_is_written_later(tmp_path: Path) -> None:
    journal = Journal(tmp_path / FILE_NAME)
    journal._db.execute("PRAGMA query_only = ON")
    assert not journal.append([], {}, [Sample(at=1.0, span_s=1.0, step=1, steps=1)], [Mark(1.0, MarkKind.BEGIN)])
    journal._db.execute("PRAGMA query_only = OFF")
    assert journal.append([])
    found, marks = journal.history()
    assert len(found) == len(marks) == 1
    journal.close()
