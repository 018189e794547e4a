"""A job of three nodes, each in a network namespace of its own, and what its ranks say they did."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from edge_helpers import Run

from namespaces import Namespaces
from rerail.runtime.journal import FILE_NAME, Journal
from witness import Step, read, split_brains

SCRIPT = str(Path(__file__).parent.parent.parent / "bench" / "cluster_train.py")
PATIENCE_S = 120.0
STEPS = 200
ENV = {
    "RERAIL_TOKEN": "the same on all",
    "RERAIL_DETECTORS": "0",
    "RERAIL_STANDBYS": "0",
    "RERAIL_NODE_WAIT_S": "60",
    "RERAIL_AGENT_LOST_S": "5",
    "OMP_NUM_THREADS": "1",
}


class Cluster:
    """Three nodes; the controller is on node 0."""

    def __init__(self, folder: Path, wires: Namespaces, nnodes: str, *arguments: str, **env: str) -> None:
        self.folder, self.wires, self._nnodes, self._arguments, self._env = folder, wires, nnodes, arguments, env
        self.go, self.file = folder / "go", folder / "witness"
        self.runs: dict[int, Run] = {}
        self._all: list[Run] = []

    def start(self, node: int, *flags: str) -> Run:
        """`rerail run` on one node, for the first time or again."""
        address = self.wires.address(node)
        place = ("--nnodes", self._nnodes, "--node-rank", str(node), "--rdzv-id", "trio", "--max-restarts", "100")
        meet = ("--rdzv-endpoint", f"{self.wires.address(0)}:29400", "--local-addr", address, "--nproc-per-node", "1")
        work = ("--witness", str(self.file), "--go", str(self.go), "--until", str(STEPS), *self._arguments)
        self.runs[node] = Run(
            self.folder / f"node{node}.{len(self._all)}",
            *(*place, *meet, "--run-dir", str(self.folder / f"run{node}"), *flags, SCRIPT, *work),
            env={**ENV, "RERAIL_NODE": f"node{node}", **self._env},
            prefix=self.wires.prefix(node),
        )
        self._all.append(self.runs[node])
        return self.runs[node]

    # --- what happens ---

    def steps(self) -> list[Step]:
        return read(self.file)

    @property
    def newest(self) -> Step:
        return self.steps()[-1]

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait for something; no node may end meanwhile."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            ended = [node for node, run in self.runs.items() if run.process.poll() is not None]
            assert not ended, f"node {ended} ended before there was {what}\n{self.story()}"
            assert time.monotonic() < deadline, f"no {what} in {PATIENCE_S:.0f} s\n{self.story()}"
            time.sleep(0.05)
        return found

    def moving(self, world: int = 3, generation: int = 0, more: int = 3) -> None:
        """Wait until all ranks of such a world have completed some more steps."""
        seen = len(self.steps())

        def moved() -> bool:
            new = [step for step in self.steps()[seen:] if step.world == world and step.generation >= generation]
            return all(sum(step.rank == rank for step in new) >= more for rank in range(world))

        self.until(moved, f"{more} more steps of {world} ranks in generation {generation} or later")

    def said(self, node: int, pattern: str) -> None:
        """Wait for a line of one node."""
        self.until(lambda: re.search(pattern, self.runs[node].err), f"{pattern!r} from node {node}")

    def gives_up(self, node: str) -> None:
        """Wait until the controller has called this node lost."""

        def lost() -> bool:
            journal = Journal(self.folder / "run0" / FILE_NAME, read_only=True)
            try:
                return any(
                    found.code == "node.lost" for found in journal.records(kind="diagnosis") if node in found.summary
                )
            finally:
                journal.close()

        self.until(lost, f"a diagnosis of {node} lost")

    # --- the end ---

    def finish(self, world: int = 3, nodes: tuple[int, ...] = (0, 1, 2)) -> set[str]:
        """Let it come to its end; what all of its ranks hold then."""
        self.go.touch()
        for node in nodes:
            assert self.runs[node].ended() == 0, self.story()
        told = "".join(run.out for run in self._all)
        digests = re.findall(rf"^rank (\d) done (\w+) world {world}$", told, re.MULTILINE)
        assert {int(rank) for rank, _ in digests} == set(range(world)), self.story()
        self.sound()
        for run in self._all:
            run.leaves_nothing()
        assert not any(self.wires.pids(node) for node in range(3)), "processes are left in the namespaces"
        return {digest for _, digest in digests}

    def sound(self) -> None:
        assert not (found := split_brains(self.steps())), "\n".join(found) + self.story()

    def story(self) -> str:
        return "\n".join(f"===== {run.folder.name}\n{run.story()}" for run in self._all)

    def clean_up(self) -> None:
        for run in self._all:
            run.clean_up()


@contextlib.contextmanager
def cluster(folder: Path, nnodes: str = "3", *arguments: str, **env: str) -> Iterator[Cluster]:
    """Three nodes that train; removed whatever the test finds."""
    with Namespaces(3) as wires:
        job = Cluster(folder, wires, nnodes, *arguments, **env)
        try:
            for node in range(3):
                job.start(node)
            job.moving()
            yield job
        finally:
            job.clean_up()
