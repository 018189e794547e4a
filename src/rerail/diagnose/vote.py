"""Finds the replica whose state has gone astray: compares the checksums of ranks that must hold the same. Pure.

Called by `session.votes` (do all agree?) and `runtime.training` (who is wrong?). The majority of each group of tensors is
right. Two that differ are a tie, as are any without a majority. Then all compute the same steps again from a version on which
they agreed: whoever had come to another result the first time was wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest

import msgspec

CLEARLY = 16.0
"""Whoever was four times as far from the right result as any other was wrong. Squares."""
Votes = Mapping[int, tuple[int, ...]]
"""By rank: one checksum for each group of tensors."""


class Ballot(msgspec.Struct, frozen=True, kw_only=True):
    """How the replicas have voted on one version."""

    version: int
    voters: tuple[int, ...]
    suspects: tuple[int, ...] = ()
    """Whoever differs from the majority; all voters in a tie; nobody when all agree."""
    groups: tuple[int, ...] = ()
    """Groups of tensors in which they differ."""
    tie: bool = False


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """What came of computing the same steps again."""

    suspects: tuple[int, ...] = ()
    """Whoever had come to another result the first time; empty if nobody can be named."""
    again: bool = False
    """They differ once more: it was no passing fault."""


def count(version: int, votes: Votes) -> Ballot:
    """Group by group, for two ranks may each be wrong in another one. A vote with fewer groups differs in the rest."""
    ranks = tuple(sorted(votes))
    suspects: set[int] = set()
    groups, tie = [], False
    for group, sums in enumerate(zip_longest(*(votes[rank] for rank in ranks))):
        ((right, most), *others) = Counter(sums).most_common()
        if others:
            groups.append(group)
            tie = tie or 2 * most <= len(ranks)
            suspects |= {rank for rank, one in zip(ranks, sums, strict=True) if one != right}
    named = ranks if tie else tuple(sorted(suspects))
    return Ballot(version=version, voters=ranks, suspects=named, groups=tuple(groups), tie=tie)


def compare(first: Votes, second: Votes, far: Mapping[int, float] | None = None) -> Replay:
    """Name whoever was wrong the first time, now that all have computed it twice.

    `far`: how far each was from the result where they differed, in squares. A wrong one spoils the results of all a little.
    """
    if len(set(second.values())) > 1:
        return Replay(again=True)
    (right,) = set(second.values()) or {()}
    wrong = tuple(sorted(rank for rank, sums in first.items() if sums != right))
    if len(wrong) < len(first):
        return Replay(suspects=wrong)
    *others, (last, furthest) = sorted((far or {}).items(), key=lambda one: one[1]) or [(-1, 0.0)]
    clear = bool(others) and furthest > CLEARLY * others[-1][1]
    return Replay(suspects=(last,) if clear else ())
