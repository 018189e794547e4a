"""`rerail policy` and `rerail quarantine` as a user runs them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rerail.cli.main import main
from rerail.flow import Candidate, Cost, Decision, Diagnosis, Event, Rung, Severity, Signal
from rerail.runtime.journal import FILE_NAME, Journal

Run = Callable[..., tuple[int, str, str]]
NOT_ALLOWED = '[[policy]]\ncode = "process.killed"\nladder = ["restart_all", "stop"]\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RERAIL_HOME", str(tmp_path / "state"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


@pytest.fixture
def rerail(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*args: str) -> tuple[int, str, str]:
        code = main(args)
        told = capsys.readouterr()
        assert "Traceback" not in told.err
        return code, told.out, told.err

    return run


# --- check ---


def test_no_policy_is_sound(rerail: Run) -> None:
    code, out, _ = rerail("policy", "check")
    assert code == 0 and out.startswith("default policy: sound: 0 policy rules") and "handling rescheduling" in out


def test_a_sound_file_is_called_sound_and_another_file_can_be_named(rerail: Run, folder: Path) -> None:
    (folder / "rerail.toml").write_text('rungs = "retry_step"\n')
    (folder / "other.toml").write_text('handling = "graceful"\n' + NOT_ALLOWED)
    assert rerail("policy", "check")[0] == 1
    code, out, _ = rerail("policy", "check", "other.toml")
    assert code == 0 and "other.toml: sound: 1 policy rule," in out and "handling graceful" in out


def test_all_problems_are_listed_with_file_and_rule(rerail: Run, folder: Path) -> None:
    (folder / "rerail.toml").write_text(
        '[[policy]]\ncode = "gpu.*"\nmute_s = 5\n'
        '[[policy]]\ncode = "gpu.xid.79"\nmute_s = 9\n'
        '[[policy]]\ncode = "gpu.xid.48"\nladder = ["retry_step"]\n'
    )
    code, out, err = rerail("policy", "check")
    assert code == 1 and "2 problems" in err
    assert "rerail.toml, policy 2 never has a say" in out and "rerail.toml, policy 3: with retry_step alone" in out


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("no-such-tool -i {device}", "there is no program no-such-tool here"),
        ("true -i {dev}", "it has no {device}; did you mean {device} by {dev}?"),
        ("true", "it has no {device}, which stands for the number of the device"),
        ("sh -c 'true {device}", "it cannot be read (no closing quotation)"),
        (" ", "it is blank"),
    ],
)
def test_a_reset_that_cannot_work_is_refused_before_anything_is_started(
    rerail: Run, folder: Path, command: str, words: str
) -> None:
    (folder / "rerail.toml").write_text(f'reset_command = "{command}"\n')
    code, out, _ = rerail("policy", "check")
    assert code == 1 and words in out
    (folder / "train.py").write_text("print()\n")
    code, _, err = rerail("run", "--nproc-per-node", "1", str(folder / "train.py"))
    assert code == 2 and words in err


def test_a_tool_that_only_this_machine_lacks_keeps_nobody_from_an_explanation(rerail: Run, folder: Path) -> None:
    (folder / "rerail.toml").write_text('reset_command = "no-such-tool -i {device}"\n')
    assert rerail("policy", "explain", "gpu.xid.48")[0] == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("polcy = 3\n", "unknown setting 'polcy'; did you mean policy"),
        ("[policy]\ncode = 3\n", "write each as [[policy]]"),
        ("this is no toml", "is not valid TOML"),
    ],
)
def test_files_that_cannot_be_read_are_named(rerail: Run, folder: Path, text: str, words: str) -> None:
    (folder / "rerail.toml").write_text(text)
    code, _, err = rerail("policy", "check")
    assert code == 2 and "rerail.toml" in err and words in err
    assert "no such file" in rerail("policy", "check", "none.toml")[2]


# --- explain ---


def test_a_fault_is_explained_with_rule_axes_and_costs(rerail: Run, folder: Path) -> None:
    (folder / "rerail.toml").write_text(NOT_ALLOWED + 'id = "no-repair"\nnote = "x"\n')
    code, out, _ = rerail("policy", "explain", "process.killed")
    assert (
        code == 0
        and "rule        no-repair: ladder by rule no-repair; admission, running, repair by the shipped" in out
    )
    assert "would do    restart_all" in out and "replace_rank  out: the policy does not allow it" in out
    assert "T0 5.00 s, T1 2.00 s" in out


def test_an_explanation_as_json_has_verdict_escalation_and_decision(rerail: Run) -> None:
    found = json.loads(rerail("policy", "explain", "GPU-XID-48", "--json")[1])
    assert found["code"] == "gpu.xid.48" and found["verdict"]["axes"]["repair"] == "reset_device"
    assert [rule["id"] for rule in found["escalation"]] == ["needs-resets", "anything-often"]
    assert {one["rung"] for one in found["decision"]["candidates"]} == set(Rung)


def test_a_fault_that_asks_nothing_of_the_job_does_nothing_to_it(rerail: Run) -> None:
    assert "would do    nothing to the running job" in rerail("policy", "explain", "npu.81078603")[1]


def test_every_shipped_rung_can_be_explained_for_faults_of_all_kinds(rerail: Run) -> None:
    for code in ("process.hung", "training.nan", "node.lost", "gpu.xid.79", "nic.link_down", "scheduler.preempted"):
        status, out, err = rerail("policy", "explain", code)
        assert status == 0 and "would do" in out, err


def test_an_unknown_fault_is_an_error_with_a_suggestion(rerail: Run) -> None:
    code, _, err = rerail("policy", "explain", "gpu.xid.790")
    assert code == 2 and "did you mean: gpu.xid." in err


# --- replay ---


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """A job in which a rank was killed and replaced, and a device needed two resets within the hour."""
    run = tmp_path / "state" / "job1"
    killed = Diagnosis(id="d1", job="job1", at=11.0, code="process.killed", root="e1", node="n1", ranks=(1,), lost=(1,))
    candidates = (
        Candidate(rung=Rung.RETRY_STEP, feasible=False, why="gone"),
        Candidate(rung=Rung.REPLACE_RANK, feasible=True, why="feasible", expected=Cost(t1=0.3)),
        Candidate(rung=Rung.RESTART_ALL, feasible=True, why="feasible", expected=Cost(t0=5.0)),
        Candidate(rung=Rung.STOP, feasible=True, why="feasible"),
    )
    decision = Decision(
        id="c1", job="job1", at=11.0, cause_id="d1", rung=Rung.REPLACE_RANK, rule="rank-lost", candidates=candidates
    )
    records: list[tuple[int, Any]] = [(1, killed), (1, decision)]
    for number, at in enumerate((100.0, 2000.0)):
        signal = Signal(
            id=f"s{number}",
            job="job1",
            at=at,
            source="machine",
            node="n1",
            payload={"subject": "gpu3", "detector": "kernel_log"},
        )
        event = Event(
            id=f"x{number}",
            job="job1",
            at=at,
            cause_id=signal.id,
            code="gpu.xid.48",
            node="n1",
            severity=Severity.CRITICAL,
        )
        records += [(0, signal), (0, event)]
    with contextlib.closing(Journal(run / FILE_NAME)) as book:
        book.append(
            records, {"placement": [[node, device] for node in ("n1", "n2") for device in range(8)], "exit_code": 0}
        )
    return run


def test_a_replay_tells_what_would_have_been_done_beside_what_was(rerail: Run, journal: Path, folder: Path) -> None:
    code, out, _ = rerail("policy", "replay", "job1")
    assert code == 0 and "process.killed on n1: done replace_rank, would replace_rank (same" in out
    assert "quarantined: device:n1/3 is out of use until it is released: gpu.xid.48 2 times" in out
    assert "1 decision, 0 of them otherwise; 1 thing would be in quarantine" in out
    (folder / "strict.toml").write_text(NOT_ALLOWED)
    for run in ("job1", str(journal), str(journal / FILE_NAME), ""):
        out = rerail("policy", "replay", *([run] if run else []), "--policy", "strict.toml")[1]
        assert "done replace_rank, would restart_all (other: rule policy 1 does not allow replace_rank)" in out
    found = json.loads(rerail("policy", "replay", "job1", "--json")[1])
    assert found["quarantine"] == ["device:n1/3"] and found["decisions"][0]["done"] == "replace_rank"


def test_a_replay_of_nothing_is_an_error(rerail: Run) -> None:
    assert "no job has run yet" in rerail("policy", "replay")[2]


# --- quarantine of a job that is not running ---


def test_the_quarantine_of_a_job_is_kept_in_its_journal(rerail: Run, journal: Path) -> None:
    assert rerail("quarantine", "list")[1] == "nothing is out of use\n"
    code, out, err = rerail("quarantine", "add", "n1/3", "--reason", "smells burnt")
    assert code == 0 and out == "device:n1/3 is out of use until it is released\n", err
    out = rerail("quarantine", "list", "--job", "job1")[1]
    assert "device:n1/3" in out and "smells burnt (by " in out and "until it is released" in out
    (entry,) = json.loads(rerail("quarantine", "list", "--run-dir", str(journal), "--json")[1])["quarantine"]
    assert entry["subject"] == "device:n1/3" and entry["reason"] == "smells burnt"
    code, out, _ = rerail("quarantine", "release", "device:n1/3", "--json")
    assert code == 0 and json.loads(out)["quarantine"] == []
    assert rerail("quarantine", "list")[1] == "nothing is out of use\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("release", "n1"), "node:n1 is not in quarantine"),
        (("add", "n7", "--reason", "r"), "this job has no node:n7; did you mean node:n"),
        (("add", "rack:7", "--reason", "r"), "use node:NODE, device:NODE/NUMBER, link:NODE/NAME"),
        (("add", "n1"), "--reason"),
        (("ad", "n1"), "invalid choice"),
    ],
)
def test_orders_that_make_no_sense_are_refused(rerail: Run, journal: Path, words: tuple[str, ...], told: str) -> None:
    code, _, err = rerail("quarantine", *words)
    assert code == 2 and told in err


def test_quarantine_of_everything_needs_force(rerail: Run, journal: Path) -> None:
    assert rerail("quarantine", "add", "n1", "--reason", "r")[0] == 0
    code, _, err = rerail("quarantine", "add", "n2", "--reason", "r")
    assert code == 2 and "nothing could train" in err and "--force" in err
    assert rerail("quarantine", "add", "n2", "--reason", "r", "--force")[0] == 0
