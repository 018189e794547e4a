"""The quick look and the deep tests: real processes, real memory, real files; a detector stands in for hardware that is not here."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from rerail.detect import checkup, deep, inventory
from rerail.detect.checkup import Figure, Finished, Health, Phase, Problem, State, Task, Unseen, concluded, run_tasks
from rerail.detect.deep import Effort, Order
from rerail.detect.deep_tests import MIB, Product, Region, on_every_core
from rerail.detect.detector import Detector, Reading
from rerail.faults.catalog import Fault, parse
from rerail.flow import Severity

SMALL = Effort(
    seconds=0.1, copy_mib=16, pattern_mib=16, disk_mib=3, matrix=64, device_matrix=256, device_mib=4, collective_mib=1, ranks=2
)  # fmt: skip
FAULTS: list[Fault] = parse(
    """
[[fault]]
code = "gpu.gone"
title = "A GPU is gone"
class = "gpu"
hardware = true
scope = "device"
severity = "critical"
seen = ["kernel", "reading"]
pattern = 'GPU has fallen off the bus'
reading = {name = "gpu.present", is = 0}
advice = "Drain the node."

[[fault]]
code = "gpu.back"
title = "A GPU is back"
class = "gpu"
scope = "device"
role = "clear"
seen = ["kernel"]
pattern = 'GPU was reset successfully'
clears = ["gpu.*"]

[[fault]]
code = "nic.flaps"
title = "A link flaps"
class = "nic"
scope = "link"
severity = "warning"
seen = ["kernel", "reading"]
pattern = 'Link is Down on port'
times = 3
within_s = 60.0
reading = {name = "nic.downs", rises = 5}

[[fault]]
code = "process.segfault"
title = "A program crashed"
class = "process"
seen = ["kernel"]
pattern = 'segfault at'
""",
    "test.toml",
)


class Scripted:
    """A detector that gives prepared samples."""

    every_s = 1.0

    def __init__(self, name: str, *samples: list[Reading], why_not: str = "", blind: Sequence[str] = ()) -> None:
        self.name, self._samples, self._why_not, self._blind = name, list(samples), why_not, list(blind)

    def supported(self) -> str:
        return self._why_not

    def check(self) -> list[Reading]:
        return self._samples.pop(0)

    def blind_spots(self) -> list[str]:
        return self._blind


def look(*detectors: Detector, timeout_s: float = 5.0) -> Health:
    return concluded(checkup.examine({"gpu": detectors}, FAULTS, timeout_s, apart_s=0.01), ["gpu"])


def test_this_machine_is_looked_at_in_seconds_and_without_torch() -> None:
    code = (
        "import sys; from rerail.detect.checkup import checkup, State; health = checkup(['cpu', 'memory'])\n"
        "assert health.areas['cpu'] is not State.NOT_SEEN, health\n"
        "assert set(health.areas) == {'cpu', 'memory'}, health\n"
        "sys.exit('torch' in sys.modules)"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 20


def test_the_child_that_looks_does_not_import_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    health = checkup.checkup(["cpu", checkup.KERNEL_LOG])
    assert not [problem for problem in health.problems if problem.code.startswith("check.")]


def test_what_both_samples_show_is_a_problem() -> None:
    gone = Reading("gpu.present", "gpu3", 0, "serial 17")
    health = look(Scripted("gpus", [gone], [gone]))
    assert health.areas == {"gpu": State.FAILED} and not health.healthy
    (problem,) = health.problems
    assert (problem.code, problem.subject, problem.advice) == ("gpu.gone", "gpu3", "Drain the node.")
    assert "serial 17" in problem.text and problem.hardware


def test_what_was_over_at_the_second_sample_is_none() -> None:
    health = look(Scripted("gpus", [Reading("gpu.present", "gpu3", 0)], [Reading("gpu.present", "gpu3", 1)]))
    assert health.areas == {"gpu": State.OK} and not health.problems


def test_a_counter_that_runs_is_seen_running_and_a_warning_is_no_failure() -> None:
    health = look(Scripted("nics", [Reading("nic.downs", "eth0", 100)], [Reading("nic.downs", "eth0", 105)]))
    assert health.areas == {"gpu": State.WARNING} and health.healthy
    assert [problem.code for problem in health.problems] == ["nic.flaps"]


def test_what_cannot_be_seen_is_told_with_its_reason() -> None:
    ok = [Reading("x", "y", 1)]
    health = look(
        Scripted("none", why_not="no such hardware"),
        Scripted("half", ok, ok, blind=["ECC is hidden"]),
        Scripted("broken", ok),
    )
    assert {(one.what, one.why) for one in health.unseen} >= {("none", "no such hardware"), ("half", "ECC is hidden")}
    assert any(one.what == "broken" and "IndexError" in one.why for one in health.unseen)
    assert health.areas == {"gpu": State.OK}
    assert look(Scripted("none", why_not="no")).areas == {"gpu": State.NOT_SEEN}


def test_a_detector_that_hangs_is_a_problem_and_stops_nobody() -> None:
    release = threading.Event()

    class Hanging(Scripted):
        def check(self) -> list[Reading]:
            release.wait()
            return []

    gone = Reading("gpu.present", "gpu0", 0)
    try:
        health = look(Hanging("driver"), Scripted("gpus", [gone], [gone]), timeout_s=0.2)
    finally:
        release.set()
    assert {(one.code, one.subject) for one in health.problems} == {
        ("check.detector_hangs", "driver"),
        ("gpu.gone", "gpu0"),
    }


def test_the_kernel_log_is_judged_by_age_number_and_what_came_after() -> None:
    gone = "NVRM: GPU 0000:{}:00.0: GPU has fallen off the bus"
    lines = [
        (9000.0, gone.format("01")),
        (500.0, gone.format("02")),
        (400.0, gone.format("03")),
        (300.0, "NVRM: GPU 0000:03:00.0: GPU was reset successfully"),
        (200.0, "python[7]: segfault at 0 ip 00"),
        (100.0, "eth0: Link is Down on port 1"),
        (30.0, "eth0: Link is Down on port 1"),
    ]
    found = {problem.subject: problem for problem in checkup.judge_log(lines, FAULTS)}
    assert {subject: one.severity for subject, one in found.items()} == {
        "0000:01:00": Severity.WARNING,  # long ago
        "0000:02:00": Severity.CRITICAL,
    }
    assert "8 min ago" in found["0000:02:00"].text
    assert {subject: one.old for subject, one in found.items()} == {"0000:01:00": True, "0000:02:00": False}
    lines_read = Figure(area="kernel-log", name="lines", value=7)
    past = concluded([lines_read, found["0000:01:00"]], ["kernel-log"])
    assert past.areas == {"kernel-log": State.OK} and past.problems, "history is told, and does not count"
    assert concluded([lines_read, *found.values()], ["kernel-log"]).areas == {"kernel-log": State.FAILED}
    flaps = checkup.judge_log([*lines, (20.0, "eth0: Link is Down on port 1")], FAULTS)
    assert not [one for one in flaps if one.code == "nic.flaps"]
    flaps = checkup.judge_log([*lines, (20.0, lines[-1][1]), (10.0, lines[-1][1])], FAULTS)
    assert [one.code for one in flaps if one.severity is Severity.WARNING and not one.subject] == ["nic.flaps"]


def test_a_kernel_log_that_cannot_be_read_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    lines, why = inventory.kernel_log(tmp_path / "kmsg")
    assert not lines and "cannot be read" in why


def test_a_module_that_cannot_be_imported_blinds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rerail.detect.host_cpu", None)
    (unusable,) = inventory.detectors_of("cpu")
    assert "cannot be used" in unusable.supported() and not unusable.check() and not unusable.blind_spots()
    assert len(inventory.all_detectors()) > 3
    inventory.all_watchers()


# --- child processes that do not come back ---

TALK = "from rerail.detect.checkup import *\nimport os, time\n" + "with report() as tell:\n  "


def child(code: str, area: str = "gloo", subject: str = "cuda:0") -> Task:
    return Task(argv=(sys.executable, "-c", TALK + code), area=area, subject=subject)


def test_a_test_that_hangs_is_found_where_it_hangs() -> None:
    code = "tell(Figure(area='disk', name='a', value=1)); tell(Phase(area='device-math')); time.sleep(600)"
    began = time.monotonic()
    notes = run_tasks([child(code)], 2.0)
    assert time.monotonic() - began < 10
    (problem,) = [note for note in notes if isinstance(note, Problem)]
    assert (problem.code, problem.area, problem.subject) == ("check.hang", "device-math", "cuda:0")
    assert "state S" in problem.text
    assert Figure(area="disk", name="a", value=1) in notes


@pytest.mark.parametrize(
    ("code", "how"), [("os.abort()", "SIGABRT"), ("os._exit(3)", "exit status 3"), ("raise KeyError('x')", "KeyError")]
)
def test_a_test_that_crashes_is_found(code: str, how: str) -> None:
    notes = run_tasks([child(code), child("tell(Figure(area='gloo', name='b', value=2))")], 30.0)
    (problem,) = [note for note in notes if isinstance(note, Problem)]
    assert problem.code == "check.crash" and how in problem.text
    assert Figure(area="gloo", name="b", value=2) in notes


def test_noise_on_stdout_and_threads_that_never_end_do_no_harm() -> None:
    code = (
        "print('hello'); os.write(1, b'noise'); __import__('threading').Thread(target=time.sleep, args=(600,)).start()"
    )
    assert run_tasks([child(code)], 20.0) == []


def test_of_linked_processes_only_the_one_that_failed_is_blamed() -> None:
    began = time.monotonic()
    notes = run_tasks([child("time.sleep(600)", subject="a"), child("os.abort()", subject="b")], 60.0, linked=True)
    assert [(note.subject, note.code) for note in notes if isinstance(note, Problem)] == [("b", "check.crash")]
    assert time.monotonic() - began < 30


def test_no_child_is_left_behind() -> None:
    run_tasks([child("os.fork(); time.sleep(600)", subject="x")], 1.5)
    end = time.monotonic() + 10  # what a killed process has started dies at once, but nobody here waits for it
    while left := [pid for pid in os.listdir("/proc") if pid.isdigit() and _is_ours(pid)]:
        assert time.monotonic() < end, left
        time.sleep(0.01)


def _is_ours(pid: str) -> bool:
    try:
        return b"os.fork(); time.sleep(600)" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


# --- the deep tests ---


def test_deep_on_this_machine(tmp_path: Path) -> None:
    heard: list[Health] = []
    health = deep.deep(str(tmp_path), effort=SMALL, tell=heard.append)
    assert not health.problems and health.healthy
    done = {"memory-speed", "memory-pattern", "disk", "cpu-math", "gloo"}
    assert {name for name, state in health.areas.items() if state is State.OK} >= done
    assert {figure.area for figure in health.figures if figure.value > 0} >= done
    assert [name for part in heard for name in part.areas] == list(health.areas)
    assert not list(tmp_path.iterdir())


def test_only_what_is_asked_for_is_done(tmp_path: Path) -> None:
    assert list(deep.deep(str(tmp_path), ["disk"], effort=SMALL).areas) == ["disk"]


def test_a_directory_that_is_gone_is_a_problem_of_the_disk(tmp_path: Path) -> None:
    (problem,) = deep.deep(str(tmp_path / "gone"), ["disk"], effort=SMALL).problems
    assert (problem.code, problem.area) == ("check.error", "disk") and "FileNotFoundError" in problem.text


def test_without_torch_the_tests_that_need_it_are_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    health = deep.deep(str(tmp_path), ["cpu-math", "gloo", "devices"], effort=SMALL)
    assert set(health.areas.values()) == {State.NOT_SEEN} and len(health.areas) == 3
    assert all("no torch here" in one.why for one in health.unseen)


def test_a_flipped_bit_in_memory_is_found() -> None:
    region, pattern = Region(3 * MIB), os.urandom(MIB)
    region.fill(pattern)
    assert region.difference(pattern) == ""
    place = 2 * MIB + 12345
    region._pages[place] ^= 0x10
    assert region.difference(pattern).startswith(f"byte {place} is ")
    region.fill(pattern)
    region._pages[MIB : 2 * MIB] = region._pages[0:MIB]  # an address line that is stuck
    assert region.difference(pattern).startswith(f"byte {MIB} is ")


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_a_wrong_sum_is_found_and_a_right_one_is_not(kind: torch.dtype, whole: bool) -> None:
    product = Product(torch, kind, 128, whole=whole, shortened=2**-9)
    right = (product.left.float() @ product.right.float()).to(kind)
    assert product.fault(right) == ""
    bad = right.clone()
    bad[7, 9] += 1 if whole else 64
    assert "1 of " in product.fault(bad)
    bad[7, 9] = float("nan")
    assert "1 of " in product.fault(bad)


def test_every_core_has_its_turn_and_a_failure_in_one_is_not_lost() -> None:
    seen: set[int] = set()
    assert on_every_core(lambda core: seen.update(os.sched_getaffinity(0))) == len(seen)
    assert seen == os.sched_getaffinity(0)
    with pytest.raises(ZeroDivisionError):
        on_every_core(lambda core: print(1 // 0))


def figure(subject: str, value: float) -> Figure:
    return Figure(area="device-link", name="to device", value=value, unit="GB/s", subject=subject)


def test_only_a_device_far_below_others_of_its_model_is_slow() -> None:
    models = {"cuda:0": "H200", "cuda:1": "H200", "cuda:2": "H200", "cuda:3": "T4"}
    notes = [figure("cuda:0", 50), figure("cuda:1", 15), figure("cuda:2", 52), figure("cuda:3", 6)]
    assert [(one.subject, usual) for one, usual in deep.far_below(notes, models)] == [("cuda:1", 51.0)]
    assert deep.far_below([figure("cuda:0", 50), figure("cuda:1", 20)], models) == []


def test_a_slow_device_has_a_second_try_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {"cuda:1": [5.0, 45.0], "cuda:2": [5.0, 6.0]}
    alone: list[str] = []

    def runs(tasks: Sequence[Task], timeout_s: float) -> list[checkup.Note]:
        chosen = list(tasks)
        alone.extend(task.subject for task in chosen if len(chosen) == 1)
        return [figure(task.subject, speeds.get(task.subject, [50.0, 50.0]).pop(0)) for task in chosen]

    monkeypatch.setattr(deep, "run_tasks", runs)
    models = {f"cuda:{index}": "H200" for index in range(6)}
    notes = deep._on_devices(Order(test="", effort=SMALL), models, ["device-link"])
    assert sorted(alone) == ["cuda:1", "cuda:2"]
    assert [(note.code, note.subject) for note in notes if isinstance(note, Problem)] == [("check.slow", "cuda:2")]


def test_a_result_survives_the_wire() -> None:
    health = concluded([Unseen(area="a", what="b", why="c"), Phase(area="a"), Finished()], ["a", "z"])
    assert health.areas == {"a": State.NOT_SEEN} and health.healthy
