"""The NVIDIA detector under the real nvidia-ml-py, over a libnvidia-ml.so.1 compiled from stubs/nvml.c."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rerail.detect import accelerators, nvidia
from rerail.detect.accelerators import AcceleratorDetector
from rerail.detect.detector import Detector, Reading, Value, Watcher
from rerail.detect.nvidia import XidWatcher, detector

pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
STUB = Path(__file__).parent / "stubs" / "nvml.c"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is needed to build the stand-in for libnvidia-ml.so.1")
    path = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(path), str(STUB)], check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture
def say(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Tells the stub what its GPUs do."""
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(accelerators, "REOPEN_AFTER", 1)
    yield lambda text: monkeypatch.setenv("NVML_STUB", text)


def values(detector: AcceleratorDetector, subject: str = "gpu0") -> dict[str, Value]:
    return {reading.name: reading.value for reading in detector.check() if reading.subject == subject}


def test_a_healthy_gpu_gives_its_numbers_and_no_alarm(say: Callable[[str], None]) -> None:
    say("gpus=2")
    gpus = detector()
    assert isinstance(gpus, Detector) and gpus.supported() == ""
    seen = values(gpus)
    expected: dict[str, Value] = {
        "gpu.present": 1,
        "gpu.ecc.uncorrected": 0,
        "gpu.ecc.corrected_lifetime": 0,
        "gpu.ecc.sram_threshold": 0,
        "gpu.remapped_rows.failed": 0,
        "gpu.recovery_action": "none",
        "gpu.throttle.hw_slowdown": 0,
        "gpu.temperature": 45,
        "gpu.temperature.margin": 44,
        "gpu.temperature.shutdown_margin": 47,
        "gpu.temperature.memory_margin": 45,
        "gpu.power_w": 350.0,
        "gpu.power_ratio": 0.5,
        "gpu.clock_ratio": 1.0,
        "gpu.pcie.lanes_lost": 0,
        "gpu.pcie.generations_lost": 0,
        "gpu.fabric.state": "completed",
        "gpu.fabric.status": 0,
        "gpu.fabric.route_unhealthy": 0,
        "gpu.persistence_mode": 1,
        "gpu.ecc.change_pending": 0,
        "gpu.inforom_corrupt": 0,
        "gpu.reset_required": 0,
        "gpu.clock_stuck": 0,
    }
    assert expected.items() <= seen.items()
    assert "gpu.retired_pages.pending" not in seen, "the device does not know it"
    assert "gpu.foreign_processes" not in seen, "nobody said which processes are ours"
    assert values(gpus, "gpu1/link17") == {
        "gpu.link.up": 1,
        "gpu.link.replays": 0,
        "gpu.link.recoveries": 0,
        "gpu.link.crc_errors": 0,
    }
    assert str(gpus.devices()[0]) == "NVIDIA H200, 00000000:1A:00.0, serial 1654023000100"
    assert gpus.blind_spots() == []


@pytest.mark.parametrize(
    ("said", "name", "value"),
    [
        ("ecc_unc0=3", "gpu.ecc.uncorrected", 3),
        ("ecc_cor_agg0=70", "gpu.ecc.corrected_lifetime", 70),
        ("sram_exceeded0=1", "gpu.ecc.sram_threshold", 1),
        ("sram_parity0=4", "gpu.ecc.sram_uncorrected_lifetime", 4),
        ("rows_pending0=1", "gpu.remapped_rows.pending", 1),
        ("rows_failed0=1", "gpu.remapped_rows.failed", 1),
        ("pages_pending0=1", "gpu.retired_pages.pending", 1),
        ("f29_0_0=50 f30_0_0=11", "gpu.retired_pages", 61),
        ("f29_0_0=50 f30_0_0=11", "gpu.retired_pages.over_limit", 1),
        ("f230_0_0=1", "gpu.recovery_action", "gpu_reset"),
        ("f230_0_0=2", "gpu.recovery_action", "node_reboot"),
        ("f230_0_0=99", "gpu.recovery_action", "99"),
        ("f180_0_0=1", "gpu.pcie.fatal_errors", 1),
        ("reasons0=0x48", "gpu.throttle.hw_thermal", 1),
        ("reasons0=0x80", "gpu.throttle.hw_power_brake", 1),
        ("margin0=-7", "gpu.temperature.margin", -7),
        ("heat0=91", "gpu.temperature.margin", -2),
        ("width0=8", "gpu.pcie.lanes_lost", 8),
        ("generation0=1", "gpu.pcie.generations_lost", 4),
        ("fabric0=2", "gpu.fabric.state", "in_progress"),
        ("fabric_status0=999", "gpu.fabric.status", 999),
        ("fabric_health0=0x11", "gpu.fabric.route_unhealthy", 1),
        ("fabric_health0=0x4aa", "gpu.fabric.misconfigured", 3),
        ("fabric_v3=1 fabric_summary0=2", "gpu.fabric.health", "unhealthy"),
        ("ecc_pending0=0", "gpu.ecc.change_pending", 1),
        ("mig_pending0=1", "gpu.mig.change_pending", 1),
        ("persistence0=0", "gpu.persistence_mode", 0),
        ("error0=16", "gpu.reset_required", 1),
        ("inforom0=14", "gpu.inforom_corrupt", 1),
        ("handle0=8", "gpu.insufficient_power", 1),
        ("load0=100 clock0=345", "gpu.clock_stuck", 1),
        ("load0=100 clock0=345 reasons0=0x40", "gpu.clock_stuck", 0),
        ("load0=100 power0=110000", "gpu.busy_at_idle_power", 1),
    ],
)
def test_what_is_wrong_is_read(say: Callable[[str], None], said: str, name: str, value: Value) -> None:
    say(said)
    assert values(detector()).get(name) == value


def test_an_idle_gpu_may_slow_its_pcie_link(say: Callable[[str], None]) -> None:
    say("generation0=1 load0=0")
    assert "gpu.pcie.generations_lost" not in values(detector())


def test_an_unknown_call_is_left_out_and_not_asked_again(
    say: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    say("pages_pending=-1")
    gpus = detector()
    assert "gpu.retired_pages.pending" not in values(gpus)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetRetiredPagesPendingStatus", None)  # asking would be an error now
    assert values(gpus)["gpu.present"] == 1


def test_an_older_driver_knows_fewer_fields(say: Callable[[str], None]) -> None:
    say("old_driver=1 nvl_replay0=5 link_3_0=0")
    gpus = detector()
    seen = values(gpus)
    assert "gpu.recovery_action" not in seen and seen["gpu.present"] == 1
    assert values(gpus, "gpu0/link2") == {
        "gpu.link.up": 1,
        "gpu.link.replays": 5,
        "gpu.link.recoveries": 0,
        "gpu.link.crc_errors": 0,
    }
    assert values(gpus, "gpu0/link3")["gpu.link.up"] == 0


def test_a_link_that_goes_down_is_told_and_one_never_wired_is_not(say: Callable[[str], None]) -> None:
    say("gpus=1")
    gpus = detector()
    assert values(gpus, "gpu0/link4")["gpu.link.up"] == 1
    say("gpus=1 f165_4_0=0 f163_4_0=12")
    assert values(gpus, "gpu0/link4") == {
        "gpu.link.up": 0,
        "gpu.link.replays": 0,
        "gpu.link.recoveries": 0,
        "gpu.link.crc_errors": 12,
    }
    say("gpus=1 " + " ".join(f"f165_{link}_0=0" for link in range(18)))
    assert values(gpus, "gpu0/link4")["gpu.link.up"] == 0, "all links of a card that had links"
    assert not values(detector(), "gpu0/link4"), "a card that never had any"


def test_one_lost_gpu_is_gone_and_the_others_keep_their_numbers(say: Callable[[str], None]) -> None:
    say("gpus=4")
    gpus = detector(expected=4)
    gpus.check()
    say("gpus=4 lost1=1")
    first = {(one.subject, one.name): one for one in gpus.check()}
    assert [first[f"gpu{index}", "gpu.present"].value for index in range(4)] == [1, 0, 1, 1]
    assert (
        "GPU is lost" in first["gpu1", "gpu.present"].note
        and "serial 1654023000101" in first["gpu1", "gpu.present"].note
    )
    assert first["gpu", "gpu.missing"].value == 1
    assert first["nvidia", "accelerator.monitor_down"].value == 0
    say("gpus=3 gone1=1 ecc_unc3=9")  # connected anew: NVML counts the others 0, 1, 2
    later = {(one.subject, one.name): one.value for one in gpus.check()}
    assert later["gpu1", "gpu.present"] == 0
    assert later["gpu3", "gpu.ecc.uncorrected"] == 9
    say("gpus=4")
    assert values(gpus, "gpu1")["gpu.present"] == 1, "back after a reset"


def test_a_machines_only_gpu_may_be_lost(say: Callable[[str], None]) -> None:
    say("gpus=1")
    gpus = detector()
    gpus.check()
    say("gpus=1 lost0=1")
    assert {(one.name, one.value) for one in gpus.check()} >= {("gpu.present", 0), ("accelerator.monitor_down", 0)}


def test_a_gpu_that_is_lost_from_the_start_is_counted_once(say: Callable[[str], None]) -> None:
    say("gpus=2 lost1=1")
    gpus = detector()
    assert values(gpus, "gpu1") == {"gpu.present": 0}
    say("gpus=2")
    assert values(gpus, "gpu1")["gpu.present"] == 1
    assert [device.index for device in gpus.devices()] == [0, 1]


def test_all_gone_at_once_is_the_driver_not_the_gpus(say: Callable[[str], None]) -> None:
    say("gpus=8")
    gpus = detector()
    gpus.check()
    for said in ("gpus=8 lost=1", "gpus=0", "gpus=8 error=1"):
        say(said)
        readings = gpus.check()
        assert [(one.name, one.subject, one.value) for one in readings] == [
            ("accelerator.monitor_down", "nvidia", 1)
        ], said
        assert readings[0].note
    say("gpus=8")
    assert values(gpus, "gpu7")["gpu.present"] == 1


def test_a_driver_that_does_not_fit_is_seen_where_there_is_hardware(
    say: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say("init=18")
    monkeypatch.setattr(accelerators, "PCI", tmp_path)
    assert "mismatch" in detector().supported().lower()
    card = tmp_path / "0000:1a:00.0"
    card.mkdir()
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030200\n")
    gpus = detector()
    assert gpus.supported() == ""
    (down,) = gpus.check()
    assert (down.name, down.value) == ("accelerator.monitor_down", 1) and "mismatch" in down.note.lower()
    assert "nothing can be seen" in gpus.blind_spots()[0]


def test_a_mig_slice_says_what_it_hides(say: Callable[[str], None]) -> None:
    say("gpus=1 mig0=1")
    gpus = detector()
    seen = values(gpus)
    assert gpus.devices()[0].virtual == "MIG slice"
    assert "gpu.ecc.uncorrected" not in seen and "gpu.utilization" not in seen and seen["gpu.mig.enabled"] == 1
    assert gpus.blind_spots()[0].startswith("gpu0: in MIG mode")
    say("gpus=1 virtual0=2 ecc_unc=-1")
    assert detector().blind_spots()[0].startswith("gpu0: is a vGPU")
    say("gpus=1 ecc_unc=-1")
    assert "no ECC counters" in detector().blind_spots()[0]


def test_foreign_processes_are_counted(say: Callable[[str], None]) -> None:
    say("gpus=2 pid0=4711 pid1=4712")
    readings = detector(ours=lambda pid: pid == 4712).check()
    found = {one.subject: one for one in readings if one.name == "gpu.foreign_processes"}
    assert (found["gpu0"].value, found["gpu1"].value) == (1, 0)
    assert found["gpu0"].note == "pid 4711: 3072 MiB"


def test_what_belongs_to_the_machine(
    say: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say("gpus=2 vbios0=1 vbios1=2")
    assert values(detector(), "gpu") == {"gpu.vbios_versions": 2}
    say("gpus=2 cluster=7")
    monkeypatch.setattr(nvidia, "IMEX_CHANNELS", tmp_path / "channels")
    gpus = detector()
    assert values(gpus, "gpu") == {"gpu.vbios_versions": 1, "gpu.fabric.imex_missing": 1}
    (tmp_path / "channels").mkdir()
    assert values(gpus, "gpu")["gpu.fabric.imex_missing"] == 0


def test_xid_events_are_told(say: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    say("gpus=4 event=1 event_gpu=3 xid=79")
    watcher = XidWatcher()
    assert isinstance(watcher, Watcher) and watcher.supported() == ""
    events = watcher.watch()
    assert next(events) == Reading("gpu.xid", "gpu3", 79, momentary=True)
    say("gpus=4 event=2 event_gpu=0 xid=48")
    assert next(events) == Reading("gpu.xid", "gpu0", 48, momentary=True)
    monkeypatch.setattr(nvidia, "EVENT_WAIT_MS", 1)
    say("gpus=4 wait_error=15 events=3")  # waiting fails, and no device can be registered again
    assert list(events) == []


def test_a_watcher_can_be_stopped(say: Callable[[str], None]) -> None:
    say("gpus=1 event=0")
    watcher = XidWatcher()
    watcher.stop()
    assert list(watcher.watch()) == []
