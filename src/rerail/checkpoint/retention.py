"""What to keep: turns the committed steps of a tier into those that may go. Deletes nothing that is not replaced.

The newest committed step always stays, and so does every step that a rule names. Called by `checkpoint.saving` after
each commit and by `rerail ckpt prune`.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from rerail.checkpoint import names
from rerail.checkpoint.manifest import LARGEST, Commit, decode_commit
from rerail.checkpoint.names import StepId
from rerail.checkpoint.tiers import Tier
from rerail.errors import CheckpointError, StateError


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """What stays. A step stays if any of these says so; without any, everything does."""

    last: int = 0
    """The newest so many."""
    every: int = 0
    """Steps that are a multiple of this."""
    best: int = 0
    """So many with the best `metric`."""
    metric: str = ""
    """Name of the metric; a leading `-` means that less is better, as in `-loss`."""

    def __post_init__(self) -> None:
        for name in ("last", "every", "best"):
            if getattr(self, name) < 0:
                raise StateError(f"Keep({name}={getattr(self, name)}): must not be negative")

    @classmethod
    def of(cls, wish: Keep | int | None) -> Keep:
        """As users say it: a rule, the newest so many, or everything."""
        if isinstance(wish, int) and wish < 1:
            raise StateError(f"keep={wish}: the number of steps to keep is at least 1; without keep, all stay")
        return cls(last=wish) if isinstance(wish, int) else (wish or cls())

    @property
    def everything(self) -> bool:
        return not (self.last or self.every or self.best)


def to_keep(commits: Iterable[Commit], verified: set[StepId], keep: Keep) -> set[StepId]:
    """The steps that stay: the newest, the newest that was read back, and what a rule names. Pure."""
    known = sorted(commits, key=lambda commit: commit.id)
    if keep.everything or not known:
        return {commit.id for commit in known}
    kept = {known[-1].id}
    kept.update([commit.id for commit in known if commit.id in verified][-1:])
    kept.update(commit.id for commit in known[max(0, len(known) - keep.last) :] if keep.last)
    kept.update(commit.id for commit in known if keep.every and commit.step % keep.every == 0)
    name = keep.metric.removeprefix("-")
    sign = -1.0 if keep.metric.startswith("-") else 1.0
    rated = sorted((commit for commit in known if name in commit.metrics), key=lambda c: (sign * c.metrics[name], c.id))
    kept.update(commit.id for commit in rated[max(0, len(rated) - keep.best) :] if keep.best)
    return kept


def prune(tier: Tier, keep: Keep, committed: StepId, busy: set[StepId]) -> list[StepId]:
    """Remove what no rule keeps, and what saves before `committed` left unfinished. What was removed.

    A step that was found damaged, or is not to be trusted, counts for no rule, and is left for people to look at. `busy` are steps that are being
    saved or copied: they are left alone.
    """
    keep = keep if tier.lasting else Keep(last=1)  # memory is dear, and was compared as it was filled
    whole: list[Commit] = []
    verified: set[StepId] = set()
    unfinished: list[StepId] = []
    for step in (found for name in tier.names() if (found := names.step_of(name)) is not None):
        there = set(tier.names(step.folder))
        if names.DISTRUSTED in there:
            continue
        if names.COMMIT not in there:
            if step < committed and step not in busy:
                unfinished.append(step)
            continue
        try:
            commit = decode_commit(tier.get(f"{step.folder}/{names.COMMIT}", LARGEST), step)
        except (OSError, CheckpointError):
            continue  # not ours to judge: `rerail ckpt verify` says what is wrong with it
        marks = [names.verified_name(int(rank)) for rank in commit.ranks]
        # a mark with words in it says what was found wrong later
        sizes = [tier.size(f"{step.folder}/{mark}") for mark in marks if mark in there]
        if any(sizes) and step != committed:
            continue
        whole.append(commit)
        if len(sizes) == len(marks) and not any(sizes):
            verified.add(step)
    stay = to_keep(whole, verified, keep) | {committed} | busy
    gone = sorted([*unfinished, *(commit.id for commit in whole if commit.id not in stay)])
    for step in gone:
        tier.remove(step.folder)
    for name in tier.names():
        if name.startswith(names.TRASH):  # whoever was deleting it died
            tier.remove(name)
    return gone
