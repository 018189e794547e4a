"""Finds the replica whose state has gone astray: turns checksums that replicas hand in into Ballots. Pure.

Called by `runtime.training` for every checksum a rank reports. Ranks that hold the same state vote with one checksum
per group of tensors. When all of them have voted, or all that are still there, the majority of each group is right. Two
that differ are a tie, as are any without a majority: then one of them is wrong, and nobody can say which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest

import msgspec

VERSIONS = 16
"""Versions of one set of replicas that are kept; the one begun first goes first."""
SETS = 4096
"""Sets of replicas that are kept; the one that voted longest ago goes first."""


class Ballot(msgspec.Struct, frozen=True, kw_only=True):
    """How the replicas have voted on one version."""

    version: int
    voters: tuple[int, ...]
    suspects: tuple[int, ...] = ()
    """Whoever differs from the majority; all voters in a tie; nobody when all agree."""
    groups: tuple[int, ...] = ()
    """Groups of tensors in which they differ."""
    tie: bool = False


class _Election(msgspec.Struct):
    votes: dict[int, tuple[int, ...]] = {}
    counted: bool = False
    """Since the last vote."""


class VoteBox:
    """The votes of all sets of replicas."""

    def __init__(self) -> None:
        self._sets: dict[tuple[int, ...], dict[int, _Election]] = {}
        self._gone: set[int] = set()

    def take(self, rank: int, version: int, sums: tuple[int, ...], replicas: tuple[int, ...]) -> Ballot | None:
        """One vote; the Ballot if it was the last to come. A replaced rank votes again, and makes another Ballot.

        When a rank that was there all along votes again with another result, the version was made again: its votes are
        collected anew (better say so beforehand: `rewind`). The vote of a rank that is none of the replicas is void.
        """
        if rank not in replicas:
            return None
        self._gone.discard(rank)
        replicas = tuple(sorted(set(replicas)))
        elections = self._sets[replicas] = self._sets.pop(replicas, {})
        if len(self._sets) > SETS:
            del self._sets[next(iter(self._sets))]
        election = elections.setdefault(version, _Election())
        if len(elections) > VERSIONS:
            del elections[next(iter(elections))]
        before = election.votes.get(rank)
        if before == sums:
            return None
        if before is not None:
            election.votes.clear()
        election.votes[rank] = sums
        election.counted = False
        return self._close(replicas, version, election)

    def forget(self, rank: int) -> list[Ballot]:
        """The rank is gone and its votes with it; the Ballots that only waited for it."""
        self._gone.add(rank)
        ballots = []
        for replicas, elections in self._sets.items():
            for version, election in elections.items() if rank in replicas else ():
                if election.votes.pop(rank, None) is None:  # else it was not the one they waited for
                    ballots.append(self._close(replicas, version, election))
        return [ballot for ballot in ballots if ballot is not None]

    def rewind(self, version: int) -> None:
        """The job goes back to this version: votes on later ones are void."""
        for elections in self._sets.values():
            for later in [one for one in elections if one > version]:
                del elections[later]

    def _close(self, replicas: tuple[int, ...], version: int, election: _Election) -> Ballot | None:
        """Nothing while votes are missing, or where a single one has nothing to be compared with."""
        missing = set(replicas) - election.votes.keys() - self._gone
        if missing or election.counted or len(election.votes) < 2:
            return None
        election.counted = True
        return _count(version, election.votes)


def _count(version: int, votes: Mapping[int, tuple[int, ...]]) -> Ballot:
    """Group by group, for two ranks may each be wrong in another one. A vote with fewer groups differs in the rest."""
    ranks = tuple(sorted(votes))
    suspects: set[int] = set()
    groups, tie = [], False
    for group, sums in enumerate(zip_longest(*(votes[rank] for rank in ranks))):
        ((right, count), *others) = Counter(sums).most_common()
        if others:
            groups.append(group)
            tie = tie or 2 * count <= len(ranks)
            suspects |= {rank for rank, one in zip(ranks, sums, strict=True) if one != right}
    named = ranks if tie else tuple(sorted(suspects))
    return Ballot(version=version, voters=ranks, suspects=named, groups=tuple(groups), tie=tie)
