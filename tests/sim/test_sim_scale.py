"""Decisions about thousands of ranks: right, and not made rank by rank."""

from rerail.decide.choose import choose
from rerail.decide.quarantine import Entry, takes_the_last
from rerail.decide.situation import Situation
from rerail.decide.subjects import several
from rerail.flow import Diagnosis, Place, Rung

PLACES = {rank: Place(f"n{rank // 8}", rank % 8) for rank in range(16_384)}
FREE = tuple(Place(f"s{n // 8}", n % 8) for n in range(1_000))


def test_hundreds_of_ranks_get_a_place_each() -> None:
    lost = tuple(range(512))
    diagnosis = Diagnosis(id="d", job="j", at=0.0, code="node.lost", root="", node="n0", ranks=lost, lost=lost)
    barred = dict.fromkeys(lost, "not connected")
    now = Situation(aware=True, in_training=True, survivors=15_872, places=PLACES, barred=barred, free=FREE)
    decision = choose(diagnosis, now, at=0.0)
    assert decision.rung is Rung.SWAP_NODE
    assert list(decision.moves.values()) == list(FREE[:512])
    short = Situation(aware=True, in_training=True, survivors=15_872, places=PLACES, barred=barred, free=FREE[:511])
    assert choose(diagnosis, short, at=0.0).rung is Rung.RESTART_ALL


def test_spare_devices_of_the_own_node_are_found_among_many() -> None:
    diagnosis = Diagnosis(id="d", job="j", at=0.0, code="x", root="", node="n9", ranks=(72, 80), lost=(72, 80))
    free = (*FREE, Place("n9", 8), Place("n10", 8))
    now = Situation(
        aware=True, in_training=True, survivors=9, places=PLACES, barred={72: "sick", 80: "sick"}, free=free
    )
    decision = choose(diagnosis, now, at=0.0)
    assert decision.rung is Rung.SWAP_DEVICE
    assert decision.moves == {72: Place("n9", 8), 80: Place("n10", 8)}


def test_nobody_may_lose_all_ranks_however_they_are_counted() -> None:
    lost = (0, 1)
    diagnosis = Diagnosis(id="d", job="j", at=0.0, code="process.killed", root="", node="n0", ranks=lost, lost=lost)
    two = {rank: PLACES[rank] for rank in lost}
    decision = choose(diagnosis, Situation(aware=True, in_training=True, survivors=1, places=two), at=0.0)
    replace = next(one for one in decision.candidates if one.rung is Rung.REPLACE_RANK)
    assert replace.why == "no rank would be left that keeps the state"


def test_the_last_of_a_kind_is_known() -> None:
    members = ["node:a", "node:b", "device:a/0", "device:b/0"]
    one = {"device:a/0": Entry(subject="device:a/0", reason="", since=0.0)}
    assert takes_the_last({}, members, "device:a/0") == ""
    assert takes_the_last(one, members, "device:b/0") == "is the last device"
    assert takes_the_last(one, members, "node:b") == "has the last devices"
    assert takes_the_last({}, ["node:a"], "node:a") == "is the last node"
    assert several(members, "node", 2) and not several(members, "node", 3) and not several([], "node", 1)
