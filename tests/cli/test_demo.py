from pathlib import Path

import pytest
import torch

from rerail.cli.demo_gpt import GPT, Sources, fingerprint
from rerail.cli.demo_train import raise_if_asked
from rerail.cli.demo_view import View, incident_line, incident_table
from rerail.cli.watch import Step, WatchedJob, WatchError
from rerail.flow import Cost, Report, Rung


def report(**changes: object) -> Report:
    values: dict[str, object] = {
        "id": "r-1", "job": "j", "at": 0.0, "incident": 1, "code": "process.killed", "summary": "rank 2 killed (SIGKILL)",
        "rung": Rung.REPLACE_RANK, "ok": True, "cost": Cost(detect=0.01, t0=0.2, t1=0.3, t2=0.04), "resumed_step": 120,
    }  # fmt: skip
    return Report(**(values | changes))  # type: ignore[arg-type]


def test_incidents_are_told_in_one_line() -> None:
    line = incident_line(report())
    assert "rank 2 killed (SIGKILL)" in line
    assert "replaced, survivors kept in 0.34 s, resumed at step 120" in line
    assert "found in" not in line
    frozen = incident_line(report(summary="rank 1 frozen", cost=Cost(detect=1.1, t1=0.4)))
    assert "found in 1.10 s" in frozen
    lost = incident_line(report(code="controller.lost", summary="controller killed", attempts=0, cost=Cost(detect=0.7)))
    assert "took over after 0.70 s" in lost


def test_table_has_every_incident_and_phase() -> None:
    text = incident_table([report(), report(incident=2, summary="rank 3 raised ConnectionError", rung=Rung.RETRY_STEP)])
    assert [line.split()[0] for line in text.splitlines()[:3]] == ["#", "1", "2"]
    assert "0.30" in text and "0.55" in text


def test_plain_view_shows_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    view = View()
    view.begin("disturbed", 20)
    view.steps([Step(0.0, 0, 1, number, 2.5) for number in range(1, 21)])
    view.incident(report())
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "loss 2.50" in line]) == 10
    assert "rank 2 killed" in lines[-1]


def test_wish_for_an_exception_is_granted_once(tmp_path: Path) -> None:
    raise_if_asked(tmp_path, 3, rehearsing=False)
    (tmp_path / "raise-3").touch()
    raise_if_asked(tmp_path, 3, rehearsing=True)
    with pytest.raises(ConnectionError):
        raise_if_asked(tmp_path, 3, rehearsing=False)
    raise_if_asked(tmp_path, 3, rehearsing=False)


def test_same_seed_same_weights_and_data_depends_on_step_and_rank_only() -> None:
    def small() -> GPT:
        torch.manual_seed(0)
        return GPT(layers=1, width=16, heads=2, length=8)

    assert fingerprint(small()) == fingerprint(small())
    changed = small()
    with torch.no_grad():
        changed.norm.bias[0] += 1e-7
    assert fingerprint(changed) != fingerprint(small())
    data = Sources(length=8, batch=2, limit=1 << 16)
    tokens, targets = data.batch(5, 1)
    assert torch.equal(tokens, data.batch(5, 1)[0])
    assert not torch.equal(tokens, data.batch(5, 2)[0])
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert small()(tokens, targets).item() > 0


def test_watching_reads_whole_lines_and_names_the_end(tmp_path: Path) -> None:
    line = '{"at": 1.0, "pid": 7, "step": 1}'
    (tmp_path / "rank-0.jsonl").write_text(line + "\n" + line[:10])
    with WatchedJob(["sh", "-c", "echo gone wrong; exit 3"], tmp_path, 1) as job:
        assert [step.pid for step in job.poll()] == [7]
        with pytest.raises(WatchError, match=r"exit code 3 while waiting for: rain(?s:.)*gone wrong"):
            job.wait_for("rain", lambda _: False)
        with open(tmp_path / "rank-0.jsonl", "a") as file:
            file.write(line[10:] + "\n")
        assert len(job.poll()) == 1
        assert job.pid(0) == 7


def test_a_watched_job_leaves_nothing_behind(tmp_path: Path) -> None:
    with WatchedJob(["sleep", "1000"], tmp_path, 1) as job:
        assert job.process.poll() is None
    assert job.process.returncode == -15
