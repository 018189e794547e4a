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
    ("content", "words"),
    [
        (b"this is no toml", "is not valid TOML"),
        (b"\xff\xfe\0", "is not valid TOML: byte 1 is no UTF-8; save it as UTF-8 text"),
    ],
)
def test_files_that_cannot_be_read_are_named(rerail: Run, folder: Path, content: bytes, words: str) -> None:
    (folder / "rerail.toml").write_bytes(content)
    for command in (("policy", "check"), ("faults", "list"), ("run", "train.py")):
        code, _, err = rerail(*command)
        assert code == 2 and "rerail.toml" in err and words in err
    assert "no such file" in rerail("policy", "check", "none.toml")[2]


def test_wrong_plain_settings_are_listed_with_the_rest(rerail: Run, folder: Path) -> None:
    (folder / "rerail.toml").write_text(
        'polcy = 3\nstandbys = "two"\nhang_floor_s = -1\nbeat_s = nan\nhandling = "gracefull"\nescalation = 7\n'
        '[[policy]]\ncode = 79\nmute_s = 5\n[[policy]]\ncode = "gpu.xdi.*"\nmute_s = 5\n'
    )
    code, out, err = rerail("policy", "check")
    assert (code, out.splitlines()) == (
        1,
        [
            "rerail.toml: unknown setting 'polcy'; did you mean policy?",
            "rerail.toml: escalation is no list of tables; write each as [[escalation]]",
            "rerail.toml, setting not accepted: standbys: a whole number is expected here, not text in quotes",
            "rerail.toml, setting handling is 'gracefull', but must be one of rescheduling, graceful; did you mean graceful?",
            "rerail.toml, setting hang_floor_s is -1.0, but must not be negative",
            "rerail.toml, setting beat_s is nan, but a finite number is needed (default 0.1)",
            "rerail.toml, policy 1: code: a word in quotes or a list of words is expected here, not 79",
        ],
    )
    assert "7 problems" in err
    code, _, err = rerail("run", "train.py")
    assert code == 2 and "unknown setting 'polcy'" in err and "5 more problems: rerail policy check" in err
    (folder / "rerail.toml").write_text('[[policy]]\ncode = "gpu.xdi.*"\nmute_s = 5\n')
    assert "did you mean gpu.xid.*?" in rerail("policy", "check")[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            'restart_limits = "rank=0, node=0, job=0"',
            "with rank=0 no process could ever be started anew; write 1 or more",
        ),
        ('max_restarts = 0\nrungs = "replace_rank,restart_all"', "max_restarts is 0, so of replace_rank restart_all"),
        ("restart_window_s = nan", "setting restart_window_s is nan, but a finite number is needed (default 3600)"),
        ("restart_window_s = inf", "setting restart_window_s is inf, but a finite number is needed"),
        ("restart_window_s = 0", "setting restart_window_s is 0, so no restart would ever count; give it seconds"),
        (
            '[[policy]]\ncode = "gpu.xid.48"\nrepair = "reset_device"\nladder = ["restart_all", "stop"]',
            "policy 1: repair is reset_device, but its ladder (restart_all stop) has no such rung; add reset_device",
        ),
        (
            'reset_limit = 0\n[[policy]]\ncode = "gpu.xid.79"\nrepair = "reset_device"',
            "policy 1: repair is reset_device, but no device may be reset (settings rungs, reset_limit); allow it",
        ),
        ('[[policy]]\nadmission = "no"', "policy 1: it is about every fault everywhere, so with admission no any"),
    ],
)
def test_policies_that_cannot_work_are_not_called_sound(rerail: Run, folder: Path, text: str, words: str) -> None:
    (folder / "rerail.toml").write_text(text + "\n")
    code, out, _ = rerail("policy", "check")
    assert code == 1 and words in out


def test_nothing_is_said_against_policies_that_are_only_strict(rerail: Run, folder: Path) -> None:
    (folder / "rerail.toml").write_text(
        'max_restarts = 0\nrestart_limits = "rank=1"\nrungs = "replace_rank,restart_all,stop"\n'
        '[[policy]]\nnode = "rack7-*"\nadmission = "no"\n'
    )
    assert rerail("policy", "check")[0] == 0


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
    for vendors in ("80E01801", "NPU-80E01801", "80e01801"):
        for command in (("policy", "explain"), ("faults", "show")):
            assert "npu.80e01801: Ascend HBM" in rerail(*command, vendors)[1]
    found = json.loads(rerail("policy", "explain", "GPU-XID-48", "--json")[1])
    assert found["code"] == "gpu.xid.48" and found["verdict"]["axes"]["repair"] == "reset_device"
    assert [rule["id"] for rule in found["escalation"]] == ["needs-resets", "anything-often"]
    assert {one["rung"] for one in found["decision"]["candidates"]} == set(Rung)


def test_a_fault_that_takes_its_place_out_of_use_is_explained_with_and_without_a_spare(rerail: Run) -> None:
    out = rerail("policy", "explain", "gpu.xid.79")[1]
    assert "would do    stop (rule nothing-left): 1 of 4 ranks have no healthy place left" in out
    assert "  replace_rank  out: device:n1/1 is out of use: gpu.xid.79\n" in out
    assert "with a spare device of its node: swap_device (rule place-lost): device:n1/1 is out of use" in out
    assert json.loads(rerail("policy", "explain", "gpu.xid.79", "--json")[1])["with_spare"]["rung"] == "swap_device"
    assert "with a spare device of its node: swap_device" in rerail("policy", "explain", "gpu.xid.48")[1]
    assert "with a spare" not in rerail("policy", "explain", "process.killed")[1]
    lost = rerail("policy", "explain", "node.lost")[1]
    assert "would do    restart_all" in lost and "with a spare node: swap_node" in lost


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


def moved_away(code: str) -> list[tuple[int, Any]]:
    """Records of a hot switch that only a monitor has led to."""
    signal = Signal(
        id="s", job="job1", at=10.0, source="machine", node="n1", payload={"subject": "gpu1", "detector": "nvidia"}
    )
    event = Event(id="x", job="job1", at=10.0, cause_id="s", code=code, node="n1", severity=Severity.WARNING)
    leave = Diagnosis(id="d", job="job1", at=11.0, code=code, root="", node="n1", ranks=(1,), rule="evacuate")
    switch = Decision(id="c", job="job1", at=11.0, cause_id="d", rung=Rung.HOT_SWITCH, rule="hot-switch")
    heard = [(0, signal), (0, event)] if code != "place.quarantined" else []
    return [*heard, (1, leave), (1, switch)]


@pytest.mark.parametrize(
    ("code", "rule", "words"),
    [
        (
            "gpu.xid.63",
            "",
            "would nothing (other: only a monitor told, and rule mapping lets the ranks stay)\n          admission",
        ),
        ("gpu.xid.63", "running = 'boundary'", "would nothing (other: only a monitor told, and rule policy 1 lets"),
        ("gpu.xid.63", "admission = 'no'\nrunning = 'boundary'", "would hot_switch (same: the policy allows it)"),
        ("gpu.xid.63", "admission = 'no'\nrunning = 'boundary'\nmute_s = 600", "would nothing (other"),
        ("place.quarantined", "", "would hot_switch (same: put out of use by hand, whatever the policy says)\ndefault"),
    ],
)
def test_a_replay_lets_ranks_stay_where_the_policy_does(
    rerail: Run, tmp_path: Path, folder: Path, code: str, rule: str, words: str
) -> None:
    with contextlib.closing(Journal(tmp_path / "state" / "job1" / FILE_NAME)) as book:
        book.append(moved_away(code), {"placement": [["n1", device] for device in range(4)], "exit_code": 0})
    if rule:
        (folder / "rerail.toml").write_text(f'[[policy]]\ncode = "{code}"\n{rule}\n')
    out = rerail("policy", "replay", "job1")[1]
    assert f"{code} on n1: done hot_switch, {words}" in out
    assert f"1 decision, {int('other' in words)} of them otherwise" in out


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
