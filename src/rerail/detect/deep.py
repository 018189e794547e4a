"""Turns minutes of work for every part of this machine into findings: memory, arithmetic, devices, collectives, disk.

`deep` is called by `rerail check --deep` and before a node comes back from quarantine. Every test is a child process with a
deadline (`detect.deep_tests`), so this module needs no torch. Only what is wrong for sure is a problem: a wrong bit, an
error, a hang, a device that reaches less than a third of what its like in the same machine reach. All else is a figure.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rerail.detect.checkup import Figure, Health, Note, Problem, Task, concluded, run_tasks
from rerail.detect.host_memory import cgroups, read_int, read_text, table
from rerail.flow import Handling, Severity

TIMEOUT_S = 120.0
FAR_BELOW = 1 / 3
"""Of what its peers reach. Less than that is no spread between devices, whatever they are."""
DEVICES = "devices"
DEVICE_AREAS = ("device-math", "device-memory", "device-link")
COLLECTIVE = "device-collective"
ALONE = ("memory-speed", "memory-pattern", "disk", "cpu-math")
AREAS = (*ALONE, "gloo", DEVICES, *DEVICE_AREAS, COLLECTIVE)
WRONG = {
    "memory-speed": "copied memory differs from its source: have the DIMMs replaced; trust nothing computed here",
    "memory-pattern": "memory does not keep what is written to it: have the DIMMs replaced (EDAC or the BMC say which)",
    "disk": "the disk gives back other bytes than were written: save the data, replace the drive",
    "cpu-math": "a core computes wrongly: take it offline and have the processor replaced",
    "device-math": "the device computes wrongly and says nothing of it: take it out of use, run the vendor's diagnosis",
    "device-memory": "the device's memory does not keep its content: take it out of use, run the vendor's diagnosis",
    "device-link": "bytes change on the way between host and device: reseat or replace the device or its riser",
    "gloo": "sums over loopback are wrong: suspect this machine's memory or processor",
    "device-collective": "sums over the devices' links are wrong: suspect the links (NVLink, PCIe) or a device",
}
"""What a wrong bit in an area means, for people."""


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """How much of everything."""

    seconds: float = 2.0
    """For each measurement."""
    copy_mib: int = 4096
    """Memory for copies, all cores together; never more than a quarter of what is free."""
    pattern_mib: int = 1024
    disk_mib: int = 256
    matrix: int = 512
    device_matrix: int = 4096
    device_mib: int = 256
    collective_mib: int = 32
    ranks: int = 4
    """Processes of the collective over loopback."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a child process is to do."""

    test: str
    effort: Effort
    areas: tuple[str, ...] = ()
    directory: str = ""
    device: str = ""
    """`cuda:3`; empty: the host."""
    rank: int = 0
    world: int = 1
    store: str = ""
    timeout_s: float = TIMEOUT_S


def deep(
    directory: str,
    only: Sequence[str] = (),
    *,
    timeout_s: float = TIMEOUT_S,
    effort: Effort | None = None,
    tell: Callable[[Health], None] = lambda health: None,
) -> Health:
    """All tests, or only these. `tell` hears of each when it is done."""
    wanted = [area for area in AREAS if not only or area in only]
    order = Order(test="", effort=_bounded(effort or Effort()), directory=directory, timeout_s=timeout_s)
    health = Health()

    def take(notes: list[Note], *areas: str) -> list[Note]:
        nonlocal health
        part = concluded(notes, areas)
        health += part
        tell(part)
        return notes

    for area in (area for area in ALONE if area in wanted):
        take(run_tasks([_task(order, area)], timeout_s), area)
    if "gloo" in wanted:
        take(_collective(order, "gloo", [""] * order.effort.ranks), "gloo")
    if not {DEVICES, *DEVICE_AREAS, COLLECTIVE} & set(wanted):
        return health
    listed = take(run_tasks([_task(order, DEVICES)], timeout_s), DEVICES)
    devices = {note.subject: note.name for note in listed if isinstance(note, Figure)}
    on_devices = [area for area in DEVICE_AREAS if area in wanted]
    if devices and on_devices:
        take(_on_devices(order, devices, on_devices), *on_devices)
    if devices and COLLECTIVE in wanted:
        take(_collective(order, COLLECTIVE, list(devices)), COLLECTIVE)
    return health


def _bounded(effort: Effort) -> Effort:
    """Take no more than a quarter of the memory that is free."""
    most = spare_memory() // 4 >> 20
    copy, pattern = min(effort.copy_mib, most), min(effort.pattern_mib, most)
    return msgspec.structs.replace(effort, copy_mib=copy, pattern_mib=pattern)


def spare_memory() -> int:
    """Bytes that could be taken now without anyone being killed for it."""
    left = [table(read_text("/proc/meminfo")).get("MemAvailable", 1 << 20) << 10]
    for folder in cgroups(Path("/"), "memory"):
        limit, used = read_int(folder / "memory.max"), read_int(folder / "memory.current")
        if limit is not None and used is not None:
            left.append(max(0, limit - used))
    return min(left)


def _task(order: Order, test: str, **more: Any) -> Task:
    order = msgspec.structs.replace(order, test=test, **more)
    # one thread for each core is started by the test itself; loopback is where sockets of one machine meet
    env = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    env |= {"GLOO_SOCKET_IFNAME": "lo"} if test == "gloo" else {}
    argv = (sys.executable, "-m", "rerail.detect.deep_tests", msgspec.json.encode(order).decode())
    return Task(argv=argv, area=order.areas[0] if order.areas else test, subject=order.device, env=env)


def _on_devices(order: Order, devices: dict[str, str], areas: Sequence[str]) -> list[Note]:
    """All devices at once; one that is far below its peers has a second try alone, since links may be shared."""
    tasks = {device: _task(order, "device", device=device, areas=tuple(areas)) for device in devices}
    notes = run_tasks(tasks.values(), order.timeout_s)
    suspects = {figure.subject for figure, _ in far_below(notes, devices)}
    for device in suspects:
        again = run_tasks([tasks[device]], order.timeout_s)
        best = {(note.area, note.name): note.value for note in again if isinstance(note, Figure)}
        notes = [_better(note, best) if isinstance(note, Figure) and note.subject == device else note for note in notes]
        notes += [note for note in again if isinstance(note, Problem)]
    return [*notes, *(_slow(figure, usual, devices) for figure, usual in far_below(notes, devices))]


def _better(figure: Figure, best: dict[tuple[str, str], float]) -> Figure:
    return msgspec.structs.replace(figure, value=max(figure.value, best.get((figure.area, figure.name), 0.0)))


def far_below(notes: Iterable[Note], models: dict[str, str]) -> list[tuple[Figure, float]]:
    """Figures of devices that reach less than a third of what the other devices of the same model reach, with the latter."""
    figures = [note for note in notes if isinstance(note, Figure)]
    found = []
    for one in figures:
        peers = [
            other.value
            for other in figures
            if other.subject != one.subject
            and (other.area, other.name) == (one.area, one.name)
            and models.get(other.subject) == models.get(one.subject)
        ]
        if peers and one.value < statistics.median(peers) * FAR_BELOW:
            found.append((one, statistics.median(peers)))
    return found


def _slow(figure: Figure, usual: float, models: dict[str, str]) -> Problem:
    return Problem(
        area=figure.area,
        code="check.slow",
        title="a device is far slower than its peers",
        subject=figure.subject,
        text=f"{figure.name} {figure.value:.3g} {figure.unit}; the other {models[figure.subject]} reach {usual:.3g}",
        advice="look for throttling, a link that was trained down (rerail check) or another job on this device",
        action=Handling.ISOLATE_DEVICE,
        hardware=True,
    )


def _collective(order: Order, area: str, devices: Sequence[str]) -> list[Note]:
    with tempfile.TemporaryDirectory(prefix="rerail-check-") as folder:
        tasks = [
            _task(order, area, rank=rank, world=len(devices), store=f"{folder}/store", device=device)
            for rank, device in enumerate(devices)
        ]
        return run_tasks(tasks, order.timeout_s, linked=True)


def wrong(area: str, subject: str, text: str) -> Problem:
    """The worst there is: a result that is not what it must be, and nobody has said so."""
    return Problem(
        area=area,
        code="check.corruption",
        title="silent corruption",
        severity=Severity.CRITICAL,
        subject=subject,
        text=text,
        advice=WRONG[area],
        action=Handling.ISOLATE_DEVICE if area.startswith("device") else Handling.DRAIN_NODE,
        hardware=True,
    )
