"""Durable checkpoints end to end: a killed job goes on as if nothing had been, in the same layout or in another one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import Run, Start, torchrun

from rerail.checkpoint import catalog, names
from rerail.checkpoint.files import FileTier

SCRIPT = Path(__file__).with_name("saved.py")
STEPS, EVERY = 24, 4


def committed(root: Path) -> list[tuple[int, int]]:
    """(epoch, step) of what counts, oldest first; every one is opened and so proven whole."""
    found = [one for one in catalog.folders(FileTier(root)) if one.committed]
    return [(catalog.open_step(one.tier, one.id).id.epoch, one.id.step) for one in found]


def kill_everything(run: Run) -> None:
    """As a power cut would: launcher, controller, agent, ranks and persisters at once."""
    processes = [*psutil.Process(run.process.pid).children(recursive=True), psutil.Process(run.process.pid)]
    for process in processes:
        process.suspend()
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, timeout=20)


def later_losses(run: Run, first: int) -> dict[tuple[int, int], float]:
    return {place: loss for place, loss in run.losses.items() if place[1] > first}


@pytest.mark.parametrize(("layout", "more"), [("ddp", ()), ("fsdp", ()), ("zero", ()), ("fsdp", ("--bare",))])
@pytest.mark.timeout(400)
def test_a_rank_is_killed_then_the_whole_job_and_the_bits_are_those_of_a_quiet_run(
    start: Start, tmp_path: Path, layout: str, more: tuple[str, ...]
) -> None:
    quiet = start(layout, str(STEPS), str(tmp_path / "quiet"), *more, ranks=2, script=SCRIPT)
    quiet.finish()  # without a pause between steps, so that saves are left out: the disk is never waited for
    assert committed(tmp_path / "quiet")[-1] == (1, STEPS)

    root = tmp_path / "root"
    first = start(layout, str(STEPS), str(root), "--sleep", "0.2", *more, ranks=2, script=SCRIPT)
    first.reach(6)
    first.send(1, signal.SIGKILL)
    # on a busy machine a save in between may be left out
    first.until(lambda: committed(root)[-1:] >= [(1, 12)], "a save by the newcomer")
    kill_everything(first)
    assert len(first.pids[1]) == 2, first.told("a replaced rank 1")
    saved = committed(root)

    second = start(layout, str(STEPS), str(root), *more, ranks=2, script=SCRIPT)
    second.finish()
    assert min(step for _, step in second.losses) == saved[-1][1] + 1, second.told("to go on behind the newest save")
    assert second.losses == later_losses(quiet, saved[-1][1])
    assert second.digests == quiet.digests
    assert {**first.losses, **second.losses} == quiet.losses
    assert committed(root)[-1] == (2, STEPS)


@pytest.mark.timeout(300)
def test_a_newcomer_that_is_hit_by_the_next_fault_in_its_first_step_keeps_the_true_schedule(
    start: Start, tmp_path: Path
) -> None:
    """Rank 1 is lost in step 6, and rank 0 when all of them replay it."""
    quiet = start("ddp", "12", str(tmp_path / "quiet"), ranks=3, script=SCRIPT)
    quiet.finish()
    run = start(
        "ddp", "12", str(tmp_path / "root"), "--sleep", "0.1", "--die", "inside@1@6,again@0@6", ranks=3, script=SCRIPT
    )
    run.finish()
    assert len(run.pids[0]) == len(run.pids[1]) == 2, run.told("two replaced ranks")
    assert run.losses == quiet.losses and run.digests == quiet.digests


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.timeout(300)
def test_without_room_for_snapshots_every_save_is_waited_for_and_exact(
    start: Start, tmp_path: Path, layout: str
) -> None:
    quiet = start(layout, str(STEPS), str(tmp_path / "quiet"), ranks=2, script=SCRIPT)
    quiet.finish()
    root, env = tmp_path / "root", {"RERAIL_SNAPSHOT_MEMORY": "0"}
    run = start(layout, str(STEPS), str(root), "--sleep", "0.1", ranks=2, script=SCRIPT, env=env)
    run.reach(2 * EVERY)
    assert (1, EVERY) in committed(root), "the training went on before the save was done"
    run.send(1, signal.SIGKILL)
    run.finish()
    # a rank that is killed between its step and its word on it leaves that one out
    assert run.digests == quiet.digests and run.losses.items() <= quiet.losses.items()
    assert len(quiet.losses) - len(run.losses) <= 1, sorted(quiet.losses.keys() - run.losses.keys())
    (report,) = run.reports()
    assert report["rung"] == ("replace_rank" if layout == "ddp" else "restart_all"), report
    assert any("checkpoints are written straight from the tensors" in line for line in run.output), run.told("a word")
    assert committed(root)[-1][1] == STEPS


@pytest.mark.parametrize(
    ("layout", "when", "rank"),
    [("ddp", "before", 1), ("ddp", "inside", 0), ("fsdp", "before", 0), ("fsdp", "inside", 1)],
)
def test_a_rank_lost_in_the_middle_of_a_save_holds_up_no_other_save(
    start: Start, tmp_path: Path, layout: str, when: str, rank: int
) -> None:
    """It dies before its part of step 8 is copied, or in the very step that is being saved."""
    root = tmp_path / "root"
    run = start(layout, "20", str(root), "--sleep", "0.1", "--die", f"{when}@{rank}@8", ranks=2, script=SCRIPT)
    run.finish()
    assert len(run.pids[rank]) == 2, run.told("a replaced rank")
    # on a busy machine one in between may be left out; the last one is waited for
    assert {(1, 4), (1, 20)} <= set(committed(root)) <= {(1, step) for step in (4, 8, 12, 16, 20)}


@pytest.mark.parametrize("step", [12, 20])
def test_a_rank_lost_while_the_next_save_is_agreed_agrees_again_with_the_others(
    start: Start, tmp_path: Path, step: int
) -> None:
    """By measured times, one small collective in the step behind each save, and behind each repair: a newcomer must not be
    alone in it. Behind a repair the next save may come sooner, not later."""
    root = tmp_path / "root"
    args = ("ddp", "26", str(root), "--planned", "--sleep", "0.03", "--die", f"inside@1@{step}")
    run = start(*args, ranks=2, script=SCRIPT)
    run.finish()
    assert len(run.pids[1]) == 2, run.told("a replaced rank")
    saved = set(committed(root))
    assert (1, 26) in saved and min(saved) <= (1, 20), run.told("a save of the lost rank or sooner, and the last one")
    planned = [note.payload for note in run.records("signal") if note.source == "checkpoint.planned"]
    assert planned and all(note["step_s"] > 0.03 and note["steps"] >= 1 for note in planned), planned


def command_of(launcher: str, ranks: int, folder: Path, *args: str) -> tuple[list[str], dict[str, str]]:
    """How to run the script by one of three launchers, and in which environment."""
    command = {
        "alone": [],
        "torchrun": [*torchrun(folder), "--standalone", "--nproc-per-node", str(ranks)],
        "rerail": ["-m", "rerail.cli.main", "run", "--nproc-per-node", str(ranks)],
    }[launcher]
    env = {**os.environ, "RERAIL_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return [sys.executable, *command, str(SCRIPT), *args], env


def launched(launcher: str, ranks: int, folder: Path, *args: str) -> dict[int, dict[str, Any]]:
    """Run the script to its end; what each rank said last, and its first step."""
    command, env = command_of(launcher, ranks, folder, *args)
    told = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert told.returncode == 0, told.stdout + told.stderr
    lines = told.stdout.replace("loaded ", "").replace("}{", "}\n{").splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        rank = found.setdefault(event["rank"], {"losses": {}})
        if "loss" in event:
            rank["losses"][event["step"]] = event["loss"]
        rank.update({key: event[key] for key in ("loaded", "digest") if key in event})
    assert len(found) == ranks, told.stdout + told.stderr
    return found


@pytest.mark.timeout(400)
def test_every_layout_reads_what_the_one_before_has_saved(tmp_path: Path) -> None:
    """1 rank, 2, 2, 2, 4, 4, 3 and 1 again; each finds the whole tensors just as they were, and trains on."""
    before, step = "", 0
    for launcher, ranks, layout in [
        ("alone", 1, "ddp"),
        ("torchrun", 2, "fsdp"),
        ("rerail", 2, "zero"),
        ("rerail", 2, "tp"),
        ("torchrun", 4, "fsdp+tp"),
        ("rerail", 4, "hsdp"),
        ("torchrun", 3, "zero"),
        ("alone", 1, "ddp"),
    ]:
        step += 3
        ranks_said = launched(launcher, ranks, tmp_path, layout, str(step), str(tmp_path / "root"), "--loaded")
        where = f"{layout} of {ranks} by {launcher}"
        assert ranks_said[0]["loaded"] == before or not before, f"{where} found other tensors than were saved"
        assert sorted(ranks_said[0]["losses"]) == [step - 2, step - 1, step], where
        before = ranks_said[0]["digest"]
    assert set(range(3, step + 1, 3)) <= {saved for _, saved in committed(tmp_path / "root")}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("launcher", "ranks", "layout"), [("torchrun", 2, "ddp"), ("torchrun", 2, "fsdp"), ("alone", 1, "ddp")]
)
def test_without_rerail_run_a_second_start_goes_on_where_the_first_ended(
    tmp_path: Path, launcher: str, ranks: int, layout: str
) -> None:
    straight = launched(launcher, ranks, tmp_path, layout, "9", str(tmp_path / "straight"))
    half = launched(launcher, ranks, tmp_path, layout, "5", str(tmp_path / "parts"))
    rest = launched(launcher, ranks, tmp_path, layout, "9", str(tmp_path / "parts"))
    for rank in range(ranks):
        assert rest[rank]["digest"] == straight[rank]["digest"]
        assert {**half[rank]["losses"], **rest[rank]["losses"]} == straight[rank]["losses"]
        assert min(rest[rank]["losses"]) == 6


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("launcher", "ranks", "layout"), [("torchrun", 2, "fsdp"), ("alone", 1, "ddp")])
def test_told_to_end_without_rerail_run_it_saves_one_step_more_and_ends(
    tmp_path: Path, launcher: str, ranks: int, layout: str
) -> None:
    straight = launched(launcher, ranks, tmp_path, layout, "40", str(tmp_path / "straight"))
    root = tmp_path / "root"
    command, env = command_of(launcher, ranks, tmp_path, layout, "40", str(root), "--every", "1000", "--sleep", "0.1")
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if '"rank": 0' in line and '"step": 5,' in line:
                process.send_signal(signal.SIGTERM)
        assert process.wait(60) != 0
    ((_, step),) = committed(root) or [(0, 0)]
    assert 5 <= step < 40 and f"told to end: step {step} will be saved first" in "".join(said), "".join(said)
    rest = launched(launcher, ranks, tmp_path, layout, "40", str(root))
    for rank in range(ranks):
        assert min(rest[rank]["losses"]) == step + 1
        assert rest[rank]["digest"] == straight[rank]["digest"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_told_to_end_under_rerail_run_no_step_is_lost(tmp_path: Path, layout: str) -> None:
    """Snapshots are far apart: what is saved is the step that the ranks were in, not the newest one of those."""
    straight = launched("rerail", 2, tmp_path, layout, "40", str(tmp_path / "straight"))
    root, done = tmp_path / "root", [0, 0]
    command, env = command_of("rerail", 2, tmp_path, layout, "40", str(root), "--every", "1000", "--sleep", "0.1")
    env["RERAIL_SNAPSHOT_EVERY"] = "1000"
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            for event in (json.loads(part) for part in line.replace("}{", "}\n{").splitlines() if part.startswith("{")):
                done[event["rank"]] = max(done[event["rank"]], event.get("step", 0))
                if event["rank"] == 0 and event.get("step") == 5:
                    process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    ((_, step),) = committed(root) or [(0, 0)]
    assert f"step {step} was saved to {root} before the end" in "".join(said), "".join(said)
    assert step >= min(done) >= 5, f"{done} were done: {''.join(said)}"
    rest = launched("rerail", 2, tmp_path, layout, "40", str(root))
    for rank in range(2):
        assert min(rest[rank]["losses"]) == step + 1
        assert rest[rank]["digest"] == straight[rank]["digest"]


@pytest.mark.timeout(120)
def test_a_step_that_a_start_finds_damaged_is_marked_and_no_longer_counted_on(tmp_path: Path) -> None:
    root = tmp_path / "root"
    launched("alone", 1, tmp_path, "ddp", "8", str(root))
    newest = root / [one for one in catalog.folders(FileTier(root)) if one.committed][-1].id.folder
    (shard,) = newest.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    again = launched("alone", 1, tmp_path, "ddp", "12", str(root))
    assert min(again[0]["losses"]) == 5, "it starts from the step before"
    assert "does not match its checksum" in (newest / names.verified_name(0)).read_text()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("arguments", "why"), [("''", "empty place"), ("'x', when=0", "at least 1"), ("'x', keep=0", "at least 1")]
)
def test_places_and_rules_that_are_none(tmp_path: Path, arguments: str, why: str) -> None:
    script = f"import rerail; rerail.join().checkpoints({arguments})"
    told = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert told.returncode == 1 and why in told.stderr, told.stderr


@pytest.mark.timeout(200)
def test_torchrun_can_still_end_the_others_when_one_has_failed_and_start_all_again(tmp_path: Path) -> None:
    """It ends them with SIGTERM, too; the step they then agree on never comes, and the next attempt must not hear of it."""
    straight = launched("torchrun", 2, tmp_path, "ddp", "20", str(tmp_path / "straight"))
    args = ("ddp", "20", str(tmp_path / "root"), "--sleep", "0.05", "--die", "inside@1@9")
    (python, *command), env = command_of("torchrun", 2, tmp_path, *args)
    command.insert(command.index("--standalone"), "--max-restarts=1")
    env |= {
        "TEST_DIR": str(tmp_path),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # else torchrun itself does not come back
    told = subprocess.run([python, *command], env=env, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stdout + told.stderr
    for rank in (0, 1):
        assert straight[rank]["digest"] in told.stdout, told.stdout + told.stderr


def test_a_finished_job_that_is_started_again_trains_no_further(tmp_path: Path) -> None:
    root = tmp_path / "root"
    first = launched("rerail", 1, tmp_path, "ddp", "6", str(root))
    saved = set(committed(root))
    again = launched("rerail", 1, tmp_path, "ddp", "6", str(root))
    assert again[0]["digest"] == first[0]["digest"]
    assert set(committed(root)) == saved
    assert not again[0]["losses"], "a step was taken behind the end"


def test_what_is_saved_to_the_first_place_is_copied_to_the_others_and_they_are_enough(tmp_path: Path) -> None:
    fast, slow, far = (tmp_path / name for name in ("fast", "slow", "far"))
    places = f"{fast},{slow},{far}"
    straight = launched("rerail", 2, tmp_path, "fsdp", "9", str(tmp_path / "straight"))
    half = launched("rerail", 2, tmp_path, "fsdp", "5", places)
    assert committed(fast)[-1] == committed(slow)[-1] == committed(far)[-1] == (1, 5)
    shutil.rmtree(fast)
    shutil.rmtree(slow)
    rest = launched("rerail", 2, tmp_path, "fsdp", "9", places)
    for rank in (0, 1):
        assert rest[rank]["digest"] == straight[rank]["digest"]
        assert {**half[rank]["losses"], **rest[rank]["losses"]} == straight[rank]["losses"]
    assert committed(fast)[-1] == committed(far)[-1] == (2, 9)


def test_a_place_that_cannot_be_written_stops_the_job_at_once_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    command = [sys.executable, "-m", "rerail.cli.main", "run", "--nproc-per-node", "2"]
    env = {**os.environ, "RERAIL_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    run = [*command, str(SCRIPT), "ddp", "6", str(tmp_path / "file")]
    told = subprocess.run(run, env=env, capture_output=True, text=True, timeout=150)
    assert told.returncode == 93, told.stderr
    assert "nothing can be written to" in told.stderr
    assert "job.guard" not in told.stderr and "Connection closed" not in told.stderr, told.stderr
