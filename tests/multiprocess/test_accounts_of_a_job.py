"""The accounts of a real job with real faults: every second of it is there, and what was done to it is found in them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from harness import Run, Start

pytestmark = pytest.mark.timeout(400)


def whole(run: Run) -> dict[str, Any]:
    told = run.command("report", "job", "--json")
    assert told.returncode == 0, told.stderr
    found: dict[str, Any] = json.loads(told.stdout)
    parts = found["parts"]
    assert sum(parts.values()) == pytest.approx(found["wall_s"], rel=0.005)
    assert all(seconds >= 0 for seconds in parts.values())
    ends = [piece["end"] for piece in found["pieces"]]
    assert [piece["begin"] for piece in found["pieces"]][1:] == ends[:-1], "a gap, or an overlap"
    return found


def test_kills_an_exception_and_a_lost_controller_are_accounted_for(start: Start, tmp_path: Path) -> None:
    run = start(
        "ddp", "150", "--sleep", "0.05", "--tell", ranks=2, env={"RERAIL_ALLOW_INJECT": "1", "RERAIL_VOTE_EVERY": "0"}
    )
    run.reach(20)
    run.inject("kill", "--rank", "1")
    run.reach(50)
    run.kill_controller()
    run.reach(90)
    run.inject("exception", "--rank", "0")
    run.finish()
    found = whole(run)
    parts, incidents = found["parts"], found["incidents"]
    assert [one["code"] for one in incidents] == ["process.killed", "controller.lost", "process.exception"]
    assert found["exit_code"] == 0 and found["takeovers"] == 1 and found["runs"] == 1 and found["steps"] == 150
    assert parts["training"] > 150 * 0.05 * 0.8, "every step sleeps, and a step that counts is training"
    assert parts["start-up"] > 0 and parts["T1 reschedule"] > 0 and parts["T0 lost work"] > 0
    assert incidents[0]["total_s"] > 0 and incidents[1]["total_s"] == 0 < incidents[2]["total_s"]
    assert parts["not running"] == 0 and found["ettr"] == pytest.approx(parts["training"] / found["wall_s"])
    page, trace = tmp_path / "r.html", tmp_path / "t.json"
    told = run.command("report", "job", "--format", "html", "--out", str(page), "--trace", str(trace))
    assert told.returncode == 0, told.stderr
    assert len(re.findall("<svg", page.read_text())) == 4, "the loss is told, too"
    assert any(event["name"] == "build" for event in json.loads(trace.read_text())["traceEvents"])


def test_steps_that_a_restart_of_all_computes_again_are_lost_work(start: Start) -> None:
    env = {"RERAIL_RUNGS": "restart_all, stop", "RERAIL_SNAPSHOT_EVERY": "20"}
    run = start("ddp", "45", "--sleep", "0.1", "--fault", "die@1@35", ranks=2, env=env)
    run.finish()
    (report,) = run.reports()
    assert report["rung"] == "restart_all" and report["resumed_step"] == 20 and report["lost_steps"] == 15, report
    assert report["cost"]["t0"] >= 0.1 * report["lost_steps"], "every step sleeps"
    (recovery,) = run.records("recovery")
    assert set(recovery.sources.values()) == {"what was left of step 20 in memory, or saved"}, recovery
    parts = whole(run)["parts"]
    assert parts["T0 lost work"] >= 0.08 * report["lost_steps"], parts


def test_a_job_that_is_stopped_by_its_own_fault_adds_up_too(start: Start) -> None:
    run = start("ddp", "40", "--sleep", "0.02", "--fault", "always@1@10", ranks=2)
    run.process.wait(150)
    assert run.process.returncode != 0, run.told("a job that fails")
    found = whole(run)
    assert found["exit_code"] == run.process.returncode and found["incidents"][-1]["rung"] == "stop"
    assert found["parts"]["shut-down"] > 0
