"""Compares how far ranks that all wait in a collective have come: turns counts into the one that is behind. Pure.

Called by `runtime.intake` when every node says that its ranks wait.
"""

from __future__ import annotations

from collections.abc import Mapping


def behind(counts: Mapping[int, int]) -> int:
    """The rank that has begun the fewest collectives, or -1 when all have begun as many: then nobody stands out."""
    if not counts or len(set(counts.values())) == 1:
        return -1
    return min(counts, key=lambda rank: (counts[rank], rank))


def counts_of(text: str) -> dict[int, int]:
    """Counts as they travel in a signal: `0:118,1:120`. What cannot be read is left out."""
    found: dict[int, int] = {}
    for item in text.split(","):
        rank, _, count = item.partition(":")
        if rank.isdecimal() and count.isdecimal():
            found[int(rank)] = int(count)
    return found
