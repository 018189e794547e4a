"""`rerail plan`: on paper, from a file, from a journal; and what it refuses."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rerail.cli.main import main
from rerail.flow import Cost, Report, Rung, Signal
from rerail.planner.paper import Job, answer
from rerail.planner.reference import PUBLISHED, expected, modelled, replaced
from rerail.planner.units import quantity
from rerail.runtime.journal import FILE_NAME, Journal
from rerail.runtime.samples import Mark, MarkKind, Sample


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", *words])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_a_plan_on_paper_says_what_when_and_on_what_it_rests(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(capsys, "--gpus", "16384", "--params", "405e9", "--write", "2TB/s", "--length", "54d")
    assert code == 0
    assert "one every 3.1 h" in out and "goodput   99." in out
    assert "store beside the cluster" in out and "419 unplanned interruptions" in out
    assert "none of this is worth it" not in out


def test_short_jobs_on_hardware_that_seldom_fails_are_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = plan(capsys, "--gpus", "8", "--params", "3B", "--write", "2.7GB/s", "--length", "40min")
    assert out.startswith("none of this is worth it")


@pytest.mark.parametrize("length", ["10min", "59min"])
def test_jobs_that_end_before_their_first_hourly_checkpoint_are_told_so_too(
    length: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = plan(capsys, "--gpus", "8", "--params", "3B", "--length", length)
    assert out.startswith("none of this is worth it")


@pytest.mark.parametrize("gpus", ["1", "4", "8"])
def test_one_node_has_no_other_to_save_to(gpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(capsys, "--gpus", gpus, "--params", "1e9")
    assert code == 0 and "another node" not in out and "beside 1 node:" in out


def test_what_is_listed_is_what_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = plan(capsys, "--gpus", "64", "--params", "7e9")
    summary, losses, _ = out.split("\n\n")
    listed = [float(line.split("%")[0].split()[-1]) for line in losses.splitlines()]
    goodput = float(summary.split("goodput")[1].split("%")[0])
    assert "waiting for nodes" in losses and "everything else" in losses
    assert 100 - goodput == pytest.approx(sum(listed), abs=0.01)


def test_every_replica_holds_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = plan(capsys, "--gpus", "64", "--params", "7e9", "--replicas", "64")
    assert "98 GB, 98 GB on each of 64 devices" in out


def test_replicas_need_no_snapshots_for_what_a_replica_has(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = plan(capsys, "--gpus", "64", "--params", "7B", "--replicas", "8", "--json")
    told = json.loads(out)["plan"]["planned"]
    assert told["waste"]["source"]["node"] == "replica"
    assert told["intervals"]["store"] is not None


def test_a_file_and_the_command_line_which_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('gpus = 1024\nparams = "70B"\nwrite = "20GB/s"\nmtbf = "2 d"\nelastic = true\n')
    _, out, _ = plan(capsys, "--config", str(file), "--mtbf", "1 d", "--json")
    job = json.loads(out)["job"]
    assert (job["gpus"], job["write"], job["mtbf"], job["elastic"]) == (1024, 20e9, 86_400, True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--params", "3B"], "--gpus is missing"),
        (["--gpus", "8", "--params", "3B", "--mtbf", "0"], "mtbf is '0'; it has to be more than 0"),
        (["--gpus", "8", "--params", "3B", "--rate", "-1"], "rate is '-1'; it has to be more than 0"),
        (["--gpus", "8", "--params", "3B", "--write", "3 GBs"], "'GBs' is no unit here; did you mean GB/s?"),
        (["--gpus", "4", "--params", "3B", "--per-node", "8"], "per_node is 8, but there are only 4 gpus"),
        (["--gpus", "8", "--params", "3B", "--write", "-1GB/s"], "write is '-1GB/s'; it has to be more than 0"),
        (["--gpus", "8", "--params", "3B", "--mtbf", "3h", "--rate", "1"], "mtbf is '3h' and rate '1'"),
        (["--gpus", "8", "--params", "7e15"], "TB on each of 8 gpus, which no device holds"),
        (["--gpus", "1e12", "--params", "7e9"], "nobody has more than 1e+07"),
        (["--gpus", "8", "--params", "7e9", "--length", "5 s"], "length is 5 s, but a step takes 10 s"),
        (["--gpus", "8", "--params", "3B", "--replicas", "9"], "replicas is 9, but there are only 8 gpus"),
        (["--gpus", "8.5", "--params", "3B"], "gpus is 8.5; a whole number is needed"),
        (["--gpus", "1.5", "--params", "3B"], "gpus is 1.5; a whole number is needed"),
        (["--gpus", "8", "--params", "3B", "--replicas", "1.5"], "replicas is 1.5; a whole number is needed"),
        (["--gpus", "8", "--params", "0.5"], "params is 0.5; a model has at least 1"),
        (["--gpus", "8", "--params", "3B", "--mtbf", "5"], "mtbf is '5': its unit is missing"),
        (["--gpus", "8", "--params", "3B", "--rate", "1e308"], "rate is 1e+308: that is less than a millisecond from"),
        (["--gpus", "8", "--params", "3B", "--rate", "1e-308"], "rate is 1e-308: that is more than 10,000 years from"),
        (["--gpus", "8", "--params", "3B", "--mtbf", "1e300d"], "mtbf is 8.64e+304 s: that is more than 10,000 years"),
        (["--gpus", "8", "--params", "3B", "--write", "0"], "write is '0'; it has to be more than 0"),
        (
            ["--gpus", "8", "--params", "3B", "--node-share", "0.8", "--job-share", "0.3"],
            "node_share is 0.8 and job_share 0.3",
        ),
        (["--config", "missing.toml"], "missing.toml cannot be read"),
        (["--journal", "nobody"], "no job"),
    ],
)
def test_bad_input_is_refused_with_the_field_the_value_and_what_would_be_right(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RERAIL_HOME", str(tmp_path))
    code, out, err = plan(capsys, *words)
    assert code == 2 and not out
    assert told in err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gpus = 8\nparms = 3e9", "parms is not known; did you mean params?"),
        ("gpus = [", "is no TOML file"),
        ('gpus = 8\nparams = "3B"\nelastic = "yes"', "elastic is 'yes'; true or false is needed"),
        (f"gpus = 8\nparams = {'9' * 400}", "(400 characters), which is too large"),
        (f"gpus = 8\nparams = {'9' * 5000}", "is no TOML file"),
    ],
)
def test_files_that_are_wrong(text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(text)
    code, _, err = plan(capsys, "--config", str(file))
    assert code == 2 and told in err


def journal_of(folder: Path, faults: int) -> Path:
    """A job of four ranks that lost one every ten minutes, two seconds each."""
    journal = Journal(folder / FILE_NAME)
    told: list[tuple[int, Signal | Report]] = [
        (0, Signal(id="s0", job="j", at=1000.0, source="checkpoint.planned", node="n", payload={"step_s": 0.5}))
    ]
    for n in range(1, faults + 1):
        cost = Cost(detect=0.5, t0=1.0, t1=1.0, t2=0.25, t3=9.0, t4=0.25)
        report = Report(
            id=f"r{n}",
            job="j",
            at=1000.0 + 600.0 * n,
            incident=n,
            code="process.killed",
            summary="",
            rung=Rung.REPLACE_RANK,
            ok=True,
            cost=cost,
        )
        told.append((n, report))
    journal.append(told, {"placement": [["n", 0]] * 4})
    journal.close()
    return folder


def test_a_journal_gives_the_rates_and_times_that_a_job_has_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = journal_of(tmp_path / "run", faults=12)
    code, out, _ = plan(capsys, "--journal", str(folder), "--params", "1e9", "--json")
    told = json.loads(out)
    assert code == 0
    assert told["job"]["mtbf"] == pytest.approx(600, rel=0.2)
    assert told["mtbf_between"][0] < 600 < told["mtbf_between"][1]
    assert (told["job"]["process_down"], told["job"]["step"], told["job"]["gpus"]) == (2.0, 0.5, 4)
    assert "in the journal of run" in told["assumed"]["process_down"]


@pytest.mark.parametrize("damage", ["foreign", "truncated", "empty"])
def test_a_journal_that_is_none(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    file = folder / FILE_NAME
    if damage == "foreign":
        folder.mkdir()
        file.write_bytes(b"these are not the records you look for" * 100)
    else:
        journal_of(folder, faults=0 if damage == "empty" else 200)
    if damage == "truncated":
        for rest in folder.glob(f"{FILE_NAME}-*"):
            rest.unlink()
        file.write_bytes(file.read_bytes()[:5000])
    code, out, err = plan(capsys, "--journal", f"{folder}/", "--params", "1e9")
    assert code == 2 and not out
    assert str(folder) in err and "Traceback" not in err


def test_the_founding_reference_is_met_by_its_model_and_beaten(capsys: pytest.CaptureFixture[str]) -> None:
    for params, published in PUBLISHED.items():
        model, ours = modelled(params), expected(params)
        assert model.flush == pytest.approx(published.flush, rel=0.01)
        assert model.restart == pytest.approx(published.restart, rel=0.15)
        assert ours.fault(ours.flush) < published.fault(published.flush) / 3
        assert replaced(params).fault(1.0) < ours.fault(1.0)
    code, out, _ = plan(capsys, "--reference")
    assert code == 0 and "they were not measured on that server" in out
    assert json.loads(plan(capsys, "--reference", "--json")[1])["1.5e+10"]["published"]["load"] == 90.0


def test_more_faults_are_planned_with_more_saves() -> None:
    seldom = answer(Job(gpus=64, params=7e9, mtbf=86_400.0 * 10)).planned
    often = answer(Job(gpus=64, params=7e9, mtbf=3600.0)).planned
    assert all(often.intervals[tier] <= seldom.intervals[tier] for tier in often.intervals)
    assert often.waste.total > seldom.waste.total


def test_a_journal_of_several_nodes_and_of_incidents_that_are_no_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = journal_of(tmp_path / "run", faults=12)
    journal = Journal(folder / FILE_NAME)
    grown = Report(
        id="g", job="j", at=8300.0, incident=90, code="node.back", summary="", rung=Rung.GROW, ok=True, cost=Cost()
    )
    taken = Report(
        id="t",
        job="j",
        at=8400.0,
        incident=91,
        code="controller.lost",
        summary="",
        rung=Rung.RETRY_STEP,
        ok=True,
        cost=Cost(),
        attempts=0,
    )
    places = [[f"n{n // 8}", n % 8] for n in range(32)]
    journal.append([(90, grown), (91, taken)], {"placement": places})
    journal.close()
    _, out, _ = plan(capsys, "--journal", str(folder), "--params", "1e9", "--json")
    job = json.loads(out)["job"]
    assert (job["gpus"], job["per_node"]) == (32, 8)
    assert job["mtbf"] == pytest.approx(600, rel=0.2)
    assert job["node_share"] < 0.05, "no node was lost"


def test_a_job_without_faults_is_not_taken_for_one_that_fails_all_the_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = journal_of(tmp_path / "run", faults=0)
    journal = Journal(folder / FILE_NAME)
    why = "a checkpoint every 12 steps"
    later = Signal(
        id="s9",
        job="j",
        at=1010.0,
        source="checkpoint.planned",
        node="n",
        step=40,
        payload={"step_s": 0.5, "message": why},
    )
    journal.append([(0, later)], {})
    journal.close()
    for name in (str(folder), str(folder / FILE_NAME)):
        _, out, _ = plan(capsys, "--journal", name, "--params", "1e9")
        assert "0 nodes beside 1 node" in out and "one every 533 d (90 %:" in out.splitlines()[0], out
        assert "  step 40: a checkpoint every 12 steps" in out
        assert out.splitlines()[-1].startswith("more:"), "what the job has planned comes before"


def test_an_impossible_job_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = plan(capsys, "--gpus", "8", "--params", "5e11", "--mtbf", "2s", "--write", "1MB/s", "--copy", "1MB/s")
    assert out.startswith("no interval keeps up with these faults")


def told_of(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> dict[str, Any]:
    code, out, err = plan(capsys, "--journal", str(folder), "--params", "1e9", "--json", *words)
    assert code == 0, err
    return dict(json.loads(out))


def test_no_fault_of_a_journal_makes_a_leap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = [told_of(capsys, journal_of(tmp_path / f"run{n}", faults=n)) for n in range(1, 5)]
    between = [one["job"]["mtbf"] for one in found]
    assert between == sorted(between, reverse=True)
    assert all(more / less < 1000 for more, less in pairwise(between)), between
    shares = [one["job"]["node_share"] for one in found]
    assert 0.05 < shares[-1] < shares[0] < 0.21, "what is usual weighs a few faults, not millions"


def test_what_is_given_goes_before_the_journal_and_is_not_said_to_be_its(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = journal_of(tmp_path / "run", faults=12)
    own = told_of(capsys, folder, "--mtbf", "3h", "--step", "2s")
    assert (own["job"]["mtbf"], own["job"]["step"]) == (10_800, 2)
    assert not {"mtbf", "step", "rate"} & set(own["assumed"]) and own["mtbf_between"] is None
    rated = told_of(capsys, folder, "--rate", "2")
    assert rated["job"]["mtbf"] == pytest.approx(86_400 * 1000 / (2 * 4)) and "mtbf" not in rated["assumed"]


def test_a_journal_of_another_size_is_scaled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = journal_of(tmp_path / "run", faults=12)
    same, larger = told_of(capsys, folder), told_of(capsys, folder, "--gpus", "64")
    assert larger["job"]["mtbf"] == pytest.approx(same["job"]["mtbf"] / 16)
    assert larger["mtbf_between"] == pytest.approx([one / 16 for one in same["mtbf_between"]])
    assert "that was on 4 ranks, and is scaled to 64" in larger["assumed"]["mtbf"]
    assert told_of(capsys, folder, "--gpus", "2")["job"]["per_node"] == 2


def test_the_step_of_a_job_without_checkpoints_is_known_from_its_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal(tmp_path / "run" / FILE_NAME)
    told_so_far = Sample(at=1010.0, span_s=10.0, step=50, steps=50, moved=1010.0, compute=0.2, told=50, joined=1)
    journal.append([], {"placement": [["n", 0]] * 2}, [told_so_far], [Mark(1000.0, MarkKind.BEGIN)])
    journal.close()
    told = told_of(capsys, tmp_path / "run")
    assert told["job"]["step"] == pytest.approx(0.2) and "measured by run" in told["assumed"]["step"]


def test_the_verdict_says_what_the_table_says(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = plan(capsys, "--gpus", "8", "--params", "3B", "--write", "2.7GB/s", "--length", "30min")
    verdict, summary, losses, _ = out.split("\n\n")
    costs = float(verdict.split("cost ")[1].split("%")[0])
    assert 100 - float(summary.split("restarts of all: ")[1].split("%")[0]) == pytest.approx(costs, abs=0.006)
    waiting = next(line for line in losses.splitlines() if "waiting for nodes" in line)
    assert float(waiting.split("%")[0].split()[-1]) < 0.01, "nobody waits a day in a job of half an hour"
    assert "store beside the cluster  never" in summary and "the job begins anew" in summary


def test_nothing_is_saved_less_often_than_a_job_lasts(capsys: pytest.CaptureFixture[str]) -> None:
    for length in ("10min", "59min", "6h", "54d"):
        _, out, _ = plan(capsys, "--gpus", "8", "--params", "3B", "--mtbf", "20h", "--length", length, "--json")
        intervals = json.loads(out)["plan"]["planned"]["intervals"].values()
        assert all(one is None or one <= quantity("length", length, "duration") * 1.01 for one in intervals)


def test_standbys_and_sources_are_planned_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = plan(capsys, "--gpus", "64", "--params", "7B", "--replicas", "2")
    assert "recover   process or device, node from a replica; everything from store beside the cluster" in out
    assert "standbys  1 on each node: a rank is lost every" in out and "saves to store are made from it" in out
    _, out, _ = plan(capsys, "--gpus", "1", "--params", "1B")
    assert "standbys  0 on each node" in out


def test_sizes_that_no_device_has_are_doubted(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(capsys, "--gpus", "8", "--params", "500B")
    assert code == 0 and out.startswith("careful: params is 5e+11: that is 875 GB on each of 8 devices")


def test_numbers_are_written_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = plan(capsys, "--gpus", "1e6", "--params", "1e12", "--write", "9TB/s")
    assert "470 a day" in out
    for words in (["--gpus", "64", "--params", "7B"], ["--gpus", "1", "--params", "1B", "--bytes-per-param", "14B"]):
        _, out, _ = plan(capsys, *words)
        assert "e-0" not in out and "e+0" not in out
        assert not any("0.000%" in line and "█" in line for line in out.splitlines())
