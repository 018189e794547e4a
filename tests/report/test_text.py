"""What people read: the page of an incident and the table, from a real journal through the real commands."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from rerail.cli import incidents as incidents_command
from rerail.cli import report as report_command
from rerail.cli import status as status_command
from rerail.cli.main import main
from rerail.errors import UsageError
from rerail.flow import AnyRecord, Cost, Decision, Diagnosis, Event, Phase, Recovery, Report, Role, Rung, Signal
from rerail.report.compose import one_line
from rerail.report.summary import find_run
from rerail.report.text import bar, costs, table
from rerail.runtime.journal import FILE_NAME, Journal

COST = Cost(detect=0.2, t0=0.04, t1=3.9, t2=0.3, t3=1.1)


def incident(number: int) -> list[tuple[int, AnyRecord]]:
    p = f"{number}-"
    records: list[AnyRecord] = [
        Signal(id=p + "s", job="j", at=1.0, source="process.exit", node="n03", rank=2),
        Event(id=p + "e", job="j", at=1.0, cause_id=p + "s", code="process.killed", node="n03", rank=2),
        Event(id=p + "e2", job="j", at=1.0, code="collective.failed", node="n03", rank=1, role=Role.SYMPTOM),
        Diagnosis(
            id=p + "d", job="j", at=1.0, cause_id=p + "e", code="process.killed", root=p + "e", node="n03", ranks=(2,),
            rule="earliest-root", summary="rank 2 killed (SIGKILL)", evidence=("process ended by SIGKILL",), echoes=(p + "e2",),
        ),
        Decision(
            id=p + "c", job="j", at=1.0, cause_id=p + "d", rung=Rung.REPLACE_RANK, fallbacks=(Rung.RESTART_ALL, Rung.STOP),
            rule="rank-lost", why="the other ranks are alive and keep their state", ranks=(2,),
        ),
        Recovery(
            id=p + "r", job="j", at=2.0, cause_id=p + "c", rung=Rung.REPLACE_RANK, generation=1, ok=True, resumed_step=48120,
            sources={0: "own", 2: "replica 0"},
        ),
        Report(
            id=p + "p", job="j", at=2.0, cause_id=p + "r", incident=number, code="process.killed",
            summary="rank 2 killed (SIGKILL)", rung=Rung.REPLACE_RANK, ok=True, cost=COST, resumed_step=48120, ranks=(2,), node="n03",
        ),
    ]  # fmt: skip
    return [(number, record) for record in records]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RERAIL_HOME", str(tmp_path))
    for age, job in enumerate(("new", "old")):
        journal = Journal(tmp_path / job / FILE_NAME)
        journal.append([*incident(1), *incident(2)], {"exit_code": 0})
        journal.close()
        os.utime(tmp_path / job / FILE_NAME, (1000 - age, 1000 - age))
    return tmp_path


def test_report_page(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report"]) == 0
    text = capsys.readouterr().out
    for part in (
        "incident 2", "node n03, rank 2", "process.killed", "rank 2 killed (SIGKILL)", "| process ended by SIGKILL",
        "1 x collective.failed (folded", "replace rank 2  (rule rank-lost; next: restart all, stop)",
        "because the other ranks are alive", "resumed at    step 48,120 (lost 0 steps, exact: rank 2 from replica 0)",
        "T1 reschedule      3.90 s  ████████████████████", "total              5.54 s", "more: rerail",
    ):  # fmt: skip
        assert part in text, f"{part!r} not in\n{text}"


def test_report_of_a_number_a_job_and_as_json(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "1", "--json"]) == 0
    story = json.loads(capsys.readouterr().out)
    assert story["report"]["incident"] == 1 and len(story["events"]) == 2 and story["recovery"]["ok"]
    assert main(["report", "old"]) == 0
    assert "incident 2" in capsys.readouterr().out


def test_what_is_not_there_is_said(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "7"]) == 2
    assert "has no incident 7" in capsys.readouterr().err
    assert main(["report", "nonesuch"]) == 2
    assert "jobs there: new, old" in capsys.readouterr().err
    assert main(["incidents", "--run-dir", str(home)]) == 2
    assert "holds no journal" in capsys.readouterr().err


def test_no_job_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no job has run yet"):
        find_run(env={"RERAIL_HOME": str(tmp_path / "none")})


def test_newest_run_is_found(home: Path) -> None:
    assert find_run().name == "new" and find_run("old").name == "old"


def test_incident_table(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["incidents"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].split() == [
        "#",
        "when",
        "what",
        "done",
        "lost",
        "detect",
        "T0",
        "T1",
        "T2",
        "T3",
        "T4",
        "total",
    ]
    assert "rank replaced" in text and "2 incidents, 11.1 s in all" in text
    assert main(["incidents", "--json"]) == 0
    assert [r["incident"] for r in json.loads(capsys.readouterr().out)] == [1, 2]


def test_status_of_a_job_that_has_ended(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    assert "job new: ended with exit code 0, 2 incidents" in capsys.readouterr().out
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"job": "new", "live": False, "exit_code": 0, "incidents": 2}


def test_commands_have_the_same_shape() -> None:
    for module in (report_command, incidents_command, status_command):
        assert callable(module.add_arguments) and callable(module.run)


def test_bars_show_anything_that_is_not_shown_as_zero() -> None:
    assert bar(0.0, 5.0) == bar(0.0001, 0.0001) == "" and bar(0.01, 5.0) == "▏" and bar(5.0, 5.0) == "█" * 20
    assert table([]) == "no incidents"


def test_the_line_of_a_repair_tells_its_whole_time_not_that_of_its_last_phase() -> None:
    recovery, report = (record for _, record in incident(1)[-2:])
    assert isinstance(recovery, Recovery) and isinstance(report, Report)
    phases = (
        Phase(name="reschedule", start=0.0, end=0.1),
        Phase(name="replay", start=0.1, end=0.34),
        Phase(name="rank 0: run out", start=0.0, end=0.002),
    )
    line = one_line(report, msgspec.structs.replace(recovery, phases=phases))
    assert "replaced in 0.34 s" in line


def test_a_restart_that_nobody_can_time_shows_no_times() -> None:
    (_, report) = incident(1)[-1]
    assert isinstance(report, Report)
    report = msgspec.structs.replace(report, rung=Rung.RESTART_ALL, resumed_step=-1)
    page, row = "\n".join(costs(report)), table([report]).splitlines()[1]
    assert "T0 to T4 are not known: the script does not call rerail.join()" in page and "0.20 s" in page
    assert row.split()[-7:] == ["0.20", *"------"] and "3.90" not in page + row
