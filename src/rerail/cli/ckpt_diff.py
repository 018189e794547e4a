"""`rerail ckpt diff A B`: turns two steps into what is different between their tensors, bit by bit.

Both are read in pieces, so that memory does not grow with the model. Called by `cli.ckpt`.
"""

from __future__ import annotations

import argparse

import msgspec
import torch

from rerail.checkpoint.catalog import Saved, Step
from rerail.checkpoint.export import bytes_of, stream
from rerail.checkpoint.header import SIZES
from rerail.cli.ckpt_roots import clean, opened, place_at, progress
from rerail.errors import UsageError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SHOWN = 40
"""Lines of one kind; --json has them all."""


class Difference(msgspec.Struct, kw_only=True):
    """One tensor that is not the same."""

    name: str
    elements: int
    differ: int
    largest: float | None
    """Largest absolute difference; None where it cannot be said, because a side is not a number or infinite."""


class Comparison(msgspec.Struct, kw_only=True):
    """Everything that is different."""

    a: str
    b: str
    equal: bool
    compared: int
    only_in_a: list[str]
    only_in_b: list[str]
    other_kind: dict[str, tuple[str, str]]
    """By name: type and shape in A and in B."""
    differ: list[Difference]


def diff(args: argparse.Namespace) -> int:
    """Print what differs; the exit code is that of diff(1)."""
    a, b = opened(place_at(args.a)), opened(place_at(args.b))
    found = compare(a, b, args.what)
    print(msgspec.json.encode(found).decode() if args.json else _text(found))
    return 0 if found.equal else 1


def compare(a: Step, b: Step, what: str = "") -> Comparison:
    """Tensor by tensor; with `what` only those of the object tracked under that name."""
    of_a, of_b = _of(a, what), _of(b, what)
    if what and not of_a and not of_b:
        raise UsageError(f"neither has tensors of {what!r}")
    common = [name for name in of_a if name in of_b]
    other = {name: (_kind(of_a[name]), _kind(of_b[name])) for name in common if _kind(of_a[name]) != _kind(of_b[name])}
    same = [name for name in common if name not in other]
    differ = _differences(a, b, [(name, of_a[name]) for name in same])
    only_in_a = [name for name in of_a if name not in of_b]
    only_in_b = [name for name in of_b if name not in of_a]
    return Comparison(
        a=f"{a.tier.url}@{a.id.step}",
        b=f"{b.tier.url}@{b.id.step}",
        equal=not (differ or other or only_in_a or only_in_b),
        compared=len(same),
        only_in_a=only_in_a,
        only_in_b=only_in_b,
        other_kind=other,
        differ=differ,
    )


def _differences(a: Step, b: Step, same: list[tuple[str, Saved]]) -> list[Difference]:
    found: dict[str, Difference] = {}
    with progress("compared", sum(bytes_of(saved) for _, saved in same)) as advance:
        for (name, mine), (_, theirs) in zip(stream(a, same), stream(b, same), strict=True):
            advance(mine.numel() * mine.element_size())
            changed = _bits(mine) != _bits(theirs)
            count = int(changed.sum())
            if not count:
                continue
            one = found.setdefault(name, Difference(name=name, elements=0, differ=0, largest=0.0))
            one.differ += count
            gap = float((_wide(mine)[changed] - _wide(theirs)[changed]).abs().max())
            one.largest = None if one.largest is None or gap != gap or gap == float("inf") else max(one.largest, gap)
    for name, saved in same:
        if name in found:
            found[name].elements = bytes_of(saved) // SIZES[saved.dtype]
    return list(found.values())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers: a NaN equals itself, and 0 is not -0."""
    return tensor.reshape(-1).view(_BITS[tensor.element_size()])


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).to(torch.complex128 if tensor.is_complex() else torch.float64)


def _of(step: Step, what: str) -> dict[str, Saved]:
    inside = f"{what}."
    return {
        name: saved for name, saved in step.tensors().items() if not what or name.rpartition("/")[2].startswith(inside)
    }


def _kind(saved: Saved) -> str:
    return f"{saved.dtype} {list(saved.shape)}"


def _text(found: Comparison) -> str:
    if found.equal:
        return f"equal: {found.compared} tensors, bit for bit"
    lines = [f"A {found.a}", f"B {found.b}"]
    lines += _some([f"only in A   {clean(name)}" for name in found.only_in_a])
    lines += _some([f"only in B   {clean(name)}" for name in found.only_in_b])
    lines += _some(
        [f"other kind  {clean(name)}: {mine}, {theirs}" for name, (mine, theirs) in found.other_kind.items()]
    )
    lines += _some([f"differs     {clean(one.name)}: {_how_much(one)}" for one in found.differ])
    return "\n".join([*lines, f"{len(found.differ)} of {found.compared} tensors of the same kind differ"])


def _how_much(one: Difference) -> str:
    gap = "one side is not finite" if one.largest is None else f"by {one.largest:.3g} at most"
    return f"{one.differ:,} of {one.elements:,} elements, {gap}"


def _some(lines: list[str]) -> list[str]:
    return lines if len(lines) <= SHOWN else [*lines[:SHOWN], f"... and {len(lines) - SHOWN} more (--json has all)"]
