"""Turns questions about this machine (how many devices, is that address mine) into answers without importing torch.

Called by `cli.run`.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from rerail.errors import UsageError

_DEVICE_FILES = {"gpu": "nvidia[0-9]*", "npu": "davinci[0-9]*"}
_VISIBLE = {
    "gpu": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
    "xpu": ("ZE_AFFINITY_MASK",),
}
_AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
_INTEL = "0x8086"


def ranks_for(asked: str, env: Mapping[str, str] = os.environ, dev: Path = Path("/dev")) -> int:
    """--nproc-per-node as a number: given as one, or counted for gpu, xpu, npu, cpu, auto."""
    if re.fullmatch(r"[+-]?\d+", asked):
        if int(asked) < 1:
            raise UsageError(f"--nproc-per-node is {asked}, but at least one rank is needed")
        return int(asked)
    if asked == "cpu":
        return len(os.sched_getaffinity(0))
    if asked == "auto":
        found = (device_count(kind, env, dev) for kind in ("gpu", "npu", "xpu"))
        return next((count for count in found if count), len(os.sched_getaffinity(0)))
    if asked not in _VISIBLE:
        raise UsageError(f"--nproc-per-node is {asked!r}", hint="use a number, or one of gpu, xpu, npu, cpu, auto")
    count = device_count(asked, env, dev)
    if not count:
        raise UsageError(
            f"--nproc-per-node {asked}, but no {asked} is usable here",
            hint=f"looked at {dev} and {', '.join(_VISIBLE[asked])}; use a number, or cpu",
        )
    return count


def device_count(kind: str, env: Mapping[str, str] = os.environ, dev: Path = Path("/dev")) -> int:
    """Devices of one kind that ranks may use: those with a device file, or fewer if a variable hides some."""
    present = _present(kind, dev)
    for name in _VISIBLE[kind]:
        if name in env:
            visible = _visible(env[name])
            return min(visible, present) if present else visible
    return present


def _present(kind: str, dev: Path) -> int:
    if kind == "xpu":
        vendors = Path("/sys/class/drm").glob("renderD*/device/vendor")
        return sum(1 for vendor in vendors if _text(vendor) == _INTEL) if (dev / "dri").exists() else 0
    files = [path for path in dev.glob(_DEVICE_FILES[kind]) if re.fullmatch(r"[a-z]+\d+", path.name)]
    if kind == "gpu" and not files and (dev / "kfd").exists():
        return sum(1 for node in _AMD_NODES.glob("*/gpu_id") if _text(node) not in ("", "0"))
    return len(files)


def _visible(listed: str) -> int:
    """Entries of a *_VISIBLE_DEVICES list; -1 or an empty entry hides itself and all behind it."""
    count = 0
    for entry in listed.split(","):
        if entry.strip() in ("", "-1"):
            break
        count += 1
    return count


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def is_local(host: str) -> bool:
    """Whether `host` names this machine."""
    if host in ("localhost", "0.0.0.0", "::", socket.gethostname()):
        return True
    try:
        wanted = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    own = {address.address.split("%")[0] for addresses in psutil.net_if_addrs().values() for address in addresses}
    return any(address in own or address.startswith("127.") for address in wanted)


def address_towards(host: str) -> str:
    """The address by which a machine that reaches `host` reaches us: that of the interface we would use.

    A name of our own that resolves to a loopback address (as Debian's /etc/hosts does) is of no use to others:
    then `host` itself, which they are given anyway, is the better answer.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing; the kernel only chooses the interface
            found = str(probe.getsockname()[0])
    except OSError:
        return socket.getfqdn()
    ours_only = found.startswith("127.") or found == "::1"
    asked_so = host == "localhost" or host.startswith("127.") or host == "::1"
    return host if ours_only and not asked_so else found


def answers(host: str, port: int) -> bool:
    """Whether something listens there already."""
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False
