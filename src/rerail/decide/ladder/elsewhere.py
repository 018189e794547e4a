"""The rungs that give a rank another place: a spare device of its node, or a spare node. Pure."""

from __future__ import annotations

from rerail.decide.budget import EVACUATE
from rerail.decide.ladder.strategy import Moves, Reason, Strategy, barred_among, in_place_obstacle, replaced
from rerail.decide.situation import Situation, broken
from rerail.flow import Cost, Diagnosis, Place, Rung
from rerail.wording import ranks


def _movers(diagnosis: Diagnosis, now: Situation) -> list[int]:
    """Those that cannot stay; all, if none is barred: then it is the place that is no longer trusted."""
    return barred_among(diagnosis, now) or list(broken(diagnosis))


def _taken(movers: list[int], now: Situation, *, same_node: bool) -> Moves:
    """A free place for each, as far as there are any: on its own node, or on another one."""
    found: Moves = {}
    left = dict.fromkeys(now.free)  # in their order; hundreds of ranks may have to move at once
    nodes = {place.node for place in left}
    for rank in movers:
        here = now.places.get(rank, Place("", -1)).node
        if same_node and here not in nodes:
            continue
        place = next((p for p in left if (p.node == here) is same_node), None)
        if place is not None:
            found[rank] = place
            del left[place]
    return found


def _answers(diagnosis: Diagnosis, now: Situation) -> Reason | None:
    if diagnosis.rule == EVACUATE:
        return Reason(EVACUATE, "its place is no longer to be trusted, and there is a better one")
    movers = barred_among(diagnosis, now)
    if movers:
        return Reason("place-lost", now.barred[movers[0]])
    if not diagnosis.lost:
        return None
    if Rung.REPLACE_RANK in now.tried:
        return Reason("place-doubted", f"replacing {ranks(diagnosis.lost)} in place has failed")
    if why := now.worn or now.unfit.get(Rung.REPLACE_RANK, ""):
        return Reason("place-doubted", why)
    return None


def _obstacle(diagnosis: Diagnosis, now: Situation, *, same_node: bool) -> str:
    if found := in_place_obstacle(now):
        return found
    movers = _movers(diagnosis, now)
    if not movers:
        return "no rank is broken"
    taken = _taken(movers, now, same_node=same_node)
    unplaced = [rank for rank in movers if rank not in taken]
    if not unplaced:
        return ""
    where = "the same node" if same_node else "another node"
    return f"there is no spare place on {where} for {ranks(unplaced)}"


def _hot_answers(diagnosis: Diagnosis, now: Situation) -> Reason | None:
    if diagnosis.rule != EVACUATE:
        return None
    return Reason("hot-switch", "it still works: a spare is made ready first, and no step is lost")


def _hot_obstacle(diagnosis: Diagnosis, now: Situation) -> str:
    either = [_obstacle(diagnosis, now, same_node=same) for same in (True, False)]
    return "" if "" in either else either[1]


def _hot_moves(diagnosis: Diagnosis, now: Situation) -> Moves:
    movers = _movers(diagnosis, now)
    near = _taken(movers, now, same_node=True)
    return near if len(near) == len(movers) else _taken(movers, now, same_node=False)


HOT_SWITCH = Strategy(
    rung=Rung.HOT_SWITCH,
    usual=Cost(t1=0.05, t2=0.02, t3=0.05),
    answers=_hot_answers,
    obstacle=_hot_obstacle,
    replaces=replaced,
    moves=_hot_moves,
)


def _swap(rung: Rung, usual: Cost, *, same_node: bool) -> Strategy:
    return Strategy(
        rung=rung,
        usual=usual,
        answers=_answers,
        obstacle=lambda diagnosis, now: _obstacle(diagnosis, now, same_node=same_node),
        replaces=replaced,
        moves=lambda diagnosis, now: _taken(_movers(diagnosis, now), now, same_node=same_node),
    )


SWAP_DEVICE = _swap(Rung.SWAP_DEVICE, Cost(t1=0.4, t2=0.02, t3=0.05), same_node=True)
SWAP_NODE = _swap(Rung.SWAP_NODE, Cost(t1=1.0, t2=0.05, t3=0.2), same_node=False)
