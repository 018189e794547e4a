"""Real jobs whose training goes wrong: they go back, compute again, leave data out, and stop when nothing helps."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Run, Start

pytestmark = pytest.mark.timeout(400)
SICK = Path(__file__).with_name("sick.py")
QUIET = {"RERAIL_VOTE_EVERY": "0"}
Begin = Callable[..., Run]


@pytest.fixture
def begin(start: Start) -> Begin:
    """A job of two ranks that tell their losses."""

    def job(*args: str, **env: str) -> Run:
        return start(*args, ranks=2, script=SICK, env={**QUIET, **env})

    return job


def finished(run: Run) -> dict[int, str]:
    run.finish()
    assert len(run.digests) == 2, run.told("digests of both ranks")
    return run.digests


def rungs(run: Run) -> list[tuple[str, str]]:
    assert all(report["ok"] for report in run.reports()), run.told("repairs that succeed")
    return [(report["code"], report["rung"]) for report in run.reports()]


def left_out(run: Run) -> list[str]:
    """What the journal says about data that were passed over."""
    return [str(one.payload["message"]) for one in run.records("signal") if one.source == "data.skipped"]


BACK = ("training.nan", "roll_back")


def test_a_gradient_that_is_nan_once_leaves_no_trace(begin: Begin) -> None:
    run = begin("50", "--sleep", "0.1", RERAIL_ALLOW_INJECT="1")
    run.reach(10)
    told = run.inject("nan", "--rank", "1", "--seed", "2")
    spoilt = int(str(told["message"]).split("in step ")[1])
    digests = finished(run)
    assert rungs(run) == [BACK], run.told("one roll back")
    (report,) = run.reports()
    assert report["resumed_step"] < spoilt, (report, told)
    assert report["lost_steps"] >= 1 and report["ranks"] == [1], report
    assert [len(pids) for pids in run.pids.values()] == [1, 1], "no process was lost"
    assert not left_out(run), "the data were good"
    assert digests == finished(begin("50")), run.told("the weights of an undisturbed run")
    page = run.command("report", "1").stdout
    assert "roll back  (rule compute-again" in page and "loss is nan" in page, page
    assert "rolled back" in run.command("incidents").stdout


@pytest.mark.parametrize(
    "how",
    [
        ("--nan", "0:20"),
        pytest.param(("--nan", "0:20", "--behind"), marks=pytest.mark.slow),
        ("--nan", "0:20", "--behind", "--tell-every", "7"),
        ("--nan", "0:20", "--gradient"),
    ],
    ids=["inside the step", "behind the step", "told now and then", "its gradient alone"],
)
def test_a_batch_that_is_nan_is_computed_again_and_then_left_out(begin: Begin, how: tuple[str, ...]) -> None:
    run = begin("60", *how)
    digests = finished(run)
    assert rungs(run) == [BACK, BACK], run.told("two roll backs")
    assert left_out(run) == [
        "left out of the training before step 21, on every rank: batch 20 of epoch 0",
    ], run.told("which batch was left out")
    assert [record.rule for record in run.records("decision")] == ["compute-again", "leave-data-out"]
    assert digests == finished(begin("60", "--without", "0:20")), run.told("the weights of a run without that batch")
    assert "left out      before step 21, on every rank: batch 20" in (page := run.command("report", "2").stdout), page
    assert not any(math.isnan(run.losses[1, step]) for step in range(30, 61))


def test_a_batch_whose_damage_shows_only_some_steps_later_is_left_out_with_those_behind_it(begin: Begin) -> None:
    run = begin("60", "--poison", "0:20", "--by", "3000", "--lr", "0.0005", RERAIL_SNAPSHOT_EVERY="10")
    digests = finished(run)
    assert rungs(run) == [BACK, BACK], run.told("two roll backs")
    (skips,) = [record.skips for record in run.records("decision") if record.skips]
    ((first, count),) = skips.items()
    assert first <= 20 < first + count <= 30, skips
    gone = [f"0:{index}" for index in range(first, first + count)]
    assert digests == finished(begin("60", "--lr", "0.0005", "--without", *gone)), run.told(f"a run without {gone}")


def test_what_never_helps_stops_the_job_for_good(begin: Begin) -> None:
    run = begin("60", "--nan", *(f"0:{index}" for index in range(20, 40)))
    run.finish(93)
    assert [record.rule for record in run.records("decision")] == ["compute-again", "leave-data-out", "stays-bad"]
    said = "\n".join(run.output)
    assert (
        "loss is nan in step 21 on rank 1" in said and "then its data left out, and it went wrong all the same" in said
    )


@pytest.mark.slow
def test_many_bad_batches_in_a_row_stop_the_job_at_the_limit(begin: Begin) -> None:
    run = begin("60", "--nan", "0:20", "0:30", RERAIL_ROLL_BACK_LIMIT="3")
    run.finish(93)
    rules = [record.rule for record in run.records("decision")]
    assert rules == ["compute-again", "leave-data-out", "compute-again", "stays-bad"], rules
    assert "all went back 3 times with less than 100 steps of progress" in "\n".join(run.output)


def test_with_an_empty_setting_it_is_only_told(begin: Begin) -> None:
    run = begin("60", "--nan", "0:20", "--sleep", "0.1", RERAIL_ROLL_BACK="")
    finished(run)
    assert not run.reports() and math.isnan(run.losses[1, 60])
    assert any(event.code == "training.nan" for event in run.records("event")), run.told("word of it")


def test_a_newcomer_and_a_restart_know_what_was_left_out(begin: Begin) -> None:
    """One rank is lost right behind the batch that was left out, then all of them."""
    run = begin("90", "--nan", "0:20", "--sleep", "0.1", RERAIL_ALLOW_INJECT="1", RERAIL_SNAPSHOT_EVERY="7")
    run.until(lambda: any("left out of" in line for line in run.output), "a batch left out")
    run.inject("kill", "--rank", "1")
    run.until(lambda: len(run.pids[1]) > 1, "a new rank 1")
    run.reach(max(run.steps.values()) + 4)
    for rank in (0, 1):
        run.inject("kill", "--rank", str(rank))
    digests = finished(run)
    assert digests == finished(begin("90", "--without", "0:20")), run.told("the weights of a run without that batch")


def test_when_memory_holds_nothing_from_before_all_start_from_a_checkpoint_from_before(
    begin: Begin, tmp_path: Path
) -> None:
    """The loss is told so rarely that both snapshots, and a checkpoint, are spoilt by then."""
    saved = tmp_path / "saved"
    how = ("--nan", "0:24", "--behind", "--tell-every", "40", "--sleep", "0.1", "--save", str(saved), "--every", "10")
    run = begin("60", *how, RERAIL_SNAPSHOT_EVERY="2")
    digests = finished(run)
    assert rungs(run)[0] == ("training.nan", "restart_all"), run.reports()
    # a busy machine leaves a save out while the one before is still being written
    starts = re.findall(r"starts from the checkpoint of step (\d+)", "\n".join(run.output))
    assert starts and set(starts) <= {"10", "20"}, run.told("a start from before")
    assert digests == finished(begin("60", "--without", "0:24")), run.told("the weights of a run without that batch")
    spoilt = {path.parent.name for path in saved.glob("*/DISTRUSTED")}
    assert spoilt and all(int(name[5:15]) in (30, 40) for name in spoilt), spoilt
    again = begin("60", "--save", str(saved))
    again.finish()
    assert any("starts from the checkpoint of step 60" in line for line in again.output), again.told("a start from 60")


def test_without_anything_from_before_the_job_stops_and_says_so(begin: Begin) -> None:
    run = begin("60", "--nan", "0:24", "--behind", "--tell-every", "40", RERAIL_SNAPSHOT_EVERY="2")
    run.finish(93)
    assert "neither a snapshot nor a checkpoint from before the fault is kept" in "\n".join(run.output)


@pytest.mark.parametrize("how", [(), ("--numbers",)], ids=["loader", "step numbers"])
def test_a_batch_that_the_script_refuses_is_left_out_without_going_back(begin: Begin, how: tuple[str, ...]) -> None:
    run = begin("40", "--refuse", "0:15", "0:16", "0:25", *how)
    digests = finished(run)
    assert rungs(run) == [("training.bad_batch", "roll_back")] * 2, run.reports()
    assert [report["lost_steps"] for report in run.reports()] == [0, 0]
    (taken,) = [line for line in run.output if "taken 1:" in line]
    if how:
        assert " 0:42" in taken, "the numbers of the steps move on"
    else:
        assert digests == finished(begin("40", "--without", "0:15", "0:16", "0:25")), run.told("a run without them")
    assert len(left_out(run)) == 3 and "batch 15 of epoch 0" in left_out(run)[0], left_out(run)


def test_a_script_that_refuses_everything_is_stopped(begin: Begin) -> None:
    run = begin("40", "--refuse", *(f"0:{index}" for index in range(15, 30)))
    run.finish(93)
    assert "wanted none of 4 batches for the step from 15" in "\n".join(run.output)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_spike_of_the_loss_is_computed_again_and_its_data_left_out(begin: Begin, tmp_path: Path) -> None:
    """A level is known after about 50 beats of a second each; memory holds nothing from before a spike by then."""
    poison, steps = 1500, 2100
    how = (str(steps), "--lr", "0.0005", "--samples", "40000")
    saved = ("--save", str(tmp_path / "saved"), "--every", "100")
    run = begin(*how, *saved, "--poison", f"0:{poison}", "--sleep", "0.04", RERAIL_ROLL_BACK="nan, spike")
    run.reach(poison)
    digests = finished(run)
    codes = [report["code"] for report in run.reports()]
    assert codes == ["training.loss_spike"] * 2, run.told("two roll backs because of a spike")
    skips = [record.skips for record in run.records("decision") if record.skips]
    assert skips and all(one == skips[0] for one in skips), skips
    ((first, count),) = skips[0].items()
    assert first <= poison < first + count, skips
    want = finished(begin(*how, "--without", *(f"0:{index}" for index in range(first, first + count))))
    assert digests == want, run.told(f"the weights of a run without the batches {first} to {first + count - 1}")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("ROLL_BACK", "nans", "there is no fault of the training called 'nans'; did you mean nan?"),
        ("ROLL_BACK", "nan, fire", "called 'fire' (there are: nan, spike, divergence)"),
        ("ROLL_BACK_LIMIT", "-1", "must not be negative"),
        ("ROLL_BACK_LIMIT", "many", "a number is needed"),
    ],
)
def test_settings_that_mean_nothing_are_refused_before_anything_starts(
    begin: Begin, name: str, value: str, says: str
) -> None:
    run = begin("5", **{f"RERAIL_{name}": value})
    run.process.wait(60)
    run._reader.join(10)
    assert run.process.returncode == 2, run.told("a refusal")
    assert says in "\n".join(run.output), run.told(says)
