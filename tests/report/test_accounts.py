"""The accounts of a job, from a journal through the real command, in every format."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rerail.cli.main import main
from rerail.flow import AnyRecord, Cost, Phase, Recovery, Report, Rung, Signal
from rerail.report.accounts import Accounts, accounts
from rerail.report.partition import Cause
from rerail.report.spells import interruptions, runs_of, windows_of
from rerail.report.webpage import goodput
from rerail.runtime.journal import FILE_NAME, Journal
from rerail.runtime.samples import Mark, MarkKind, Sample

BEGIN = 1_800_000_000.0


def told(number: int, at: float, **more: Any) -> list[tuple[int, AnyRecord]]:
    """An incident whose first signal came at this second of the job, and which took 17 seconds from there."""
    phases = tuple(
        Phase(name=name, start=start, end=end)
        for name, start, end in (("reschedule", 0, 10), ("form", 10, 14), ("replay", 14, 17), ("rank 1: build", 2, 8))
    )
    cost = Cost(detect=2.0, t0=5.0, t1=10.0, t2=1.0, t3=3.0, t4=1.0)
    shared = {"job": "j", "rung": Rung.REPLACE_RANK, "ok": True}
    report = {"id": f"p{number}", "at": BEGIN + at + 17, "cause_id": f"r{number}", "incident": number, "cost": cost}
    names = {"code": "process.killed", "summary": "rank 1 killed | <b>", "ranks": (1,), "node": "n0", "lost_steps": 4}
    return [
        (number, Signal(id=f"s{number}", job="j", at=BEGIN + at, source="process.exit", node="n0", rank=1)),
        (number, Recovery(id=f"r{number}", at=BEGIN + at + 17, generation=1, phases=phases, **shared)),
        (number, Report(**{**shared, **report, **names, **more})),
    ]


def samples(until: int = 1000) -> list[Sample]:
    """Ten seconds each, a step a second, a tenth of it data and a fifth checkpoints."""
    return [
        Sample(
            at=BEGIN + at, span_s=10.0, step=at, steps=10, moved=BEGIN + at, loss=5.0 - at / 500, data=0.1, compute=0.6,
            communication=0.1, checkpoint=0.2, told=10, standbys=2.0, spares=1.0, joined=2, saves=int(at % 300 == 0),
        )
        for at in range(110, until, 10)
    ]  # fmt: skip


MARKS = [
    Mark(BEGIN, MarkKind.BEGIN),
    Mark(BEGIN + 100, MarkKind.TRAINED, "0"),
    Mark(BEGIN + 998, MarkKind.END, "0"),
    Mark(BEGIN + 1000, MarkKind.LEFT),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RERAIL_HOME", str(tmp_path))
    journal = Journal(tmp_path / "big" / FILE_NAME)
    journal.append([*told(1, 300), *told(2, 600)], {"exit_code": 0}, samples(), MARKS)
    journal.close()
    return tmp_path / "big"


def read(folder: Path) -> Accounts:
    journal = Journal(folder / FILE_NAME, read_only=True)
    found = accounts(journal, "j")
    journal.close()
    assert found is not None
    return found


def test_every_second_is_accounted_for(folder: Path) -> None:
    found = read(folder)
    assert found.wall_s == 1000 and found.exit_code == 0 and found.steps == 890
    assert sum(found.parts.values()) == pytest.approx(1000, rel=0.005)
    assert found.parts[Cause.STARTUP] == pytest.approx(100) and found.parts[Cause.SHUTDOWN] == pytest.approx(10)
    one, two = found.incidents
    wanted = dict(zip(one.parts, (2.0, 5.0, 10.0, 1.0, 3.0, 1.0), strict=True))
    assert one.parts == pytest.approx(wanted, abs=1e-5) and two.parts == pytest.approx(wanted, abs=1e-5)
    assert (one.detect_s, one.handle_s, one.total_s) == pytest.approx((2, 17, 22), abs=1e-5)
    # 890 s of steps, less two incidents; of the rest 0.1 was data and 0.2 checkpoints
    assert found.parts[Cause.TRAINING] == pytest.approx((890 - 2 * 22) * 0.7, rel=0.005)
    assert found.parts[Cause.CHECKPOINT] == found.checkpoint_s == pytest.approx((890 - 2 * 22) * 0.2, rel=0.005)
    assert found.ettr == pytest.approx(found.parts[Cause.TRAINING] / 1000)
    assert (found.faults, found.mtbf_s, found.lost_steps, found.checkpoints) == (2, 500, 8, 3)
    assert found.mttr_s == pytest.approx(22, abs=1e-4) and found.step_s == pytest.approx(1.0)
    assert (found.standby_s, found.spare_s) == pytest.approx((1780, 890))
    assert found.by_code == {"process.killed": (2, pytest.approx(44, abs=1e-4))}


def test_goodput_over_time_is_the_same_training(folder: Path) -> None:
    found = read(folder)
    shares = goodput(found.pieces, 50)
    assert sum(share for _, share in shares) / 50 == pytest.approx(found.ettr, rel=1e-6)
    assert shares[0][1] == 0 and all(0 <= share <= 1 for _, share in shares)


def test_text_and_markdown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "job"]) == 0
    text = capsys.readouterr().out
    for part in (
        "job big   began", "ended with exit code 0", "ETTR (goodput)", "MTBF", "500 s (8 min 20 s)", "T1 reschedule",
        "3 checkpoints saved", "adds up to the wall time", "process.killed", "1,000 s (16 min 40 s)",
    ):  # fmt: skip
        assert part in text, f"{part!r} not in\n{text}"
    assert re.search(r"^  all +1,000\.00 s +100\.00 %", text, re.M)
    assert main(["report", "job", "big", "--format", "markdown"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len({row.replace("\\|", "").count("|") for row in rows if row.startswith("| T1")}) == 1
    assert any(row.startswith("| ETTR (goodput) |") for row in rows)


def test_json_has_all_of_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "job", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["parts"].values()) == pytest.approx(found["wall_s"], rel=0.005)
    assert len(found["incidents"]) == 2 and found["incidents"][0]["parts"]["T1 reschedule"] == pytest.approx(
        10, abs=1e-4
    )
    assert sum(one["end"] - one["begin"] for one in found["pieces"]) == pytest.approx(1000)
    assert len(found["samples"]) == 89


def test_html_is_one_file_that_needs_nothing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.html"
    assert main(["report", "--format", "html", "--out", str(out)]) == 0, "a format for jobs asks for the job"
    assert capsys.readouterr().out == "" and sorted(path.name for path in tmp_path.iterdir()) == ["big", "report.html"]
    page = out.read_text()
    drawings = re.findall(r"<svg.*?</svg>", page, re.S)
    titles = [ElementTree.fromstring(one).attrib["aria-label"] for one in drawings]
    assert titles == [
        "Timeline",
        "What each incident cost, T0 to T4",
        "Goodput over time",
        "Loss, with incidents marked",
    ]
    axes = [set(re.findall(r'y="\d+\.\d" text-anchor="middle">(\d+)</text>', drawings[n])) for n in (0, 2, 3)]
    assert axes[0] == axes[1] == axes[2] and "0" in axes[0], "one range of time for all"
    assert not re.search(r"<title>(data|checkpoint|waiting)", drawings[0]), "no stripes where only shares are known"
    assert "rank 1 killed | &lt;b&gt;" in drawings[3] and "<b>" not in page
    assert not re.search(r"<script|<link|src=|@import|url\(", page)


def test_the_trace_opens_in_perfetto(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.json"
    assert main(["report", "job", "--trace", str(out)]) == 0
    assert "ETTR" in capsys.readouterr().out
    events = json.loads(out.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "i", "C"}
    slices = [event for event in events if event["ph"] == "X"]
    assert all(isinstance(event["ts"], int) and event["dur"] >= 0 for event in slices)
    whole = sum(event["dur"] for event in slices if (event["pid"], event["tid"]) == (1, 1))
    assert whole == pytest.approx(1000e6, rel=0.005)
    tracks = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"controller", "job", "incidents", "rank 1", "n0"} <= tracks
    (build, _) = [event for event in slices if event["name"] == "build"]
    assert (build["ts"], build["dur"]) == (302_000_000, 6_000_000)


def test_a_journal_without_samples_is_reported_as_far_as_it_goes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    db = sqlite3.connect(folder / FILE_NAME)
    db.executescript("DROP TABLE samples; DROP TABLE marks;")
    db.close()
    assert main(["report", "job"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"ETTR \(goodput\) +not known", text) and re.search(r"steps +not known", text)
    assert "no end is written down" in text and "T1 reschedule" in text
    for form in ("markdown", "json", "html"):
        assert main(["report", "job", "--format", form]) == 0
    found = read(folder)
    assert sum(found.parts.values()) == pytest.approx(found.wall_s) and found.parts[Cause.RESCHEDULE] > 0


def test_a_job_that_was_killed_in_the_middle_of_a_repair(tmp_path: Path) -> None:
    journal = Journal(tmp_path / FILE_NAME)
    journal.append(told(1, 300)[:1], {}, samples(250), MARKS[:2])
    found = accounts(journal, "j")
    journal.close()
    assert found is not None and found.exit_code is None and found.wall_s == 300
    assert [(one.over, one.ok, one.summary) for one in found.incidents] == [
        (False, False, "the job ended before it was over")
    ]
    assert sum(found.parts.values()) == pytest.approx(300)


def test_runs_takeovers_and_what_lies_between() -> None:
    again = [Mark(BEGIN + 2000, MarkKind.BEGIN), Mark(BEGIN + 2500, MarkKind.TAKEOVER)]
    first, second = runs_of(samples(), [*MARKS, *again], (BEGIN, BEGIN + 2600))
    assert (first.begin, first.end, first.trained, first.closed) == (BEGIN, BEGIN + 1000, BEGIN + 100, True)
    assert (second.end, second.closed, second.trained, second.silent) == (BEGIN + 2600, False, None, True)
    assert runs_of([], [], None) == []


def test_a_second_run_from_an_older_checkpoint(tmp_path: Path) -> None:
    journal = Journal(tmp_path / FILE_NAME)
    later = [
        msgspec.structs.replace(one, at=one.at + 2000, moved=one.moved + 2000, step=one.step + 780)
        for one in samples(210)
    ]
    again = [Mark(BEGIN + 2000, MarkKind.BEGIN), Mark(BEGIN + 2100, MarkKind.TRAINED, "960")]
    journal.append([], {}, [*samples(), *later], [*MARKS, *again])
    found = accounts(journal, "j")
    journal.close()
    assert found is not None and (found.runs, found.exit_code) == (2, None)
    assert (found.lost_steps, found.steps) == (990 - 960, 890 + 100 - 30)
    assert found.parts[Cause.LOST] == pytest.approx(30) and found.parts[Cause.OFF] == pytest.approx(1000)
    assert sum(found.parts.values()) == pytest.approx(found.wall_s) == pytest.approx(2200)


def test_a_controller_that_was_lost_while_all_trained_on_costs_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / FILE_NAME)
    lost = told(1, 300, code="controller.lost", attempts=0)
    journal.append(lost, {}, samples(), MARKS)
    found = accounts(journal, "j")
    journal.close()
    assert found is not None and found.incidents[0].total_s == 0 and found.faults == 1 and found.mttr_s is None


def test_a_hot_switch_stands_still_only_in_its_pause_and_a_stop_until_the_end() -> None:
    switch, stop = (dict(told(n, 300, rung=rung))[n] for n, rung in ((1, Rung.HOT_SWITCH), (2, Rung.STOP)))
    assert isinstance(switch, Report) and isinstance(stop, Report)
    runs = runs_of(samples(), MARKS, None)
    (one, two) = interruptions({1: BEGIN + 200, 2: BEGIN + 300}, {1: switch, 2: stop}, {"r1": told(1, 300)[1][1]}, runs)  # type: ignore[dict-item]
    assert (one.begin, one.signal, one.end) == (BEGIN + 300, BEGIN + 300, BEGIN + 317)
    assert (two.signal, two.parked, two.end) == (BEGIN + 300, BEGIN + 317, BEGIN + 317)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.floats(-10, 1200), st.floats(0, 30), st.integers(0, 5)), max_size=20),
    st.lists(st.floats(-100, 1200), max_size=8),
    st.integers(0, 4),
)
def test_accounts_add_up_for_any_samples_and_incidents(
    rows: list[tuple[float, float, int]], faults: list[float], marks: int
) -> None:
    journal = Journal(Path(":memory:"))
    entries = [entry for number, at in enumerate(faults, 1) for entry in told(number, at)]
    taken = [
        Sample(
            at=BEGIN + at, span_s=span, step=n, steps=n, moved=BEGIN + at if n else 0.0, data=span, compute=1.0, told=n
        )
        for at, span, n in rows
    ]
    journal.append(entries, {}, taken, MARKS[:marks])
    found = accounts(journal, "j")
    journal.close()
    if found is None:
        assert not entries and not marks
        return
    assert all(seconds >= 0 for seconds in found.parts.values())
    assert sum(found.parts.values()) == pytest.approx(found.wall_s, rel=0.005, abs=1e-5)


def test_windows_go_from_step_to_step_over_samples_without_any() -> None:
    first, _, third = taken = samples(140)
    taken[1] = Sample(at=BEGIN + 120, span_s=10.0, step=110, steps=0)
    assert [(one.begin, one.end) for one in windows_of(taken)] == [
        (BEGIN + 100, first.moved),
        (first.moved, third.moved),
    ]


# --- what is refused ---


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["job", "--format", "pdf"], "invalid choice: 'pdf' (choose from"),
        (["1", "--format", "html"], "--format html is for a whole job"),
        (["last", "--trace", "x.json"], "--trace is for a whole job"),
        (["job", "--json", "--format", "html"], "--json and --format html are two different things"),
        (["job", "--out", "nowhere/x.txt"], "--out nowhere/x.txt cannot be written: No such file"),
        (["job", "--trace", "/"], "--trace / cannot be written: it is a folder"),
        (["job", "--out", "/dev/full"], "--out /dev/full cannot be written: No space left"),
        (["job", "nonesuch"], "no job 'nonesuch'"),
        (["what", "big"], "'what' is not the number of an incident"),
    ],
)
def test_bad_words_are_refused(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["report", *words]) == 2
    told = capsys.readouterr()
    assert said in told.err and "Traceback" not in told.err and len(told.err.splitlines()) >= 2, told.err


def test_damaged_and_foreign_journals_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / FILE_NAME
    whole = path.read_bytes()
    for body, said in (
        (whole[:5000], "damaged"),
        (b"", "not a rerail journal"),
        (b"something else" * 999, "not a rerail"),
    ):
        path.write_bytes(body)
        for form in ("text", "html"):
            assert main(["report", "job", "--format", form]) == 2
            assert said in capsys.readouterr().err
    path.unlink()
    other = sqlite3.connect(path)
    other.executescript("CREATE TABLE records (a TEXT)")
    other.close()
    assert main(["report", "job"]) == 2 and "is not a rerail journal" in capsys.readouterr().err


def test_a_journal_with_nothing_in_it_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Journal(folder.parent / "empty" / FILE_NAME).close()
    assert main(["report", "job", "empty"]) == 2
    assert "holds nothing yet" in capsys.readouterr().err


def test_what_stood_in_a_file_stays_when_the_new_one_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / ("x" * 250)  # the draft beside it has a longer name, which no file can have
    out.write_text("before")
    assert main(["report", "job", "--out", str(out)]) == 2
    assert out.read_text() == "before"


def accounts_of(folder: Path, told: list[Sample], marks: list[Mark]) -> Accounts:
    journal = Journal(folder / FILE_NAME)
    assert journal.append([], {}, told, marks)
    found = accounts(journal, "j")
    journal.close()
    assert found is not None
    return found


def moved(sample: Sample, by: float, **changes: Any) -> Sample:
    return msgspec.structs.replace(sample, at=sample.at + by, moved=sample.moved + by, **changes)


def test_a_job_that_was_off_until_a_controller_took_over_did_not_train_meanwhile(tmp_path: Path) -> None:
    """All nodes lost power at 500 s, and came back three hours later; the first minute computes old steps again."""
    before = samples(500)
    after = [moved(one, 10_800.0, step=490, steps=0 if one.at < BEGIN + 200 else one.steps) for one in samples(500)]
    marks = [*MARKS[:2], Mark(BEGIN + 10_850, MarkKind.TAKEOVER), Mark(BEGIN + 11_300, MarkKind.END, "0")]
    found = accounts_of(tmp_path, [*before, *after], marks)
    assert found.parts[Cause.OFF] == pytest.approx(10_850 - 490)
    assert found.parts[Cause.TRAINING] < 800
    assert sum(found.parts.values()) == pytest.approx(found.wall_s)


def test_a_controller_that_is_back_late_while_ranks_trained_on(tmp_path: Path) -> None:
    gap = [one for one in samples() if not BEGIN + 400 < one.at < BEGIN + 500]
    late = [*MARKS[:2], Mark(BEGIN + 495, MarkKind.TAKEOVER), *MARKS[2:]]
    found = accounts_of(tmp_path, gap, late)
    assert found.parts[Cause.OFF] == 0 and found.runs == 1


def test_a_clock_that_was_set_back_between_two_runs(tmp_path: Path) -> None:
    second = [msgspec.structs.replace(mark, at=mark.at - 2000) for mark in MARKS]
    found = accounts_of(tmp_path, [*samples(), *(moved(one, -2000.0) for one in samples())], [*MARKS, *second])
    assert sum(found.parts.values()) == pytest.approx(found.wall_s)
    assert found.wall_s == pytest.approx(3000.0)


def test_a_clock_that_was_set_back_in_the_middle_of_a_run(tmp_path: Path) -> None:
    marks = [*MARKS[:2], Mark(BEGIN - 50, MarkKind.END, "0")]
    found = accounts_of(tmp_path, samples(), marks)
    assert found.wall_s == pytest.approx(990.0) and found.parts[Cause.TRAINING] > 500


def test_the_exit_code_is_that_of_the_last_run(tmp_path: Path) -> None:
    first = [*MARKS[:2], Mark(BEGIN + 998, MarkKind.END, "1")]
    second = [Mark(BEGIN + 2000, MarkKind.BEGIN), Mark(BEGIN + 2010, MarkKind.LEFT)]
    assert accounts_of(tmp_path, samples(), [*first, *second]).exit_code is None


def test_a_sample_that_cannot_be_written_holds_up_nothing_else(tmp_path: Path) -> None:
    journal = Journal(tmp_path / FILE_NAME)
    bad = msgspec.structs.replace(samples()[0], data=float("nan"))
    assert journal.append([], {"generation": 1}, [bad], [])
    assert journal.append([], {"generation": 2}, samples(130), [])
    assert journal.state()["generation"] == 2
    assert len(journal.history()[0]) == len(samples(130))
    journal.close()
