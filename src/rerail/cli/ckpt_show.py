"""`rerail ckpt show ROOT`: turns the description of a step into words: tensors, how they are split, and the small state.

Reads no tensor data and executes nothing of what it reads. Called by `cli.ckpt`.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import msgspec
import torch

from rerail.checkpoint.catalog import Saved, Step
from rerail.checkpoint.header import SIZES
from rerail.cli.ckpt_roots import clean, look, metrics_text, opened, place_at, size_text, when
from rerail.errors import StateError, UsageError
from rerail.session import plain
from rerail.session.small import Small, decode

SHOWN = 6
"""Entries of a list or dictionary that are shown."""


def show(args: argparse.Namespace) -> int:
    """Print one step."""
    step = opened(place_at(args.root, args.step))
    if args.rank not in step.manifests:
        raise UsageError(f"--rank {args.rank}: this step was saved by ranks {', '.join(map(str, step.manifests))}")
    tensors = step.tensors()
    small = small_in_words(step.manifests[args.rank].small)
    if args.json:
        print(msgspec.json.encode(_as_json(step, tensors, args.rank, small)).decode())
        return 0
    print("\n".join([*_heading(step), *_small_lines(args.rank, small), *_tensor_lines(tensors)]))
    return 0


def _as_json(step: Step, tensors: dict[str, Saved], rank: int, small: dict[str, str]) -> dict[str, Any]:
    return {
        **msgspec.to_builtins(look(step.tier, step.id)),
        "small": {"rank": rank, **small},
        "tensors": [
            {
                "name": name,
                "dtype": saved.dtype,
                "shape": saved.shape,
                "size": _bytes(saved),
                "split": split(saved),
                "parts": [
                    {"rank": part.rank, "start": part.box.start, "shape": part.box.shape} for part in saved.parts
                ],
            }
            for name, saved in tensors.items()
        ],
    }


def _heading(step: Step) -> list[str]:
    row, commit = look(step.tier, step.id), step.commit
    state = "every byte was read back" if row.verified else clean(row.why) or "not read back yet"
    lines = [
        f"step {step.id.step:,}   {when(commit.saved_at)}   {size_text(step.size)}   {_ranks(commit.world_size)}   {state}",
        f"  {step.tier.url}/{step.id.folder}",
        _line("job", f"{clean(commit.job) or '(no name)'}, the {_nth(step.id.epoch)} to write here"),
    ]
    if step.id.generation:
        lines.append(_line("generation", f"{step.id.generation}: ranks were replaced so many times before"))
    if commit.metrics:
        lines.append(_line("metrics", metrics_text(commit.metrics)))
    if commit.layout:
        lines.append(_line("layout", " · ".join(f"{clean(name)}: {clean(how)}" for name, how in commit.layout.items())))
    versions = " · ".join(f"{clean(name)} {clean(value)}" for name, value in commit.versions.items())
    return [*lines, *([_line("versions", versions)] if versions else [])]


# --- small state ---


def small_in_words(data: bytes) -> dict[str, str]:
    """What the small state of a rank says, by subject. One that cannot be read is said to be so."""
    try:
        small = decode(data)
        objects = plain.decode(small.objects)
    except (msgspec.DecodeError, StateError, ValueError, RuntimeError, RecursionError) as error:
        return {"small state": f"cannot be read: {error}"}
    said = {"next step": f"{small.version:,}", "data": _data(small), "random": _random(small)}
    for name, value in objects.items() if isinstance(objects, dict) else ():
        subject, _, kind = str(name).partition(":")
        if kind == "groups" and isinstance(value, list):
            said[subject] = "; ".join(brief(_telling(group)) for group in value) or "no groups"
        elif kind == "scalars" and isinstance(value, dict):
            if value:
                said[f"{subject} scalars"] = f"of {len(value)} parameters"
        else:
            said[str(name)] = brief(_telling(value))
    if small.buffers:
        said["buffers"] = f"{len(small.buffers)} that change in the forward pass: {brief(sorted(small.buffers))}"
    return said


def _telling(state: Any) -> Any:
    """Without what is private to its class, and without switches that are off."""
    if not isinstance(state, dict):
        return state
    return {
        key: value
        for key, value in state.items()
        if not str(key).startswith("_") and value is not None and value is not False
    } or state


def _data(small: Small) -> str:
    own = ", with the loader's own state" if small.position.loader is not None else ""
    samples = f", {small.position.samples:,} samples taken" if small.position.samples else ""
    return f"epoch {small.position.epoch}, batch {small.position.index} is next{samples}{own}"


def _random(small: Small) -> str:
    kinds = ["Python", "torch"]
    if small.random.numpy is not None:
        kinds.append("NumPy")
    if small.random.devices:
        kinds.append(f"{len(small.random.devices)} devices")
    return ", ".join(kinds)


def brief(value: Any, depth: int = 0) -> str:
    """Plain data on one line, cut short."""
    if isinstance(value, torch.Tensor):
        return f"{plain.dtype_name(value.dtype)}{list(value.shape)}" if value.numel() != 1 else str(value.item())
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        if set(value) == {"__tensor__"}:
            return "tensor, listed below"
        cells = [f"{clean(str(key))} {brief(item, depth + 1)}" for key, item in list(value.items())[: 2 * SHOWN]]
        more = [f"and {len(value) - 2 * SHOWN} more"] if len(value) > 2 * SHOWN else []
        return ", ".join([*cells, *more]) if depth == 0 else "{" + ", ".join([*cells, *more]) + "}"
    if isinstance(value, list | tuple):
        cells = [brief(item, depth + 1) for item in value[:SHOWN]]
        return "[" + ", ".join([*cells, *(["..."] if len(value) > SHOWN else [])]) + "]"
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    text = clean(str(value))
    return text if len(text) <= 60 else text[:59] + "…"


def _small_lines(rank: int, small: dict[str, str]) -> list[str]:
    return [f"state of rank {rank}", *(_line(clean(name), text) for name, text in small.items())]


# --- tensors ---


def split(saved: Saved) -> str:
    """How a tensor is divided, in words."""
    parts = [part for part in saved.parts if part.box.volume] or saved.parts
    ranks = sorted({part.rank for part in parts})
    if len(parts) == 1:
        return f"whole, rank {ranks[0]}"
    cuts = [len({part.box.start[dim] for part in parts}) for dim in range(len(saved.shape))]
    where = f"{_ranks_named(ranks)}"
    along = [dim for dim, count in enumerate(cuts) if count > 1]
    if len(along) == 1:
        return f"{len(parts)} parts along dimension {along[0]}, {where}"
    if math.prod(cuts) == len(parts):
        return f"{' x '.join(str(cuts[dim]) for dim in along)} parts, {where}"
    return f"{len(parts)} parts, {where}"


def _tensor_lines(tensors: dict[str, Saved]) -> list[str]:
    total = sum(_bytes(saved) for saved in tensors.values())
    rows = [
        (clean(name), saved.dtype, str(list(saved.shape)), size_text(_bytes(saved)), split(saved))
        for name, saved in tensors.items()
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    lines = [f"tensors: {len(tensors):,}, {size_text(total)}"]
    for row in rows:
        cells = [row[0].ljust(widths[0]), row[1].ljust(widths[1]), row[2].ljust(widths[2]), row[3].rjust(widths[3])]
        lines.append("  " + "  ".join([*cells, row[4]]))
    return lines


def _bytes(saved: Saved) -> int:
    return math.prod(saved.shape) * SIZES[saved.dtype]


def _line(name: str, text: str) -> str:
    return f"  {name:<12}{text}" if len(name) < 12 else f"  {name}  {text}"


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count != 1 else ''}"


def _ranks_named(ranks: list[int]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {shown}"


def _nth(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
