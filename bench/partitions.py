"""Cuts a job of three nodes into parts again and again, and counts split brains: processes that train a rank of another's.

    python bench/partitions.py --count 200 --seed 1        figures; goes on where a run with the same seed was stopped
    python bench/partitions.py --count 3 --no-lease        the same without leases: shows that the count can be other than 0

Two nodes train and the third stands by, so a cut always makes somebody take the place of somebody else. The ranks hardly ever wait
for one another, so one that is cut off could train on by itself for as long as it is let. As root, with iproute2.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from namespaces import Namespaces, why_not
from witness import Checker, Step, Tail

HERE = Path(__file__).parent
PATIENCE_S = 120.0
NODES = 3
ENV = {
    "RERAIL_TOKEN": "the same on all",
    "RERAIL_DETECTORS": "0",
    "RERAIL_STANDBYS": "0",
    "RERAIL_VOTE_EVERY": "0",
    "RERAIL_SNAPSHOT_EVERY": "1000000",
    "RERAIL_NODE_WAIT_S": "20",
    "RERAIL_NO_PROGRESS_LIMIT": "1000000",  # every restart begins at step 0: nothing is saved here
    "OMP_NUM_THREADS": "1",
}


class Cut(NamedTuple):
    """What is done to the wires, and for how long."""

    alone: tuple[int, ...]
    """Nodes that are parted from the others."""
    carrier: bool
    for_s: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one cut."""

    index: int
    alone: tuple[int, ...]
    for_s: float
    recovered: bool
    again_s: float
    """From the cut until all ranks had completed a step of a newer generation; 0: no new one was needed."""
    split_brains: int


class Bench:
    """One job that is cut and cut again."""

    def __init__(self, folder: Path, wires: Namespaces, lost_s: float, *, lease: bool) -> None:
        self.folder, self.wires = folder, wires
        self.env = {
            **os.environ,
            **ENV,
            "RERAIL_AGENT_LOST_S": str(lost_s),
            "RERAIL_TEST_NO_LEASE": "0" if lease else "1",
        }
        self.tail, self.checker, self.found = Tail(folder / "witness"), Checker(), list[str]()
        self.last: dict[int, Step] = {}
        self.generation, self.world = -1, 0
        self.processes = [self._start(node) for node in range(NODES)]

    def _start(self, node: int) -> object:
        address = self.wires.address(0)
        command = [sys.executable, "-m", "rerail.cli.main", "run", "--nnodes", f"2:{NODES}", "--node-rank", str(node)]
        command += ["--rdzv-id", "partitions", "--rdzv-endpoint", f"{address}:29400", "--nproc-per-node", "1"]
        command += ["--local-addr", self.wires.address(node), "--max-restarts", "100000"]
        command += ["--run-dir", str(self.folder / f"run{node}"), str(HERE / "cluster_train.py")]
        command += [
            "--until",
            "1000000000",
            "--delay",
            "0.05",
            "--local",
            "1000000",
            "--witness",
            str(self.folder / "witness"),
        ]
        with open(self.folder / f"node{node}.log", "wb") as log:
            env = {**self.env, "RERAIL_NODE": f"node{node}"}
            return self.wires.start(node, command, env, stdout=log, stderr=log)

    def look(self) -> None:
        """Read and judge what has been completed since the last look."""
        for step in self.tail.new():
            if found := self.checker.look(step):
                self.found.append(found)
            elif step.generation >= self.generation:
                if step.generation > self.generation:
                    self.generation, self.world, self.last = step.generation, step.world, {}
                self.last[step.rank] = step

    def moving(self, since_ns: int, generation: int = -1, limit_s: float = PATIENCE_S) -> bool:
        """Wait until every rank has completed a step since then, in this generation or a newer one."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            self.look()
            whole = self.generation >= generation and len(self.last) == self.world > 0
            if whole and all(step.at > since_ns for step in self.last.values()):
                return True
            time.sleep(0.05)
        return False

    def settle(self) -> None:
        """From three ranks to two and a node that stands by."""
        if not self.moving(0):
            raise SystemExit(f"the job did not start; see {self.folder}")
        self.wires.cut(NODES - 1)
        if not self.moving(0, self.generation + 1):
            raise SystemExit(f"the job did not go on with two nodes; see {self.folder}")
        self.wires.heal()
        time.sleep(3)

    def part(self, index: int, cut: Cut) -> Result:
        """One cut, until all is well again."""
        self.look()
        known, before, began = len(self.found), self.generation, time.monotonic_ns()
        if cut.carrier:
            for node in cut.alone:
                self.wires.cut(node, carrier=True)
        else:
            self.wires.split([node for node in range(NODES) if node not in cut.alone], cut.alone)
        over = time.monotonic() + cut.for_s
        while time.monotonic() < over:
            self.look()
            time.sleep(0.05)
        self.wires.heal()
        healed = time.monotonic_ns()
        recovered = self.moving(healed)
        time.sleep(1.0)  # a lost node that comes back, a rank that was to be replaced: whatever may still come
        recovered = recovered and self.moving(time.monotonic_ns())
        first = [step.at for step in self.last.values()]
        again = self._again(before, began) if self.generation > before and first else 0.0
        return Result(
            index=index,
            alone=cut.alone,
            for_s=cut.for_s,
            recovered=recovered,
            again_s=again,
            split_brains=len(self.found) - known,
        )

    def _again(self, generation: int, since_ns: int) -> float:
        """When the first newer generation had a step of every rank."""
        seen: dict[int, set[int]] = {}
        for step in Tail(self.folder / "witness").new():
            if step.generation > generation and step.at > since_ns:
                ranks = seen.setdefault(step.generation, set())
                ranks.add(step.rank)
                if len(ranks) == step.world:
                    return (step.at - since_ns) / 1e9
        return 0.0


def cut_of(seed: int, index: int, lost_s: float) -> Cut:
    """The same for the same seed. A third is about as long as a lease, the others long enough for others to take over."""
    chosen = random.Random(f"{seed} {index}")
    alone = chosen.choice([(0,), (1,), (2,), (1,), (2,), (1, 2)])
    short = chosen.random() < 1 / 3
    length = chosen.uniform(0.3, 1.3) * lost_s if short else lost_s + chosen.uniform(1.0, 6.0)
    return Cut(alone, chosen.random() < 0.3, round(length, 2))


def told(results: list[Result]) -> str:
    """The figures."""
    again = [result.again_s for result in results if result.again_s]
    middle = f"{statistics.median(again):.1f} s" if again else "-"
    return (
        f"{len(results)} partitions: {sum(result.split_brains > 0 for result in results)} with a split brain, "
        f"{sum(result.recovered for result in results)} recovered; {len(again)} needed a new generation, "
        f"median {middle} from the cut to steps of all ranks again"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lost-s", type=float, default=3.0, help="agent_lost_s; the lease is three quarters of it")
    parser.add_argument("--no-lease", action="store_true", help="show what happens without")
    parser.add_argument("--for-s", type=float, default=0.0, help="stop after this many seconds; the next run goes on")
    args = parser.parse_args()
    if why := why_not():
        print(f"partitions: {why}", file=sys.stderr)
        return 2
    kept = HERE / "results" / f"partitions-{args.seed}{'-no-lease' * args.no_lease}.jsonl"
    kept.parent.mkdir(exist_ok=True)
    results = (
        [msgspec.json.decode(line, type=Result) for line in kept.read_bytes().splitlines()] if kept.exists() else []
    )
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rerail-partitions-") as name, Namespaces(NODES) as wires:
        bench = Bench(Path(name), wires, args.lost_s, lease=not args.no_lease)
        bench.settle()
        for index in range(len(results), args.count):
            if args.for_s and time.monotonic() - began > args.for_s:
                break
            result = bench.part(index, cut_of(args.seed, index, args.lost_s))
            results.append(result)
            with open(kept, "ab") as file:
                file.write(msgspec.json.encode(result) + b"\n")
            print(f"{result}", flush=True)
            for line in bench.found[len(bench.found) - result.split_brains :][:3]:
                print(f"  SPLIT BRAIN: {line}", flush=True)
            if not result.recovered:
                for node in range(NODES):
                    print((Path(name) / f"node{node}.log").read_text(errors="replace")[-1500:], flush=True)
                break
    print(told(results))
    return 1 if any(result.split_brains or not result.recovered for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
