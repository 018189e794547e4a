"""The job under chaos: starts its nodes, knows who is where, and says what is left of it in the end.

Used by `bench/chaos.py` (the driver) and `bench/chaos_faults.py` (what goes wrong). Every node is a `rerail run` in a network
namespace of its own or, where there are none, on a loopback address of its own. All processes of a node carry its mark.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from namespaces import Namespaces
from rerail.flow import Report
from rerail.runtime.journal import FILE_NAME, Journal
from witness import Checker, Step, Tail

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"
MARK = "RERAIL_CHAOS"
LOST_S = 4.0
"""agent_lost_s of the job; the lease is three quarters of it."""
CLONE_NEWNET = 0x40000000
SETTINGS = """\
max_restarts = 1000000
no_progress_limit = 1000000
roll_back_limit = 1000000
restart_limits = ""
vote_every = 20
snapshot_every = 10
agent_lost_s = {lost_s}
node_wait_s = 60.0
controller_away_s = 600.0
detectors_off = "host.*, amd, ascend, kernel_log, notice.*, nvidia*"

[[escalation]]
code = "*"
times = 0

[[escalation]]
code = "*"
together = true
times = 0
"""


class Size(NamedTuple):
    """How large the job is."""

    nodes: int = 3
    spares: int = 1
    per_node: int = 2
    delay: float = 0.05
    """Seconds that each step is stretched by."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def all_nodes(self) -> int:
        return self.nodes + self.spares


class ChaosJob:
    """One long-running job. `look` is to be called often: it reads what the ranks have done, and does what is due."""

    def __init__(self, folder: Path, size: Size, wires: Namespaces | None) -> None:
        self.folder, self.size, self.wires = folder, size, wires
        self.mark = uuid.uuid4().hex
        self.saved, self.run0, self.end = folder / "saved", folder / "run0", folder / "end"
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}
        self.down: set[int] = set()
        """Nodes that are dead on purpose and will be started again."""
        self.tail, self.checker = Tail(folder / "witness"), Checker()
        self.last: dict[int, Step] = {}
        self.generation = self.high = self.sick_at = -1
        self.found: list[str] = []
        """What must never happen, and did."""
        self.digests: dict[tuple[int, int], str] = {}
        """(rank, step): what the rank held, the last time it completed that step."""
        self._generation_of: dict[int, int] = {}
        self.intervals: deque[float] = deque(maxlen=20_000)
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._shm = set(os.listdir("/dev/shm"))
        self._port = 29400 if wires is not None else _free_port()
        self._inside = ThreadPoolExecutor(4, initializer=self._enter)
        (folder / "rerail.toml").write_text(SETTINGS.format(lost_s=LOST_S))
        self.disks = [path for path in (self.saved, self.run0) if _mount(path)]

    # --- its nodes ---

    def address(self, node: int) -> str:
        return self.wires.address(node) if self.wires is not None else f"127.0.0.{node + 1}"

    def start(self, node: int) -> None:
        """`rerail run` on one node, for the first time or again."""
        size = self.size
        command = [sys.executable, "-m", "rerail.cli.main", "run", "--allow-inject", "--nnodes", str(size.nodes)]
        command += ["--spare-nodes", str(size.spares), "--nproc-per-node", str(size.per_node), "--rdzv-id", "chaos"]
        command += ["--rdzv-endpoint", f"{self.address(0)}:{self._port}", "--local-addr", self.address(node)]
        command += ["--node-rank", str(node), "--run-dir", str(self.folder / f"run{node}"), "--standbys", "1"]
        command += ["--config", str(self.folder / "rerail.toml"), str(HERE / "chaos_train.py")]
        command += ["--witness", str(self.folder / "witness"), "--end", str(self.end)]
        command += ["--delay", str(size.delay), "--save", str(self.saved)]
        prefix = self.wires.prefix(node) if self.wires is not None else []
        env = {**os.environ, "RERAIL_TOKEN": "the same on all", "RERAIL_NODE": f"node{node}", "OMP_NUM_THREADS": "1"}
        env |= {
            MARK: f"{self.mark}-{node}",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(SOURCE), str(HERE), os.environ.get("PYTHONPATH", "")))),
        }
        with open(self.folder / f"node{node}.log", "ab") as log:
            self.launchers[node] = subprocess.Popen(
                [*prefix, *command], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.down.discard(node)

    def pids(self, node: int = -1, containing: str = "") -> list[int]:
        """Living processes of one node, or of all, whose command line contains this."""
        needle = f"{MARK}={self.mark}-{node if node >= 0 else ''}".encode()
        found = []
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                ours = any(word == needle or (node < 0 and word.startswith(needle)) for word in words)
                if ours and containing.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def ranks_on(self, node: int) -> dict[int, int]:
        """Ranks that are on this node as far as known, and their processes."""
        return {step.rank: step.pid for step in self.last.values() if step.node == f"node{node}"}

    def kill_node(self, node: int, *, launcher_only: bool = False) -> None:
        """All of it is gone at once; or its launcher alone, and the rest follows."""
        self.down.add(node)
        if launcher_only:
            self.launchers[node].kill()
        elif self.wires is not None:
            self.wires.kill(node)
        else:
            while pids := self.pids(node):
                signal_all(pids, signal.SIGKILL)
        self.launchers[node].wait()

    def revive(self, node: int) -> None:
        """The dead node is back, once nothing of its former life is left."""
        if self.wires is not None:
            self.wires.restore(node)
        signal_all(self.pids(node), signal.SIGKILL)
        if self.launchers[node].poll() is not None:
            self.start(node)

    # --- what happens ---

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, action))

    @property
    def done(self) -> int:
        """The step that all ranks have completed."""
        return min(step.step for step in self.last.values())

    @property
    def busy(self) -> bool:
        """Whether something is still to be done about a fault."""
        return bool(self._later)

    def look(self) -> None:
        """Read what has been done since the last look, and do what is due."""
        for step in self.tail.new():
            if self.size.ranks != step.world:
                self.found.append(f"rank {step.rank} is one of {step.world}, not of {self.size.ranks}")
            if said := self.checker.look(step):
                self.found.append(said)
                continue
            before = self.last.get(step.rank)
            if before is not None and (before.pid, before.step + 1) == (step.pid, step.step) and step.rank == 0:
                self.intervals.append((step.at - before.at) / 1e9)
            self.generation, self.high = max(self.generation, step.generation), max(self.high, step.step)
            self.last[step.rank] = step
            self._claim(step)
        due = [one for one in self._later if one[0] <= time.monotonic()]
        self._later = [one for one in self._later if one not in due]
        for _, action in due:
            action()
        for node, launcher in self.launchers.items():
            if launcher.poll() is not None and node not in self.down and not self.end.exists():
                self.found.append(f"node {node} ended by itself, with exit code {launcher.returncode}")
                self.start(node)

    def _claim(self, step: Step) -> None:
        """What others told of this step in an older generation is void: a rank that advances beside them does not tell it again."""
        newest = self._generation_of.get(step.step, -1)
        if step.generation > newest:
            self._generation_of[step.step] = step.generation
            for rank in range(self.size.ranks):
                self.digests.pop((rank, step.step), None)
        self.digests[step.rank, step.step] = step.digest

    def whole_since(self, since_ns: int) -> bool:
        """Whether every rank has completed a step since then."""
        return len(self.last) == self.size.ranks and all(step.at > since_ns for step in self.last.values())

    def wait(self, condition: Callable[[], bool], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
            self.look()
        return True

    def ask(self, function: Callable[[], Any]) -> Any:
        """Call this where the controller can be reached; what is due is done meanwhile."""
        answer = self._inside.submit(function)
        while not answer.done():
            self.look()
            time.sleep(0.01)
        return answer.result()

    def _enter(self) -> None:
        """A thread of ours moves to the network of node 0."""
        if self.wires is None:
            return
        with open(self.wires.prefix(0)[1].removeprefix("--net=")) as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def reports(self) -> list[Report]:
        try:
            journal = Journal(self.run0 / FILE_NAME, read_only=True)
        except Exception:
            return []
        with contextlib.closing(journal):
            return [record for record in journal.records(kind="report") if isinstance(record, Report)]

    @property
    def usual_s(self) -> float:
        """The median step."""
        return statistics.median(self.intervals) if self.intervals else 0.0

    # --- the end ---

    def finish(self, limit_s: float = 700.0) -> str:
        """Let it come to its end; what is wrong with that, or nothing. A save may be waited for, to its deadline of 600 s."""
        self.end.write_text(str(self.high + 100))
        deadline = time.monotonic() + limit_s
        for node, launcher in self.launchers.items():
            try:
                code = launcher.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return f"node {node} did not end in {limit_s:.0f} s"
            if code:
                return f"node {node} ended with exit code {code}"
        self.look()
        missing = [rank for rank, step in self.last.items() if step.step != self.high]
        return f"rank {missing} did not come to step {self.high}" if missing else ""

    def leaks(self, limit_s: float = 30.0) -> list[str]:
        """What is left when all has ended."""
        deadline = time.monotonic() + limit_s
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def _left(self) -> list[str]:
        left = [f"process {pid}" for pid in self.pids()]
        left += [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - self._shm]
        for node in range(self.size.all_nodes if self.wires is not None else 0):
            left += [f"process {pid} in the namespace of node {node}" for pid in self.wires.pids(node)]
            left += [f"socket {one} on node {node}" for one in self._sockets(node)]
        known = ("job.json", "journal.sqlite", "controller.json", "logs")
        for run in self.folder.glob("run*"):
            left += [f"{path}" for path in run.iterdir() if not path.name.startswith(known)]
        left += [f"{path}" for path in self.saved.rglob("*") if path.name.startswith((".tmp", "COPYING"))]
        return left

    def _sockets(self, node: int) -> list[str]:
        """TCP sockets that somebody still holds: all but those in TIME_WAIT and on their way there."""
        shown = subprocess.run(
            [*self.wires.prefix(node), "cat", "/proc/net/tcp"], capture_output=True, text=True, check=False
        ).stdout
        rows = [line.split() for line in shown.splitlines()[1:]]
        return [f"{row[1]} to {row[2]} in state {row[3]}" for row in rows if row[3] in ("01", "0A", "08", "02")]

    def clean_up(self) -> None:
        """Whatever became of it: nothing stays."""
        while pids := self.pids():
            signal_all(pids, signal.SIGKILL)
            time.sleep(0.01)
        for launcher in self.launchers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(5)
        self._inside.shutdown()
        for file in self.run0.glob(f"{FILE_NAME}*") if self.run0 in self.disks else ():
            shutil.copy(file, self.folder)  # the disk it is on goes now
        for path in self.disks:  # processes that are dying hold it a moment longer
            subprocess.run(["umount", "--lazy", str(path)], capture_output=True, check=False)

    def story(self) -> str:
        """The last words of every node."""
        logs = sorted(self.folder.glob("node*.log"))
        return "\n".join(f"===== {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


def signal_all(pids: list[int], signum: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def _mount(path: Path) -> bool:
    """A small file system of its own, if we may: it can be filled without harm to anybody."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(path)]
    try:
        return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
