"""Which places for checkpoints answer, asked by a rank before it touches them: a thread in a place that hangs keeps it from ending.

Called by `session.checkpoints`, `session.starting` and `session.owed`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rerail.checkpoint.probing import ANSWER_S, silent
from rerail.checkpoint.tiers import Tier
from rerail.config import settings_of_rank

PATIENCE_S = 600.0
"""Seconds to wait for an answer where there is no other place to use."""


def answering(tiers: Sequence[Tier], *, write: bool) -> list[Tier]:
    """Those that can be used; none of them is waited for longer than a few seconds."""
    hung = silent(tiers, write=write, limit_s=_limit_s())
    return [tier for tier in tiers if tier not in hung]


def some_answering(tiers: Sequence[Tier], say: Callable[[str], None], *, write: bool) -> list[Tier]:
    """The same at the start of a job, with words about the others. If none answers, one that does is waited for, long."""
    limit_s, began = _limit_s(), time.monotonic()
    hung = silent(tiers, write=write, limit_s=limit_s)
    if len(hung) == len(tiers):
        say(f"no place for checkpoints answers ({_named(hung)}); waiting for one")
    while len(hung) == len(tiers) and time.monotonic() - began < PATIENCE_S:
        hung = silent(tiers, write=write, limit_s=limit_s)
    found = [tier for tier in tiers if tier not in hung]
    if hung:
        then = "the job goes on without" if found else "given up"
        say(f"{_named(hung)} has not answered for {limit_s:.0f} s; {then}. See whether its server or disk is well")
    return found


def _limit_s() -> float:
    return min(ANSWER_S, settings_of_rank().storage_hang_s)


def _named(tiers: Sequence[Tier]) -> str:
    return ", ".join(tier.url for tier in tiers)
