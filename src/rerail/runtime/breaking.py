"""Breaks one part of a machine on purpose, as gently as it can be: each function says what it did and how to undo it.

What could hurt anyone but the job is refused: a file system or a memory limit that is not small, a cgroup with strangers
in it, connections of other processes. Called by `runtime.injecting`; functions may block.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from rerail.errors import RerailError
from rerail.runtime.injections import dice
from rerail.runtime.processes import descendants

KMSG = Path("/dev/kmsg")
KMSG_MARK = "rerail-inject: "
"""As `detect.kernel_log` knows it."""
STUB_NVML = "RERAIL_STUB_NVML"
"""Names the file in which a stub NVML reads what its GPUs are to do: `lost3=1`."""
SLOW_DISK = 1 << 20
"""Bytes per second that a slow disk still reads and writes."""
CHUNKS = (64 << 20, 1 << 20, 1 << 12)


class Refused(RerailError, RuntimeError):
    """Cannot or must not be done here; the text says why."""


class Broken(NamedTuple):
    """What was done."""

    text: str
    undo: Callable[[], None] | None = None
    again: Callable[[], object] | None = None
    """To be repeated while it lasts."""


def kernel_log(line: str, kmsg: Path = KMSG) -> Broken:
    """A line in the kernel log, marked so that only a job that allows it takes it for the kernel's own."""
    try:
        with open(kmsg, "wb", buffering=0) as log:
            log.write(f"{KMSG_MARK}{line}\n".encode())
    except OSError as error:
        raise Refused(f"{kmsg} cannot be written ({error.strerror}): this needs root") from None
    return Broken(f"wrote to the kernel log: {KMSG_MARK}{line}")


def device_lost(local_rank: int) -> Broken:
    """The stub's GPU of this rank is lost. There is no honest way to do that to a real one."""
    name = os.environ.get(STUB_NVML, "")
    if not name:
        raise Refused(
            f"{STUB_NVML} is not set where the job was started: a real GPU is not taken away, only one of a stub NVML"
        )
    file, word = Path(name), f"lost{local_rank}=1"
    before = file.read_text() if file.exists() else ""
    file.write_text(" ".join([*before.split(), word]))

    def undo() -> None:
        file.write_text(" ".join(one for one in file.read_text().split() if one != word))

    return Broken(f"GPU {local_rank} is lost, according to {file}", undo)


def disk_full(folder: str, max_size: int) -> Broken:
    """One file fills the file system. It has no name any more, so that the space is free again when this process ends."""
    try:
        there = os.statvfs(folder)
        size = there.f_blocks * there.f_frsize
        if size >= max_size:
            raise Refused(
                f"the file system of {folder} has {size >> 20} MiB, and only one smaller than --max-size "
                f"({max_size >> 20} MiB) is filled: make a small one (mount -t tmpfs -o size=64m tmpfs DIR)"
            )
        fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
    except OSError as error:
        raise Refused(f"{folder} cannot be filled: {error.strerror}") from None
    taken = 0
    try:
        for chunk in CHUNKS:
            with contextlib.suppress(_NoSpace):
                while True:
                    taken += _take(fd, taken, chunk)
    except OSError as error:
        os.close(fd)
        raise Refused(f"{folder} could not be filled: {error.strerror}") from None
    return Broken(f"filled the file system of {folder} with {taken} bytes", lambda: os.close(fd))


class _NoSpace(Exception):
    """The file system is full, for a piece of this size."""


def _take(fd: int, at: int, size: int) -> int:
    try:
        os.posix_fallocate(fd, at, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _NoSpace from None
        raise
    return size


def slow_disk(folder: str, pids: Iterable[int], ours: Callable[[int], bool]) -> Broken:
    """By the cgroup of these processes: v2 where there is nobody else in it, v1 by a cgroup of their own."""
    try:
        device = _disk_of(os.stat(folder).st_dev)
    except OSError as error:
        raise Refused(f"{folder} is not on a disk of its own: {error.strerror}") from None
    ranks = [pid for pid in pids if ours(pid)]
    if not ranks:
        raise Refused("there is no rank on this node")
    blkio = _mounted("cgroup", "blkio")
    return _slowed_apart(device, Path(blkio), ranks) if blkio else _slowed_in_place(device, ranks, ours)


def _slowed_in_place(device: str, pids: list[int], ours: Callable[[int], bool]) -> Broken:
    """io.max of a cgroup v2."""
    limits = []
    for group in {_cgroup_v2(pid) for pid in pids}:
        if group is None or not (group / "io.max").exists():
            raise Refused("the ranks are not in a cgroup v2 with the io controller, so their disk cannot be slowed")
        strangers = [pid for pid in map(int, (group / "cgroup.procs").read_text().split()) if not ours(pid)]
        if strangers:
            raise Refused(
                f"the ranks share the cgroup {group} with others (process {strangers[0]}), who would be slowed"
            )
        limits.append(group / "io.max")
    for limit in limits:
        try:
            limit.write_text(f"{device} rbps={SLOW_DISK} wbps={SLOW_DISK}")
        except OSError as error:
            raise Refused(f"{limit} cannot be written: {error.strerror}") from None

    def undo() -> None:
        for limit in limits:
            with contextlib.suppress(OSError):
                limit.write_text(f"{device} rbps=max wbps=max")

    return Broken(f"disk {device} is throttled to {SLOW_DISK >> 20} MiB/s for {len(limits)} cgroups", undo)


def _slowed_apart(device: str, mounted: Path, pids: list[int]) -> Broken:
    """A cgroup v1 of their own for the ranks and what they have started, and back to the old one when it is over."""
    before = next((line.split(":", 2)[2] for line in _cgroups(pids[0]) if ":blkio:" in line), "/")
    home = mounted / before.lstrip("/")
    group = home / f"rerail-slow-disk-{os.getpid()}"

    def undo() -> None:
        for _ in range(50):  # what is started meanwhile is born in the group
            with contextlib.suppress(OSError):
                _move((group / "cgroup.procs").read_text().split(), home)
                group.rmdir()
            if not group.exists():
                return
            time.sleep(0.02)

    try:
        group.mkdir()
        for what in ("read", "write"):
            (group / f"blkio.throttle.{what}_bps_device").write_text(f"{device} {SLOW_DISK}")
        _move([pid for rank in pids for pid in (rank, *descendants(rank))], group)
    except OSError as error:
        undo()
        raise Refused(f"{group} cannot be made or used: {error.strerror}; this needs root") from None
    return Broken(f"disk {device} is throttled to {SLOW_DISK >> 20} MiB/s for {len(pids)} ranks", undo)


def _move(pids: Iterable[int | str], group: Path) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            (group / "cgroup.procs").write_text(str(pid))


def _disk_of(device: int) -> str:
    """major:minor of the whole disk: io.max knows no partitions."""
    name = f"{os.major(device)}:{os.minor(device)}"
    place = Path("/sys/dev/block", name).resolve(strict=True)
    return (place.parent / "dev").read_text().strip() if (place / "partition").exists() else name


def _cgroup_v2(pid: int) -> Path | None:
    path = next((line[3:] for line in _cgroups(pid) if line.startswith("0::")), "")
    mounted = _mounted("cgroup2")
    return Path(mounted, path.lstrip("/")) if mounted and path not in ("", "/") else None


def _cgroups(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return []


def _mounted(kind: str, option: str = "") -> str:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, what, options, *_ = line.split(" ")
        if what == kind and (not option or option in options.split(",")):
            return where
    return ""


def memory_limit(pid: int) -> int:
    """Bytes that the cgroup of a process may use, its parents' limits included; 0 if there is no limit."""
    found = [0]
    for line in _cgroups(pid):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mounted, name = _mounted("cgroup2"), "memory.max"
        elif "memory" in controllers.split(","):
            mounted, name = _mounted("cgroup", "memory"), "memory.limit_in_bytes"
        else:
            continue
        here = Path(mounted, path.lstrip("/")) if mounted else Path("/nowhere")
        for folder in (here, *here.parents):
            with contextlib.suppress(OSError, ValueError):
                found.append(int((folder / name).read_text()))
    return min((limit for limit in found if 0 < limit < 1 << 60), default=0)


def check_memory(pid: int, max_size: int) -> None:
    """Refuse to fill a memory that is not small."""
    limit = memory_limit(pid)
    if not limit or limit >= max_size:
        has = f"its limit is {limit >> 20} MiB" if limit else "it has none"
        raise Refused(
            f"a rank is only let run out of memory in a cgroup with a memory limit below --max-size "
            f"({max_size >> 20} MiB), and {has}; start the job in a small one (systemd-run --scope -p MemoryMax=800M)"
        )


def network_cut(pid: int, port: int) -> Broken:
    """Close the established TCP connections of one process, and nobody else's; both ends notice at once."""
    if shutil.which("ss") is None:
        raise Refused("the program `ss` (iproute2) is not installed")
    before = _connections(pid, port)
    if not before:
        raise Refused(f"the rank has no established TCP connection{f' with port {port}' if port else ''}")
    said = _cut(before)
    left = before & _connections(pid, port)
    if len(left) == len(before):
        raise Refused(f"the kernel closed none of {len(before)} connections (root needed?) {said}".rstrip())
    return Broken(
        f"closed {len(before) - len(left)} TCP connections",
        undo=lambda: None,
        again=lambda: _cut(_connections(pid, port)),
    )


_Ends = tuple[tuple[str, int], tuple[str, int]]


def _connections(pid: int, port: int) -> set[_Ends]:
    import psutil  # here, because agents need it for nothing else at their start

    found: set[_Ends] = set()
    with contextlib.suppress(psutil.Error):
        for one in psutil.Process(pid).net_connections(kind="tcp"):
            if one.status == psutil.CONN_ESTABLISHED and one.raddr and port in (0, one.laddr.port, one.raddr.port):
                found.add(((one.laddr.ip, one.laddr.port), (one.raddr.ip, one.raddr.port)))
    return found


def _cut(connections: set[_Ends]) -> str:
    said = ""
    for here, there in connections:
        ends = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in (here, there)]
        command = ["ss", "--kill", "--tcp", "--no-header", "src", ends[0], "dst", ends[1]]
        said = subprocess.run(command, capture_output=True, text=True, timeout=10).stderr.strip() or said
    return said


def corrupt_checkpoint(folder: str, seed: int) -> Broken:
    """One byte of one shard of the newest committed step becomes another one."""
    from rerail.checkpoint import catalog
    from rerail.checkpoint.files import FileTier

    if not Path(folder).is_dir():
        raise Refused(f"{folder} is not a directory of this node")
    tier = FileTier(folder)
    found = next(catalog.candidates([tier]), None)
    if found is None:
        raise Refused(f"no step is committed in {folder}")
    try:
        step = catalog.open_step(tier, found.id)
        shards = [one.file for _, one in sorted(step.manifests.items()) if one.file and one.size]
        if not shards:
            raise Refused(f"{found.id.folder} has no shard with data in it")
        name = dice(seed, "shard").choice(shards)
        fd = os.open(Path(folder, found.id.folder, name), os.O_RDWR)
        try:
            begin = 8 + int.from_bytes(os.pread(fd, 8, 0), "little")  # behind the header of safetensors
            at = dice(seed, "byte").randrange(min(begin, os.fstat(fd).st_size - 1), os.fstat(fd).st_size)
            (old,) = os.pread(fd, 1, at)
            os.pwrite(fd, bytes([old ^ 0xFF]), at)
            os.fsync(fd)
        finally:
            os.close(fd)
    except (OSError, RuntimeError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(f"{folder}/{found.id.folder}: {error}") from None
    return Broken(f"{found.id.folder}/{name}: byte {at} was {old:#04x} and is {old ^ 0xFF:#04x}")
