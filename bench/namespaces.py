"""Several machines on one: turns a number into network namespaces with addresses of their own, whose links can be cut.

    with Namespaces(3) as nodes:
        nodes.start(0, ["python", "-m", ...])      a process on node 0, which has the address nodes.address(0)
        nodes.cut(1); nodes.restore(1)             its packets are lost, as behind a dead switch
        nodes.split([0], [1, 2])                   each group reaches its own members only

Every namespace has a link to a bridge; a cut or a split moves links between bridges. Used by `bench/partitions.py` and
`tests/cluster`. Needs root and iproute2 (`why_not` says what is missing). All names carry the number of the process that made
them, so that several may be used at once, and what a killed process left behind is removed by the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_NAME = re.compile(r"rr(\d+)-\d+[nvb]\d+")
_FOLDER = Path("/run/netns")
_serial = itertools.count()


class Namespaces:
    """A few nodes on one wire. Nothing of it reaches the network of the machine itself."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._prefix = f"rr{os.getpid()}-{next(_serial)}"
        self._bridges = 0

    def __enter__(self) -> Namespaces:
        sweep()
        try:
            self._bridge(0)
            for node in range(self.count):
                self._add(node)
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def prefix(self, node: int) -> list[str]:
        """What a command begins with to be run on this node."""
        return ["nsenter", f"--net={_FOLDER / self._name('n', node)}"]

    def start(self, node: int, command: Sequence[str], env: Mapping[str, str] = os.environ, **options: Any) -> Any:
        """A process on this node, in a session of its own."""
        return subprocess.Popen([*self.prefix(node), *command], env=dict(env), start_new_session=True, **options)

    def pids(self, node: int) -> list[int]:
        """Every process on this node."""
        return _pids(self._name("n", node))

    # --- what goes wrong ---

    def cut(self, node: int, *, carrier: bool = False) -> None:
        """Nothing comes through any more; with `carrier` the node also sees that its link is down."""
        _ip("link", "set", self._name("v", node), *(("down",) if carrier else ("nomaster",)))

    def restore(self, node: int) -> None:
        """Cut, split or slow: as at the beginning."""
        _ip("link", "set", self._name("v", node), "master", self._name("b", 0), "up")
        for prefix, device in self._ends(node):
            subprocess.run([*prefix, "tc", "qdisc", "del", "dev", device, "root"], capture_output=True, check=False)

    def flap(self, node: int, times: int, down_s: float, up_s: float) -> None:
        """Down and up again and again."""
        for _ in range(times):
            self.cut(node, carrier=True)
            time.sleep(down_s)
            self.restore(node)
            time.sleep(up_s)

    def slow(self, node: int, rate: str) -> None:
        """No more than this goes through its link, in either direction: `1mbit`."""
        for prefix, device in self._ends(node):
            shape = ["tbf", "rate", rate, "burst", "8kb", "latency", "400ms"]
            _run(*prefix, "tc", "qdisc", "replace", "dev", device, "root", *shape)

    def split(self, *groups: Sequence[int]) -> None:
        """Nodes reach those of their own group only."""
        for number, group in enumerate(groups):
            self._bridge(number)
            for node in group:
                _ip("link", "set", self._name("v", node), "master", self._name("b", number), "up")

    def heal(self) -> None:
        """All links as at the beginning."""
        for node in range(self.count):
            self.restore(node)

    def kill(self, node: int) -> None:
        """The node loses its power: no process says good-bye, and its kernel does not either."""
        self.cut(node, carrier=True)
        _kill(self._name("n", node))

    def remove(self) -> None:
        """Leave nothing behind."""
        for node in range(self.count):
            _remove(self._name("n", node))
        for number in range(self._bridges):
            subprocess.run(["ip", "link", "del", self._name("b", number)], capture_output=True, check=False)

    # --- how ---

    def _name(self, kind: str, number: int) -> str:
        return f"{self._prefix}{kind}{number}"

    def _ends(self, node: int) -> tuple[tuple[list[str], str], ...]:
        """Both ends of its link: where a command about it is run, and what it is called there."""
        return ([], self._name("v", node)), (self.prefix(node), "eth0")

    def _bridge(self, number: int) -> None:
        while self._bridges <= number:
            _ip("link", "add", self._name("b", self._bridges), "type", "bridge")
            _ip("link", "set", self._name("b", self._bridges), "up")
            self._bridges += 1

    def _add(self, node: int) -> None:
        name, link = self._name("n", node), self._name("v", node)
        _ip("netns", "add", name)
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", name, "address", "add", f"{self.address(node)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("link", "set", link, "master", self._name("b", 0), "up")


def why_not() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"there is no {' and no '.join(missing)} here (apt-get install iproute2 util-linux)"
    try:
        with Namespaces(1):
            return ""
    except (OSError, RuntimeError) as error:
        return f"network namespaces cannot be made here: {error}"


def sweep() -> None:
    """Remove what processes that are gone have left behind."""
    if _FOLDER.is_dir():
        for name in os.listdir(_FOLDER):
            if _is_left(name):
                _remove(name)
    for name in os.listdir("/sys/class/net"):
        if _is_left(name):
            subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)


def _is_left(name: str) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and not Path(f"/proc/{match[1]}").exists()


def _remove(name: str) -> None:
    if (_FOLDER / name).exists():
        _kill(name)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _kill(name: str) -> None:
    """End all processes of a namespace, also those that are just being started."""
    for _ in range(500):
        pids = _pids(name)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _pids(name: str) -> list[int]:
    """Processes in a namespace; those that are dead and not yet collected have none."""
    try:
        wanted = os.stat(_FOLDER / name)
    except OSError:
        return []
    found = []
    for pid in (entry for entry in os.listdir("/proc") if entry.isdigit()):
        with contextlib.suppress(OSError):
            seen = os.stat(f"/proc/{pid}/ns/net")
            if (seen.st_dev, seen.st_ino) == (wanted.st_dev, wanted.st_ino):
                found.append(int(pid))
    return found


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    if told.returncode:
        raise RuntimeError(f"{' '.join(command)}: {told.stderr.strip() or told.returncode}")
