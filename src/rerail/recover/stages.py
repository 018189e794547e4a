"""Where a generation stands on its way from a decision to training, and when it got there. Filled by `recover.execute`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rerail.flow import Rung
from rerail.runtime.plans import Source
from rerail.runtime.wire import Parked

NEWCOMERS = (Rung.REPLACE_RANK, Rung.RESET_DEVICE, Rung.SWAP_DEVICE, Rung.SWAP_NODE)
"""Rungs that build a process which gets its state from the others."""


class Stage(StrEnum):
    """Where the newest generation stands."""

    IDLE = "idle"
    WAITING_FOR_NODES = "waiting for nodes"
    PICKING_PORT = "picking a port"
    WARMING = "making a spare ready"
    PARKING = "parking"
    FORMING = "forming"
    REPLAYING = "replaying"


@dataclass
class Marks:
    """When each stage of the newest generation ended (monotonic), and what the ranks told: the timeline's raw data."""

    paused_at: float = 0.0
    """Of a hot switch: when the training was interrupted."""
    parked_at: float = 0.0
    formed_at: float = 0.0
    resumed_at: float = 0.0
    version: int = -1
    sources: dict[int, Source] = field(default_factory=dict)
    parked: dict[int, Parked] = field(default_factory=dict)
    stateless: bool = False
    """All were parked, and nobody had what a newcomer needs."""

    def in_vain(self, rung: Rung) -> tuple[Rung, ...]:
        """Rungs that need not be tried any more when this one has failed: a newcomer in another place finds no more either."""
        return tuple(dict.fromkeys((rung, *NEWCOMERS))) if self.stateless and rung in NEWCOMERS else (rung,)
