"""Turns processors, sensors, clock and kernel limits of the machine into readings. Called by `detect.monitor`."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rerail.detect.detector import Detector, Reading
from rerail.detect.host_memory import cgroups, names, read_int, read_text, share, table, to_int

TIME_ERROR = 5
STA_UNSYNC = 0x40
SLOW_SOURCES = frozenset({"hpet", "acpi_pm", "jiffies"})
"""What the kernel falls back to when it no longer trusts the processors' own counters."""
PROCESSES_A_LOOK = 100
"""A full count of the zombies may take many looks: reading every process at once costs too much on a large machine."""
OWN_COMMANDS = frozenset({"nvme", "drivetemp"})
"""Sensors that are read by a command to a drive, which may hang; `host_storage` asks those with a deadline."""


def cpu_list(text: str) -> int | None:
    """How many processors `0-3,8` names; None if it is not such a list."""
    count = 0
    try:
        for part in text.split(",") if text else ():
            first, _, last = part.partition("-")
            count += int(last or first) - int(first) + 1
    except ValueError:
        return None
    return count


class Processors:
    """Processors that are there, and how much of their time others take."""

    name = "host.cpu"

    def __init__(self, root: Path = Path("/"), every_s: float = 10.0) -> None:
        self.every_s = every_s
        self._proc, self._cpu = root / "proc", root / "sys/devices/system/cpu"
        self._quota = cgroups(root, "cpu")[:1]
        self._last: list[int] = []
        self._last_quota: dict[str, int] = {}

    def supported(self) -> str:
        return "" if self.check() else "neither /proc/stat nor /sys/devices/system/cpu can be read"

    def check(self) -> list[Reading]:
        found: dict[str, float] = {}
        present, online = cpu_list(read_text(self._cpu / "present")), cpu_list(read_text(self._cpu / "online"))
        if present and online:
            if read_text(self._cpu / "smt/control") in ("off", "forceoff"):
                present //= 2  # the second thread of each core is off on purpose
            found["cpu.offline_count"] = max(0, present - online)
        load = read_text(self._proc / "loadavg").split()
        try:
            found["cpu.load_per_core"] = round(float(load[1]) / (online or present or 1), 3)
        except (IndexError, ValueError):
            pass
        found.update(self._time())
        found.update(self._throttled())
        return [Reading(name, "cpu", value) for name, value in found.items()]

    def blind_spots(self) -> list[str]:
        return []

    def _time(self) -> Iterator[tuple[str, float]]:
        """What /proc/stat says of the time since the last look."""
        text = read_text(self._proc / "stat")
        first = text.partition("\n")[0].split()
        if first[:1] == ["cpu"] and all(word.isdigit() for word in first[1:]):
            now = [int(word) for word in first[1:9]]
            spent = [after - before for before, after in zip(self._last, now, strict=False)]
            self._last = now
            if len(spent) == 8 and sum(spent) > 0:  # user nice system idle iowait irq softirq steal
                yield "cpu.steal_share", share(max(0, spent[7]), sum(spent))
                yield "cpu.interrupt_share", share(max(0, spent[5] + spent[6]), sum(spent))
        blocked = table(text[text.rfind("\nprocs_running") + 1 :]).get("procs_blocked")
        if blocked is not None:
            yield "os.tasks.blocked", blocked

    def _throttled(self) -> Iterator[tuple[str, float]]:
        """The share of scheduling periods in which our cgroup had used up its processor time."""
        for folder in self._quota:
            now = table(read_text(folder / "cpu.stat"))
            periods = now.get("nr_periods", 0) - self._last_quota.get("nr_periods", now.get("nr_periods", 0))
            if periods > 0:
                lost = now.get("nr_throttled", 0) - self._last_quota.get("nr_throttled", 0)
                yield "cpu.cgroup.throttled_share", share(max(0, lost), periods)
            self._last_quota = now


class Throttling:
    """How often and how long processors were slowed down for heat."""

    name = "host.cpu.throttle"
    KINDS = (
        ("package_throttle_count", "cpu.throttle.count"),
        ("package_throttle_total_time_ms", "cpu.throttle.total_ms"),
    )

    def __init__(self, root: Path = Path("/"), every_s: float = 30.0) -> None:
        self.every_s = every_s
        base = root / "sys/devices/system/cpu"
        self._folders: dict[str, list[str]] = {}
        """Package -> the folders of one processor of each of its cores."""
        seen = set()
        for name in names(base):
            if name[3:].isdigit() and (base / name / "thermal_throttle").is_dir():
                package, core = (read_text(base / name / "topology" / f) for f in ("physical_package_id", "core_id"))
                if (package, core or name) not in seen:
                    seen.add((package, core or name))
                    self._folders.setdefault(f"package{package or 0}", []).append(str(base / name / "thermal_throttle"))

    def supported(self) -> str:
        return "" if self._folders else "the processors count no thermal throttling (virtual machine, or not Intel)"

    def check(self) -> list[Reading]:
        found = []
        for package, folders in self._folders.items():
            for file, name in self.KINDS:
                # every processor of a package counts the same events of the package
                value = read_int(f"{folders[0]}/{file}")
                if value is not None:
                    found.append(Reading(name, package, value))
            cores = [read_int(f"{folder}/core_throttle_total_time_ms") for folder in folders]
            times = [value for value in cores if value is not None]
            if times:
                found.append(Reading("cpu.throttle.worst_core_ms", package, max(times)))
        return found

    def blind_spots(self) -> list[str]:
        return []


class Sensors:
    """Temperatures, fans, voltages, mains and power caps that the kernel shows."""

    name = "host.sensors"

    def __init__(self, root: Path = Path("/"), every_s: float = 30.0) -> None:
        self.every_s = every_s
        self._heat: list[tuple[str, str, str, int]] = []
        """Reading, subject, file, and the limit in thousandths of a degree."""
        self._fans: list[tuple[str, str]] = []
        self._alarms: list[tuple[str, str, str]] = []
        self._caps: list[tuple[str, str]] = []
        self._spun: set[str] = set()
        self._highest: dict[str, int] = {}
        self._supplies = root / "sys/class/power_supply"
        self._list(root / "sys/class")

    def supported(self) -> str:
        if self._heat or self._fans or self._alarms or self._caps or names(self._supplies):
            return ""
        return "no sensors: neither hwmon chips nor thermal zones, power supplies or power caps are shown"

    def check(self) -> list[Reading]:
        margins: dict[tuple[str, str], int] = {}
        for name, subject, file, limit in self._heat:
            value = read_int(file)
            if value is not None:
                key = (name, subject)
                margins[key] = min(limit - value, margins.get(key, 1 << 30))
        found = [Reading(name, subject, margin / 1000) for (name, subject), margin in margins.items()]
        for subject, file in self._fans:
            speed = read_int(file)
            if speed:
                self._spun.add(file)
            if speed is not None and file in self._spun:  # a connector without a fan has always stood still
                found.append(Reading("power.fan.rpm", subject, speed))
        for name, subject, file in self._alarms:
            alarm = read_int(file)
            if alarm is not None:
                found.append(Reading(name, subject, alarm))
        return [*found, *self._power()]

    def blind_spots(self) -> list[str]:
        return [] if self._fans else ["fans, voltages and power supplies: only the BMC sees them here"]

    def _power(self) -> Iterator[Reading]:
        for subject, file in self._caps:
            cap = read_int(file)
            if cap:
                highest = self._highest[file] = max(cap, self._highest.get(file, 0))
                yield Reading("power.cap.lowered_share", subject, share(highest - cap, highest), f"{cap} uW")
        for supply in names(self._supplies):
            online = read_int(self._supplies / supply / "online")
            if online is not None and read_text(self._supplies / supply / "type") in ("Mains", "UPS"):
                if online:
                    self._spun.add(supply)
                if supply in self._spun:
                    yield Reading("power.supply.online", supply, online)

    def _list(self, base: Path) -> None:
        for chip in names(base / "hwmon"):
            folder = base / "hwmon" / chip
            kind = read_text(folder / "name") or chip
            if kind not in OWN_COMMANDS:
                self._list_chip(folder, kind, f"{chip}/{kind}")
        for zone in names(base / "thermal"):
            folder = base / "thermal" / zone
            limits = [
                read_int(folder / name.replace("_type", "_temp"))
                for name in names(folder)
                if name.startswith("trip_point_") and name.endswith("_type") and read_text(folder / name) == "critical"
            ]
            if limits and limits[0] and limits[0] > 0:
                subject = f"{zone}/{read_text(folder / 'type')}"
                self._heat.append(("power.temperature.margin_c", subject, str(folder / "temp"), limits[0]))
        for zone in names(base / "powercap"):
            if zone.startswith("intel-rapl:") and zone.count(":") == 1:
                file = str(base / "powercap" / zone / "constraint_0_power_limit_uw")
                self._caps.append((f"{zone}/{read_text(base / 'powercap' / zone / 'name')}", file))

    def _list_chip(self, folder: Path, kind: str, subject: str) -> None:
        heat = (
            "cpu.temperature.margin_c" if kind in ("coretemp", "k10temp", "zenpower") else "power.temperature.margin_c"
        )
        for name in names(folder):
            file, sensor = str(folder / name), name.partition("_")[0]
            if name.startswith("temp") and name.endswith("_input"):
                limit = read_int(folder / f"{sensor}_crit") or read_int(folder / f"{sensor}_max")
                if limit and limit > 0:
                    self._heat.append((heat, subject, file, limit))
            elif name.startswith("fan") and name.endswith("_input"):
                self._fans.append((f"{subject}/{sensor}", file))
            elif name.endswith("_alarm") and sensor.rstrip("0123456789") in ("fan", "in", "curr", "power"):
                area = sensor.rstrip("0123456789")
                reading = {"fan": "power.fan.alarm", "power": "power.input.alarm"}.get(area, "power.voltage.alarm")
                self._alarms.append((reading, f"{subject}/{name}", file))


class _Timex(ctypes.Structure):
    """The beginning of the kernel's struct timex, and room for the rest of it."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    ]


def clock_state() -> tuple[int, int] | None:
    """State and status bits of the kernel's clock discipline; None if it may not be asked."""
    timex = _Timex()
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else (state, timex.status)


class Clock:
    """Whether the wall clock follows a time server, and whether it jumped."""

    name = "host.clock"

    def __init__(
        self,
        root: Path = Path("/"),
        every_s: float = 10.0,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
        state: Callable[[], tuple[int, int] | None] = clock_state,
    ) -> None:
        self.every_s = every_s
        self._source = root / "sys/devices/system/clocksource/clocksource0/current_clocksource"
        self._wall, self._steady, self._state = wall, steady, state
        self._offset: float | None = None

    def supported(self) -> str:
        return ""

    def check(self) -> list[Reading]:
        found = []
        before = self._steady()
        wall = self._wall()
        after = self._steady()
        offset = wall - (before + after) / 2
        if self._offset is not None:
            found.append(Reading("os.clock.jump_s", "clock", round(abs(offset - self._offset), 3)))
        self._offset = offset
        state = self._state()
        if state is not None:
            unsynced = state[0] == TIME_ERROR or bool(state[1] & STA_UNSYNC)
            found.append(Reading("os.clock.unsynced", "clock", int(unsynced), f"status {state[1]:#x}"))
        source = read_text(self._source)
        if source:
            found.append(Reading("os.clock.slow_source", "clock", int(source in SLOW_SOURCES), source))
        return found

    def blind_spots(self) -> list[str]:
        return [] if self._state() else ["whether the clock follows a time server: adjtimex is not allowed here"]


class Limits:
    """How near the machine is to its limits of processes, open files and tracked connections; zombies."""

    name = "host.limits"

    def __init__(self, root: Path = Path("/"), every_s: float = 15.0) -> None:
        self.every_s = every_s
        self._proc = root / "proc"
        self._pids = cgroups(root, "pids")
        self._left: list[str] = []
        self._zombies = self._counted = 0

    def supported(self) -> str:
        return "" if names(self._proc) else "no /proc"

    def check(self) -> list[Reading]:
        kernel, netfilter = self._proc / "sys/kernel", self._proc / "sys/net/netfilter"
        found = []
        load = read_text(self._proc / "loadavg").split()
        threads = to_int(load[3].partition("/")[2]) if len(load) > 3 else None
        limits = [limit for limit in (read_int(kernel / "pid_max"), read_int(kernel / "threads-max")) if limit]
        if threads is not None and limits:
            found.append(Reading("os.threads.used_share", "kernel", share(threads, min(limits)), f"{threads} threads"))
        files = read_text(self._proc / "sys/fs/file-nr").split()
        if len(files) == 3 and all(word.isdigit() for word in files) and int(files[2]):
            found.append(Reading("os.files.used_share", "kernel", share(int(files[0]), int(files[2]))))
        tracked, most = read_int(netfilter / "nf_conntrack_count"), read_int(netfilter / "nf_conntrack_max")
        if tracked is not None and most:
            found.append(Reading("os.conntrack.used_share", "kernel", share(tracked, most)))
        found += self._cgroup_pids()
        self._count_zombies()
        return [*found, Reading("os.zombies", "processes", self._counted)]

    def blind_spots(self) -> list[str]:
        return []

    def _cgroup_pids(self) -> Iterator[Reading]:
        for folder in self._pids:
            used, most = read_int(folder / "pids.current"), read_int(folder / "pids.max")
            if used is not None and most:
                yield Reading("os.cgroup.pids_share", folder.name, share(used, most), f"limit {most}")
                return

    def _count_zombies(self) -> None:
        """Look at the next processes; when all had their turn, the count is what they showed."""
        if not self._left:
            self._left = [name for name in names(self._proc) if name.isdigit()]
        now, self._left = self._left[:PROCESSES_A_LOOK], self._left[PROCESSES_A_LOOK:]
        for process in now:
            # "12 (any name, even with brackets) Z 1 ..."
            state = read_text(f"{self._proc}/{process}/stat").rpartition(") ")[2][:1]
            self._zombies += state == "Z"
        if not self._left:
            self._counted, self._zombies = self._zombies, 0


def detectors(root: Path = Path("/")) -> list[Detector]:
    """All detectors of this module."""
    return [Processors(root), Throttling(root), Sensors(root), Clock(root), Limits(root)]
