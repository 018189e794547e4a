"""Turns the PCI bus (links, error counters, devices that are gone) into readings. Called by `detect.monitor`.

Watched are accelerators, network cards and NVMe drives, and the port above each, which counts errors of the same link.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rerail.detect.detector import Detector, Reading
from rerail.detect.host_memory import names, read_bytes, read_text, share, table

NVIDIA, AMD = "0x10de", "0x1002"
KINDS = {"0x12": "accelerator", "0x02": "network", "0x0108": "nvme"}
"""Beginning of the class code -> what it is."""
ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
ERRORS = (("correctable", "TOTAL_ERR_COR"), ("nonfatal", "TOTAL_ERR_NONFATAL"), ("fatal", "TOTAL_ERR_FATAL"))
ACS = 0x0D
"""Id of the extended capability that can send traffic between neighbours up to the root complex."""
SOURCE_VALID_OR_REDIRECT = 0x0D


class Device(NamedTuple):
    """One watched device."""

    address: str
    kind: str
    folder: str
    port: str
    """Folder of the port above it; empty where there is none."""
    note: str


def kind_of(class_code: str, vendor: str) -> str:
    """What a device is, or empty if it is not watched: the graphics chip of a BMC is no accelerator."""
    if class_code.startswith("0x03"):
        return "accelerator" if vendor in (NVIDIA, AMD) else ""
    return next((kind for prefix, kind in KINDS.items() if class_code.startswith(prefix)), "")


def link_speed(text: str) -> float | None:
    """Gigatransfers of `16.0 GT/s PCIe`; None for `Unknown`."""
    try:
        return float(text.split()[0]) or None
    except (IndexError, ValueError):
        return None


def link_width(text: str) -> int | None:
    """Lanes; None for 0 (no link) and for what a dead device answers (63 or 255)."""
    return int(text) if text.isdigit() and 0 < int(text) <= 32 else None


def redirects(config: bytes) -> bool:
    """Whether a port's access control sends peer traffic upwards, by its configuration space (4096 bytes, root only)."""
    at = 0x100
    for _ in range(64):  # a broken list may go round in circles
        if at < 0x100 or at + 8 > len(config):
            return False
        head = int.from_bytes(config[at : at + 4], "little")
        if head & 0xFFFF == ACS:
            return bool(int.from_bytes(config[at + 6 : at + 8], "little") & SOURCE_VALID_OR_REDIRECT)
        at = head >> 20
    return False


class Pci:
    """Links, errors and presence of the watched devices."""

    name = "host.pci"

    def __init__(self, root: Path = Path("/"), every_s: float = 30.0) -> None:
        self.every_s = every_s
        self._root = root
        self._base = root / "sys/bus/pci/devices"
        self._devices: dict[str, Device] = {}
        self._ignored: set[str] = set()
        self._bound: set[str] = set()
        self._redirecting: int | None = None
        self._best: dict[str, tuple[int | None, float | None]] = {}
        """Lanes and speed that a device and the port above it can both do."""

    def supported(self) -> str:
        if not names(self._base):
            return "no PCI bus is shown in /sys/bus/pci/devices"
        self._list()
        return "" if self._devices else "no accelerator, network card or NVMe drive on the PCI bus"

    def check(self) -> list[Reading]:
        there = self._list()
        if not there:
            return []  # a bus without any device is a bus that we cannot see
        found = []
        for address, device in self._devices.items():
            gone = address not in there or read_bytes(f"{device.folder}/config", 4) == b"\xff\xff\xff\xff"
            found.append(Reading("pcie.device.gone", address, int(gone), device.note))
            if not gone:
                found += self._look(device)
        for port, device in {device.port: device for device in self._devices.values() if device.port}.items():
            found += self._errors(port, os.path.basename(port), f"port above {device.address}, {device.note}")
        if self._redirecting is None:
            self._redirecting = self._count_redirecting()
        if self._redirecting >= 0:
            found.append(Reading("pcie.acs.redirecting_ports", "pci", self._redirecting))
        return found

    def blind_spots(self) -> list[str]:
        blind = []
        self._list()
        if self._devices and not any((Path(d.folder) / "aer_dev_fatal").exists() for d in self._devices.values()):
            blind.append("PCIe errors: no device shows AER counters (virtual machine, or firmware keeps them)")
        if self._devices and not any(
            link_width(read_text(f"{d.folder}/current_link_width")) for d in self._devices.values()
        ):
            blind.append("PCIe links: no device shows its speed and width (virtual machine)")
        return blind

    def _list(self) -> set[str]:
        """All addresses on the bus; those not met before are sorted out once."""
        there = set(names(self._base))
        for address in sorted(there - self._ignored - self._devices.keys()):
            folder = self._base / address
            kind = kind_of(read_text(folder / "class"), read_text(folder / "vendor"))
            if not kind or (folder / "physfn").exists():  # virtual functions come and go, and have no link of their own
                self._ignored.add(address)
                continue
            real = os.path.realpath(folder)
            above = os.path.dirname(real)
            note = f"{kind} {read_text(folder / 'vendor')}:{read_text(folder / 'device')}"
            port = above if ADDRESS.fullmatch(os.path.basename(above)) else ""
            self._devices[address] = Device(address, kind, str(folder), port, note)
        return there

    def _look(self, device: Device) -> Iterator[Reading]:
        folder = device.folder
        if os.path.exists(f"{folder}/driver"):
            self._bound.add(device.address)
        if device.address in self._bound:
            lost = not os.path.exists(f"{folder}/driver")
            yield Reading("pcie.device.driver_lost", device.address, int(lost), device.note)
        yield from self._errors(folder, device.address, device.note)
        if read_text(f"{folder}/power/runtime_status") == "suspended":
            return  # asking for the link would wake it
        best_width, best_speed = self._limits(device)
        width, speed = (
            link_width(read_text(f"{folder}/current_link_width")),
            link_speed(read_text(f"{folder}/current_link_speed")),
        )
        if width and best_width:
            note = f"x{width} of x{best_width}, {device.note}"
            yield Reading("pcie.link.width_share", device.address, share(width, best_width), note)
        if speed and best_speed:
            # an idle accelerator lowers its speed to save power: another name, so that it is judged otherwise
            name = "pcie.link.accelerator_speed_share" if device.kind == "accelerator" else "pcie.link.speed_share"
            note = f"{speed:g} of {best_speed:g} GT/s, {device.note}"
            yield Reading(name, device.address, share(speed, best_speed), note)

    def _limits(self, device: Device) -> tuple[int | None, float | None]:
        if device.address not in self._best:
            folders = [folder for folder in (device.folder, device.port) if folder]
            widths = [link_width(read_text(f"{folder}/max_link_width")) for folder in folders]
            speeds = [link_speed(read_text(f"{folder}/max_link_speed")) for folder in folders]
            width = min((width for width in widths if width), default=None)
            speed = min((speed for speed in speeds if speed), default=None)
            self._best[device.address] = (width, speed)
        return self._best[device.address]

    def _errors(self, folder: str, subject: str, note: str) -> Iterator[Reading]:
        for kind, total in ERRORS:
            lines = read_text(f"{folder}/aer_dev_{kind}")
            count = table(lines[lines.rfind("\n") + 1 :]).get(total) if lines else None
            if count is not None:
                yield Reading(f"pcie.aer.{kind}", subject, count, note)

    def _count_redirecting(self) -> int:
        """How many ports above accelerators redirect peer traffic; -1 where that is right or cannot be known."""
        if b" hypervisor" in read_bytes(self._root / "proc/cpuinfo", 1 << 13):
            return -1  # the guest needs it
        folders = set()
        for device in self._devices.values():
            above = device.port if device.kind == "accelerator" else ""
            while ADDRESS.fullmatch(os.path.basename(above)):
                folders.add(above)
                above = os.path.dirname(above)
        configs = [read_bytes(f"{folder}/config", 1 << 12) for folder in sorted(folders)]
        readable = [config for config in configs if len(config) > 0x100]
        return sum(map(redirects, readable)) if readable else -1


def detectors(root: Path = Path("/")) -> list[Detector]:
    """All detectors of this module."""
    return [Pci(root)]
