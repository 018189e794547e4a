"""Proves that no rank of a job was ever trained by two processes: turns the steps that ranks say they completed into findings.

Every rank appends a line to one file when it has completed a step; all nodes share the machine, and so its clock. Used by
`bench/partitions.py`, `bench/chaos.py` and `tests/cluster`; `bench/cluster_train.py` and `bench/chaos_train.py` write.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step that one process has completed."""

    rank: int
    pid: int
    step: int
    generation: int
    world: int
    born: int = 0
    """When the process began to tell: numbers of processes are used again."""
    at: int
    """CLOCK_MONOTONIC, nanoseconds."""
    node: str = ""
    digest: str = ""
    """What the rank holds after the step, where it tells that."""


class Witness:
    """The writing side, one per rank."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._born = time.monotonic_ns()

    def completed(self, *, rank: int, step: int, generation: int, world: int, digest: str = "") -> None:
        """In one write, so that lines of several ranks never mix."""
        line = Step(
            rank=rank,
            pid=os.getpid(),
            step=step,
            generation=generation,
            world=world,
            born=self._born,
            at=time.monotonic_ns(),
            node=os.environ.get("RERAIL_NODE", ""),
            digest=digest,
        )
        os.write(self._fd, msgspec.json.encode(line) + b"\n")


class Tail:
    """The reading side: what has been written since the last look."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._rest = path, 0, b""

    def new(self) -> list[Step]:
        """In the order of time."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._at)
            data = file.read()
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return sorted((msgspec.json.decode(line, type=Step) for line in lines), key=lambda step: step.at)


class Checker:
    """Finds steps that must not have been completed.

    When the ranks of a generation have begun, those of older ones have parked or ended; and once another process has
    completed a step of a rank, the former one never does again.
    """

    def __init__(self) -> None:
        self._newest: Step | None = None
        self._process: dict[int, Step] = {}
        self._former: dict[tuple[int, int, int], Step] = {}

    def look(self, step: Step) -> str:
        """What is wrong with it, as a sentence; empty if nothing is."""
        found, newest = "", self._newest
        if newest is not None and step.generation < newest.generation:
            found = (
                f"rank {step.rank} (process {step.pid}) completed step {step.step} of generation {step.generation} "
                f"{(step.at - newest.at) / 1e9:.3f} s after rank {newest.rank} had one of generation {newest.generation}"
            )
        elif newest is None or step.generation > newest.generation:
            self._newest = step
        if (by := self._former.get((step.rank, step.pid, step.born))) is not None:
            return (
                f"rank {step.rank} (process {step.pid}) completed step {step.step} "
                f"{(step.at - by.at) / 1e9:.3f} s after process {by.pid} had taken its place"
            )
        before = self._process.get(step.rank)
        if before is not None and (before.pid, before.born) != (step.pid, step.born) and not found:
            self._former[step.rank, before.pid, before.born] = step
        if not found:
            self._process[step.rank] = step
        return found


def read(path: Path) -> list[Step]:
    """All steps there are."""
    return Tail(path).new()


def split_brains(steps: list[Step]) -> list[str]:
    """All that is wrong with these, in the order of time."""
    checker = Checker()
    return [found for step in steps if (found := checker.look(step))]
