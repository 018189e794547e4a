"""Turns DCMI (`detect.dcmi`) or, without it, the text of `npu-smi` into samples of Ascend NPUs.

The vendor half of `detect.accelerators`. Both give the same names; `npu-smi` starts a process for each question and knows
less, so it is asked more seldom. Links of the NPU's own network ports come from `hccn_tool` where that is installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Protocol

from rerail.detect import dcmi
from rerail.detect.accelerators import Absent, Accelerator, AcceleratorDetector, Lost, Sample, Unreachable
from rerail.detect.dcmi import Dcmi, fault_codes, virtual

TOOLS = "/usr/local/Ascend/driver/tools:/usr/local/sbin:/usr/local/bin"
DEADLINE_S = 5.0
"""For one run of a tool: with a card that hangs, it hangs too."""
LINK_EVERY_S = 60.0
TEXT_EVERY_S = 60.0
CLEARED = "cleared"


class _Reader(Protocol):
    """One way to the NPUs."""

    def devices(self) -> list[Accelerator]: ...

    def sample(self, device: Accelerator) -> Iterator[Sample]: ...


class Ascend:
    """The vendor of `accelerators`."""

    name = "ascend"
    word = "npu"

    def __init__(self) -> None:
        self._reader: _Reader | None = None
        self._codes: dict[str, set[str]] = {}
        """Fault codes of each device at the last look."""
        self._link_at: dict[str, float] = {}
        self._hccn_tool: str | None = None

    def open(self) -> list[Accelerator]:
        self._hccn_tool = _tool("hccn_tool")
        self._reader = _reader()
        return self._reader.devices()

    def close(self) -> None:
        """DCMI has no end; it holds nothing open between two calls."""
        self._reader = None

    def sample(self, device: Accelerator) -> Iterator[Sample]:
        if self._reader is None:
            raise Unreachable("not connected")
        codes: set[str] = set()
        for sample in self._reader.sample(device):
            if sample.name == "npu.fault_code":
                codes.add(str(sample.value))
            yield sample
        for code in self._codes.get(device.key, set()) - codes:
            yield Sample("npu.fault_code", CLEARED, code)
        self._codes[device.key] = codes
        yield from self._link(device)

    def machine(self) -> Iterator[Sample]:
        return iter(())

    def blind_spots(self, device: Accelerator) -> list[str]:
        found = []
        if device.virtual:
            found.append("is a vNPU: ECC, links and fault codes belong to the host")
        elif isinstance(self._reader, _Text):
            found.append("seen through npu-smi only: no HCCS counters, no test of the network, a look takes seconds")
        if not device.virtual and self._hccn_tool is None:
            found.append("hccn_tool is not here: the state of the network port is unknown")
        return found

    def _link(self, device: Accelerator) -> Iterator[Sample]:
        tool, now = self._hccn_tool, time.monotonic()
        if device.virtual or tool is None or now - self._link_at.get(device.key, float("-inf")) < LINK_EVERY_S:
            return
        self._link_at[device.key] = now
        said = re.search(r"link status:\s*(\w+)", _run(tool, "-i", str(device.index), "-link", "-g"))
        if said:
            yield Sample("npu.link.up", int(said[1].upper() == "UP"))


def detector(*, expected: int = 0, every_s: float | None = None) -> AcceleratorDetector:
    """The detector of Ascend NPUs; every 10 s through DCMI, every 60 s through `npu-smi`."""
    default = 10.0 if dcmi.load() is not None else TEXT_EVERY_S
    return AcceleratorDetector(Ascend(), expected=expected, every_s=every_s or default)


def _reader() -> _Reader:
    library = dcmi.load()
    if library is not None:
        return Dcmi(library)
    tool = _tool("npu-smi")
    if tool is None:
        raise Absent("neither libdcmi.so nor npu-smi is here")
    return _Text(tool)


# --- npu-smi ---


class _Text:
    """NPUs through the table that `npu-smi info` prints: two rows for each chip."""

    def __init__(self, tool: str) -> None:
        self._tool = tool
        self._rows: dict[str, dict[str, str]] = {}
        self._fresh: set[str] = set()

    def devices(self) -> list[Accelerator]:
        self._look()
        return [_device_of_row(row) for row in self._rows.values()]

    def sample(self, device: Accelerator) -> Iterator[Sample]:
        if device.key not in self._fresh:
            self._look()
        self._fresh.discard(device.key)
        row = self._rows.get(device.key)
        if row is None or row["health"].upper() == "UNKNOWN":
            raise Lost("npu-smi: " + ("no longer in the table" if row is None else "health is UNKNOWN"))
        yield Sample("npu.health", row["health"].lower())
        for name, word in (("npu.temperature", row["heat"]), ("npu.power_w", row["power"])):
            if re.fullmatch(r"[\d.]+", word):
                yield Sample(name, float(word))
        where = ("-i", row["npu"], "-c", row["chip"])
        if row["health"].upper() == "OK":
            yield Sample("npu.fault_codes", 0)
        else:
            said = _pairs(_run(self._tool, "info", "-t", "health", *where))
            codes = re.findall(r"[0-9A-Fa-f]{8}", said.get("error code", ""))
            yield Sample("npu.fault_codes", len(codes))
            yield from fault_codes((code.upper() for code in codes), said.get("error information", ""))
        said = _pairs(_run(self._tool, "info", "-t", "ecc", *where))
        for name, words in _ECC_LINES.items():
            numbers = [int(said[word]) for word in words if said.get(word, "").isdigit()]
            if numbers:
                yield Sample(name, sum(numbers))

    def _look(self) -> None:
        text = _run(self._tool, "info")
        self._rows = {_device_of_row(row).key: row for row in table_rows(text)}
        self._fresh = set(self._rows)
        if not text:
            raise Unreachable(f"npu-smi does not answer within {DEADLINE_S:g} s, or fails")


_ECC_LINES = {
    "npu.ecc.corrected": ("hbm single bit error count",),
    "npu.ecc.uncorrected": ("hbm double bit error count",),
    "npu.ecc.corrected_lifetime": ("hbm single bit aggregate total err cnt",),
    "npu.ecc.uncorrected_lifetime": ("hbm double bit aggregate total err cnt",),
    "npu.isolated_pages": ("hbm single bit isolated pages count", "hbm double bit isolated pages count"),
    "npu.isolated_pages.pending": (
        "hbm single bit next-isolated pages count",
        "hbm double bit next-isolated pages count",
    ),
}


def table_rows(text: str) -> list[dict[str, str]]:
    """The chips of an `npu-smi info` table. Some versions print a physical number beside the chip's."""
    found: list[dict[str, str]] = []
    upper: list[list[str]] = []
    for line in text.splitlines():
        cells = [cell.split() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3 or not all(cells) or not cells[0][0].isdigit():
            upper = []
        elif upper:
            number = cells[0][1] if len(cells[0]) > 1 else str(len(found))
            npu, *name = upper[0]
            power, heat, *_ = upper[2]
            place = {"npu": npu, "chip": cells[0][0], "number": number, "bus": cells[1][0]}
            found.append({"name": " ".join(name), "health": upper[1][0], "power": power, "heat": heat, **place})
            upper = []
        elif len(cells[0]) > 1 and not cells[0][1].isdigit() and len(cells[2]) > 1:
            upper = cells
    return found


def _device_of_row(row: dict[str, str]) -> Accelerator:
    bus = row["bus"].lower() if ":" in row["bus"] else ""
    place = f"card {row['npu']} chip {row['chip']}"  # two halves of a divided chip may share an address
    return Accelerator(int(row["number"]), row["name"], place, bus, "", virtual(row["name"]))


def _pairs(text: str) -> dict[str, str]:
    """`Name : value` lines by lower-case name."""
    parts = (line.partition(":") for line in text.splitlines())
    return {name.strip().lower(): value.strip() for name, colon, value in parts if colon}


def _tool(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=TOOLS)


def _run(tool: str, *arguments: str) -> str:
    """What it prints, or nothing: late and failed are the same here."""
    try:
        done = subprocess.run(
            (tool, *arguments), capture_output=True, text=True, errors="replace", timeout=DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
