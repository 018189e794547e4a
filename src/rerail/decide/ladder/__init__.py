"""The recovery ladder: one small strategy for each rung, finest first. Pure.

    in_place    retry step, replace rank            every rank stays where it is
    back        roll back                           all go back to before a fault of the training itself
    reset       reset device                        its device is repaired first
    elsewhere   hot switch, swap device, swap node  a rank gets another place
    seats       grow, shrink                        go on with fewer ranks, and fill their seats again
    all_ranks   restart all, stop                   nothing is kept

Read by `decide.choose`, which takes the cheapest that answers the fault, is allowed and has nothing in its way. What a rung
does is for `recover.execute`.
"""

from __future__ import annotations

from rerail.decide.ladder.all_ranks import RESTART_ALL, STOP
from rerail.decide.ladder.back import ROLL_BACK
from rerail.decide.ladder.elsewhere import HOT_SWITCH, SWAP_DEVICE, SWAP_NODE
from rerail.decide.ladder.in_place import REPLACE_RANK, RETRY_STEP
from rerail.decide.ladder.reset import RESET_DEVICE
from rerail.decide.ladder.seats import GROW, SHRINK
from rerail.decide.ladder.strategy import Strategy

LADDER: tuple[Strategy, ...] = (
    RETRY_STEP,
    ROLL_BACK,
    HOT_SWITCH,
    REPLACE_RANK,
    RESET_DEVICE,
    SWAP_DEVICE,
    SWAP_NODE,
    GROW,
    SHRINK,
    RESTART_ALL,
    STOP,
)

__all__ = ["LADDER", "Strategy"]
