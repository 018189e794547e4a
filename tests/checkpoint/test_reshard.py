"""Saved in any boxes, read in any others: the bytes are the same, and only what is needed is read."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rerail.checkpoint import boxes, catalog, dtypes, manifest, reshard, shards, staging
from rerail.checkpoint.arena import Arena
from rerail.checkpoint.boxes import Box
from rerail.checkpoint.catalog import Step
from rerail.checkpoint.files import FileTier
from rerail.checkpoint.header import SIZES
from rerail.checkpoint.layout import Piece
from rerail.checkpoint.manifest import RankManifest
from rerail.checkpoint.reshard import Wanted
from rerail.checkpoint.saving import Order, carry_out
from rerail.checkpoint.staging import Stager
from rerail.errors import CheckpointError

CHUNK = 4096
DTYPES = [dtypes.dtype_of(code) for code in SIZES]
bounded = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
many = settings(max_examples=200, deadline=None)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a page, so that small tensors have several, and no room for small state that is not there."""
    monkeypatch.setattr(manifest, "CHUNK", CHUNK)
    monkeypatch.setattr(shards, "RankManifest", functools.partial(RankManifest, chunk=CHUNK))
    monkeypatch.setattr(staging, "SMALL_ROOM", 4096)


def save(root: Path, ranks: Sequence[Sequence[Piece]]) -> Step:
    """One save by several ranks, each with its own arena, in a thread because the first waits for the others."""

    def one(rank: int) -> bool:
        fd = os.memfd_create("arena")
        try:
            arena = Arena(fd)
            assert Stager(arena, slots=1, overlap=False).stage(1, ranks[rank], b"small")
            order = Order(
                version=1,
                epoch=1,
                generation=0,
                rank=rank,
                group=tuple(range(len(ranks))),
                world_size=len(ranks),
                tiers=(str(root),),
                read_back=False,
                deadline_s=20.0,
            )
            (outcome,) = carry_out(order, arena, set)
            assert outcome.ok, outcome.notes
            return outcome.ok
        finally:
            os.close(fd)

    with ThreadPoolExecutor(len(ranks)) as pool:
        assert all(pool.map(one, range(len(ranks))))
    (found,) = catalog.folders(FileTier(root))
    return catalog.open_step(found.tier, found.id)


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


# --- making tensors and boxes ---


def filled(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bytes at all, NaNs included; a bool is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(tuple(shape))


def bytes_of(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(s, s + n) for s, n in zip(box.start, box.shape, strict=True))]


def cut(box: Box, pieces: int, dice: random.Random) -> list[Box]:
    """Uneven parts that cover the box: rows, columns or a grid, some of them empty."""
    parts = [box]
    while len(parts) < pieces and box.shape:
        whole = parts.pop(dice.randrange(len(parts)))
        dim = dice.randrange(len(box.shape))
        at = dice.randint(0, whole.shape[dim])
        for start, length in ((0, at), (at, whole.shape[dim] - at)):
            parts.append(
                Box(
                    tuple(s + start if d == dim else s for d, s in enumerate(whole.start)),
                    tuple(length if d == dim else n for d, n in enumerate(whole.shape)),
                )
            )
    return parts


def any_box(shape: Sequence[int], dice: random.Random) -> Box:
    start = tuple(dice.randint(0, length) for length in shape)
    return Box(start, tuple(dice.randint(0, length - at) for at, length in zip(start, shape, strict=True)))


def target(box: Box, dtype: torch.dtype, way: int) -> torch.Tensor:
    """Room for a box: contiguous, transposed, or every second element of something larger."""
    if way == 1 and box.shape:
        return filled(box.shape[::-1], dtype, 7).permute(*reversed(range(len(box.shape))))
    if way == 2 and box.shape:
        larger = filled([2 * length for length in box.shape], dtype, 7)
        return larger[tuple(slice(0, 2 * length, 2) for length in box.shape)]
    return filled(box.shape, dtype, 7)


class Spec(NamedTuple):
    """One tensor of a job."""

    name: str
    tensor: torch.Tensor
    parts: list[Box]


def described(index: int, shape: Sequence[int], dtype: torch.dtype, pieces: int, dice: random.Random) -> Spec:
    tensor = filled(shape, dtype, dice.randrange(1 << 30))
    return Spec(f"t{index}", tensor, cut(Box((0,) * len(shape), tuple(shape)), pieces, dice))


def dealt(specs: Sequence[Spec], ranks: int, dice: random.Random) -> list[list[Piece]]:
    """Each part to one rank or another; a rank may have several of one tensor, or none of any."""
    hands: list[list[Piece]] = [[] for _ in range(ranks)]
    for name, tensor, parts in specs:
        for box in parts:
            piece = Piece(name, part_of(tensor, box), tuple(tensor.shape), box.start, saved=True)
            hands[dice.randrange(ranks)].append(piece)
    return hands


shapes = st.lists(st.one_of(st.integers(0, 9), st.sampled_from([1, 31, 64])), max_size=4).filter(
    lambda shape: math.prod(shape) <= 6000
)
tensors = st.lists(st.tuples(shapes, st.sampled_from(DTYPES), st.integers(1, 6)), min_size=1, max_size=6)


@bounded
@given(tensors, st.integers(1, 3), st.integers(0, 2**31))
def test_any_boxes_are_read_from_any_others(
    chosen: list[tuple[list[int], torch.dtype, int]], ranks: int, seed: int
) -> None:
    dice = random.Random(seed)
    specs = [described(index, *one, dice) for index, one in enumerate(chosen)]
    with folder() as root:
        step = save(root, dealt(specs, ranks, dice))
        wanted: list[Wanted] = []
        right: list[bytes] = []
        for name, tensor, _ in specs:
            whole = Box((0,) * tensor.dim(), tuple(tensor.shape))
            for box in [*cut(whole, dice.randint(1, 5), dice), any_box(tensor.shape, dice)]:
                wanted.append(Wanted(name, target(box, tensor.dtype, dice.randrange(3)), whole.shape, box.start))
                right.append(bytes_of(part_of(tensor, box)))
        read = reshard.load(step, wanted)
        assert [bytes_of(one.tensor) for one in wanted] == right
        assert read <= most_to_read(step, wanted)


def most_to_read(step: Step, wanted: Sequence[Wanted]) -> int:
    """Whole rows of the saved boxes, from the first to the last that is needed, rounded up to chunks."""
    chunks: set[tuple[int, int]] = set()
    for name, tensor, _, start in wanted:
        saved = step.tensors()[name]
        for box, rank, at in saved.parts:
            common = boxes.intersection(box, Box(start, tuple(tensor.shape)))
            if common is not None:
                row = math.prod(box.shape[1:]) * SIZES[saved.dtype]
                first = common.start[0] - box.start[0] if box.shape else 0
                rows = common.shape[0] if box.shape else 1
                end = at + (first + rows) * row
                chunks.update((rank, index) for index in range((at + first * row) // CHUNK, -(-end // CHUNK)))
    return sum(min(CHUNK, step.manifests[rank].size - index * CHUNK) for rank, index in chunks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = filled((7, 5), dtype, 1)
    pieces = [[Piece("w", tensor[:3], (7, 5), (0, 0), True)], [Piece("w", tensor[3:], (7, 5), (3, 0), True)]]
    step = save(tmp_path, pieces)
    columns = torch.zeros(7, 2, dtype=dtype)
    reshard.load(step, [Wanted("w", columns, (7, 5), (0, 3))])
    assert bytes_of(columns) == bytes_of(tensor[:, 3:])
    assert bytes_of(reshard.whole_tensor(step, "w")) == bytes_of(tensor)


def test_only_the_chunks_that_are_needed_are_read(tmp_path: Path) -> None:
    """One row of the tensor is one chunk of a file."""
    tensor = filled((64, 1024), torch.float32, 1)
    halves = [[Piece("w", tensor[start : start + 32], (64, 1024), (start, 0), True)] for start in (0, 32)]
    step = save(tmp_path, halves)

    def read(start: tuple[int, int], shape: tuple[int, int]) -> int:
        into = torch.zeros(shape)
        count = reshard.load(step, [Wanted("w", into, (64, 1024), start)])
        assert bytes_of(into) == bytes_of(part_of(tensor, Box(start, shape)))
        return count // CHUNK

    assert read((10, 0), (3, 1024)) == 3
    assert read((30, 0), (4, 1024)) == 4, "two rows of each rank"
    assert read((5, 7), (1, 1)) == 1
    assert read((20, 100), (10, 4)) == 10, "a column of ten rows"
    assert read((0, 100), (64, 4)) == 64, "a column of all"
    assert read((0, 0), (0, 1024)) == 0


def test_many_targets_share_the_chunks_they_need(tmp_path: Path) -> None:
    tensor = filled((4, 1024), torch.float32, 1)
    step = save(tmp_path, [[Piece("w", tensor, (4, 1024), (0, 0), True)]])
    parts = [Wanted("w", torch.zeros(1, 256), (4, 1024), (2, column)) for column in range(0, 1024, 256)]
    assert reshard.load(step, parts) == CHUNK
    assert b"".join(bytes_of(part.tensor) for part in parts) == bytes_of(tensor[2])


def test_memory_for_spans_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reshard, "ROOM", 10_000)
    tensor = filled((64, 64), torch.float32, 1)
    step = save(tmp_path, [[Piece("w", tensor, (64, 64), (0, 0), True)]])
    parts = [Wanted("w", torch.zeros(64, 4), (64, 64), (0, column)) for column in range(0, 64, 4)]
    reshard.load(step, parts)
    assert bytes_of(torch.cat([part.tensor for part in parts], 1)) == bytes_of(tensor)


# --- what does not fit ---


@pytest.mark.parametrize(
    "wrong",
    [
        Wanted("other", torch.zeros(4, 3), (4, 3), (0, 0)),
        Wanted("w", torch.zeros(4, 4), (4, 4), (0, 0)),
        Wanted("w", torch.zeros(12), (12,), (0,)),
        Wanted("w", torch.zeros(4, 3, dtype=torch.float64), (4, 3), (0, 0)),
        Wanted("w", torch.zeros(4, 3, dtype=torch.int32), (4, 3), (0, 0)),
        Wanted("w", torch.zeros(4, 3), (4, 3), (1, 0)),
        Wanted("w", torch.zeros(4, 3), (4, 3), (-1, 0)),
        Wanted("w", torch.zeros(4, 3), (4, 3), (0,)),
        Wanted("w", torch.zeros(0, 3, dtype=torch.complex128), (4, 3), (0, 0)),
    ],
    ids=[
        "name",
        "shape",
        "dimensions",
        "wider",
        "integer",
        "behind the end",
        "before the start",
        "start",
        "unknown type",
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_changed(tmp_path: Path, wrong: Wanted) -> None:
    step = save(tmp_path, [[Piece("w", torch.ones(4, 3), (4, 3), (0, 0), True)]])
    fine = Wanted("w", torch.zeros(4, 3), (4, 3), (0, 0))
    with pytest.raises(CheckpointError, match=f"^{wrong.name!r}"):
        reshard.load(step, [fine, wrong])
    assert not fine.tensor.any(), "the first was filled although the second does not fit"


def test_a_flipped_bit_is_found_where_it_is_read_and_only_there(tmp_path: Path) -> None:
    tensor = filled((8, 1024), torch.float32, 1)
    step = save(tmp_path, [[Piece("w", tensor, (8, 1024), (0, 0), True)]])
    file = tmp_path / step.id.folder / step.manifests[0].file
    data = bytearray(file.read_bytes())
    data[step.tensors()["w"].parts[0].at + 5 * 4096 + 17] ^= 1
    file.write_bytes(data)
    rows = torch.zeros(2, 1024)
    reshard.load(step, [Wanted("w", rows, (8, 1024), (3, 0))])
    assert bytes_of(rows) == bytes_of(tensor[3:5])
    with pytest.raises(CheckpointError, match="checksum"):
        reshard.load(step, [Wanted("w", rows, (8, 1024), (4, 0))])


# --- the arithmetic, against counting ---


def cells(box: Box) -> list[tuple[int, ...]]:
    """Every element of a box, in the order it lies in memory."""
    return list(itertools.product(*(range(s, s + n) for s, n in zip(box.start, box.shape, strict=True))))


def boxes_of(dims: int) -> st.SearchStrategy[Box]:
    numbers: Callable[[int], st.SearchStrategy[tuple[int, ...]]] = lambda most: st.tuples(  # noqa: E731
        *[st.integers(0, most)] * dims
    )
    return st.builds(Box, numbers(4), numbers(4))


pairs = st.integers(0, 4).flatmap(lambda dims: st.tuples(boxes_of(dims), boxes_of(dims)))


@many
@given(pairs)
def test_runs_cover_just_what_both_boxes_have(pair: tuple[Box, Box]) -> None:
    source, into = pair
    there, here = cells(source), cells(into)
    found = [
        (there[run.source + offset], here[run.target + offset])
        for run in boxes.runs(source, into)
        for offset in range(run.length)
    ]
    assert all(one == other for one, other in found)
    assert sorted(one for one, _ in found) == sorted(set(there) & set(here))


@many
@given(pairs)
def test_an_intersection_is_what_both_have(pair: tuple[Box, Box]) -> None:
    common = boxes.intersection(*pair)
    assert set(cells(common) if common else []) == set(cells(pair[0])) & set(cells(pair[1]))


@many
@given(st.integers(0, 3).flatmap(lambda dims: st.lists(boxes_of(dims), max_size=6)))
def test_an_overlap_is_found_if_there_is_one(some: list[Box]) -> None:
    sets = [set(cells(box)) for box in some]
    shared = any(one & other for one, other in itertools.combinations(sets, 2))
    found = boxes.overlap(some)
    assert (found is not None) == shared
    if found is not None:
        assert set(cells(found[0])) & set(cells(found[1]))
