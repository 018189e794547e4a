"""What people read: the page of an incident and the table, from a real journal through the real commands."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rerail.cli import incidents as incidents_command
from rerail.cli import report as report_command
from rerail.cli import status as status_command
from rerail.cli.main import main
from rerail.errors import UsageError
from rerail.flow import (
    AnyRecord,
    Cost,
    Decision,
    Diagnosis,
    Event,
    Phase,
    Place,
    Recovery,
    Report,
    Role,
    Rung,
    Severity,
    Signal,
)
from rerail.report.compose import one_line
from rerail.report.summary import find_run
from rerail.report.text import bar, costs, done, table
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


@pytest.mark.parametrize("rung", list(Rung))
def test_every_rung_has_words(rung: Rung) -> None:
    assert done(
        Report(id="r", job="j", at=0.0, incident=1, code="c", summary="", rung=rung, ok=True, cost=Cost(), attempts=1)
    )


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
    told = json.loads(capsys.readouterr().out)
    assert [r["incident"] for r in told["incidents"]] == [1, 2] and told["also_seen"] == []


def test_an_incident_has_one_date_wherever_it_is_shown(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of its fault: the repair took 90 seconds."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    journal, begin = Journal(home / "long" / FILE_NAME), 1_700_000_000.0
    records = [msgspec.structs.replace(one, at=begin) for _, one in incident(1)]
    for place, one in enumerate(records):
        if isinstance(one, Recovery | Report):
            records[place] = msgspec.structs.replace(one, at=begin + 90.0)
    journal.append([(1, one) for one in records], {})
    journal.close()
    shown = []
    for words in (["report", "last", "long"], ["incidents", "long"], ["report", "job", "long"]):
        assert main(words) == 0
        shown.append({word for word in capsys.readouterr().out.split() if re.fullmatch(r"\d\d:\d\d:\d\d,?", word)})
    assert shown[0] == shown[1] == {"22:13:19"} and shown[0] <= shown[2], shown
    assert main(["incidents", "long", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["incidents"][0]["fault_at"] == pytest.approx(begin - COST.detect)


# --- what was only told ---


def told_at(at: float, code: str, source: str = "machine", number: int = 0, **more: Any) -> list[tuple[int, AnyRecord]]:
    """One word of a monitor or of the training, as the controller writes it down."""
    over, rank, detector = more.get("over", False), more.get("rank", -1), more.get("detector", "nvidia")
    payload = {"code": code, "subject": more.get("subject", ""), "over": over, "detector": detector}
    name = f"{at}-{code}-{payload['subject']}-{rank}-{over}"
    signal = Signal(id=f"s-{name}", job="j", at=at, source=source, node="n03", rank=rank, payload=payload)
    event = Event(
        id=f"e-{name}", job="j", at=at, cause_id=signal.id, code=code, node="n03", rank=rank, message=f"about {code}",
        severity=more.get("severity", Severity.ERROR), evidence=more.get("evidence", ""),
    )  # fmt: skip
    return [(number, signal), (number, event)]


ALSO = [
    *told_at(10.0, "gpu.xid.63", subject="gpu3", detector="kernel_log", evidence="NVRM: Xid (PCI:0000:3b:00): 63"),
    *told_at(20.0, "gpu.xid.63", subject="gpu3", detector="kernel_log", evidence="NVRM: Xid (PCI:0000:3b:00): 63"),
    *told_at(30.0, "training.straggler_data", "training.straggler", rank=3, subject="rank 3"),
    *told_at(35.0, "training.loss_spike", "training.health", subject="rank -1"),
    *told_at(40.0, "training.straggler_data", "training.straggler", rank=3, subject="rank 3", over=True),
    *told_at(50.0, "nic.down", subject="mlx5_0"),
    *told_at(51.0, "nic.down", subject="mlx5_1"),
    *told_at(60.0, "nic.down", over=True),
    *told_at(70.0, "never.begun", over=True),
]


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job without incidents whose machines and training had faults."""
    monkeypatch.setenv("RERAIL_HOME", str(tmp_path))
    journal = Journal(tmp_path / "quiet" / FILE_NAME)
    journal.append(ALSO, {"exit_code": 0})
    journal.close()
    return tmp_path


@pytest.mark.parametrize("command", ["incidents", "report"])
def test_what_was_only_told_is_shown_without_any_incident(
    quiet: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command]) == 0
    first, heading, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("no incidents") and heading == "also seen, and no incident by itself:"
    assert [re.split(r"  +", row.strip())[1:] for row in rows] == [
        ["gpu.xid.63", "n03, gpu3", "2 times", "NVRM: Xid (PCI:0000:3b:00): 63"],
        ["training.straggler_data", "n03, rank 3", "once, over", "about training.straggler_data"],
        ["training.loss_spike", "n03", "once, not over", "about training.loss_spike"],
        ["nic.down", "n03, mlx5_0", "once, over", "about nic.down"],
        ["nic.down", "n03, mlx5_1", "once, over", "about nic.down"],
    ]
    assert main([command, "--json"]) == 0
    also = json.loads(capsys.readouterr().out)["also_seen"]
    assert [(one["code"], one["count"], one["over"]) for one in also][:3] == [
        ("gpu.xid.63", 2, False),
        ("training.straggler_data", 1, True),
        ("training.loss_spike", 1, False),
    ]


def test_of_many_the_gravest_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(tmp_path / FILE_NAME)
    slight = [one for n in range(40) for one in told_at(float(n), "slight", subject=f"gpu{n}", severity=Severity.INFO)]
    journal.append([*slight, *told_at(99.0, "grave", severity=Severity.CRITICAL)], {})
    journal.close()
    assert main(["incidents", "--run-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 1 + 20 + 1 and "grave" in lines[-2] and lines[-1] == "  and 21 more (--json shows all)"


def test_an_incidents_page_tells_what_was_seen_about_its_time_and_not_its_cause_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cause = told_at(1000.0, "gpu.xid.79", number=1, subject="gpu3")
    named = cause[1][1].id
    records = [
        (number, msgspec.structs.replace(record, at=1000.0 + index))
        for index, (number, record) in enumerate(incident(1))
    ]
    records = [(n, msgspec.structs.replace(r, root=named) if isinstance(r, Diagnosis) else r) for n, r in records]
    others = [
        *told_at(1002.0, "gpu.xid.79", number=1, subject="gpu3"),
        *told_at(10.0, "nic.down", subject="mlx5_0"),  # and it lasts
        *told_at(20.0, "gpu.hot", subject="gpu1"),
        *told_at(30.0, "gpu.hot", subject="gpu1", over=True),
        *told_at(850.0, "gpu.xid.63", detector="kernel_log"),
        *told_at(950.0, "gpu.xid.31", detector="kernel_log"),
        *told_at(1003.0, "training.nan", "training.health", number=1, rank=2),
        *told_at(5000.0, "training.nan", "training.health", rank=1),
    ]
    journal = Journal(tmp_path / FILE_NAME)
    journal.append([*cause, *records, *others], {})
    journal.close()
    assert main(["report", "1", "--run-dir", str(tmp_path)]) == 0
    page = capsys.readouterr().out.splitlines()
    at = next(index for index, line in enumerate(page) if line.startswith("  also seen"))
    assert [line[16:].split()[1].rstrip(",") for line in page[at : at + 3]] == [
        "nic.down",
        "gpu.xid.31",
        "training.nan",
    ]
    assert page[at + 3].startswith("  decision") and not any("training.nan (folded" in line for line in page)
    assert any(line.endswith("n03, mlx5_0, once, not over: about nic.down") for line in page)
    assert main(["report", "1", "--run-dir", str(tmp_path), "--json"]) == 0
    story = json.loads(capsys.readouterr().out)
    assert [one["code"] for one in story["also_seen"]] == ["nic.down", "gpu.xid.31", "training.nan"]
    assert main(["incidents", "--run-dir", str(tmp_path)]) == 0
    assert "gpu.xid.79" not in capsys.readouterr().out, "what repeats a cause is not seen beside it"


def test_status_of_a_job_that_has_ended(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    assert "job new: ended with exit code 0, 2 incidents" in capsys.readouterr().out
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"job": "new", "live": False, "exit_code": 0, "incidents": 2}


def test_one_incident_is_one(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(tmp_path / "single" / FILE_NAME)
    journal.append(incident(1))
    journal.close()
    assert main(["incidents", "--run-dir", str(tmp_path / "single")]) == 0
    assert "job single: 1 incident, 5.5 s in all" in capsys.readouterr().out


def test_commands_have_the_same_shape() -> None:
    for module in (report_command, incidents_command, status_command):
        assert callable(module.add_arguments) and callable(module.run)


def test_bars_show_anything_that_is_not_shown_as_zero() -> None:
    assert bar(0.0, 5.0) == bar(0.0001, 0.0001) == "" and bar(0.01, 5.0) == "▏" and bar(5.0, 5.0) == "█" * 20
    assert table([], {}) == "no incidents"


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
    ready = (
        *phases,
        Phase(name="rank 1: build", start=0.0, end=3.1),
        Phase(name="rank 1: rehearse", start=3.1, end=3.6),
    )
    moved = msgspec.structs.replace(report, rung=Rung.HOT_SWITCH, moves={2: Place("n03", 3)})
    line = one_line(moved, msgspec.structs.replace(recovery, rung=Rung.HOT_SWITCH, phases=ready))
    assert "rank 2 on n03/3; a pause of 0.34 s, no step lost" in line, "training goes on while a spare is made ready"


def test_a_restart_that_nobody_can_time_shows_no_times() -> None:
    (_, report) = incident(1)[-1]
    assert isinstance(report, Report)
    report = msgspec.structs.replace(report, rung=Rung.RESTART_ALL, resumed_step=-1)
    page, row = "\n".join(costs(report)), table([report], {}).splitlines()[1]
    assert "T0 to T4 are not known: the script does not call rerail.join()" in page and "0.20 s" in page
    assert row.split()[-7:] == ["0.20", *"------"] and "3.90" not in page + row
