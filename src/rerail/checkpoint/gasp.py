"""The dying gasp: saves the newest snapshots that the ranks of this node left in memory when the job came to its end.

    python -m rerail.checkpoint.gasp ARENA...        prints one line for the user, or nothing

Every snapshot carries the order by which it would be saved. Of the versions that all ranks here have, the newest are
saved, each rank in a thread; ranks on other nodes do the same, and what all have is committed. Started by
`runtime.launcher` when ranks and agent are gone. Needs no torch.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from rerail.checkpoint import names, nodes
from rerail.checkpoint.arena import Arena
from rerail.checkpoint.guarded import GuardedPlaces
from rerail.checkpoint.places import Places
from rerail.checkpoint.probing import silent
from rerail.checkpoint.saving import Order, Outcome, carry_out
from rerail.checkpoint.tiers import tier_at
from rerail.config import settings_of_rank
from rerail.errors import CheckpointError, StateError

_order = msgspec.json.Decoder(Order)

DEADLINE_S = 30.0
"""Seconds that the other nodes' ranks may take."""


def orders_of(arena: Arena) -> dict[int, Order]:
    """How to save each sealed version of one rank."""
    found = {}
    for seal in arena.seals():
        try:
            text = arena.meta(seal.version).order
            if text:
                order = _order.decode(text)
                lasting = tuple(url for url in order.tiers if url != nodes.URL)  # the nodes go down as this one does
                if lasting:
                    changes = {"tiers": lasting, "read_back": False, "deadline_s": DEADLINE_S}
                    found[seal.version] = msgspec.structs.replace(order, **changes)
        except (msgspec.DecodeError, StateError):
            continue
    return found


def unsaved(arenas: list[Arena]) -> bool:
    """Whether there is anything here that ought to be saved and is not."""
    newest = [max(orders_of(arena).items(), default=None, key=lambda item: item[0]) for arena in arenas]
    return all(newest) and any(not _is_saved(found[1]) for found in newest if found is not None)


def gasp(arenas: list[Arena]) -> str:
    """Save what can be saved; a line for the user."""
    orders = [orders_of(arena) for arena in arenas]
    common = set[int].intersection(*(set(found) for found in orders)) if orders else set()
    for version in sorted(common, reverse=True):
        mine = [found[version] for found in orders]
        if _is_saved(mine[0]):
            return ""
        places = GuardedPlaces(settings_of_rank().storage_hang_s)
        with ThreadPoolExecutor(len(arenas), thread_name_prefix="rerail-gasp") as pool:
            outcomes = list(pool.map(partial(_save, places), mine, arenas))
        if all(outcome.ok for outcome in outcomes):
            return f"step {version} was saved to {outcomes[0].url} before the end"
        failed = next(outcome for outcome in outcomes if not outcome.ok)
        return f"step {version} could not be saved before the end: {failed.notes[-1] if failed.notes else 'no reason given'}"
    return ""


def _save(places: Places, order: Order, arena: Arena) -> Outcome:
    return list(carry_out(order, arena, lambda: {order.id}, places=places))[-1]


def _is_saved(order: Order) -> bool:
    tiers = [tier_at(url) for url in order.tiers]
    hung = silent(tiers, write=False)
    for tier in (tier for tier in tiers if tier not in hung):
        try:
            if names.COMMIT in tier.names(order.id.folder):
                return True
        except (OSError, CheckpointError):
            continue
    return False


def main() -> None:
    told = gasp([Arena(int(text)) for text in sys.argv[1:]])
    if told:
        print(f"rerail: {told}", flush=True)
    os.close(sys.stdout.fileno())
    os._exit(0)  # threads that hang in a place would be waited for otherwise


if __name__ == "__main__":
    main()
