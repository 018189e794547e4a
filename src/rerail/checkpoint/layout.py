"""How a rank's tensors lie in its file and in memory: a safetensors header, what it saves, then what it only keeps.

Planned once and used for every save. `Layout.fill` gives any part of the file straight from the tensors, for a host that
has no room for a snapshot. Called by `checkpoint.staging` and `session.snapshotting`.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rerail.checkpoint import header
from rerail.checkpoint.arena import Entry, Meta
from rerail.checkpoint.dtypes import code_of

ALIGN = 64


class Piece(NamedTuple):
    """A tensor of this rank: its local part, which box of the whole it is, and whether this rank is the one to save it."""

    name: str
    tensor: torch.Tensor
    whole: tuple[int, ...]
    start: tuple[int, ...]
    saved: bool
    changing: bool = False
    """Changes in a forward pass, so that it is copied at once."""

    @property
    def size(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


class Layout(NamedTuple):
    """Where everything goes."""

    pieces: Sequence[Piece]
    key: list[Any]
    order: list[int]
    """Which piece each entry is."""
    entries: list[Entry]
    saved: int
    file_size: int
    image_size: int
    head: bytes

    def fits(self, pieces: Sequence[Piece]) -> bool:
        """Whether these pieces would be laid out alike."""
        return self.pieces is pieces or self.key == _key(pieces)

    def of_file(self, small: bytes) -> Meta:
        """What the file holds, and nothing that is kept in memory only."""
        return Meta(self.entries[: self.saved], self.saved, self.file_size, small)

    def fill(self, pieces: Sequence[Piece], offset: int, buffer: memoryview) -> None:
        """The bytes of the file from `offset` on, as the tensors are right now."""
        end, target = offset + len(buffer), torch.frombuffer(buffer, dtype=torch.uint8)
        if offset < len(self.head):
            here = self.head[offset:end]
            buffer[: len(here)] = here
        first = bisect.bisect_right(self.entries, offset, hi=self.saved, key=lambda entry: entry.at) - 1
        for index in range(max(0, first), self.saved):
            at, piece = self.entries[index].at, pieces[self.order[index]]
            if at >= end:
                break
            begin, until = max(offset, at), min(end, at + piece.size)
            if begin < until:
                flat = piece.tensor.detach().reshape(-1).view(torch.uint8)
                target[begin - offset : until - offset].copy_(flat[begin - at : until - at])


def plan(pieces: Sequence[Piece]) -> Layout:
    """A layout for these pieces."""
    saved = [index for index, piece in enumerate(pieces) if piece.saved]
    # wide types first: everything is aligned without a gap, which safetensors does not allow
    saved.sort(key=lambda index: -pieces[index].tensor.element_size())
    names = _unique([pieces[index].name for index in saved])
    described = [
        (name, code_of(pieces[index].tensor.dtype), tuple(pieces[index].tensor.shape))
        for name, index in zip(names, saved, strict=True)
    ]
    head, placed = header.build(described, {"format": "pt"})
    file_size = placed[-1].at + placed[-1].size if placed else len(head)
    at, places = file_size, [tensor.at for tensor in placed]
    rest = [index for index, piece in enumerate(pieces) if not piece.saved]
    for index in rest:
        at = -(-at // ALIGN) * ALIGN
        places.append(at)
        at += pieces[index].size
    entries = [_entry(pieces[index], place) for index, place in zip([*saved, *rest], places, strict=True)]
    return Layout(pieces, _key(pieces), [*saved, *rest], entries, len(saved), file_size, at, head)


def _key(pieces: Sequence[Piece]) -> list[Any]:
    return [(p.name, p.tensor.dtype, p.tensor.shape, p.tensor.device.type, p.whole, p.start, p.saved) for p in pieces]


def _entry(piece: Piece, at: int) -> Entry:
    tensor = piece.tensor
    return Entry(
        piece.name, code_of(tensor.dtype), tuple(tensor.shape), tensor.device.type, at, piece.whole, piece.start
    )


def _unique(names: list[str]) -> list[str]:
    """Keys for the file: a second part of the same tensor gets a number."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        count = seen.get(name, 0)
        seen[name] = count + 1
        found.append(name if not count else f"{name}#{count}")
    return found
