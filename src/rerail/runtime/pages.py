"""What each rank would leave if its node were lost: the newest of what its agent has told of its step clock page.

Kept by the controller (`runtime.intake` fills it) and handed to the agent of whichever node the rank is moved to (`recover.execute`).
"""

from __future__ import annotations

from rerail.runtime.orders import Kept

VERSIONS = 3
"""Small states kept of each rank."""
LARGEST = 6 << 20
"""Bytes handed to a successor in all; what does not fit is left out, the oldest first."""


class Pages:
    """The controller's side: what each rank would leave if its node were lost now."""

    def __init__(self) -> None:
        self._smalls: dict[int, dict[int, tuple[bytes, bytes]]] = {}
        self._heard: dict[int, list[bytes]] = {}

    def take(self, kept: Kept) -> None:
        if kept.heard is not None:
            self._heard[kept.rank] = kept.heard
        if kept.version < 0:
            return
        smalls = self._smalls.setdefault(kept.rank, {})
        rest = kept.rest
        if rest is None:
            newest = max(smalls, default=-1)
            if newest < 0:
                return  # nobody knows what it belongs to
            rest = smalls[newest][1]
        # a job that went back writes the same versions again, and what was later is void
        smalls = {version: parts for version, parts in smalls.items() if version < kept.version}
        smalls[kept.version] = kept.body, rest
        self._smalls[kept.rank] = {version: smalls[version] for version in sorted(smalls)[-VERSIONS:]}

    def of(self, rank: int) -> list[Kept]:
        """For its successor: what it heard, and its newest small states, the newest last."""
        room = LARGEST
        found: list[Kept] = []
        for version, (body, rest) in sorted(self._smalls.get(rank, {}).items(), reverse=True):
            room -= len(body) + len(rest)
            if room >= 0:
                found.insert(0, Kept(rank=rank, version=version, body=body, rest=rest))
        heard = self._heard.get(rank, [])
        if heard and sum(map(len, heard)) <= room:
            found.insert(0, Kept(rank=rank, heard=heard))
        return found
