"""A rank that will not save what others are saving says so, so that nobody waits for it until the deadline.

Called by `session.owed` and `checkpoint.dcp`. Needs no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from rerail.checkpoint import names
from rerail.checkpoint.names import StepId
from rerail.checkpoint.tiers import Tier
from rerail.errors import CheckpointError


def decline(tiers: Sequence[Tier], step: StepId, rank: int, why: str, coordinator: int = 0) -> None:
    """This rank will not save `step`, on any tier. The others wait for the coordinator's word."""
    for tier in tiers:
        with contextlib.suppress(OSError, CheckpointError):
            tier.make_folder(step.folder)
            tier.put(f"{step.folder}/{names.failure_name(rank)}", why.encode())
            if rank == coordinator:
                tier.put(f"{step.folder}/{names.ABORT}", why.encode())
