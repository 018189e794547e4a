"""Which checkpoint counts: turns what lies on the tiers into the newest step that is whole, or into reasons why not.

Only COMMIT is believed. A step whose COMMIT, manifests or shards are missing, changed or do not fit together is passed
over, with the reason, for the next older one. Called by the session on a start, and by `rerail ckpt`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rerail.checkpoint import boxes, collecting, names
from rerail.checkpoint.boxes import Box
from rerail.checkpoint.manifest import LARGEST, Commit, RankManifest, decode_commit, decode_rank
from rerail.checkpoint.names import StepId
from rerail.checkpoint.tiers import Tier
from rerail.errors import CheckpointError

LARGEST_WORD = 1 << 16


class Part(NamedTuple):
    """A box of a tensor, and where it lies."""

    box: Box
    rank: int
    at: int


class Saved(NamedTuple):
    """A tensor of the whole job as saved."""

    dtype: str
    shape: tuple[int, ...]
    parts: list[Part]


@dataclass(frozen=True)
class Step:
    """A committed step whose description is whole. Its data are checked as they are read."""

    tier: Tier
    id: StepId
    commit: Commit
    manifests: dict[int, RankManifest]

    @property
    def size(self) -> int:
        return sum(manifest.size for manifest in self.manifests.values())

    def tensors(self) -> dict[str, Saved]:
        """All tensors of the job by name."""
        return self._tensors

    @cached_property
    def _tensors(self) -> dict[str, Saved]:
        found: dict[str, Saved] = {}
        for rank, manifest in self.manifests.items():
            for name, tensor in manifest.tensors.items():
                saved = found.setdefault(name, Saved(tensor.dtype, tensor.shape, []))
                if (saved.dtype, saved.shape) != (tensor.dtype, tensor.shape):
                    raise CheckpointError(f"{name!r} is {tensor.dtype}{tensor.shape} on rank {rank}, not so elsewhere")
                saved.parts.extend(Part(one.box, rank, one.at) for one in tensor.boxes)
        return found


class Found(NamedTuple):
    """A step folder on a tier."""

    tier: Tier
    id: StepId
    committed: bool


def folders(tier: Tier) -> list[Found]:
    """Every step folder, oldest first."""
    steps = sorted(step for name in tier.names() if (step := names.step_of(name)) is not None)
    return [Found(tier, step, names.COMMIT in tier.names(step.folder)) for step in steps]


@collecting.paused()
def open_step(tier: Tier, step: StepId) -> Step:
    """A committed step with all its manifests, checked against each other. CheckpointError says what is wrong."""
    if names.DISTRUSTED in tier.names(step.folder):
        raise CheckpointError(tier.get(f"{step.folder}/{names.DISTRUSTED}", LARGEST_WORD).decode(errors="replace"))
    try:
        commit = decode_commit(tier.get(f"{step.folder}/{names.COMMIT}", LARGEST), step)
    except FileNotFoundError:
        raise CheckpointError("it was never committed") from None
    manifests = {}
    for rank in sorted(map(int, commit.ranks)):
        try:
            data = tier.get(f"{step.folder}/{names.manifest_name(rank)}", LARGEST)
            manifests[rank] = decode_rank(data, commit, rank)
            file = manifests[rank].file
            if file and tier.size(f"{step.folder}/{file}") != manifests[rank].size:
                raise CheckpointError(f"{file} has another size than when it was saved")
        except FileNotFoundError as error:
            raise CheckpointError(f"the files of rank {rank} are gone ({error.filename})") from None
    found = Step(tier, step, commit, manifests)
    check_whole(found)
    return found


def check_whole(step: Step) -> None:
    """Every element of every tensor is in it exactly once."""
    expected = step.commit.world_size - len(step.commit.vacant)
    if len(step.manifests) != expected:
        raise CheckpointError(f"{len(step.manifests)} of {expected} ranks are in it")
    for name, saved in step.tensors().items():
        if len(saved.parts) == 1 and saved.parts[0].box.shape == saved.shape:
            continue
        volume = Box((), saved.shape).volume
        covered = sum(part.box.volume for part in saved.parts)
        if covered != volume:
            raise CheckpointError(f"{name!r} has {volume} elements, {covered} of them were saved")
        if boxes.overlap([part.box for part in saved.parts]) is not None:
            raise CheckpointError(f"two parts of {name!r} overlap")


def distrust(tiers: Iterable[Tier], step: StepId, why: str) -> None:
    """Let no start take this step any more, wherever it lies. It may not be committed yet."""
    for tier in tiers:
        with contextlib.suppress(OSError, CheckpointError):
            if tier.names(step.folder):
                tier.put(f"{step.folder}/{names.DISTRUSTED}", why.encode()[:LARGEST_WORD])


def candidates(tiers: Sequence[Tier]) -> Iterator[Found]:
    """Committed steps of all tiers, newest first; of equals, that on the earlier tier first."""
    seen: Iterable[tuple[int, Found]] = (
        (order, found) for order, tier in enumerate(tiers) for found in folders(tier) if found.committed
    )
    for _, found in sorted(seen, key=lambda pair: (tuple(-part for part in pair[1].id), pair[0])):
        yield found


def whole(
    tiers: Sequence[Tier], passed_over: Callable[[Found, Exception], None], number: int | None = None
) -> Iterator[Step]:
    """Steps whose description is whole, newest first; of this number, if one is given."""
    for found in candidates(tiers):
        if number is not None and found.id.step != number:
            continue
        try:
            yield open_step(found.tier, found.id)
        except (OSError, CheckpointError) as error:
            passed_over(found, error)


def newest(tiers: Sequence[Tier], passed_over: Callable[[str], None]) -> Step | None:
    """The newest step whose description is whole; why newer ones are not goes to `passed_over`."""

    def say(found: Found, error: Exception) -> None:
        passed_over(f"{found.tier.url}/{found.id.folder} is passed over: {error}")

    return next(whole(tiers, say), None)
