"""Boxes: rectangular parts of a tensor. Pure arithmetic for reading only what a new layout needs.

A box is where it starts and how long it is in every dimension. Called by `checkpoint.manifest` and
`checkpoint.reshard`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A part of a tensor, in the tensor's own coordinates."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        return math.prod(self.shape)


class Run(NamedTuple):
    """Elements that lie one behind the other in both boxes: where in the source, where in the target, how many."""

    source: int
    target: int
    length: int


def intersection(one: Box, other: Box) -> Box | None:
    """What both cover; None if nothing."""
    start = tuple(max(a, b) for a, b in zip(one.start, other.start, strict=True))
    shape = tuple(
        min(a + m, b + n) - s
        for a, m, b, n, s in zip(one.start, one.shape, other.start, other.shape, start, strict=True)
    )
    return Box(start, shape) if all(length > 0 for length in shape) else None


def runs(source: Box, target: Box) -> Iterator[Run]:
    """The elements that both cover, as runs in row-major order of each."""
    common = intersection(source, target)
    if common is None:
        return
    if not common.shape:
        yield Run(0, 0, 1)
        return
    inner = _inner(source, target, common)
    count = math.prod(common.shape[inner:])
    source_strides, target_strides = strides(source.shape), strides(target.shape)
    from_source = [s - a for s, a in zip(common.start, source.start, strict=True)]
    from_target = [s - a for s, a in zip(common.start, target.start, strict=True)]
    base_source = sum(at * stride for at, stride in zip(from_source, source_strides, strict=True))
    base_target = sum(at * stride for at, stride in zip(from_target, target_strides, strict=True))
    for index in _indices(common.shape[:inner]):
        yield Run(
            base_source + sum(i * stride for i, stride in zip(index, source_strides, strict=False)),
            base_target + sum(i * stride for i, stride in zip(index, target_strides, strict=False)),
            count,
        )


def count_runs(source: Box, target: Box) -> int:
    """How many there would be."""
    common = intersection(source, target)
    return 0 if common is None else math.prod(common.shape[: _inner(source, target, common)])


def _inner(source: Box, target: Box, common: Box) -> int:
    """The dimension behind which all are whole in both boxes, so that one run spans them."""
    inner = max(len(common.shape) - 1, 0)
    while inner > 0 and common.shape[inner] == source.shape[inner] == target.shape[inner]:
        inner -= 1
    return inner


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements between neighbours in every dimension of a contiguous tensor."""
    found, step = [], 1
    for length in reversed(shape):
        found.append(step)
        step *= length
    return tuple(reversed(found))


def overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two of the boxes that share an element, if there are any."""
    some = [box for box in boxes if box.volume]
    if len(some) < 2:
        return None
    if not some[0].shape:
        return some[0], some[1]
    # along the dimension that parts them best, so that few have to be compared
    along = max(range(len(some[0].shape)), key=lambda dim: len({box.start[dim] for box in some}))
    some.sort(key=lambda box: box.start[along])
    for index, box in enumerate(some):
        end = box.start[along] + box.shape[along]
        for other in some[index + 1 :]:
            if other.start[along] >= end:
                break
            if intersection(box, other) is not None:
                return box, other
    return None


def _indices(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
        return
    for first in range(shape[0]):
        for rest in _indices(shape[1:]):
            yield (first, *rest)
