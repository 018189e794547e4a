"""A shard is lost that no replica holds: the survivors keep what they have, and all go back only if it does not heal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import Start

Digests = Callable[..., dict[int, str]]
SHADOWED = {"RERAIL_FIDELITY": "fast", "RERAIL_REHAB_FROM": "10", "RERAIL_SNAPSHOT_EVERY": "20"}
FAST = {**SHADOWED, "RERAIL_SHADOW_COST": "0"}
LOST = ("--fault", "die@2@33")
"""In the middle of a step, so that all survivors are at its beginning."""


@pytest.mark.parametrize("style", ["fsdp", "pp"])
def test_survivors_keep_their_steps_and_the_lost_shard_comes_from_its_snapshot(start: Start, style: str) -> None:
    run = start(style, "80", "--tell", *LOST, env=FAST)
    run.finish()
    (report,) = run.reports()
    assert (report["rung"], report["fidelity"], report["lost_steps"]) == ("replace_rank", "approximate", 0), report
    (recovery,) = run.records("recovery")
    assert recovery.resumed_step == 33 and recovery.sources[2].startswith("its snapshot of step 20"), recovery
    assert set(recovery.sources.values()) - {recovery.sources[2]} <= {"own", "behind"}, recovery
    assert all(len(pids) == (2 if rank == 2 else 1) for rank, pids in run.pids.items()), run.pids
    assert any("the training has healed" in line for line in run.output), run.told("that it has healed")
    assert style == "pp" or len(set(run.digests.values())) == 1, "all hold one model"


@pytest.mark.parametrize("shadow", ["0", "4"])
def test_a_lost_tensor_parallel_slice_comes_back_alone(start: Start, shadow: str) -> None:
    env = {**(SHADOWED if shadow != "0" else FAST), "RERAIL_REHAB_SHARE": "0.5", "RERAIL_SHADOW_EVERY": shadow}
    run = start("tp", "80", "--tell", "--fault", "rest@1@33", ranks=2, env=env)
    run.finish()
    (report,) = run.reports()
    assert (report["rung"], report["fidelity"], report["lost_steps"]) == ("replace_rank", "approximate", 0), report
    (recovery,) = run.records("recovery")
    wanted = "its snapshot of step 20" if shadow == "0" else "its shadow of step 32"
    assert recovery.sources[1].startswith(wanted), recovery
    assert any("the training has healed" in line for line in run.output), run.told("that it has healed")


def test_the_lost_parameters_go_on_where_the_survivors_drift(start: Start) -> None:
    """Snapshots every five steps: by step 33 every rank knows whether a straight line pays. It says so, and it heals."""
    run = start("fsdp", "80", "--tell", *LOST, env={**FAST, "RERAIL_SNAPSHOT_EVERY": "5"})
    run.finish()
    (report,) = run.reports()
    assert (report["rung"], report["fidelity"], report["lost_steps"]) == ("replace_rank", "approximate", 0), report
    (recovery,) = run.records("recovery")
    assert recovery.sources[2] in (
        "its snapshot of step 30 (not exact)",
        "its snapshot of step 30, parameters on in a straight line from that of step 25 (not exact)",
    ), recovery
    assert any("the training has healed" in line for line in run.output), run.told("that it has healed")
    assert len(set(run.digests.values())) == 1, "all hold one model"


def test_what_does_not_heal_goes_back_and_is_exact_from_there(start: Start, undisturbed: Digests) -> None:
    run = start("fsdp", "80", "--tell", *LOST, "--sick", "1", env=FAST)
    run.finish()
    first, second = run.reports()
    assert first["fidelity"] == "approximate"
    assert (second["rung"], second["code"], second["fidelity"]) == ("roll_back", "training.unhealed", "exact"), second
    assert second["resumed_step"] == 20
    assert run.digests == undisturbed("fsdp", "80"), run.told("the weights of a run without faults")


def test_where_it_is_not_allowed_all_go_back(start: Start, undisturbed: Digests) -> None:
    run = start("fsdp", "60", "--tell", *LOST, env={**FAST, "RERAIL_REHAB_SHARE": "0.1"})
    run.finish()
    (report,) = run.reports()
    assert (report["fidelity"], report["resumed_step"]) == ("exact", 20), report
    assert run.digests == undisturbed("fsdp", "60"), run.told("the same weights")


def test_replicas_are_better_than_any_snapshot(start: Start, undisturbed: Digests) -> None:
    run = start("ddp", "60", "--tell", *LOST, env=FAST)
    run.finish()
    (report,) = run.reports()
    assert (report["fidelity"], report["lost_steps"]) == ("exact", 0), report
    assert run.digests == undisturbed("ddp", "60"), run.told("the same weights")


def test_a_second_fault_in_the_middle_of_healing(start: Start) -> None:
    run = start("fsdp", "80", "--tell", "--fault", "die@2@33,die@0@37", env=FAST)
    run.finish()
    assert [report["fidelity"] for report in run.reports()] == ["approximate"] * 2, run.reports()
    assert len(set(run.digests.values())) == 1


@pytest.mark.parametrize(("fault", "told"), [(33, "32, on in a straight line from that of step 28"), (24, "24")])
def test_the_lost_parameters_come_from_the_shadow(start: Start, fault: int, told: str) -> None:
    """Snapshots every 20 steps, shadows every 4: at 24, 28 and 32."""
    env = {**SHADOWED, "RERAIL_SHADOW_EVERY": "4", "RERAIL_REHAB_SHARE": "0.5"}
    run = start("fsdp", "70", "--tell", "--keep", "--fault", f"rest@1@{fault}", ranks=2, env=env)
    run.finish()
    (report,) = run.reports()
    assert (report["rung"], report["fidelity"], report["lost_steps"]) == ("replace_rank", "approximate", 0), report
    (recovery,) = run.records("recovery")
    assert recovery.sources == {
        0: "own",
        1: f"its shadow of step {told}, all else from its snapshot of step 20 (not exact)",
    }, recovery
    assert any("the training has healed" in line for line in run.output), run.told("that it has healed")
    assert len(set(run.digests.values())) == 1, "all hold one model"
    first, second = run.pids[1]
    kept, true, found = (
        torch.load(run.folder / f"1-{name}.pt") for name in (f"20-{first}", f"{fault}-{first}", f"{fault}-{second}")
    )
    stale, off = float((kept - true).norm()), float((found - true).norm())
    assert off < 0.25 * stale, (off, stale)


def test_shadows_that_each_rank_plans_by_itself(start: Start) -> None:
    """However often that is: nothing but the lost shard's parameters differs for it, and it heals."""
    run = start("fsdp", "80", "--tell", *LOST, env={**SHADOWED, "RERAIL_SHADOW_COST": "0.5"})
    run.finish()
    (recovery,) = run.records("recovery")
    assert recovery.resumed_step == 33 and recovery.sources[2].startswith("its shadow of step "), recovery
    assert any("the training has healed" in line for line in run.output), run.told("that it has healed")
    assert len(set(run.digests.values())) == 1, "all hold one model"


def test_who_goes_back_after_a_shadow_is_exact_again(start: Start, undisturbed: Digests) -> None:
    run = start("fsdp", "80", "--tell", *LOST, "--sick", "1", env={**SHADOWED, "RERAIL_SHADOW_EVERY": "3"})
    run.finish()
    first, second = run.reports()
    assert first["fidelity"] == "approximate"
    assert (second["code"], second["fidelity"], second["resumed_step"]) == ("training.unhealed", "exact", 20), second
    assert run.digests == undisturbed("fsdp", "80"), run.told("the weights of a run without faults")


def test_an_exact_job_takes_no_shadows(start: Start, undisturbed: Digests) -> None:
    run = start("fsdp", "60", "--tell", *LOST, env={**SHADOWED, "RERAIL_SHADOW_EVERY": "3", "RERAIL_FIDELITY": "exact"})
    run.finish()
    (report,) = run.reports()
    assert (report["fidelity"], report["resumed_step"]) == ("exact", 20), report
    assert run.digests == undisturbed("fsdp", "60"), run.told("the same weights")


def test_parameters_that_all_have_come_from_another_rank_and_cost_nothing(start: Start) -> None:
    """ZeRO: of the lost rank's state nothing but its share of the moments was nowhere else."""
    run = start("zero", "80", "--tell", "--keep", *LOST, env=SHADOWED)
    run.finish()
    (report,) = run.reports()
    assert (report["rung"], report["fidelity"], report["lost_steps"]) == ("replace_rank", "approximate", 0), report
    (recovery,) = run.records("recovery")
    assert recovery.sources[2] == "parameters of rank 0, all else from its snapshot of step 20 (not exact)", recovery
    assert any("the training has healed" in line for line in run.output), run.told("that it has healed")
    assert len(set(run.digests.values())) == 1, "all hold one model"
    first, second = run.pids[2]
    true, found = (torch.load(run.folder / f"2-33-{pid}.pt") for pid in (first, second))
    assert torch.equal(true, found), "to the last bit"


def test_without_any_snapshot_the_lost_shard_comes_from_a_checkpoint(start: Start, tmp_path: Path) -> None:
    env = {**FAST, "RERAIL_SNAPSHOT_MEMORY": "0"}
    run = start("fsdp", "80", "--tell", *LOST, "--saves", f"{tmp_path / 'root'}@10", env=env)
    run.finish()
    (report,) = run.reports()
    assert (report["rung"], report["fidelity"], report["lost_steps"]) == ("replace_rank", "approximate", 0), report
    (recovery,) = run.records("recovery")
    assert recovery.resumed_step == 33 and recovery.sources[2].startswith("the checkpoint of step 30"), recovery
    assert any("the training has healed" in line for line in run.output), run.told("that it has healed")
    assert len(set(run.digests.values())) == 1, "all hold one model"


def test_what_does_not_heal_after_a_checkpoint_starts_again_from_there(
    start: Start, tmp_path: Path, undisturbed: Digests
) -> None:
    """All that was saved meanwhile is not exact, and is left aside."""
    env = {**FAST, "RERAIL_SNAPSHOT_MEMORY": "0"}
    saves = ("--saves", f"{tmp_path / 'root'}@5")
    run = start("fsdp", "80", "--tell", *LOST, *saves, "--sick", "1", env=env)
    run.finish()
    first, second = run.reports()
    assert first["fidelity"] == "approximate"
    assert (second["rung"], second["code"], second["fidelity"]) == ("restart_all", "training.unhealed", "exact"), second
    assert run.digests == undisturbed("fsdp", "80"), run.told("the weights of a run without faults")


@pytest.mark.parametrize("name", ["linear over 2", "vitp, drift"])
def test_lost_parameters_are_guessed_from_checkpoints(start: Start, tmp_path: Path, name: str) -> None:
    """The net has learnt in moments in which the survivors waited, and one of them teaches it to the newcomer."""
    env = {**FAST, "RERAIL_SNAPSHOT_MEMORY": "0", "RERAIL_PREDICTOR_COST": "1"}
    saves = ("--saves", f"{tmp_path / 'root'}@5")
    run = start("fsdp", "130", "--tell", "--sleep", "0.05", "--fault", "die@2@103", *saves, "--believe", name, env=env)
    run.finish()
    (report,) = run.reports()
    assert (report["rung"], report["fidelity"], report["lost_steps"]) == ("replace_rank", "approximate", 0), report
    (recovery,) = run.records("recovery")
    wanted = f"the checkpoint of step 100, parameters on as by predictor {name} (not exact)"
    assert recovery.sources[2] == wanted, recovery
    assert len(set(run.digests.values())) == 1, "all hold one model"
    learnt = [note.payload for note in run.records("signal") if note.source == "rehab.learnt"]
    told = {"linear", "linear over 2", "least squares", "vitp", "vitp, drift", "predictor_loss"}
    assert learnt and told <= set(learnt[-1]), run.told("what rank 0 has learnt")


def test_what_looks_no_good_is_refused_before_anything_is_changed_and_the_next_way_is_tried(start: Start) -> None:
    run = start("fsdp", "80", "--tell", *LOST, "--bad", "shadow", env={**SHADOWED, "RERAIL_SHADOW_EVERY": "4"})
    run.finish()
    (report,) = run.reports()
    assert (report["code"], report["fidelity"], report["attempts"]) == ("process.killed", "approximate", 2), report
    assert (report["lost_steps"], report["resumed_step"]) == (0, 33), report
    (recovery,) = run.records("recovery")
    assert recovery.sources[2] == "its snapshot of step 20 (not exact)", recovery
    assert "a restored shard looks no good" in report["summary"], report
    assert all(len(pids) == (2 if rank == 2 else 1) for rank, pids in run.pids.items()), run.pids
    assert any("the training has healed" in line for line in run.output), run.told("that it has healed")


@pytest.mark.parametrize("style", ["fsdp", "pp"])
def test_where_no_way_is_any_good_the_repair_is_exact(start: Start, undisturbed: Digests, style: str) -> None:
    """All go back, or the lost stage does its steps again. Also where another lane than that of the judge has the bad shard."""
    env = {**SHADOWED, "RERAIL_SHADOW_EVERY": "4"}
    run = start(style, "60", "--tell", *LOST, "--bad", "shadow+kept", env=env)
    run.finish()
    (report,) = run.reports()
    assert (report["fidelity"], report["attempts"]) == ("exact", 3), report
    assert report["resumed_step"] == (20 if style == "fsdp" else 33), report
    assert run.digests == undisturbed(style, "60"), run.told("the weights of a run without faults")
