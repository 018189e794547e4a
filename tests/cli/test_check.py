"""`rerail check` as a person uses it, on this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rerail.cli import check, main
from rerail.detect.checkup import Figure, Health, Problem, State, Unseen
from rerail.flow import Severity

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(main.COMMANDS, "check", "whether this machine is fit for work")


def rerail(*arguments: str) -> int:
    return main.main(["check", *arguments])


def test_a_healthy_machine_is_told_in_a_few_lines(capsys: Capture) -> None:
    assert rerail("--only", "cpu", "--only", "memory") == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].split()[0] == "cpu" and lines[1].split()[0] == "memory" and "readings" in lines[0]
    assert lines[-1].startswith("healthy") and "rerail check --deep" in lines[-1]


def test_json_says_the_same(capsys: Capture) -> None:
    assert rerail("--json", "--only", "cpu") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["healthy"] is True and set(told["areas"]) == {"cpu"} and told["took_s"] > 0


def test_a_deep_test_in_a_directory(capsys: Capture, tmp_path: Path) -> None:
    assert rerail("--deep", "--only", "disk", "--dir", str(tmp_path)) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("disk") and " ok " in first and "written at" in first and "GB/s" in first
    assert last.startswith("healthy") and "--deep" not in last


def test_a_test_that_hangs_makes_the_machine_unhealthy(capsys: Capture, tmp_path: Path) -> None:
    # nothing is ready after a hundredth of a second: as good as hung
    assert rerail("--deep", "--only", "disk", "--dir", str(tmp_path), "--timeout", "0.01") == 1
    out = capsys.readouterr().out
    assert "failed" in out.splitlines()[0] and "check.hang" in out
    assert out.splitlines()[-1].startswith("not healthy: disk failed")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "memry"], "did you mean: --only memory"),
        (["--only", "xyzzy"], "there are cpu"),
        (["--only", "disk"], "rerail check --deep --only disk"),
        (["--deep", "--dir", "/no/such/place"], "there is no such directory"),
        (["--timeout", "-1"], "a number of seconds"),
        (["--timeout", "nan"], "a number of seconds"),
        (["--timeout", "soon"], "--timeout"),
        (["--dep"], "--help"),
    ],
)
def test_a_mistake_is_answered_with_what_to_do(arguments: list[str], said: str, capsys: Capture) -> None:
    assert rerail(*arguments) == 2
    shown = capsys.readouterr()
    assert said in shown.err and not shown.out


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_is_not_ours_is_refused(tmp_path: Path, capsys: Capture) -> None:
    tmp_path.chmod(0o500)
    assert rerail("--deep", "--dir", str(tmp_path)) == 2
    assert "no right to write" in capsys.readouterr().err


def test_problems_come_with_evidence_and_advice() -> None:
    problem = Problem(
        area="nvidia", code="gpu.gone", title="A GPU is gone", severity=Severity.CRITICAL, subject="gpu3", text="read 0", advice="Do."
    )  # fmt: skip
    health = Health(
        areas={"nvidia": State.FAILED, "cpu": State.WARNING},
        problems=(problem,),
        unseen=(Unseen(area="amd", what="amd", why="none"),),
    )
    text = check.as_text(health, 2.0, deep_too=False)
    for words in (
        "critical  nvidia, gpu3: A GPU is gone (gpu.gone)",
        "    read 0",
        "    drain_node: Do.",
        "  amd: none",
    ):
        assert words in text
    assert text.endswith("not healthy: nvidia failed, warnings from cpu (2.0 s)")


def test_what_the_kernel_said_long_ago_is_told_as_history_and_does_not_count() -> None:
    old = Problem(
        area="kernel-log", code="gpu.gone", title="A GPU is gone", severity=Severity.WARNING, subject="gpu3",
        text="Xid 79 (1 times, last 200 min ago)", advice="Do.", old=True,
    )  # fmt: skip
    new = Problem(area="nvidia", code="gpu.hot", title="A GPU is hot", severity=Severity.WARNING)
    health = Health(areas={"kernel-log": State.OK, "nvidia": State.WARNING}, problems=(old, new))
    text = check.as_text(health, 2.0, deep_too=True)
    assert text.index("warning  nvidia") < text.index("past  kernel-log, gpu3: A GPU is gone (gpu.gone)")
    assert "said more than 60 min ago does not count" in text and "    if it comes again, drain_node: Do.\n" in text
    assert text.endswith("healthy, warnings from nvidia, 1 from the past that does not count (2.0 s)")


def test_figures_of_many_devices_are_told_as_a_range() -> None:
    def of(index: int, value: float) -> Figure:
        return Figure(area="device-link", name="to device", value=value, unit="GB/s", subject=f"cuda:{index}")

    assert check.figures_told([of(0, 50.04), of(1, 55.51), of(2, 54)]) == ["to device 50 to 55.5 GB/s"]
    assert check.figures_told([Figure(area="cpu", name="readings", value=1234)]) == ["1,234 readings"]
    models = [Figure(area="devices", name="H200", value=1, subject=f"cuda:{index}") for index in range(8)]
    assert check.figures_told(models) == ["8 x H200"]
