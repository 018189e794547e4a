"""Turns the kernel's own state, its modules, device files and the services of the machine into readings. Called by `detect.monitor`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rerail.detect.detector import Detector, Reading
from rerail.detect.host_memory import Known, names, read_int, read_text, table

SERVICES = (
    "nvidia-fabricmanager", "nvidia-persistenced", "nvidia-imex", "nvidia-dcgm", "containerd", "kubelet",
)  # fmt: skip
TAINTS = {4: "machine_check", 5: "bad_page", 7: "oops", 14: "soft_lockup"}
"""Bits of /proc/sys/kernel/tainted that tell of a fault since boot."""
NVIDIA, AMD, MELLANOX, AMAZON = "0x10de", "0x1002", "0x15b3", "0x1d0f"


def run_tool(command: Sequence[str], limit_s: float) -> str | None:
    """What a program prints; None if it took too long. It is killed then, but not waited for: it may hang in the kernel."""
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return ""
    try:
        return process.communicate(timeout=limit_s)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        process.kill()
        threading.Thread(target=process.communicate, name="rerail-reap", daemon=True).start()
        return None


class Services:
    """Whether the services that accelerators and containers need are running, as systemd sees them."""

    name = "host.services"

    def __init__(
        self,
        root: Path = Path("/"),
        services: Sequence[str] = SERVICES,
        every_s: float = 60.0,
        run: Callable[[Sequence[str], float], str | None] = run_tool,
    ) -> None:
        self.every_s = every_s
        self._marker = root / "run/systemd/system"
        self._command = [
            shutil.which("systemctl") or "systemctl", "show", "--property=Id,LoadState,ActiveState,UnitFileState",
            *(f"{name}.service" for name in services),
        ]  # fmt: skip
        self._run = run
        self._was_active: set[str] = set()

    def supported(self) -> str:
        if not self._marker.is_dir():
            return "systemd does not run here (a container, or another init)"
        return "" if self._ask() else "none of the watched services is installed"

    def check(self) -> list[Reading]:
        found = []
        for name, (state, enabled) in self._ask().items():
            if state == "active":
                self._was_active.add(name)
            if enabled or name in self._was_active:  # what nobody wants running may well be off
                reading = f"os.service.{name.replace('-', '_')}"
                found.append(Reading(reading, f"{name}.service", state))
        return found

    def blind_spots(self) -> list[str]:
        return []

    def _ask(self) -> dict[str, tuple[str, bool]]:
        """Installed services -> state, and whether they start at boot."""
        found = {}
        for block in (self._run(self._command, 10.0) or "").split("\n\n"):
            unit = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
            if unit.get("LoadState") == "loaded" and unit.get("ActiveState"):
                name = unit.get("Id", "").removesuffix(".service")
                found[name] = (unit["ActiveState"], unit.get("UnitFileState") == "enabled")
        return found


class Modules:
    """Kernel modules that are missing while their hardware is there."""

    name = "host.modules"

    def __init__(self, root: Path = Path("/"), every_s: float = 60.0) -> None:
        self.every_s = every_s
        self._loaded, self._bus = root / "sys/module", root / "sys/bus/pci/devices"
        self._rdma = root / "sys/class/infiniband"
        self._cards: dict[str, str] = {}
        """PCI address -> the driver that its card needs."""
        self._sorted: set[str] = set()

    def supported(self) -> str:
        if not names(self._loaded):
            return "no /sys/module"
        return "" if self._wanted() else "no hardware whose modules are known"

    def check(self) -> list[Reading]:
        if not names(self._loaded):
            return []
        return [Reading(f"os.module.{name}_missing", name, int(not there)) for name, there in self._wanted().items()]

    def blind_spots(self) -> list[str]:
        return []

    def _wanted(self) -> dict[str, bool]:
        """Modules that should be loaded -> whether they are."""
        drivers = self._needs()
        wanted = sorted(drivers)
        if "nvidia" in drivers and self._has("nvidia"):
            wanted.append("nvidia_uvm")
            if self._has("ib_core") and names(self._rdma):
                wanted.append("nvidia_peermem")
        if "mlx5_core" in drivers and self._has("ib_core"):
            wanted.append("mlx5_ib")
        if names(self._rdma):
            wanted.append("ib_uverbs")
        return {name: self._has(name) for name in wanted}

    def _has(self, name: str) -> bool:
        return (self._loaded / name).is_dir()

    def _needs(self) -> set[str]:
        """Drivers of the cards on the bus; a card given to a guest (vfio) needs none here."""
        for address in names(self._bus):
            if address not in self._sorted:
                self._sorted.add(address)
                folder = self._bus / address
                kind, vendor = read_text(folder / "class"), read_text(folder / "vendor")
                driver = ""
                if kind.startswith(("0x0300", "0x0302")) and vendor == NVIDIA:
                    driver = "nvidia"
                elif kind.startswith(("0x0300", "0x0302", "0x0380", "0x1200")) and vendor == AMD:
                    driver = "amdgpu"
                elif kind.startswith("0x02") and vendor == MELLANOX:
                    driver = "mlx5_core"
                elif vendor == AMAZON and read_text(folder / "device").startswith("0xefa"):
                    driver = "efa"
                if driver:
                    self._cards[address] = driver
        return {
            driver
            for address, driver in self._cards.items()
            if not os.path.realpath(self._bus / address / "driver").endswith("vfio-pci")
        }


class Kernel:
    """Whether the machine was started anew, and what the kernel has noted against itself since."""

    name = "host.kernel"

    def __init__(self, root: Path = Path("/"), boot_id: str = "", every_s: float = 30.0) -> None:
        self.every_s = every_s
        self._root, self._proc = root, root / "proc"
        self._boot_id = boot_id
        """That of the last time this node was seen; empty: this one."""

    def supported(self) -> str:
        return "" if self.check() else "neither the boot id nor the kernel's state can be read"

    def check(self) -> list[Reading]:
        found = []
        boot_id = read_text(self._proc / "sys/kernel/random/boot_id")
        if boot_id:
            self._boot_id = self._boot_id or boot_id
            found.append(Reading("os.boot.changed", "kernel", int(boot_id != self._boot_id), boot_id))
        taint = read_int(self._proc / "sys/kernel/tainted")
        if taint is not None:
            found += [Reading(f"os.taint.{name}", "kernel", taint >> bit & 1) for bit, name in TAINTS.items()]
        crashes = self._crashes()
        if crashes is not None:
            found.append(Reading("os.pstore.crash_records", "kernel", crashes))
        return found

    def blind_spots(self) -> list[str]:
        return []

    def _crashes(self) -> int | None:
        """Records of a crash less than a day before this boot; None if it is not known when that was."""
        stat = read_text(self._proc / "stat")
        booted = table(stat[stat.find("\nbtime") + 1 :].partition("\n")[0]).get("btime")
        if booted is None:
            return None
        count = 0
        for folder in ("sys/fs/pstore", "var/lib/systemd/pstore"):
            for name in names(self._root / folder):
                if folder == "sys/fs/pstore" and not name.startswith("dmesg-"):
                    continue  # a log of a healthy console may lie there, too
                try:
                    count += (self._root / folder / name).stat().st_mtime > booted - 86_400
                except OSError:
                    continue
        return count


class DeviceFiles:
    """Device files of accelerators and RDMA devices that were there and are not."""

    name = "host.device_files"
    WATCHED = (
        ("", r"nvidia\d+|nvidiactl|nvidia-uvm|kfd|davinci\d+|neuron\d+"),
        ("infiniband", r"uverbs\d+|rdma_cm"),
        ("dri", r"renderD\d+"),
    )
    """Folder under /dev, and what is watched in it."""

    def __init__(self, root: Path = Path("/"), every_s: float = 30.0) -> None:
        self.every_s = every_s
        self._dev = root / "dev"
        self._known = Known()

    def supported(self) -> str:
        return "" if self._there() else "no device files of accelerators or RDMA devices in /dev"

    def check(self) -> list[Reading]:
        there = self._there()
        found = [Reading("os.device_file.gone", f"/dev/{name}", 1) for name in self._known.gone(there)]
        return [*found, *(Reading("os.device_file.gone", f"/dev/{name}", 0) for name in there)]

    def blind_spots(self) -> list[str]:
        return []

    def _there(self) -> list[str]:
        return list(self._list())

    def _list(self) -> Iterator[str]:
        for folder, pattern in self.WATCHED:
            for name in names(self._dev / folder):
                if re.fullmatch(pattern, name):
                    yield f"{folder}/{name}" if folder else name


def detectors(root: Path = Path("/"), boot_id: str = "") -> list[Detector]:
    """All detectors of this module; `boot_id` is the one this node had when it was last seen."""
    return [Services(root), Modules(root), Kernel(root, boot_id), DeviceFiles(root)]
