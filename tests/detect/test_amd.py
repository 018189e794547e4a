"""The AMD detector under the real amdsmi package, over a libamd_smi.so compiled from stubs/amdsmi.c."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

import pytest

from rerail.detect import accelerators, amd
from rerail.detect.accelerators import AcceleratorDetector
from rerail.detect.amd import detector
from rerail.detect.detector import Detector, Value
from rerail.detect.judge import Judge
from rerail.faults.catalog import load_catalog, parse

STUB = Path(__file__).parent / "stubs" / "amdsmi.c"


def build(folder: Path) -> None:
    """The stub, with an answer "not supported" for all else that the package asks the library for when it is imported."""
    package = importlib.util.find_spec("amdsmi")
    if package is None or package.origin is None:
        pytest.skip("the package amdsmi is not installed")
    if shutil.which("gcc") is None:
        pytest.skip("gcc is needed to build the stand-in for libamd_smi.so")
    wrapper = (Path(package.origin).parent / "amdsmi_wrapper.py").read_text()
    names = sorted(set(re.findall(r"_libraries\['libamd_smi\.so'\]\.(\w+)", wrapper)))
    (folder / "rest.c").write_text("\n".join(f"__attribute__((weak)) int {name}() {{ return 2; }}" for name in names))
    (folder / "lib").mkdir()
    target = folder / "lib" / "libamd_smi.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", target, STUB, folder / "rest.c"], check=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("rocm")
    build(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROCM_PATH", str(folder))
        patch.delenv("ROCM_HOME", raising=False)
        for name in [name for name in sys.modules if name.startswith("amdsmi")]:
            patch.delitem(sys.modules, name)
        yield
    for name in [name for name in sys.modules if name.startswith("amdsmi")]:
        del sys.modules[name]


@pytest.fixture
def say(library: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Tells the stub what its GPUs do."""
    monkeypatch.setattr(accelerators, "REOPEN_AFTER", 1)
    return lambda text: monkeypatch.setenv("AMDSMI_STUB", text)


def values(detector: AcceleratorDetector, subject: str = "gpu0") -> dict[str, Value]:
    return {reading.name: reading.value for reading in detector.check() if reading.subject == subject}


def test_a_healthy_gpu_gives_its_numbers_and_no_alarm(say: Callable[[str], None]) -> None:
    say("gpus=2")
    gpus = detector()
    assert isinstance(gpus, Detector) and gpus.supported() == ""
    gpus.check()
    assert values(gpus) == {
        "gpu.present": 1,
        "gpu.ecc.corrected": 0,
        "gpu.ecc.uncorrected": 0,
        "gpu.ecc.deferred": 0,
        "gpu.retired_pages": 0,
        "gpu.retired_pages.pending": 0,
        "gpu.retired_pages.unreservable": 0,
        "gpu.retired_pages.over_limit": 0,
        "gpu.inforom_corrupt": 0,
        "gpu.throttle.hw_power_brake": 0,
        "gpu.throttle.sw_power_cap": 0,
        "gpu.throttle.hw_thermal": 0,
        "gpu.throttle.regulator_thermal": 0,
        "gpu.throttle.memory_thermal": 0,
        "gpu.utilization": 50,
        "gpu.power_w": 400.0,
        "gpu.power_ratio": pytest.approx(400 / 750),
        "gpu.busy_at_idle_power": 0,
        "gpu.temperature": 55,
        "gpu.temperature.margin": 45,
        "gpu.temperature.memory": 50,
        "gpu.temperature.memory_margin": 45,
        "gpu.pcie.lanes_lost": 0,
        "gpu.pcie.replays": 0,
        "gpu.pcie.recoveries": 0,
        "gpu.pcie.naks": 0,
        "gpu.link.error_status": 0,
    }
    assert values(gpus, "gpu0/umc") == {"gpu.ecc.block_uncorrected": 0, "gpu.ecc.block_corrected": 0}
    assert values(gpus, "gpu0/mp1") == {}, "this block counts nothing"
    assert values(gpus, "gpu0/link3") == {"gpu.link.up": 1}
    assert values(gpus, "gpu0/link0") == {}, "the link to itself is disabled"
    assert str(gpus.devices()[1]) == "AMD Instinct MI300X, 0000:07:00.0, serial 6922510011201"
    assert gpus.blind_spots() == []


@pytest.mark.parametrize(
    ("said", "subject", "name", "value"),
    [
        ("ecc_unc0=2", "gpu0", "gpu.ecc.uncorrected", 2),
        ("ecc_def0=1", "gpu0", "gpu.ecc.deferred", 1),
        ("umc_unc1=5", "gpu1/umc", "gpu.ecc.block_uncorrected", 5),
        ("bad_pages0=3", "gpu0", "gpu.retired_pages", 3),
        ("bad_pages0=3 pending_pages0=1", "gpu0", "gpu.retired_pages.pending", 1),
        ("bad_pages0=256", "gpu0", "gpu.retired_pages.over_limit", 1),
        ("ras0=56", "gpu0", "gpu.inforom_corrupt", 1),
        ("heat0=101", "gpu0", "gpu.temperature.margin", -1),
        ("width0=4", "gpu0", "gpu.pcie.lanes_lost", 12),
        ("replays0=9", "gpu0", "gpu.pcie.replays", 9),
        ("xgmi0=2", "gpu0", "gpu.link.error_status", 2),
        ("link3_0=0", "gpu0/link3", "gpu.link.up", 0),
        ("load0=100 power0=120", "gpu0", "gpu.busy_at_idle_power", 1),
    ],
)
def test_what_is_wrong_is_read(say: Callable[[str], None], said: str, subject: str, name: str, value: Value) -> None:
    say(said)
    assert values(detector(), subject).get(name) == value


def test_throttling_is_time_spent_throttled_since_the_last_look(say: Callable[[str], None]) -> None:
    say("thermal0=100")
    gpus = detector()
    assert "gpu.throttle.hw_thermal" not in values(gpus), "nothing to compare with yet"
    say("thermal0=180")
    seen = values(gpus)
    assert (seen["gpu.throttle.hw_thermal"], seen["gpu.throttle.sw_power_cap"]) == (1, 0)
    assert values(gpus)["gpu.throttle.hw_thermal"] == 0


def test_what_a_device_does_not_know_is_left_out(say: Callable[[str], None]) -> None:
    say("ecc_cor=-1 bad_pages=-1 no_metrics=1 xgmi=-1")
    gpus = detector()
    seen = values(gpus)
    assert seen["gpu.present"] == 1 and seen["gpu.temperature"] == 55
    assert not {"gpu.ecc.uncorrected", "gpu.retired_pages", "gpu.power_w", "gpu.link.error_status"} & set(seen)
    assert "no ECC counters" in gpus.blind_spots()[0]


def test_one_lost_gpu_is_gone_and_the_others_keep_their_numbers(say: Callable[[str], None]) -> None:
    say("gpus=3")
    gpus = detector()
    gpus.check()
    say("gpus=3 lost1=1")
    readings = {(one.subject, one.name): one for one in gpus.check()}
    assert [readings[f"gpu{index}", "gpu.present"].value for index in range(3)] == [1, 0, 1]
    assert "Device Not found" in readings["gpu1", "gpu.present"].note
    say("gpus=2 gone1=1 ecc_unc2=4")
    later = {(one.subject, one.name): one.value for one in gpus.check()}
    assert (later["gpu1", "gpu.present"], later["gpu2", "gpu.ecc.uncorrected"]) == (0, 4)
    say("gpus=3")
    assert values(gpus, "gpu1")["gpu.present"] == 1


def test_all_gone_at_once_is_the_driver_not_the_gpus(say: Callable[[str], None]) -> None:
    say("gpus=8")
    gpus = detector()
    gpus.check()
    for said in ("gpus=8 lost=1", "gpus=0", "gpus=8 down=1"):
        say(said)
        assert [(one.name, one.subject, one.value) for one in gpus.check()] == [("accelerator.monitor_down", "amd", 1)]
    say("gpus=8")
    assert values(gpus, "gpu7")["gpu.present"] == 1


def test_partitions_and_guests_say_what_they_hide(say: Callable[[str], None]) -> None:
    say("gpus=2 cpx=1 partition0=0 partition1=1")
    gpus = detector()
    gpus.check()
    assert [device.virtual for device in gpus.devices()] == ["partition", "partition"]
    assert [device.uuid[-2:] for device in gpus.devices()] == ["/0", "/1"]
    assert gpus.blind_spots()[0].startswith("gpu0: is one partition")
    say("gpus=1 mode0=3")
    assert detector().blind_spots()[0].startswith("gpu0: is a virtual function")


def test_foreign_processes_are_counted(say: Callable[[str], None]) -> None:
    say("gpus=2 pid0=4711 pid1=4712")
    found = {one.subject: one for one in detector(ours=lambda pid: pid == 4712).check() if "foreign" in one.name}
    assert (found["gpu0"].value, found["gpu0"].note, found["gpu1"].value) == (1, "pid 4711: 2048 MiB", 0)


def test_without_driver_there_is_nothing_unless_the_hardware_is_there(
    say: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say("init=34")
    monkeypatch.setattr(accelerators, "PCI", tmp_path)
    assert "Driver not loaded" in detector().supported()
    (tmp_path / "0000:06:00.0").mkdir()
    (tmp_path / "0000:06:00.0" / "vendor").write_text("0x1002\n")
    (tmp_path / "0000:06:00.0" / "class").write_text("0x120000\n")
    gpus = detector()
    assert gpus.supported() == ""
    assert [(one.name, one.value) for one in gpus.check()] == [("accelerator.monitor_down", 1)]


def test_without_library_nothing_is_printed(tmp_path: Path) -> None:
    if importlib.util.find_spec("amdsmi") is None:
        pytest.skip("the package amdsmi is not installed")
    code = "from rerail.detect.amd import detector; import sys; sys.exit('not there' not in detector().supported())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_reading_that_the_entries_of_amd_gpus_judge_is_read() -> None:
    entries = parse((resources.files("rerail.faults") / "amd.toml").read_text(), "amd.toml")
    source = Path(amd.__file__).read_text()
    assert [one.code for one in entries if one.reading is not None and f'"{one.reading.name}"' not in source] == []


@pytest.mark.parametrize(
    ("said", "code"),
    [("ecc_unc0=2", "gpu.ecc_uncorrected"), ("ecc_cor0=500", "gpu.ecc_corrected_rate"), ("xgmi0=2", "link.xgmi_error")],
)
def test_counted_errors_are_the_faults_of_all_gpus(say: Callable[[str], None], said: str, code: str) -> None:
    say("gpus=1")
    gpus, judge = detector(), Judge(load_catalog().with_readings())
    found = [finding.fault.code for reading in gpus.check() for finding in judge.take(reading, 0.0)]
    assert code not in found
    say(f"gpus=1 {said}")
    assert code in [finding.fault.code for reading in gpus.check() for finding in judge.take(reading, 10.0)]


def test_the_names_of_the_package_are_those_used(library: None) -> None:
    lib = importlib.import_module("amdsmi")
    assert all(hasattr(lib.AmdSmiGpuBlock, block) for block in amd.BLOCKS)
    used = set(re.findall(r'"(amdsmi_\w+)"', Path(amd.__file__).read_text()))
    assert used and all(hasattr(lib, name) for name in used)
