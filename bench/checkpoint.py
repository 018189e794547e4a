"""Measures the checkpoint engine beside fio, a plain copy and torch.distributed.checkpoint, taking turns in one run.

    python bench/checkpoint.py [--folder DIR] [--repeats 5] [--gib 2.2] [--json FILE]

The folder must lie on a real disk. Every save counts until it is durable; DCP gets the credit of its `sync_files`.
Loads end in live parameters and begin with the files out of the page cache. The same loads are measured once more from files in
memory (tmpfs), where no disk has a say: what is left is the engine. Needs fio (`make bench-checkpoint` gets it).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from recovery import machine
from rerail.checkpoint import catalog, reshard
from rerail.checkpoint.arena import Arena
from rerail.checkpoint.files import FileTier
from rerail.checkpoint.layout import Piece, plan
from rerail.checkpoint.saving import Order, Outcome
from rerail.checkpoint.staging import Stager
from rerail.checkpoint.stream import Stream
from rerail.checkpoint.writer import Writer
from table import Figure, render, write

SMALL_TENSORS, SMALL_BYTES = 6000, 16 << 10
MEMORY = Path("/dev/shm")
"""A file system in memory, as every Linux has one."""
State = dict[str, torch.Tensor]


def gpt_like(gib: float) -> State:
    """About 400 fp32 tensors of mixed sizes: parameters and two moments."""
    count, total = 402, int(gib * (1 << 30)) // 4
    weights = [1, 4, 4, 12][:4]
    unit = total // (count * sum(weights) // len(weights))
    return {f"t{i}": torch.randn(unit * weights[i % 4] // 64 * 64) for i in range(count)}


def many_small() -> State:
    return {f"t{i}": torch.randn(SMALL_BYTES // 4) for i in range(SMALL_TENSORS)}


def size_of(state: State) -> int:
    return sum(t.numel() * t.element_size() for t in state.values())


class Engine:
    """rerail's engine on one state: an arena, a stager and a persister."""

    def __init__(self, state: State, folder: Path) -> None:
        self.folder, self.state = folder, state
        self._pieces = [Piece(name, t, tuple(t.shape), (0,) * t.dim(), True) for name, t in state.items()]
        self._fd = os.memfd_create("bench")
        self._stager = Stager(Arena(self._fd), overlap=False)
        self._outcome: list[Outcome] = []
        self.writer = Writer(self._fd, self._outcome.append)
        self._version = 0
        self.stage()  # lays the arena out and touches its memory, as a first snapshot does
        self.stage()

    def stage(self) -> float:
        self._version += 1
        while True:  # the first time it only begins to make room
            seconds = timed(lambda: self._stager.stage(self._version, self._pieces, b""))
            if self._version in [seal.version for seal in self._stager.arena.seals()]:
                return seconds
            self._stager.settle()

    def save(self) -> tuple[float, float]:
        """Seconds for which the trainer waits, and seconds until all is durable."""
        began = time.monotonic()
        blocked = self.stage()
        self._write(None)
        return blocked, time.monotonic() - began

    def save_from_tensors(self) -> float:
        """Seconds of a save without a snapshot, for all of which the trainer waits."""
        self._version += 1
        layout = plan(self._pieces)
        stream = Stream(layout.of_file(b""), partial(layout.fill, self._pieces))
        seconds = timed(lambda: self._write(stream))
        stream.close()
        return seconds

    def _write(self, stream: Stream | None) -> None:
        order = Order(
            version=self._version, epoch=1, generation=0, rank=0, group=(0,), world_size=1, tiers=(str(self.folder),),
            read_back=False,
        )  # fmt: skip
        self.writer.save(order, stream)
        self.writer.wait()
        if not self._outcome[-1].ok:
            raise SystemExit(f"not saved: {self._outcome[-1].notes}")

    def load(self, into: State) -> float:
        forget(self.folder)
        wanted = [reshard.Wanted(name, t, tuple(t.shape), (0,) * t.dim()) for name, t in into.items()]

        def run() -> None:
            step = catalog.newest([FileTier(self.folder)], print)
            assert step is not None
            reshard.load(step, wanted)

        return timed(run)

    def private_memory(self) -> int:
        """Bytes of the persister that are not the arena's."""
        text = Path(f"/proc/{self.writer.pid}/smaps_rollup").read_text()
        kib = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines()[1:]}
        return (kib["Private_Clean"] + kib["Private_Dirty"]) << 10

    def close(self) -> None:
        self.writer.close()
        os.close(self._fd)


def timed(run: Callable[[], object]) -> float:
    began = time.monotonic()
    run()
    return time.monotonic() - began


def fio(folder: Path, size: int, kind: str, *, new: bool = True) -> float:
    """Seconds that fio takes for as many bytes, past the page cache, the final sync included.

    It writes to a new file, as every save does; `new=False` writes over one whose blocks the file system has already.
    """
    file = folder / "fio.bin"
    if kind == "write" and new:
        file.unlink(missing_ok=True)
    options = ["--bs=4M", "--direct=1", "--ioengine=libaio", "--iodepth=16", f"--size={size}", f"--filename={file}"]
    sync = ["--end_fsync=1"] if kind == "write" else []
    command = ["fio", f"--name={kind}", f"--rw={kind}", *options, *sync, "--output-format=json"]
    job = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["jobs"][0]
    return float(job["job_runtime"]) / 1000


def forget(folder: Path) -> None:
    """Take the files of a folder out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def dcp_save(state: State, folder: Path) -> float:
    shutil.rmtree(folder, ignore_errors=True)
    writer = dcp.FileSystemWriter(folder, thread_count=2, sync_files=True)
    return timed(lambda: dcp.save(dict(state), storage_writer=writer, no_dist=True))


def dcp_load(into: State, folder: Path) -> float:
    forget(folder)
    return timed(lambda: dcp.load(dict(into), storage_reader=dcp.FileSystemReader(folder), no_dist=True))


class PlainCopy:
    """A copy of the state into memory that is there already."""

    def __init__(self, state: State) -> None:
        self._state, self._flat = state, {name: torch.zeros_like(t) for name, t in state.items()}

    def seconds(self) -> float:
        def run() -> None:
            for name, tensor in self._state.items():
                self._flat[name].copy_(tensor)

        return timed(run)


def large(folder: Path, gib: float, repeats: int) -> list[Figure]:
    """A large state: persist, stall and load beside fio, a copy and DCP."""
    state = gpt_like(gib)
    size = size_of(state)
    target = {name: torch.zeros_like(t) for name, t in state.items()}
    engine = Engine(state, folder / "large")
    copy = PlainCopy(state)
    saves, blocked, copies, raw, over, loads, raw_loads, dcp_saves, dcp_loads, streamed = ([] for _ in range(10))
    for _ in range(repeats):
        raw.append(fio(folder, size, "write"))
        over.append(fio(folder, size, "write", new=False))
        copies.append(copy.seconds())
        stall, until_durable = engine.save()
        blocked.append(stall)
        saves.append(until_durable - stall)
        raw_loads.append(fio(folder, size, "read"))
        loads.append(engine.load(target))
        streamed.append(engine.save_from_tensors())
        dcp_saves.append(dcp_save(state, folder / "dcp"))
        dcp_loads.append(dcp_load(target, folder / "dcp"))
        shutil.rmtree(folder / "large")
    memory = engine.private_memory()
    engine.close()
    wrong = [name for name, t in state.items() if not torch.equal(t, target[name])]
    persist = min(raw) / min(saves)
    stall_ratio = min(blocked) / min(copies)
    read_ratio = min(loads) / min(raw_loads)
    against = statistics.median(dcp_loads) / statistics.median(loads)
    gb = f"{size / 1e9:.1f} GB"
    return [
        Figure(f"{gb}: fio write, O_DIRECT, new file", "s", tuple(raw)),
        Figure(f"{gb}: fio write, O_DIRECT, over a file", "s", tuple(over)),
        Figure(f"{gb}: rerail, sealed to durable", "s", tuple(saves)),
        Figure(f"{gb}: persist / fio, best", "ratio", (persist,), ">= 0.85", persist >= 0.85, higher_is_better=True),
        Figure(f"{gb}: rerail, without a snapshot", "s", tuple(streamed)),
        Figure(f"{gb}: DCP save, 2 threads", "s", tuple(dcp_saves)),
        Figure(f"{gb}: plain copy", "s", tuple(copies)),
        Figure(f"{gb}: trainer blocked", "s", tuple(blocked)),
        Figure(f"{gb}: blocked / copy, best", "ratio", (stall_ratio,), "<= 1.2", stall_ratio <= 1.2),
        Figure(f"{gb}: fio read, O_DIRECT", "s", tuple(raw_loads)),
        Figure(f"{gb}: rerail, verified load", "s", tuple(loads)),
        Figure(f"{gb}: load / fio read, best", "ratio", (read_ratio,), "<= 1.5", read_ratio <= 1.5),
        Figure(f"{gb}: DCP load", "s", tuple(dcp_loads)),
        Figure(f"{gb}: load against DCP, median", "x", (against,), ">= 2x", against >= 2, higher_is_better=True),
        Figure(f"{gb}: loaded tensors equal the saved", "", (), "all", not wrong, f"{len(state)} tensors"),
        Figure("persister memory beside the arena", "", (), "< 60 MB", memory < 60e6, f"{memory / 1e6:.1f} MB"),
    ]


def from_memory(gib: float, repeats: int) -> list[Figure]:
    """Loads of a large state from files in memory: no disk has a say."""
    state = gpt_like(gib)
    target = {name: torch.zeros_like(t) for name, t in state.items()}
    loads, dcp_loads = [], []
    with tempfile.TemporaryDirectory(prefix="rerail-bench-", dir=MEMORY) as name:
        engine = Engine(state, Path(name) / "large")
        engine.save()
        engine.close()
        dcp_save(state, Path(name) / "dcp")
        for _ in range(repeats):
            loads.append(engine.load(target))
            dcp_loads.append(dcp_load(target, Path(name) / "dcp"))
    wrong = [name for name, t in state.items() if not torch.equal(t, target[name])]
    against = statistics.median(dcp_loads) / statistics.median(loads)
    gb = f"{size_of(state) / 1e9:.1f} GB, files in memory"
    return [
        Figure(f"{gb}: rerail, verified load", "s", tuple(loads)),
        Figure(f"{gb}: DCP load", "s", tuple(dcp_loads)),
        Figure(f"{gb}: load against DCP, median", "x", (against,), ">= 2x", against >= 2, higher_is_better=True),
        Figure(f"{gb}: loaded tensors equal the saved", "", (), "all", not wrong, f"{len(state)} tensors"),
    ]


def small(folder: Path, repeats: int) -> list[Figure]:
    """6,000 small tensors: what each tensor costs, rather than each byte."""
    state = many_small()
    target = {name: torch.zeros_like(t) for name, t in state.items()}
    engine = Engine(state, folder / "small")
    saves, loads, dcp_saves, dcp_loads = [], [], [], []
    for _ in range(repeats):
        saves.append(engine.save()[1])
        loads.append(engine.load(target))
        dcp_saves.append(dcp_save(state, folder / "dcp"))
        dcp_loads.append(dcp_load(target, folder / "dcp"))
        shutil.rmtree(folder / "small")
    engine.close()
    save_x = statistics.median(dcp_saves) / statistics.median(saves)
    load_x = statistics.median(dcp_loads) / statistics.median(loads)
    return [
        Figure("6,000 tensors: rerail save, stall included", "s", tuple(saves)),
        Figure("6,000 tensors: DCP save", "s", tuple(dcp_saves)),
        Figure("6,000 tensors: save against DCP", "x", (save_x,), ">= 10x", save_x >= 10, higher_is_better=True),
        Figure("6,000 tensors: rerail load", "s", tuple(loads)),
        Figure("6,000 tensors: DCP load", "s", tuple(dcp_loads)),
        Figure("6,000 tensors: load against DCP", "x", (load_x,), ">= 10x", load_x >= 10, higher_is_better=True),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder beside this file by default")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gib", type=float, default=2.2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory", action="store_true", help="only loads from files in memory; no fio is needed")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rerail-bench-", dir=args.folder or Path.cwd()))
    try:
        figures = [] if args.memory else large(folder, args.gib, args.repeats) + small(folder, args.repeats)
        figures += from_memory(args.gib, args.repeats)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{render(figures)}\n\n{' · '.join(f'{key} {value}' for key, value in machine().items())}")
    if args.json:
        write(args.json, figures, machine())
    return 0 if all(figure.ok is not False for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
