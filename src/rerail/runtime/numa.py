"""--numa-binding: turns a mode and the machine's topology into the CPUs of each local rank, and binds processes to them.

The modes are torchrun's (torch/numa/binding.py), read from sysfs without torch:

    node           all CPUs of the NUMA node that the rank's device is attached to
    socket         all CPUs of that node's socket
    exclusive      an equal share of the node's physical cores, no core shared by two ranks
    core-complex   the cores that share one last-level cache, a different one for each rank where there are enough

Called by `runtime.agent`. The device of local rank N is the N-th visible one, in the order of PCI addresses.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

_ACCELERATORS = {"0x1002": ("0x0300", "0x0302", "0x0380", "0x1200"), "0x19e5": ("0x1200",)}
"""PCI vendors (AMD, Huawei) and the device classes of their accelerators; NVIDIA's driver lists its own."""
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


class Topology:
    """What sysfs says; `root` is / but for tests."""

    def __init__(self, root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> None:
        self._root, self._env = root, env
        self._allowed = os.sched_getaffinity(0) if root == Path("/") else None
        self.devices = self._visible_devices()

    def cpus_for(self, mode: str, device: int) -> set[int]:
        """CPUs for the rank of this device; empty when the topology does not tell."""
        node = self._node_of(self.devices[device])
        cpus = self._cpus_of_node(node)
        if mode == "socket":
            sockets = {self._socket(cpu) for cpu in cpus}
            nodes = (self._cpus_of_node(int(path.name[4:])) for path in self._nodes())
            return {cpu for one in nodes for cpu in one if self._socket(cpu) in sockets}
        if mode == "node":
            return cpus
        neighbours = [index for index, address in enumerate(self.devices) if self._node_of(address) == node]
        place = neighbours.index(device)
        return self._share(cpus, place, len(neighbours)) if mode == "exclusive" else self._complex(cpus, place)

    def _share(self, cpus: set[int], place: int, among: int) -> set[int]:
        """The place-th of `among` equal shares of the physical cores; the first ones get what is left over."""
        cores = [group for _, group in sorted(_grouped(cpus, self._core).items())]
        each, extra = divmod(len(cores), among)
        start = place * each + min(place, extra)
        return set().union(*cores[start : start + each + (place < extra)])

    def _complex(self, cpus: set[int], place: int) -> set[int]:
        """Largest cache groups first, as they come; ranks beyond their number begin again."""
        groups = sorted(_grouped(cpus, self._cache).items(), key=lambda item: (-len(item[1]), item[0]))
        return groups[place % len(groups)][1] if groups else set()

    # --- devices ---

    def _visible_devices(self) -> list[str]:
        present = self._present_devices()
        for name in _VISIBLE:
            if name in self._env:
                chosen = [part.strip() for part in self._env[name].split(",")]
                return [present[int(part)] for part in chosen if part.isdecimal() and int(part) < len(present)]
        return present

    def _present_devices(self) -> list[str]:
        """PCI addresses of the accelerators this process may see, sorted."""
        nvidia = self._root / "proc/driver/nvidia/gpus"
        if nvidia.is_dir():
            return sorted(path.name.lower() for path in nvidia.iterdir())
        found = []
        for path in (self._root / "sys/bus/pci/devices").glob("*"):
            if _text(path / "class")[:6] in _ACCELERATORS.get(_text(path / "vendor"), ()):
                found.append(path.name)
        return sorted(found)

    def _node_of(self, address: str) -> int:
        text = _text(self._root / "sys/bus/pci/devices" / address / "numa_node")
        return max(int(text or 0), 0)  # a machine with a single node says -1

    # --- CPUs ---

    def _nodes(self) -> list[Path]:
        return sorted((self._root / "sys/devices/system/node").glob("node[0-9]*"))

    def _cpus_of_node(self, node: int) -> set[int]:
        cpus = _numbers(_text(self._root / f"sys/devices/system/node/node{node}/cpulist"))
        return cpus if self._allowed is None else cpus & self._allowed

    def _cpu(self, cpu: int, what: str) -> str:
        return _text(self._root / f"sys/devices/system/cpu/cpu{cpu}" / what)

    def _socket(self, cpu: int) -> int:
        return int(self._cpu(cpu, "topology/physical_package_id") or 0)

    def _core(self, cpu: int) -> int:
        return min(_numbers(self._cpu(cpu, "topology/thread_siblings_list")), default=cpu)

    def _cache(self, cpu: int) -> int:
        """The first CPU that shares the cache of the highest level with this one."""
        best, shared = -1, {cpu}
        for index in (self._root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index[0-9]*"):
            level = int(_text(index / "level") or -1)
            if _text(index / "type") in ("Unified", "Data") and level > best:
                best, shared = level, _numbers(_text(index / "shared_cpu_list")) or {cpu}
        return min(shared)


def plan(mode: str, slots: int, topology: Topology | None = None) -> tuple[dict[int, set[int]], str]:
    """CPUs by local rank, and what the user should know: nothing where every rank is bound."""
    if not mode:
        return {}, ""
    topology = topology or Topology()
    if not topology.devices:
        return {}, f"--numa-binding {mode}: no accelerator was found on this node, so ranks are not bound to CPUs"
    found = {local: topology.cpus_for(mode, local) for local in range(min(slots, len(topology.devices)))}
    bound = {local: cpus for local, cpus in found.items() if cpus}
    left = [str(local) for local in range(slots) if local not in bound]
    notice = (
        f"--numa-binding {mode}: no CPUs near a device were found for local ranks {', '.join(left)}" if left else ""
    )
    return bound, notice


def bind(pid: int, cpus: set[int]) -> None:
    """Bind every thread of the process; those to come inherit it."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(thread), cpus)


def _grouped(cpus: Iterable[int], key: Callable[[int], int]) -> dict[int, set[int]]:
    groups: dict[int, set[int]] = {}
    for cpu in cpus:
        groups.setdefault(key(cpu), set()).add(cpu)
    return groups


def _numbers(text: str) -> set[int]:
    """`0-2,4` as sysfs writes it."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        found.update(range(int(low), int(high or low) + 1))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def accelerators() -> tuple[str, ...]:
    """PCI addresses of the accelerators of this machine that this process may see, by their number."""
    try:
        return tuple(Topology().devices)
    except (OSError, ValueError):
        return ()
