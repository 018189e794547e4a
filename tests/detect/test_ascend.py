"""The Ascend detector over a libdcmi.so compiled from stubs/dcmi.c, and over scripts that print what npu-smi and hccn_tool print."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rerail.detect import accelerators, ascend, dcmi
from rerail.detect.accelerators import AcceleratorDetector
from rerail.detect.ascend import detector, table_rows
from rerail.detect.detector import Detector, Value

STUB = Path(__file__).parent / "stubs" / "dcmi.c"
TABLE = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                   Version: 25.2.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 95.3        42                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3381 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | {health:<13} | 98.1        44                0    / 0             |
| 0                         | 0000:C2:00.0  | 97          0    / 0          61230/ 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
+===========================+===============+====================================================+
| 1       0                 | 3115442       | python                   | 57849                   |
+===========================+===============+====================================================+
"""
TWO_DIES = """\
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 2     Ascend910           | OK            | 171.2       38                0    / 0             |
| 0     4                   | 0000:95:00.0  | 0           0    / 0          3420 / 65536         |
+------------------------------------------------------------------------------------------------+
| 2     Ascend910           | Warning       | -           37                0    / 0             |
| 1     5                   | 0000:97:00.0  | 0           0    / 0          3197 / 65536         |
+===========================+===============+====================================================+
"""
ECC = """\
	NPU ID                                   : 1
	HBM Single Bit Error Count               : 3
	HBM Double Bit Error Count               : {double}
	HBM Single Bit Aggregate Total Err Cnt   : 12
	HBM Double Bit Aggregate Total Err Cnt   : 4
	HBM Single Bit Isolated Pages Count      : 1
	HBM Double Bit Isolated Pages Count      : 2
	HBM Single Bit Next-Isolated Pages Count : 0
	HBM Double Bit Next-Isolated Pages Count : 1
	Chip ID                                  : 0
"""
FAULTY = """\
	Health Status                  : Alarm
	Error Code                     : 80E01801 80CB8009
	Error Information              : node type=HBM, sensor type=Memory, event state=multi bit error
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is needed to build the stand-in for libdcmi.so")
    path = tmp_path_factory.mktemp("dcmi") / "libdcmi.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", path, STUB], check=True)
    return str(path)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is all of PATH that matters here."""
    monkeypatch.setattr(ascend, "TOOLS", str(tmp_path))
    monkeypatch.setattr(accelerators, "REOPEN_AFTER", 1)
    return tmp_path


@pytest.fixture
def say(library: str, tools: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Tells the library what its NPUs do."""
    monkeypatch.setattr(dcmi, "LIBRARY", library)
    return lambda text: monkeypatch.setenv("DCMI_STUB", text)


def tool(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def npu_smi(folder: Path, health: str = "OK", double: int = 0, before: str = "") -> None:
    for name, text in (("info", TABLE.format(health=health)), ("ecc", ECC.format(double=double)), ("health", FAULTY)):
        (folder / name).write_text(text)
    tool(folder, "npu-smi", f'{before}\ncase "$*" in info) cat {folder}/info;; *) cat {folder}/$3;; esac')


def values(detector: AcceleratorDetector, subject: str = "npu0") -> dict[str, Value]:
    return {reading.name: reading.value for reading in detector.check() if reading.subject == subject}


def test_a_healthy_npu_gives_its_numbers_and_no_alarm(say: Callable[[str], None]) -> None:
    say("npus=2")
    npus = detector()
    assert isinstance(npus, Detector) and npus.supported() == "" and npus.every_s == 10
    assert values(npus) == {
        "npu.present": 1,
        "npu.health": "ok",
        "npu.fault_codes": 0,
        "npu.temperature": 42,
        "npu.power_w": 95.3,
        "npu.ecc.corrected": 0,
        "npu.ecc.uncorrected": 0,
        "npu.ecc.corrected_lifetime": 0,
        "npu.ecc.uncorrected_lifetime": 0,
        "npu.isolated_pages": 0,
        "npu.isolated_pages.pending": 0,
        "npu.temperature.memory": 44,
        "npu.hccs.crc_errors": 0,
        "npu.hccs.retries": 0,
        "npu.network": "ok",
    }
    assert str(npus.devices()[1]) == "Ascend 910B3, 0000:c2:00.0"
    assert npus.blind_spots() == [
        f"npu{index}: hccn_tool is not here: the state of the network port is unknown" for index in (0, 1)
    ]


@pytest.mark.parametrize(
    ("said", "subject", "name", "value"),
    [
        ("health0=2", "npu0", "npu.health", "alarm"),
        ("hbm_double1=3", "npu1", "npu.ecc.uncorrected", 3),
        ("hbm_double_life0=9", "npu0", "npu.ecc.uncorrected_lifetime", 9),
        ("pages0=64", "npu0", "npu.isolated_pages", 64),
        ("pages_next0=1", "npu0", "npu.isolated_pages.pending", 1),
        ("heat0=103", "npu0", "npu.temperature", 103),
        ("crc0=17", "npu0", "npu.hccs.crc_errors", 17),
        ("network0=3", "npu0", "npu.network", "unreachable"),
        ("code0=0x80E01801", "npu0", "npu.fault_codes", 1),
        ("code0=0x80E01801", "npu0/80E01801", "npu.fault_code", "80E01801"),
    ],
)
def test_what_is_wrong_is_read(say: Callable[[str], None], said: str, subject: str, name: str, value: Value) -> None:
    say(said)
    assert values(detector(), subject).get(name) == value


def test_a_fault_code_ends_when_the_driver_no_longer_names_it(say: Callable[[str], None]) -> None:
    say("code0=0x80E01801 other0=0x81078603")
    npus = detector()
    assert values(npus, "npu0/81078603") == {"npu.fault_code": "81078603"}
    say("code0=0x80E01801")
    readings = [(one.subject, one.value) for one in npus.check() if one.name == "npu.fault_code"]
    assert readings == [("npu0/80E01801", "80E01801"), ("npu0/81078603", "cleared")]
    say("")
    assert [one.value for one in npus.check() if one.name == "npu.fault_code"] == ["cleared"]
    assert not [one for one in npus.check() if one.name == "npu.fault_code"]


def test_a_call_that_does_not_come_back_holds_nobody_up(
    say: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcmi, "NETWORK_DEADLINE_S", 0.05)
    say("npus=1 network_ms0=9000")
    npus = detector()
    begin = time.monotonic()
    assert "npu.network" not in values(npus)
    assert "npu.network" not in values(npus), "not asked again while the first question waits"
    assert time.monotonic() - begin < 8


def test_one_lost_npu_and_all_lost(say: Callable[[str], None]) -> None:
    say("npus=3")
    npus = detector()
    npus.check()
    for said in ("npus=3 gone1=1", "npus=3 lost1=1"):
        say(said)
        found = {one.subject: one for one in npus.check() if one.name == "npu.present"}
        assert [found[f"npu{index}"].value for index in range(3)] == [1, 0, 1]
        assert "does not exist" in found["npu1"].note or "no longer listed" in found["npu1"].note
    for said in ("npus=3 lost=1", "npus=3 list=-8005", "npus=0"):
        npus.close()
        say(said)
        assert [(one.name, one.subject, one.value) for one in npus.check()] == [
            ("accelerator.monitor_down", "ascend", 1)
        ]
    say("npus=3")
    assert values(npus, "npu1")["npu.present"] == 1


def test_what_an_npu_does_not_know_is_left_out(say: Callable[[str], None]) -> None:
    say("heat=-1 hbm_single=-1 crc=-1 network=-1 hbm_heat=-1")
    assert set(values(detector())) == {"npu.present", "npu.health", "npu.fault_codes", "npu.power_w"}


def test_a_vnpu_is_known_by_its_name(say: Callable[[str], None]) -> None:
    say("npus=1 virtual0=1")
    npus = detector()
    assert npus.supported() == "" and npus.devices()[0].virtual == "vNPU"
    assert npus.blind_spots() == ["npu0: is a vNPU: ECC, links and fault codes belong to the host"]


def test_npu_smi_is_read_where_there_is_no_library(tools: Path) -> None:
    npu_smi(tools, "Alarm", double=5)
    tool(tools, "hccn_tool", '[ "$2" = 1 ] && echo "link status: DOWN" || echo "link status: UP"')
    npus = detector()
    assert npus.supported() == "" and npus.every_s == 60
    readings = {(one.subject, one.name): one for one in npus.check()}
    assert {name: one.value for (subject, name), one in readings.items() if subject == "npu1"} == {
        "npu.present": 1,
        "npu.health": "alarm",
        "npu.temperature": 44.0,
        "npu.power_w": 98.1,
        "npu.fault_codes": 2,
        "npu.ecc.corrected": 3,
        "npu.ecc.uncorrected": 5,
        "npu.ecc.corrected_lifetime": 12,
        "npu.ecc.uncorrected_lifetime": 4,
        "npu.isolated_pages": 3,
        "npu.isolated_pages.pending": 1,
        "npu.link.up": 0,
    }
    assert readings["npu0", "npu.health"].value == "ok" and readings["npu0", "npu.fault_codes"].value == 0
    assert readings["npu0", "npu.link.up"].value == 1
    assert "multi bit error" in readings["npu1/80CB8009", "npu.fault_code"].note
    assert "npu-smi only" in npus.blind_spots()[0]
    (tools / "info").write_text(TABLE.format(health="UNKNOWN"))
    later = {(one.subject, one.name): one for one in npus.check()}
    assert later["npu1", "npu.present"].value == 0 and "UNKNOWN" in later["npu1", "npu.present"].note
    assert ("npu0", "npu.link.up") not in later, "links are asked for once a minute"


def test_npu_smi_that_hangs_or_fails_is_a_monitor_that_is_down(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npu_smi(tools)
    npus = detector()
    assert values(npus)["npu.present"] == 1
    tool(tools, "npu-smi", "echo 'DrvMngGetConsoleLogLevel failed. (g_conLogLevel=3)'; exit 87")
    assert [(one.name, one.value) for one in npus.check()] == [("accelerator.monitor_down", 1)]
    monkeypatch.setattr(ascend, "DEADLINE_S", 0.1)
    tool(tools, "npu-smi", "exec sleep 20")
    begin = time.monotonic()
    assert [(one.name, one.value) for one in npus.check()] == [("accelerator.monitor_down", 1)]
    assert time.monotonic() - begin < 5


def test_tables_of_other_versions() -> None:
    rows = table_rows(TWO_DIES)
    assert [(row["npu"], row["chip"], row["number"], row["health"], row["power"], row["bus"]) for row in rows] == [
        ("2", "0", "4", "OK", "171.2", "0000:95:00.0"),
        ("2", "1", "5", "Warning", "-", "0000:97:00.0"),
    ]
    assert [row["number"] for row in table_rows(TABLE.format(health="OK"))] == ["0", "1"]
    assert table_rows("dcmi module initialize failed. ret is -8005\n") == []


def test_without_anything_it_says_so(tools: Path) -> None:
    assert detector().supported() == "neither libdcmi.so nor npu-smi is here"
