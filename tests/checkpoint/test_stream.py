"""Hosts without room for snapshots: what is saved straight from the tensors is as exact, and as safe from faults."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from two_ranks import pieces, start

from rerail.checkpoint import catalog, manifest, room, staging
from rerail.checkpoint.arena import Arena, NoRoom
from rerail.checkpoint.files import FileTier
from rerail.checkpoint.layout import Piece, plan
from rerail.checkpoint.saving import Order, Outcome, carry_out
from rerail.checkpoint.staging import Stager
from rerail.checkpoint.stream import Stream, Streamed
from rerail.checkpoint.tiers import Source
from rerail.checkpoint.writer import Writer
from rerail.errors import ConfigError
from rerail.texts import bytes_of

LIMIT_S = 60.0
WIDE = 1_000_000
"""Columns that make a shard of several chunks."""
Fill = Callable[[int, memoryview], None]


def stream_of(version: int, rank: int, around: Callable[[Fill, int, memoryview], None] | None = None) -> Stream:
    mine = pieces(version, rank, 2, WIDE)
    layout = plan(mine)
    fill = partial(layout.fill, mine)
    small = f"small {version} of {rank}".encode()
    return Stream(layout.of_file(small), partial(around, fill) if around else fill)


class Ranks:
    """Two ranks that save from their tensors, each through a persister of its own."""

    def __init__(self) -> None:
        self._fds = [os.memfd_create(f"rank-{rank}") for rank in range(2)]
        self.outcomes: list[list[Outcome]] = [[], []]
        self.writers = [Writer(fd, told.append) for fd, told in zip(self._fds, self.outcomes, strict=True)]

    def close(self) -> None:
        for writer in self.writers:
            assert writer.close(LIMIT_S), "a persister does not end"
        for fd in self._fds:
            os.close(fd)

    def done(self) -> list[Outcome]:
        for writer in self.writers:
            assert writer.wait(LIMIT_S), self.outcomes
        return [told[-1] for told in self.outcomes]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


def order(version: int, rank: int, *tiers: Path, deadline_s: float = 30.0) -> Order:
    urls = tuple(map(str, tiers))
    return Order(
        version=version, epoch=1, generation=0, rank=rank, group=(0, 1), world_size=2, tiers=urls, deadline_s=deadline_s
    )


# --- the bytes ---

TENSORS = [
    torch.arange(5000, dtype=torch.float32),
    torch.arange(24, dtype=torch.int64).reshape(4, 6).t(),  # not contiguous
    torch.empty((0, 3)),
    torch.tensor(7.5, dtype=torch.float64),
    torch.randn(33).to(torch.bfloat16),
    torch.arange(9) % 2 == 0,
    torch.randn(6, dtype=torch.complex64),
    torch.randn(17).to(torch.float8_e4m3fn),
]
SOME = [Piece(f"t{n}", t, tuple(t.shape), (0,) * t.dim(), n != 1) for n, t in enumerate(TENSORS)]


@given(st.data())
def test_any_part_of_the_file_is_what_a_snapshot_would_hold(data: st.DataObject) -> None:
    fd = os.memfd_create("whole")
    try:
        arena, layout = Arena(fd), plan(SOME)
        assert Stager(arena, overlap=False).stage(1, SOME, b"")
        whole = bytes(arena.image(1)[: layout.file_size])
    finally:
        os.close(fd)
    offset = data.draw(st.integers(0, layout.file_size - 1))
    buffer = memoryview(bytearray(data.draw(st.integers(1, layout.file_size - offset))))
    layout.fill(SOME, offset, buffer)
    assert bytes(buffer) == whole[offset : offset + len(buffer)]


def test_a_save_from_the_tensors_is_exact(tmp_path: Path, ranks: Ranks) -> None:
    for rank, writer in enumerate(ranks.writers):
        writer.save(order(10, rank, tmp_path), stream_of(10, rank))
    assert all(outcome.ok for outcome in ranks.done()), ranks.outcomes
    assert start([FileTier(tmp_path)], WIDE).version == 10


# --- faults ---


def test_a_persister_killed_in_the_middle_is_given_the_rest_again(tmp_path: Path, ranks: Ranks) -> None:
    killed = threading.Event()

    def around(fill: Fill, offset: int, buffer: memoryview) -> None:
        if offset >= manifest.CHUNK and not killed.is_set():
            killed.set()
            os.kill(ranks.writers[0].pid, signal.SIGKILL)
        fill(offset, buffer)

    ranks.writers[0].save(order(10, 0, tmp_path), stream_of(10, 0, around))
    ranks.writers[1].save(order(10, 1, tmp_path), stream_of(10, 1))
    assert all(outcome.ok for outcome in ranks.done()), ranks.outcomes
    assert killed.is_set() and start([FileTier(tmp_path)], WIDE).version == 10


def test_a_rank_that_goes_on_before_the_end_commits_nothing(tmp_path: Path, ranks: Ranks) -> None:
    for rank, writer in enumerate(ranks.writers):
        writer.save(order(10, rank, tmp_path), stream_of(10, rank))
    ranks.done()
    reached, go_on = threading.Event(), threading.Event()

    def around(fill: Fill, offset: int, buffer: memoryview) -> None:
        if offset >= manifest.CHUNK:
            reached.set()
            go_on.wait(LIMIT_S)
        fill(offset, buffer)

    stream = stream_of(20, 1, around)
    ranks.writers[0].save(order(20, 0, tmp_path), stream_of(20, 0))
    ranks.writers[1].save(order(20, 1, tmp_path), stream)
    assert reached.wait(LIMIT_S)
    closing = threading.Thread(target=stream.close)
    closing.start()
    go_on.set()
    closing.join(LIMIT_S)
    assert not closing.is_alive()
    outcomes = ranks.done()
    assert not any(outcome.ok for outcome in outcomes)
    assert "the rank went on before all of its state was saved" in outcomes[1].notes[0], outcomes
    assert start([FileTier(tmp_path)], WIDE).version == 10


def test_a_persister_that_hangs_keeps_nobody(tmp_path: Path, ranks: Ranks) -> None:
    stopped = threading.Event()

    def around(fill: Fill, offset: int, buffer: memoryview) -> None:
        if offset >= manifest.CHUNK and not stopped.is_set():
            os.kill(ranks.writers[0].pid, signal.SIGSTOP)
            stopped.set()
        fill(offset, buffer)

    stream = stream_of(10, 0, around)
    ranks.writers[0].save(order(10, 0, tmp_path), stream)
    assert stopped.wait(LIMIT_S) and not ranks.writers[0].wait(0.5)
    stream.close()
    ranks.writers[0].kill()
    assert ranks.writers[0].wait(LIMIT_S) and not ranks.outcomes[0][-1].ok


def test_a_closed_stream_answers_nobody(tmp_path: Path, ranks: Ranks) -> None:
    stream = stream_of(10, 0)
    stream.close()
    ranks.writers[0].save(order(10, 0, tmp_path, deadline_s=0.2), stream)
    (outcome, *_) = [told[-1] for told in ranks.outcomes if ranks.writers[0].wait(LIMIT_S) and told]
    assert not outcome.ok


def test_the_second_place_gets_all_of_it_when_the_first_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = FileTier(tmp_path / "one"), FileTier(tmp_path / "two")
    write = FileTier.put_large

    def put_large(self: FileTier, path: str, source: Source, size: int, chunk: int) -> list[str]:
        if self.root == one.root:
            source(0, chunk)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, path, source, size, chunk)

    monkeypatch.setattr(FileTier, "put_large", put_large)

    def save(rank: int) -> Outcome:
        stream = stream_of(10, rank)
        told = order(10, rank, one.root, two.root)
        outcome = list(carry_out(told, Streamed(stream.connect()), lambda: {told.id}))[-1]
        stream.close()
        return outcome

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(save, range(2)))
    assert all(outcome.ok and outcome.url == two.url for outcome in outcomes), outcomes
    assert start([two], WIDE).version == 10


# --- when there is no room ---


def test_no_more_memory_is_taken_than_is_allowed() -> None:
    fd = os.memfd_create("small")
    try:
        stager = Stager(Arena(fd), overlap=False, most=1 << 20)
        with pytest.raises(
            NoRoom, match=r"no memory for 2 snapshots of .* MiB each: 1.0 MiB are allowed by snapshot_memory"
        ):
            stager.stage(1, pieces(1, 0, 1, WIDE), b"")
        assert os.fstat(fd).st_size == 0
    finally:
        os.close(fd)


def test_room_that_is_made_beside_the_training_and_does_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "LARGE", 1 << 20)
    fd = os.memfd_create("large")
    try:
        stager, mine = Stager(Arena(fd), most=1 << 20), pieces(1, 0, 1, WIDE)
        assert not stager.stage(1, mine, b""), "it is only being made"
        with pytest.raises(NoRoom):
            while not stager.stage(1, mine, b""):
                pass
    finally:
        os.close(fd)


def test_what_was_taken_is_given_back_when_the_machine_has_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter([1 << 30, 1 << 10])
    monkeypatch.setattr(room, "memory_left", lambda: next(left))
    fd = os.memfd_create("more")
    try:
        with pytest.raises(OSError, match="the machine can spare 256 MiB"):
            room.take(fd, 2 * room.PIECE)
        assert os.fstat(fd).st_size == 0
    finally:
        os.close(fd)


def test_the_narrowest_limit_above_this_process_counts(tmp_path: Path) -> None:
    def put(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    put("proc/meminfo", "MemTotal: 1000000 kB\nMemFree: 1 kB\nMemAvailable: 600000 kB\n")
    assert room.memory_left(tmp_path) == 600_000 * 1024 - 0.02 * 1_000_000 * 1024
    put("proc/self/cgroup", "0::/pod/job\n")
    put("sys/fs/cgroup/pod/job/memory.max", "max\n")
    put("sys/fs/cgroup/pod/memory.max", "1000000\n")
    put("sys/fs/cgroup/pod/memory.current", "700000\n")
    put("sys/fs/cgroup/pod/memory.stat", "anon 500000\ninactive_file 100000\nactive_file 50000\n")
    assert room.memory_left(tmp_path) == 1_000_000 - 700_000 + 150_000 - 20_000
    put("proc/self/cgroup", "garbage\n")
    put("proc/meminfo", "garbage\n")
    assert room.memory_left(tmp_path) > 1 << 60  # nothing is known: the kernel decides


ALONE = """
import sys, torch, rerail
from rerail.checkpoint import staging
staging.LARGE = 1 << 10
job = rerail.join()
model = torch.nn.Linear(300, 300, dtype=getattr(torch, sys.argv[2]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.track(model=model, optimizer=optimizer)
job.checkpoints(sys.argv[1], when=int(sys.argv[3]))
for step in job.steps(until=5):
    with job.step():
        model(torch.ones(2, 300, dtype=getattr(torch, sys.argv[2]))).abs().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def alone(*args: object) -> str:
    """What a job of one rank says whose snapshots do not fit, which it finds out beside the training."""
    env = {**os.environ, "RERAIL_SNAPSHOT_MEMORY": "0"}
    command = [sys.executable, "-c", ALONE, *map(str, args)]
    told = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert told.returncode == 0, told.stderr
    return told.stderr


@pytest.mark.timeout(120)
@pytest.mark.parametrize("every", [2, 1000])
def test_a_job_that_learns_late_that_there_is_no_room_saves_all_the_same(tmp_path: Path, every: int) -> None:
    said = alone(tmp_path, "float32", every)
    assert said.count("checkpoints are written straight from the tensors") == 1, said
    assert [found.id.step for found in catalog.folders(FileTier(tmp_path)) if found.committed][-1] == 5, said


@pytest.mark.timeout(120)
def test_a_state_that_cannot_be_saved_at_all_is_told_and_trained_on(tmp_path: Path) -> None:
    said = alone(tmp_path, "complex128", 2)
    assert "left out: tensors of type torch.complex128 cannot be saved" in said, said
    assert not any(found.committed for found in catalog.folders(FileTier(tmp_path)))


@pytest.mark.parametrize("size", ["8GB", "-1GiB", "lots", "1"])
def test_a_size_that_is_none(size: str) -> None:
    with pytest.raises(ConfigError, match="snapshot_memory"):
        bytes_of(size)


def test_sizes() -> None:
    assert (bytes_of("0"), bytes_of("1.5MiB")) == (0, 3 << 19)
