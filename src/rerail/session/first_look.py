"""Lets all ranks hear, before they change anything, whether any of those that tell their loss finds it no good.

    every teller   says so in the store of the generation, or that all is well
    all            wait until one has, or all of them have spoken

Called by `session.soundness` in the first step behind a repair that is not exact.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rerail.session.fabric import fabric

PATIENCE_S = 10.0
"""Seconds that a teller may be later than others. One without an optimizer never comes."""
LOOK_S = 0.002
_NO, _WELL = "look/no", "look/well"


def all_said(rank: int, tellers: Sequence[int], why: str) -> str:
    """Why the step is not to be completed, or nothing. `why`: what this rank finds."""
    store, until = fabric.store.target, time.monotonic() + PATIENCE_S
    try:
        if why:
            store.set(_NO, why[:1000])
            return why
        spoken = store.add(_WELL, int(rank in tellers))
        while not fabric.interrupted and not store.check([_NO]) and spoken < len(tellers) and time.monotonic() < until:
            time.sleep(LOOK_S)
            spoken = store.add(_WELL, 0)
        return store.get(_NO).decode(errors="replace") if not fabric.interrupted and store.check([_NO]) else ""
    except RuntimeError:
        return ""  # the store is gone: another fault, of which all hear by themselves
