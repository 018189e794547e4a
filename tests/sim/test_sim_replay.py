"""Traces and journals become faults; what is cut off or foreign is refused with its line, field and value."""

import json
import sqlite3
from pathlib import Path

import pytest

from rerail.errors import UsageError
from rerail.flow import Diagnosis
from rerail.runtime.journal import FILE_NAME, Journal
from rerail.runtime.samples import Mark, MarkKind, Sample
from rerail.sim.policies import policy
from rerail.sim.replay import cluster_of, faults_of, is_journal, unfelt
from rerail.sim.run import run
from rerail.sim.scenario import scenario

HERE = scenario({"gpus": 32, "spare_nodes": 1, "days": 1})
ROWS = [(3600, 1, 2, "gpu.xid.79"), (100.5, 0, 0, "process.killed"), (50_000, 3, 7, "node.lost")]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def as_csv(rows: list) -> str:
    return "at,node,device,code\n" + "".join(f"{','.join(map(str, row))}\n" for row in rows)


def test_csv_and_json_lines_say_the_same(tmp_path: Path) -> None:
    table = faults_of(write(tmp_path / "t.csv", as_csv(ROWS)), HERE)
    lines = "\n".join(json.dumps(dict(zip(("at", "node", "device", "code"), row, strict=True))) for row in ROWS)
    assert faults_of(write(tmp_path / "t.jsonl", lines), HERE) == table
    assert [fault.at for fault in table] == [100.5, 3600, 50_000]
    assert [fault.scope for fault in table] == ["device", "device", "node"]
    result = run(HERE, policy("rerail"), table)
    assert result.interruptions == 3 and result.struck == {"gpu": 1, "trace": 1, "host": 1}


def test_names_and_dates_are_understood(tmp_path: Path) -> None:
    rows = [("2026-11-16T08:00:00", "rack1-a", 0, "gpu.xid.79"), ("2026-11-16T09:30:00", "rack1-b", 0, "gpu.xid.95")]
    found = faults_of(write(tmp_path / "t.csv", as_csv(rows)), HERE)
    assert [(fault.at, fault.node) for fault in found] == [(0.0, 0), (5400.0, 1)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["column 'at' is missing", "at,node,device,code"]),
        ("at,node,device,code\n", ["holds no faults"]),
        ("time,host,code\n1,2,3\n", ["line 1", "'at'", "time, host, code"]),
        ("at,node,device,code\n1,2,3\n", ["line 2", "3 fields, the header 4", "cut off"]),
        ("at,node,device,code\nsoon,0,0,gpu.xid.79\n", ["line 2", "at is 'soon'", "seconds"]),
        ("at,node,device,code\n-5,0,0,gpu.xid.79\n", ["line 2", "at is '-5'", "0 or more"]),
        ("at,node,device,code\n90000,0,0,gpu.xid.79\n", ["at is '90000'", "24 h", "--days 2"]),
        ("at,node,device,code\nnan,0,0,gpu.xid.79\n", ["at is 'nan'"]),
        ("at,node,device,code\n1,2,3,4,5,6\n", ["6 fields, the header 4", "in quotes"]),
        ("at,node,device,code\n1e12,0,0,gpu.xid.79\n", ["at is '1e12'", "3650 days at most"]),
        ("at,node,device,code\n1e999,0,0,gpu.xid.79\n", ["at is '1e999'", "3650 days at most"]),
        (f"at,node,device,code\n1,0,{'9' * 5000},gpu.xid.79\n", ["device is '999", "0 to 7"]),
        (f"at,node,device,code\n1,{'9' * 5000},0,gpu.xid.79\n", ["node is '999", "5 nodes"]),
        (f"at,node,device,code\n1,0,0,{'x' * 140_000}\n", ["line 2 is not CSV", "field larger"]),
        (f"{'x' * 140_000},node,device,code\n", ["line 1 is not CSV"]),
        (f'{{"at": {"9" * 400}, "node": 0, "device": 0, "code": "gpu.xid.79"}}\n', ["at is 999", "3650 days"]),
        (f'{{"at": 1, "node": 0, "device": {"9" * 5000}, "code": "gpu.xid.79"}}\n', ["line 1 cannot be read"]),
        (f'{{"at": 1, "node": 0, "code": "x", "device": {"[" * 100_000}}}\n', ["line 1 cannot be read"]),
        ("at,node,device,code\n1,99,0,gpu.xid.79\n", ["node is '99'", "5 nodes", "--gpus"]),
        ("at,node,device,code\n1,,0,gpu.xid.79\n", ["node is ''"]),
        ("at,node,device,code\n1,0,8,gpu.xid.79\n", ["device is '8'", "0 to 7"]),
        ("at,node,device,code\n1,0,0,gpu.xid.79x\n", ["code is 'gpu.xid.79x'", "did you mean", "rerail faults list"]),
        ("at,node,device,code\n1,0,0,gpu.xid.79\n2026-01-01,0,0,gpu.xid.79\n", ["at is '1'", "one of the two"]),
        ('{"at": 1, "node": 0, "device": 0}\n', ["line 1", "'code' is missing"]),
        ('{"at": 1, "node": 0, "device": 0, "code": "gpu.xid.79"}\n{"at": 2, "no', ["line 2", "not JSON", "cut off"]),
    ],
)
def test_bad_traces_are_refused(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        faults_of(write(tmp_path / "t.csv", text), HERE)
    for word in words:
        assert word in str(caught.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        faults_of(tmp_path / "none.csv", HERE)
    picture = tmp_path / "a.png"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe")
    with pytest.raises(UsageError, match="neither text nor a journal"):
        faults_of(picture, HERE)
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE t (a)")
    db.close()
    with pytest.raises(UsageError, match="not a rerail journal") as caught:
        faults_of(foreign, HERE)
    assert FILE_NAME in str(caught.value) and "--run-dir" not in str(caught.value)


def test_a_journal_is_replayed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / FILE_NAME)
    for at, node, rank, code in (
        (1000.0, "n1", 9, "process.killed"),
        (1600.0, "n2", 16, "node.lost"),
        (1700.0, "n2", -1, "node.returned"),
    ):
        ranks = (rank,) if rank >= 0 else ()
        record = Diagnosis(id=f"d{at}", job="j", at=at, code=code, root="", node=node, ranks=ranks, lost=ranks)
        journal.append([(1, record)], {})
    journal.close()
    found = faults_of(tmp_path, HERE)
    assert [(fault.at, fault.code, fault.device) for fault in found] == [
        (0.0, "process.killed", 1),
        (600.0, "node.lost", 0),
    ]


def test_the_size_of_a_job_is_known_from_its_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / FILE_NAME)
    record = Diagnosis(id="d", job="j", at=1000.0, code="process.killed", root="", node="gone", ranks=(3,), lost=(3,))
    sample = Sample(at=1600.0, span_s=600.0, step=60, steps=60, moved=1600.0, compute=10.0, told=60, joined=4)
    places = [[f"n{n // 2}", n % 2] for n in range(6)]
    journal.append([(1, record)], {"placement": places}, [sample], [Mark(900.0, MarkKind.BEGIN)])
    journal.close()
    assert is_journal(tmp_path) and is_journal(tmp_path / FILE_NAME) and not is_journal(tmp_path / "none")
    found = cluster_of(tmp_path)
    assert (found["gpus"], found["per_node"], found["step_s"], found["spare_nodes"]) == (6, 2, 10.0, 1)
    assert found["days"] * 86_400 == pytest.approx(701)
    (fault,) = faults_of(tmp_path, scenario(found))
    assert fault.at == 100.0, "since the job began, not since its first fault"


def test_a_journal_with_flipped_bytes_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / FILE_NAME)
    record = Diagnosis(id="d", job="j", at=1000.0, code="process.killed", root="", summary="a long word", node="n1")
    journal.append([(1, record)], {})
    journal.close()
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        (body,) = db.execute("SELECT body FROM records").fetchone()
        data = body if isinstance(body, bytes) else body.encode()
        db.execute("UPDATE records SET body = ?", (data.replace(b"long", b"\xff\xfeng"),))
    db.close()
    with pytest.raises(UsageError, match="--trace"):
        faults_of(tmp_path, HERE)


def test_what_is_not_simulated_is_said(tmp_path: Path) -> None:
    rows = [*ROWS, (5.0, 0, 0, "training.straggler_compute")]
    faults = faults_of(write(tmp_path / "t.csv", as_csv(rows)), HERE)
    (note,) = unfelt(faults)
    assert "1 of 4 faults only slow a job down" in note and "training.straggler_compute" in note
    assert not unfelt(faults_of(write(tmp_path / "t.csv", as_csv(ROWS)), HERE))
