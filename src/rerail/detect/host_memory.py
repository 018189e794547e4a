"""Turns what the kernel says of the machine's memory (EDAC, meminfo, vmstat, pressure, cgroup) into readings.

Also holds the few readers of small kernel files that all host detectors share. Called by `detect.monitor`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from rerail.detect.detector import Detector, Reading

FOREVER = 1 << 60
"""A cgroup v1 limit at least this high means that there is none."""


def read_bytes(path: str | Path, most: int = 1 << 22) -> bytes:
    """The beginning of a small file; empty if it is missing or may not be read.

    Never waits: a pipe nobody writes to is an empty file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return b""
    try:
        found = b""
        while len(found) < most and (part := os.read(descriptor, min(most - len(found), 1 << 16))):
            found += part
        return found
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def read_text(path: str | Path) -> str:
    """The whole of a small file without the white space around it; empty if it cannot be read."""
    return read_bytes(path).decode(errors="replace").strip()


def to_int(text: str) -> int | None:
    """`12`, `0x1f` or `12 kB` as a number; None for anything else, such as `N/A (no PMA)`."""
    word = text.split(None, 1)[0] if text else ""
    try:
        return int(word, 16) if word.startswith("0x") else int(word)
    except ValueError:
        return None


def read_int(path: str | Path) -> int | None:
    """The number a file begins with, or None."""
    return to_int(read_text(path))


def names(path: str | Path) -> list[str]:
    """What a folder holds, in order; empty if it is missing or may not be read."""
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def table(text: str) -> dict[str, int]:
    """`name number` or `name: number kB` lines as a table; other lines are left out."""
    rows = {}
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        value = to_int(rest.strip())
        if value is not None:
            rows[name.rstrip(":")] = value
    return rows


def share(part: float, whole: float) -> float:
    """A part of a whole between 0 and 1, in steps that keep a stored history small."""
    return round(part / whole, 4)


def cgroups(root: Path, controller: str) -> list[Path]:
    """The folders of this process's cgroup and of its parents that limit it, the innermost first.

    Inside a container the path in /proc/self/cgroup may be that of the host: then the top of the mount is ours.
    """
    base = root / "sys/fs/cgroup"
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        kinds, _, inside = rest.partition(":")
        if controller in kinds.split(","):
            top = base / controller
        elif number == "0" and not (base / controller).is_dir():
            top = base
        else:
            continue
        own = top / inside.strip("/")
        own = own if own.is_dir() and ".." not in own.parts else top
        return [own, *(folder for folder in own.parents if folder == top or top in folder.parents)]
    return []


class Known:
    """Remembers what was there once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def gone(self, now: Iterable[str]) -> list[str]:
        """What was there at some time and is not there now."""
        there = set(now)
        self._seen |= there
        return sorted(self._seen - there)


class Edac:
    """Memory errors that the memory controller corrected, or could not correct."""

    name = "host.memory.edac"

    def __init__(self, root: Path = Path("/"), every_s: float = 30.0) -> None:
        self.every_s = every_s
        self._base = root / "sys/devices/system/edac/mc"
        self._modules: dict[str, list[tuple[str, str, str]]] = {}
        """Memory controller -> its DIMMs: subject, folder, label."""

    def supported(self) -> str:
        if not self._controllers():
            return "no EDAC memory controller: a virtual machine, memory without ECC, or no EDAC driver"
        return ""

    def check(self) -> list[Reading]:
        return [reading for controller in self._controllers() for reading in self._count(controller)]

    def blind_spots(self) -> list[str]:
        blind = [mc for mc in self._controllers() if not self._dimms(mc)]
        return [f"{mc}: errors are not told apart by DIMM" for mc in blind]

    def _controllers(self) -> list[str]:
        return [name for name in names(self._base) if name.startswith("mc") and name[2:].isdigit()]

    def _dimms(self, controller: str) -> list[tuple[str, str, str]]:
        if controller not in self._modules:
            folder = self._base / controller
            self._modules[controller] = [
                (f"{controller}/{name}", str(folder / name), read_text(folder / name / "dimm_label"))
                for name in names(folder)
                if name.startswith(("dimm", "rank")) and (folder / name / "dimm_ce_count").exists()
            ]
        return self._modules[controller]

    def _count(self, controller: str) -> Iterator[Reading]:
        for kind in ("ce", "ue"):
            total = read_int(self._base / controller / f"{kind}_count")
            named = 0
            for subject, folder, label in self._dimms(controller):
                count = read_int(f"{folder}/dimm_{kind}_count")
                if count is not None:
                    named += count
                    yield Reading(f"memory.edac.{kind}_count", subject, count, label)
            if total is not None:  # only what no DIMM has counted, so that nothing is there twice
                yield Reading(f"memory.edac.{kind}_count", controller, max(0, total - named))


class MemoryUse:
    """How much memory the machine has, has left, swaps and has given up as broken."""

    name = "host.memory.use"

    def __init__(self, root: Path = Path("/"), expected_bytes: int = 0, every_s: float = 10.0) -> None:
        self.every_s = every_s
        self.expected_bytes = expected_bytes
        """Memory the machine is said to have; 0: nobody said."""
        self._meminfo = root / "proc/meminfo"
        self._vmstat = root / "proc/vmstat"

    def supported(self) -> str:
        return "" if table(read_text(self._meminfo)).get("MemTotal") else "no /proc/meminfo"

    def check(self) -> list[Reading]:
        found: dict[str, float | None] = {}
        info = table(read_text(self._meminfo))
        total, swap = info.get("MemTotal"), info.get("SwapTotal")
        if total:
            if "MemAvailable" in info:
                found["memory.available_share"] = share(info["MemAvailable"], total)
            if self.expected_bytes:
                found["memory.total.missing_share"] = share(
                    max(0, self.expected_bytes - total * 1024), self.expected_bytes
                )
        if swap:
            found["memory.swap.used_share"] = share(swap - info.get("SwapFree", swap), swap)
        found["memory.hardware_corrupted_kb"] = info.get("HardwareCorrupted")
        stat = table(read_text(self._vmstat))
        found["memory.vmstat.oom_kill"] = stat.get("oom_kill")
        found["memory.vmstat.swapped_out_pages"] = stat.get("pswpout")
        stalls = [value for name, value in stat.items() if name.startswith("allocstall")]
        found["memory.vmstat.allocation_stalls"] = sum(stalls) if stalls else None
        return [Reading(name, "memory", value) for name, value in found.items() if value is not None]

    def blind_spots(self) -> list[str]:
        return [] if self.expected_bytes else ["a DIMM that is missing since boot: the expected memory is not set"]


class Pressure:
    """The share of the last minute in which work waited for processors, memory or disks."""

    name = "host.pressure"
    FILES = (("cpu", "cpu.pressure"), ("memory", "memory.pressure"), ("io", "storage.pressure"))

    def __init__(self, root: Path = Path("/"), every_s: float = 10.0) -> None:
        self.every_s = every_s
        self._base = root / "proc/pressure"

    def supported(self) -> str:
        # with psi=0 the files are there and cannot be read
        return (
            "" if self.check() else "no pressure figures: /proc/pressure is missing or switched off (psi=1 turns it on)"
        )

    def check(self) -> list[Reading]:
        found = []
        for file, name in self.FILES:
            for line in read_text(self._base / file).splitlines():
                kind, *fields = line.split()
                average = next((field[6:] for field in fields if field.startswith("avg60=")), "")
                try:
                    found.append(Reading(f"{name}.{kind}_share", file, share(float(average), 100)))
                except ValueError:
                    continue
        return found

    def blind_spots(self) -> list[str]:
        return []


class CgroupMemory:
    """Memory use and out-of-memory kills of the cgroups this process lives in: its container, its job, its slice."""

    name = "host.memory.cgroup"

    def __init__(self, root: Path = Path("/"), every_s: float = 5.0) -> None:
        self.every_s = every_s
        self._root = root
        self._folders = [folder for folder in cgroups(root, "memory") if self._events_file(folder)]

    def supported(self) -> str:
        return "" if self._folders else "this process is in no cgroup that counts memory"

    def check(self) -> list[Reading]:
        return [reading for folder in self._folders for reading in self._look(folder)]

    def blind_spots(self) -> list[str]:
        return []

    @staticmethod
    def _events_file(folder: Path) -> str:
        for name in ("memory.events", "memory.oom_control"):
            if (folder / name).exists():
                return name
        return ""

    def _look(self, folder: Path) -> Iterator[Reading]:
        base = str(folder)
        subject = base.removeprefix(str(self._root / "sys/fs/cgroup")) or "/"
        events = table(read_text(f"{base}/{self._events_file(folder)}"))
        if "oom_kill" in events:
            yield Reading("memory.cgroup.oom_kill", subject, events["oom_kill"])
        if "max" in events:
            yield Reading("memory.cgroup.limit_hits", subject, events["max"])
        used, limit = read_int(f"{base}/memory.current"), read_int(f"{base}/memory.max")
        if used is None:
            used, limit = read_int(f"{base}/memory.usage_in_bytes"), read_int(f"{base}/memory.limit_in_bytes")
        if used is not None and limit and limit < FOREVER:
            stat = table(read_text(f"{base}/memory.stat"))
            cache = stat.get("total_inactive_file", stat.get("inactive_file", 0))  # given up before anybody is killed
            yield Reading(
                "memory.cgroup.used_share", subject, share(max(0, used - cache), limit), f"limit {limit} bytes"
            )


def detectors(root: Path = Path("/"), expected_bytes: int = 0) -> list[Detector]:
    """All detectors of this module; `expected_bytes` is the memory the machine should have."""
    return [Edac(root), MemoryUse(root, expected_bytes), Pressure(root), CgroupMemory(root)]
