"""What a saved step says about itself: one manifest per rank, and the COMMIT that makes them count.

Nothing in them is believed before it is checked: names, sizes, ranges and checksums. A COMMIT vouches for the manifests
by their checksums, a manifest for its shard chunk by chunk, and COMMIT for itself by its last line. Called by
`checkpoint.saving` and `checkpoint.catalog`.
"""

from __future__ import annotations

import math
import re
from typing import TypeVar

import msgspec
import xxhash

from rerail.checkpoint import boxes, names
from rerail.checkpoint.boxes import Box
from rerail.checkpoint.header import SIZES
from rerail.checkpoint.names import StepId
from rerail.errors import CheckpointError

FORMAT = 1
LARGEST = 256 << 20
"""Bytes of a manifest. A million tensors stay below it."""
CHUNK = 4 << 20
"""Bytes under one checksum: the least that is read to verify anything."""
LEAST_CHUNK, MOST_CHUNK = 4096, 64 << 20
_MOST_ELEMENTS = 1 << 50
_MOST_DIMENSIONS = 64
_RANK = re.compile(r"0|[1-9]\d{0,8}", re.ASCII)

S = TypeVar("S")


class SavedBox(msgspec.Struct, frozen=True):
    """A part of a tensor in this rank's shard."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    at: int
    """Bytes from the start of the file."""

    @property
    def box(self) -> Box:
        return Box(self.start, self.shape)


class SavedTensor(msgspec.Struct, frozen=True):
    """A tensor of the whole job, and the parts of it that this rank saved."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[SavedBox, ...]


class RankManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one rank saved."""

    format: int = FORMAT
    epoch: int
    step: int
    generation: int
    rank: int
    world_size: int
    file: str
    """Name of the shard; empty if this rank had no tensors of its own to save."""
    size: int
    chunk: int = CHUNK
    hashes: tuple[str, ...]
    """xxh3-128 of every chunk of the file."""
    tensors: dict[str, SavedTensor]
    small: bytes
    """The exact small state of this rank: random state, place in the data, schedules."""


class _Format(msgspec.Struct):
    """All that is read before it is known whether the rest can be."""

    format: int


class RankEntry(msgspec.Struct, frozen=True):
    """COMMIT's word for one rank's manifest."""

    size: int
    xxh3: str


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a step count."""

    format: int = FORMAT
    epoch: int
    step: int
    generation: int
    world_size: int
    ranks: dict[str, RankEntry]
    vacant: tuple[int, ...] = ()
    """Ranks that were not there when it was saved; the others hold all that they would have saved."""
    saved_at: float
    """Seconds since 1970."""
    job: str = ""
    metrics: dict[str, float] = {}
    versions: dict[str, str] = {}
    layout: dict[str, str] = {}
    """How each tracked module was spread over the ranks, in words."""

    @property
    def id(self) -> StepId:
        return StepId(self.epoch, self.step, self.generation)


_formats, _manifests, _commits = (
    msgspec.json.Decoder(_Format),
    msgspec.json.Decoder(RankManifest),
    msgspec.json.Decoder(Commit),
)


def digest(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def encode(manifest: RankManifest) -> bytes:
    return msgspec.json.encode(manifest)


def encode_commit(commit: Commit) -> bytes:
    body = msgspec.json.format(msgspec.json.encode(commit), indent=2)
    return body + b"\n" + digest(body).encode() + b"\n"


def decode_commit(data: bytes, expected: StepId) -> Commit:
    """A COMMIT that is whole and of this directory, or CheckpointError."""
    body, _, _ = data[:-1].rpartition(b"\n")
    if data != body + b"\n" + digest(body).encode() + b"\n":
        raise CheckpointError("COMMIT does not match its own checksum")
    commit = _decode(body, _commits, "COMMIT")
    if commit.id != expected:
        raise CheckpointError(f"COMMIT is of {commit.id.folder}, but lies in {expected.folder}")
    if commit.world_size < 1 or not commit.ranks:
        raise CheckpointError("COMMIT names no ranks")
    for name, entry in commit.ranks.items():
        if not _RANK.fullmatch(name) or int(name) >= commit.world_size:
            raise CheckpointError(f"COMMIT names rank {name!r} of {commit.world_size}")
        if not 0 <= entry.size <= LARGEST:
            raise CheckpointError(f"COMMIT: the manifest of rank {name} would have {entry.size} bytes")
    seats = [*map(int, commit.ranks), *commit.vacant]
    if commit.vacant and sorted(seats) != list(range(commit.world_size)):
        raise CheckpointError(
            f"COMMIT names {len(commit.ranks)} ranks and {len(commit.vacant)} that were not there, of {commit.world_size}"
        )
    return commit


def decode_rank(data: bytes, commit: Commit, rank: int) -> RankManifest:
    """The manifest that `commit` vouches for, with every name, size and range checked."""
    entry = commit.ranks[str(rank)]
    where = names.manifest_name(rank)
    if len(data) != entry.size or digest(data) != entry.xxh3:
        raise CheckpointError(f"{where} is not the one that COMMIT vouches for")
    manifest = decode_own(data, commit.id, rank)
    if manifest.world_size != commit.world_size:
        raise CheckpointError(f"{where} is of {manifest.world_size} ranks, COMMIT of {commit.world_size}")
    return manifest


def decode_own(data: bytes, expected: StepId, rank: int) -> RankManifest:
    """The same without a COMMIT: nothing says yet that these bytes are right."""
    where = names.manifest_name(rank)
    manifest = _decode(data, _manifests, where)
    if StepId(manifest.epoch, manifest.step, manifest.generation) != expected or manifest.rank != rank:
        raise CheckpointError(f"{where} belongs to another save")
    check(manifest, where)
    return manifest


def check(manifest: RankManifest, where: str) -> None:
    """Every range lies inside the file, and no two share a byte."""
    shard = names.SHARD.fullmatch(manifest.file)
    if not (int(shard[1]) == manifest.rank if shard else manifest.file == "" and manifest.size == 0):
        raise CheckpointError(f"{where} names {manifest.file!r}, which is no shard of its rank")
    if not LEAST_CHUNK <= manifest.chunk <= MOST_CHUNK or manifest.chunk % LEAST_CHUNK or manifest.size < 0:
        raise CheckpointError(f"{where}: a file of {manifest.size} bytes in chunks of {manifest.chunk}")
    if len(manifest.hashes) != -(-manifest.size // manifest.chunk):
        raise CheckpointError(f"{where}: {len(manifest.hashes)} checksums for {manifest.size} bytes")
    ranges = []
    for name, tensor in manifest.tensors.items():
        _check_tensor(name, tensor, where)
        for saved in tensor.boxes:
            ranges.append((saved.at, saved.at + saved.box.volume * SIZES[tensor.dtype], name))
    ranges.sort()
    end = 0
    for begin, until, name in ranges:
        if begin < end or until > manifest.size:
            raise CheckpointError(f"{where}: the bytes of {name!r} overlap another's or lie outside the file")
        end = max(end, until)


def _check_tensor(name: str, tensor: SavedTensor, where: str) -> None:
    if tensor.dtype not in SIZES:
        raise CheckpointError(f"{where}: {name!r} has the unknown type {tensor.dtype!r}")
    shape = tensor.shape
    if len(shape) > _MOST_DIMENSIONS or any(not 0 <= length <= _MOST_ELEMENTS for length in shape):
        raise CheckpointError(f"{where}: {name!r} has the shape {list(shape[:_MOST_DIMENSIONS])}")
    if math.prod(max(length, 1) for length in shape) > _MOST_ELEMENTS:
        raise CheckpointError(f"{where}: {name!r} has the shape {list(shape)}")
    if len(tensor.boxes) == 1 and tensor.boxes[0].box == Box((0,) * len(shape), shape) and tensor.boxes[0].at >= 0:
        return  # all of it in one piece
    for saved in tensor.boxes:
        inside = len(saved.start) == len(saved.shape) == len(tensor.shape) and all(
            begin >= 0 and length >= 0 and begin + length <= whole
            for begin, length, whole in zip(saved.start, saved.shape, tensor.shape, strict=True)
        )
        if not inside or saved.at < 0:
            raise CheckpointError(f"{where}: a box of {name!r} lies outside its tensor")
    if boxes.overlap([saved.box for saved in tensor.boxes]) is not None:
        raise CheckpointError(f"{where}: two boxes of {name!r} overlap")


def _decode(data: bytes, decoder: msgspec.json.Decoder[S], where: str) -> S:
    try:
        written = _formats.decode(data).format
        if written > FORMAT:
            raise CheckpointError(f"{where} has format {written}, this rerail reads up to {FORMAT}: use a newer rerail")
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{where} is malformed: {error}") from error
