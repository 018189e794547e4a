from __future__ import annotations

import os
from pathlib import Path

import pytest

from rerail.detect.detector import Detector, Reading, Value
from rerail.detect.host_memory import (
    Edac,
    Known,
    MemoryUse,
    Pressure,
    cgroups,
    detectors,
    read_bytes,
    read_text,
    table,
    to_int,
)

MEMINFO = (
    "MemTotal: 1000 kB\nMemAvailable: {free} kB\nSwapTotal: 200 kB\nSwapFree: 50 kB\nHardwareCorrupted: {bad} kB\n"
)


def lay(root: Path, files: dict[str, str]) -> None:
    """Files and their texts under a folder that stands for /."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def values(readings: list[Reading], name: str) -> dict[str, Value]:
    """Subject -> value of one reading."""
    return {reading.subject: reading.value for reading in readings if reading.name == name}


def cgroup_memory(root: Path) -> Detector:
    return next(detector for detector in detectors(root) if detector.name == "host.memory.cgroup")


def test_a_file_that_is_missing_forbidden_or_a_silent_pipe_reads_as_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    lay(tmp_path, {"secret": "1", "bytes": "x" * 100})
    (tmp_path / "secret").chmod(0)
    assert [read_text(tmp_path / name) for name in ("none", "pipe", ".")] == ["", "", ""]
    if os.geteuid():
        assert read_text(tmp_path / "secret") == ""
    assert read_bytes(tmp_path / "bytes", 4) == b"xxxx"


def test_a_tree_that_may_not_be_read_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(tmp_path, {"proc/meminfo": MEMINFO.format(free=1, bad=0), "sys/devices/system/edac/mc/mc0/ce_count": "1"})

    def forbidden(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    edac, use = Edac(tmp_path), MemoryUse(tmp_path)
    monkeypatch.setattr(os, "open", forbidden)
    assert edac.check() == [] and use.check() == [] and use.supported()
    monkeypatch.setattr(os, "listdir", forbidden)
    assert edac.check() == [] and edac.supported()


def test_a_read_that_fails_half_way_reads_as_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(tmp_path, {"state": "live"})

    def broken(*_: int) -> bytes:
        raise OSError(5, "Input/output error")  # what sysfs says of a device that is gone

    monkeypatch.setattr(os, "read", broken)
    assert read_text(tmp_path / "state") == ""


@pytest.mark.parametrize(
    ("text", "number"),
    [("12", 12), ("0x1f", 31), ("7 kB", 7), ("N/A (no PMA)", None), ("", None), ("max", None), ("0xzz", None)],
)
def test_what_is_no_number_is_none(text: str, number: int | None) -> None:
    assert to_int(text) == number


def test_garbage_lines_are_left_out_of_a_table() -> None:
    assert table("a 1\nb: 2 kB\nrubbish\n\x00\ufffd\nc x\n") == {"a": 1, "b": 2}


def test_what_was_there_once_is_gone_until_it_comes_back() -> None:
    known = Known()
    assert known.gone(["a", "b"]) == []
    assert known.gone(["a"]) == ["b"]
    assert known.gone(["a", "b"]) == []


def test_memory_errors_are_counted_once_by_dimm_and_the_rest_by_controller(tmp_path: Path) -> None:
    mc = "sys/devices/system/edac/mc/mc0"
    lay(tmp_path, {
        f"{mc}/ce_count": "12\n", f"{mc}/ue_count": "1\n",
        f"{mc}/dimm3/dimm_ce_count": "10", f"{mc}/dimm3/dimm_ue_count": "0", f"{mc}/dimm3/dimm_label": "CPU0_B1",
        "sys/devices/system/edac/mc/power/x": "",
    })  # fmt: skip
    edac = Edac(tmp_path)
    assert edac.supported() == "" and edac.blind_spots() == []
    found = edac.check()
    assert values(found, "memory.edac.ce_count") == {"mc0/dimm3": 10, "mc0": 2}
    assert values(found, "memory.edac.ue_count") == {"mc0/dimm3": 0, "mc0": 1}
    assert next(reading.note for reading in found if reading.subject == "mc0/dimm3") == "CPU0_B1"
    lay(tmp_path, {f"{mc}/dimm3/dimm_ce_count": "110", f"{mc}/ce_count": "112"})
    assert values(edac.check(), "memory.edac.ce_count") == {"mc0/dimm3": 110, "mc0": 2}
    lay(tmp_path, {f"{mc}/ce_count": "rubbish"})
    assert values(edac.check(), "memory.edac.ce_count") == {"mc0/dimm3": 110}


def test_without_edac_there_is_a_reason(tmp_path: Path) -> None:
    assert "EDAC" in Edac(tmp_path).supported()
    assert Edac(tmp_path).check() == []


def test_memory_use_before_and_after(tmp_path: Path) -> None:
    vmstat = "oom_kill 3\npswpout 77\nallocstall_dma 1\nallocstall_normal 4\n"
    lay(tmp_path, {"proc/meminfo": MEMINFO.format(free=400, bad=0), "proc/vmstat": vmstat})
    use = MemoryUse(tmp_path, expected_bytes=2000 * 1024)
    before = {reading.name: reading.value for reading in use.check()}
    assert before == {
        "memory.available_share": 0.4, "memory.total.missing_share": 0.5, "memory.swap.used_share": 0.75,
        "memory.hardware_corrupted_kb": 0, "memory.vmstat.oom_kill": 3, "memory.vmstat.swapped_out_pages": 77,
        "memory.vmstat.allocation_stalls": 5,
    }  # fmt: skip
    lay(tmp_path, {"proc/meminfo": MEMINFO.format(free=10, bad=4), "proc/vmstat": "oom_kill 4\n"})
    after = {reading.name: reading.value for reading in use.check()}
    assert (after["memory.available_share"], after["memory.hardware_corrupted_kb"]) == (0.01, 4)
    assert after["memory.vmstat.oom_kill"] == 4 and "memory.vmstat.allocation_stalls" not in after
    lay(tmp_path, {"proc/meminfo": "\ufffd garbage\n", "proc/vmstat": ""})
    assert use.check() == []


def test_pressure_is_read_as_a_share(tmp_path: Path) -> None:
    lay(tmp_path, {
        "proc/pressure/cpu": "some avg10=1.00 avg60=61.50 avg300=3.00 total=1\n",
        "proc/pressure/io": "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg60=x\n",
    })  # fmt: skip
    found = Pressure(tmp_path).check()
    assert values(found, "cpu.pressure.some_share") == {"cpu": 0.615}
    assert [reading.name for reading in found] == ["cpu.pressure.some_share", "storage.pressure.some_share"]
    assert "psi=1" in Pressure(tmp_path / "empty").supported()


def test_a_job_in_cgroup_v2_sees_its_own_limit_and_that_of_its_parents(tmp_path: Path) -> None:
    base = "sys/fs/cgroup"
    lay(tmp_path, {
        "proc/self/cgroup": "0::/slice/job\n",
        f"{base}/slice/memory.events": "low 0\nmax 9\noom_kill 2\n",
        f"{base}/slice/memory.current": "900", f"{base}/slice/memory.max": "1000",
        f"{base}/slice/memory.stat": "anon 300\ninactive_file 400\n",
        f"{base}/slice/job/memory.events": "oom_kill 1\n",
        f"{base}/slice/job/memory.current": "800", f"{base}/slice/job/memory.max": "max",
    })  # fmt: skip
    cgroup = cgroup_memory(tmp_path)
    found = cgroup.check()
    assert values(found, "memory.cgroup.oom_kill") == {"/slice/job": 1, "/slice": 2}
    assert values(found, "memory.cgroup.used_share") == {"/slice": 0.5}
    assert values(found, "memory.cgroup.limit_hits") == {"/slice": 9}


def test_a_job_in_cgroup_v1_does_too(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory/job"
    lay(tmp_path, {
        "proc/self/cgroup": "4:memory:/job\n1:cpu,cpuacct:/\n0::/\n",
        f"{base}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
        f"{base}/memory.usage_in_bytes": "990", f"{base}/memory.limit_in_bytes": "1000",
        f"{base}/memory.stat": "inactive_file 0\ntotal_inactive_file 90\n",
        "sys/fs/cgroup/memory/memory.oom_control": "oom_kill 5\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5", "sys/fs/cgroup/memory/memory.limit_in_bytes": str((1 << 63) - 4096),
    })  # fmt: skip
    found = cgroup_memory(tmp_path).check()
    assert values(found, "memory.cgroup.oom_kill")["/memory/job"] == 5
    assert values(found, "memory.cgroup.used_share") == {"/memory/job": 0.9}


def test_in_a_container_the_path_of_the_host_stands_for_the_top(tmp_path: Path) -> None:
    lay(tmp_path, {"proc/self/cgroup": "0::/kubepods/pod1\n", "sys/fs/cgroup/memory.events": "oom_kill 0\n"})
    assert cgroups(tmp_path, "memory") == [tmp_path / "sys/fs/cgroup"]
    lay(tmp_path, {"proc/self/cgroup": "0::/../..\n"})
    assert cgroups(tmp_path, "memory") == [tmp_path / "sys/fs/cgroup"]
    lay(tmp_path, {"proc/self/cgroup": "rubbish"})
    assert cgroups(tmp_path, "memory") == []
    assert cgroup_memory(tmp_path).supported()
