"""Turns drives, file systems and mounts into readings, without ever waiting for one that hangs. Called by `detect.monitor`."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rerail.detect.detector import Detector, Reading
from rerail.detect.host_memory import Known, names, read_int, read_text, share, to_int

NETWORK_TYPES = frozenset(
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "lustre",
        "ceph",
        "beegfs",
        "gpfs",
        "glusterfs",
        "wekafs",
        "panfs",
        "orangefs",
        "afs",
        "9p",
        "virtiofs",
        "fuse",
        "fuseblk",
    ]
)
HARMLESS_FUSE = frozenset({"fuse.lxcfs", "fuse.gvfsd-fuse", "fuse.portal", "fuse.snapfuse"})
MOST_PROBES = 32
DISK = re.compile(r"(nvme\d+n\d+|[sv]d[a-z]+|xvd[a-z]+|md\d+)")
OK = "OK"


class Probe:
    """Something that may hang, done in a thread of its own; at most one at a time, so that a dead server costs one thread."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.result: Any = None
        """What the last act that came back has returned; None if it failed."""
        self.error = OK
        """Its error by name: `ESTALE`, `EIO`. No permission is an answer, too."""
        self._act = act
        self._began = 0.0
        self._done = threading.Event()
        self._done.set()

    def start(self) -> None:
        if self._done.is_set():
            self._done.clear()
            self._began = time.monotonic()
            threading.Thread(target=self._run, name="rerail-probe", daemon=True).start()

    def hung_s(self, until: float) -> float:
        """How long the act has been under way, after waiting for its end until this time; 0 when it came back."""
        if self._done.wait(max(0.0, until - time.monotonic())):
            return 0.0
        return round(time.monotonic() - self._began, 2)

    def _run(self) -> None:
        try:
            self.result, self.error = self._act(), OK
        except PermissionError:
            self.result, self.error = None, OK
        except OSError as error:
            self.result, self.error = None, errno.errorcode.get(error.errno or 0, "EIO")
        finally:
            self._done.set()


class Mount(NamedTuple):
    """One line of mountinfo."""

    device: str
    point: str
    kind: str
    source: str
    read_only: bool

    @property
    def remote(self) -> bool:
        return (self.kind in NETWORK_TYPES or self.kind.startswith("fuse.")) and self.kind not in HARMLESS_FUSE


def mounts(text: str) -> list[Mount]:
    """`/proc/self/mountinfo` as records; lines that are not of its form are left out."""
    found = []
    for line in text.splitlines():
        left, dash, right = line.partition(" - ")
        before, after = left.split(), right.split()
        if dash and len(before) >= 6 and len(after) >= 3:
            point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before[4])
            # the options of the file system itself: those of one mount may be read-only on purpose
            found.append(Mount(before[2], point, after[0], after[1], "ro" in after[2].split(",")))
    return found


class Mounts:
    """Mounts that are missing, became read-only or do not answer; FUSE queues."""

    name = "host.mounts"

    def __init__(
        self, root: Path = Path("/"), expected: Sequence[str] = (), every_s: float = 10.0, wait_s: float = 0.05
    ) -> None:
        self.every_s = every_s
        self.expected = tuple(expected)
        """Mount points that must be there."""
        self._root, self._wait_s = root, wait_s
        self._file, self._fuse = root / "proc/self/mountinfo", root / "sys/fs/fuse/connections"
        self._text = ""
        self._mounts: list[Mount] = []
        self._writable: set[str] = set()
        self._probes: dict[str, Probe] = {}

    def supported(self) -> str:
        return "" if mounts(read_text(self._file)) else "no /proc/self/mountinfo"

    def check(self) -> list[Reading]:
        text = read_text(self._file)
        if text != self._text:
            self._text, self._mounts = text, mounts(text)
        if not self._mounts:
            return []
        points = {mount.point for mount in self._mounts}
        found = [Reading("mount.missing", point, int(point not in points)) for point in self.expected]
        return [*found, *self._read_only(), *self._reach(), *self._queues()]

    def blind_spots(self) -> list[str]:
        return [] if self.expected else ["mounts that are missing since the start: the expected ones are not set"]

    def _read_only(self) -> Iterator[Reading]:
        devices = {mount.device: mount for mount in reversed(self._mounts)}  # a device may be mounted in many places
        for device, mount in devices.items():
            if mount.remote or mount.source.startswith("/dev/"):
                if not mount.read_only:
                    self._writable.add(device)
                if device in self._writable:
                    yield Reading("mount.readonly", mount.point, int(mount.read_only), f"{mount.kind} {mount.source}")

    def _reach(self) -> Iterator[Reading]:
        remote = {mount.device: mount for mount in reversed(self._mounts) if mount.remote}
        there = {mount.point: mount for mount in list(remote.values())[:MOST_PROBES]}
        self._probes = {point: self._probes.get(point) or Probe(self._look_at(point)) for point in there}
        for probe in self._probes.values():
            probe.start()
        until = time.monotonic() + self._wait_s
        for point, probe in self._probes.items():
            note = f"{there[point].kind} {there[point].source}"
            hung_s = probe.hung_s(until)
            yield Reading("mount.unreachable_s", point, hung_s, note)
            if not hung_s:
                yield Reading("mount.error", point, probe.error, note)

    def _look_at(self, point: str) -> Callable[[], None]:
        path = str(self._root / point.lstrip("/"))

        def look() -> None:
            os.stat(path)
            os.statvfs(path)  # goes to the server even where attributes are kept
            with os.scandir(path) as entries:
                next(entries, None)

        return look

    def _queues(self) -> Iterator[Reading]:
        """How full the request queue of each FUSE daemon is."""
        points = {
            mount.device.partition(":")[2]: mount.point for mount in self._mounts if mount.kind.startswith("fuse")
        }
        for number in names(self._fuse):
            waiting, most = (read_int(self._fuse / number / file) for file in ("waiting", "max_background"))
            if waiting is not None and most:
                subject = points.get(number, f"fuse connection {number}")
                yield Reading("storage.fuse.waiting_share", subject, share(waiting, most))


class Space:
    """Free space and inodes of given folders, /dev/shm and /tmp."""

    name = "host.space"

    def __init__(
        self, root: Path = Path("/"), directories: Sequence[str] = (), every_s: float = 15.0, wait_s: float = 0.05
    ) -> None:
        self.every_s = every_s
        self._wait_s = wait_s
        folders = dict.fromkeys((*directories, "/dev/shm", "/tmp"))
        self._asked = frozenset(directories)
        self._probes = {folder: Probe(self._measure(root / folder.lstrip("/"), folder)) for folder in folders}

    def supported(self) -> str:
        return ""

    def check(self) -> list[Reading]:
        for probe in self._probes.values():
            probe.start()
        until = time.monotonic() + self._wait_s
        found: list[Reading] = []
        file_systems: set[int] = set()
        for folder, probe in self._probes.items():
            hung_s = probe.hung_s(until)
            if folder in self._asked:
                found.append(Reading("mount.unreachable_s", folder, hung_s))
            if hung_s:
                continue
            if folder in self._asked:
                found.append(Reading("mount.error", folder, probe.error))
            status = probe.result
            if status is None or (status.f_fsid and status.f_fsid in file_systems):
                continue
            file_systems.add(status.f_fsid)
            area = "storage.shm" if folder == "/dev/shm" else "storage.space"
            if status.f_blocks:
                note = f"{status.f_bavail * status.f_frsize >> 20} MiB"
                found.append(Reading(f"{area}.free_share", folder, share(status.f_bavail, status.f_blocks), note))
            if status.f_files:
                found.append(Reading("storage.inodes.free_share", folder, share(status.f_favail, status.f_files)))
        return found

    def blind_spots(self) -> list[str]:
        return ["quotas: a full quota is only seen when a write fails"]

    def _measure(self, path: Path, folder: str) -> Callable[[], os.statvfs_result]:
        def measure() -> os.statvfs_result:
            try:
                return os.statvfs(path)
            except FileNotFoundError:
                if folder not in self._asked:
                    raise
                # not made yet: its file system is that of the nearest parent that is there
                return os.statvfs(next(parent for parent in path.parents if parent.exists()))

        return measure


class Drives:
    """State and progress of drives; degraded arrays; errors that ext4 has noted."""

    name = "host.drives"

    def __init__(self, root: Path = Path("/"), expected_nvme: int = 0, every_s: float = 15.0) -> None:
        self.every_s = every_s
        self.expected_nvme = expected_nvme
        """NVMe drives that must be there; 0: nobody said."""
        self._nvme, self._block, self._ext4 = (root / "sys" / part for part in ("class/nvme", "block", "fs/ext4"))
        self._known = Known()
        self._last: dict[str, tuple[int, int, int]] = {}
        """Requests done, milliseconds spent on them, requests under way."""
        self._stuck_since: dict[str, float] = {}

    def supported(self) -> str:
        return "" if self._disks() or names(self._nvme) or self.expected_nvme else "no drives are shown in /sys/block"

    def check(self) -> list[Reading]:
        controllers = names(self._nvme)
        found = [Reading("storage.nvme.gone", drive, 1) for drive in self._known.gone(controllers)]
        for controller in controllers:
            note = read_text(self._nvme / controller / "serial")
            found.append(Reading("storage.nvme.gone", controller, 0, note))
            state = read_text(self._nvme / controller / "state")
            if state:
                found.append(Reading("storage.nvme.state", controller, state, note))
        if self.expected_nvme:
            missing = max(0, self.expected_nvme - len(controllers))
            found.append(Reading("storage.nvme.missing", "nvme", missing))
        for disk in self._disks():
            found += self._look(disk)
        for disk in names(self._ext4):
            errors = read_int(self._ext4 / disk / "errors_count")
            if errors is not None:
                found.append(Reading("storage.ext4.error_count", disk, errors))
        return found

    def blind_spots(self) -> list[str]:
        return [] if self.expected_nvme else ["NVMe drives that are missing since boot: the expected number is not set"]

    def _disks(self) -> list[str]:
        return [name for name in names(self._block) if DISK.fullmatch(name)]

    def _look(self, disk: str) -> Iterator[Reading]:
        folder = self._block / disk
        state = read_text(folder / "device/state") if disk.startswith("sd") else ""
        if state:
            yield Reading("storage.scsi.state", disk, state)
        if disk.startswith("md"):
            degraded = read_int(folder / "md/degraded")
            if degraded is not None:
                yield Reading("storage.raid.degraded", disk, degraded)
        fields = [to_int(word) for word in read_text(folder / "stat").split()[:9]]
        if len(fields) < 9 or None in fields:
            return
        # reads, merged, sectors, ms, writes, merged, sectors, ms, under way
        reads, _, _, read_ms, writes, _, _, write_ms, under_way = (value or 0 for value in fields)
        now, done, spent_ms = time.monotonic(), reads + writes, read_ms + write_ms
        last_done, last_ms, last_under_way = self._last.get(disk, (-1, 0, 0))
        self._last[disk] = (done, spent_ms, under_way)
        if not under_way or done != last_done or not last_under_way:
            self._stuck_since[disk] = now
        stuck_s = now - self._stuck_since[disk]
        yield Reading("storage.disk.stuck_s", disk, round(stuck_s, 1), f"{under_way} requests under way")
        if last_done >= 0 and done - last_done >= 10 and spent_ms >= last_ms:
            yield Reading("storage.disk.latency_ms", disk, round((spent_ms - last_ms) / (done - last_done), 2))


def detectors(
    root: Path = Path("/"), directories: Sequence[str] = (), expected_mounts: Sequence[str] = (), expected_nvme: int = 0
) -> list[Detector]:
    """All detectors of this module; `directories` are where the job writes."""
    return [Mounts(root, expected_mounts), Space(root, directories), Drives(root, expected_nvme)]
