"""Turns what a person writes for a checkpoint (ROOT or ROOT@STEP) into steps, and steps into rows of a table.

Called by `cli.ckpt` and its neighbours. Imports no torch.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from rerail.checkpoint import catalog, names
from rerail.checkpoint.catalog import Found, Step
from rerail.checkpoint.manifest import LARGEST, Commit, decode_commit
from rerail.checkpoint.names import StepId
from rerail.checkpoint.tiers import Tier, tier_at
from rerail.errors import CheckpointError, UsageError

NOTE_LIMIT = 1 << 16
"""Bytes read of a note that lies beside a step."""
LINE_S = 10.0
"""Seconds between two lines about progress where there is no terminal."""


class Place(NamedTuple):
    """A root, and the step that was asked for: its number, its folder, or "" for the newest."""

    tier: Tier
    step: str


class Row(msgspec.Struct, kw_only=True):
    """One step folder, as `rerail ckpt ls` shows it."""

    root: str
    folder: str
    step: int
    epoch: int
    generation: int
    committed: bool = False
    whole: bool = False
    verified: bool = False
    saved_at: float | None = None
    size: int = 0
    ranks: int = 0
    job: str = ""
    metrics: dict[str, float] = {}
    versions: dict[str, str] = {}
    why: str = ""
    """Why it does not count; empty if it does."""

    @property
    def id(self) -> StepId:
        return StepId(self.epoch, self.step, self.generation)


# --- what was asked for ---


def root_at(text: str) -> Tier:
    """The tier of a root that is there."""
    if not text:
        raise UsageError("an empty name is no checkpoint root")
    tier = tier_at(text)
    local = "://" not in text or text.startswith("file://")
    if local and not Path(tier.url).is_dir():
        what = "is a file" if Path(tier.url).exists() else "does not exist"
        raise UsageError(f"{tier.url} {what}", hint="a checkpoint root is the directory given to job.checkpoints()")
    return tier


def place_at_step(text: str) -> bool:
    """Whether this names a step rather than a place."""
    root, at, last = text.rpartition("@")
    return bool(at and root and (last.isdecimal() or names.step_of(last)) and not Path(text).is_dir())


def place_at(text: str, step: str | None = None) -> Place:
    """ROOT or ROOT@STEP; `step` is what --step says."""
    if place_at_step(text):
        root, _, last = text.rpartition("@")
        if step is not None:
            raise UsageError(f"{text} names a step, and --step {step} another one")
        return Place(root_at(root), last)
    if step is not None and not step.isdecimal() and not names.step_of(step):
        raise UsageError(f"--step {step}: a number, or the name of a step's folder")
    return Place(root_at(text), step or "")


def find(place: Place) -> Found:
    """The folder that is meant: of several with the same number, the newest committed one."""
    there = catalog.folders(place.tier)
    if place.step:
        same = [
            one
            for one in there
            if place.step == one.id.folder or place.step.lstrip("0") == str(one.id.step).lstrip("0")
        ]
        if not same:
            known = ", ".join(str(one.id.step) for one in reversed(there[-8:])) or "none"
            raise UsageError(
                f"{place.tier.url} has no step {place.step}",
                hint=f"newest first, there are: {known} (rerail ckpt ls {place.tier.url})",
            )
        return max(same, key=lambda one: (one.committed, one.id))
    committed = [one for one in there if one.committed]
    if not committed:
        raise UsageError(f"no step is committed in {place.tier.url}", hint=f"rerail ckpt ls {place.tier.url}")
    return committed[-1]


def opened(place: Place) -> Step:
    """The step that is meant; without a number the newest that is whole, and a word about newer ones that are not."""
    if not place.step:
        find(place)
        for one in catalog.candidates([place.tier]):
            row = look(one.tier, one.id)
            if row.whole and not row.why:
                return catalog.open_step(one.tier, one.id)
            print(
                f"rerail ckpt: {one.tier.url}/{one.id.folder} is passed over: {clean(row.why.removeprefix('damaged: '))}",
                file=sys.stderr,
            )
        raise CheckpointError(f"no step in {place.tier.url} is whole")
    found = find(place)
    try:
        return catalog.open_step(found.tier, found.id)
    except CheckpointError as error:
        raise CheckpointError(f"{found.tier.url}/{found.id.folder}: {error}") from error


# --- rows ---


def look(tier: Tier, step: StepId) -> Row:
    """Everything that can be said about a folder without reading its tensors."""
    row = Row(root=tier.url, folder=step.folder, step=step.step, epoch=step.epoch, generation=step.generation)
    there = set(tier.names(step.folder))
    row.committed = names.COMMIT in there
    try:
        if not row.committed:
            row.size = _shard_bytes(tier, step, there)
            row.why = _unfinished(tier, step, there)
            return row
        _describe(row, decode_commit(tier.get(f"{step.folder}/{names.COMMIT}", LARGEST), step))
        whole = catalog.open_step(tier, step)
        row.size, row.whole = whole.size, True
        _judge(row, tier, step, whole.manifests, there)
    except (OSError, CheckpointError) as error:
        row.why = f"damaged: {error}"
        row.size = _shard_bytes(tier, step, there)
    return row


def _describe(row: Row, commit: Commit) -> None:
    row.saved_at, row.ranks, row.job = commit.saved_at, commit.world_size, commit.job
    row.metrics, row.versions = commit.metrics, commit.versions


def _judge(row: Row, tier: Tier, step: StepId, ranks: Collection[int], there: set[str]) -> None:
    """What the last reading of every byte found: an empty mark is good, one with a text says what is wrong."""
    marks = [mark for rank in ranks if (mark := names.verified_name(rank)) in there]
    said = [tier.get(f"{step.folder}/{mark}", NOTE_LIMIT).decode(errors="replace") for mark in marks]
    bad = [one for one in said if one]
    row.verified = len(marks) == len(ranks) and not bad
    if bad:
        row.whole, row.why = False, f"damaged: {bad[0]}"


def _unfinished(tier: Tier, step: StepId, there: set[str]) -> str:
    for name in sorted(there):
        if name == names.ABORT or name.endswith(".failed"):
            return f"given up: {tier.get(f'{step.folder}/{name}', NOTE_LIMIT).decode(errors='replace')}"
    if names.COPYING in there:
        return "unfinished: it is being copied here, or whoever did so died"
    ranks = sorted(rank for name in there if (rank := names.rank_of_manifest(name)) is not None)
    done = f"rank {', '.join(map(str, ranks[:8]))}{' ...' if len(ranks) > 8 else ''}" if ranks else "no rank"
    return f"unfinished: {done} has written; it is being saved, or its job died"


def _shard_bytes(tier: Tier, step: StepId, there: set[str]) -> int:
    total = 0
    for name in there:
        if names.SHARD.fullmatch(name):
            with contextlib.suppress(OSError):
                total += tier.size(f"{step.folder}/{name}")
    return total


# --- text ---


def table(rows: Sequence[Row]) -> str:
    """All steps, one line each; columns that say nothing are left out."""
    columns: dict[str, list[str]] = {
        "step": [str(row.step) for row in rows],
        "epoch": [str(row.epoch) for row in rows],
        "when": [when(row.saved_at) for row in rows],
        "size": [size_text(row.size) for row in rows],
        "ranks": [str(row.ranks or "-") for row in rows],
        "verified": [("yes" if row.verified else "no") if row.committed else "-" for row in rows],
        "job": [clean(row.job) for row in rows],
        "metrics": [metrics_text(row.metrics) for row in rows],
        "root": [row.root for row in rows],
        "state": [clean(row.why) or "whole" for row in rows],
    }
    for name in ("epoch", "root"):
        if len(set(columns[name])) == 1:
            del columns[name]
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    right = {"step", "epoch", "size", "ranks"}
    widths = {name: max(len(name), *map(len, cells)) for name, cells in columns.items()}
    lines = []
    for index in range(-1, len(rows)):
        cells = [(name, name if index < 0 else columns[name][index]) for name in columns]
        line = "  ".join(
            text.rjust(widths[name]) if name in right else text.ljust(widths[name]) for name, text in cells
        )
        lines.append(line.rstrip())
    return "\n".join(lines)


def when(at: float | None) -> str:
    if at is None:
        return "-"
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (ValueError, OverflowError, OSError):
        return "?"


def size_text(size: float) -> str:
    """Bytes as a person would write them."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1000
    raise AssertionError("unreachable")


def metrics_text(metrics: dict[str, float]) -> str:
    return ", ".join(f"{clean(name)} {value:.4g}" for name, value in metrics.items())


def clean(text: str) -> str:
    """A text from a file, safe to print: on one line, without control characters that a terminal would obey."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in " ".join(text.split()))


# --- progress ---


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Counts bytes: a bar on a terminal, a line now and then elsewhere. Both go to stderr."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda size: bar.advance(task, size)
        return
    lock, done, told = threading.Lock(), 0, time.monotonic()

    def advance(size: int) -> None:
        nonlocal done, told
        with lock:
            done += size
            if time.monotonic() - told >= LINE_S:
                told = time.monotonic()
                print(f"{what}: {size_text(done)} of {size_text(total)}", file=sys.stderr, flush=True)

    yield advance
