"""What a save asks about the places it may go to, answered in the plainest way: every place is good.

For commands and for the saves of one moment; the persister, which has a memory of what failed, answers by
`checkpoint.guarded`. Called by `checkpoint.saving` and `checkpoint.copying`. Needs no torch.
"""

from __future__ import annotations

from rerail.checkpoint.tiers import Tier, tier_at


class Places:
    """Places by their URL."""

    silence_s = 30.0
    """Seconds without an answer after which a place counts as hung."""

    def at(self, url: str) -> Tier:
        """The tier there. CheckpointError if there can be none."""
        return tier_at(url)

    def out(self, url: str) -> str:
        """Why nothing is to be written there at present; empty: it may be tried."""
        return ""

    def failed(self, url: str, error: Exception, size: int = 0) -> None:
        """A save or copy could not be written there; `size`: the bytes that one like it needs."""

    def saved(self, url: str) -> None:
        """A save or copy is whole there."""


PLAIN = Places()
