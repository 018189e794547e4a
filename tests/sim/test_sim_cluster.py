"""Where ranks are, and what is broken."""

from rerail.flow import Place
from rerail.sim.cluster import Cluster
from rerail.sim.faults import Fault
from rerail.sim.scenario import scenario


def fault(scope: str, node: int, device: int = 0, nodes: int = 1, needs: str = "replace") -> Fault:
    return Fault(
        number=0, at=0.0, kind="gpu", code="gpu.xid.79", scope=scope, seen="explicit", needs=needs,
        node=node, device=device, nodes=nodes,
    )  # fmt: skip


def cluster(spares: int = 2) -> Cluster:
    return Cluster(scenario({"gpus": 32, "spare_nodes": spares}))


def test_a_fault_hits_whoever_is_there() -> None:
    one = cluster()
    assert one.hit(fault("device", 1, 3)) == [11]
    assert one.hit(fault("node", 1)) == list(range(8, 16))
    assert one.hit(fault("batch", 2, nodes=3)) == list(range(16, 32)), "a spare node has no rank"
    assert one.hit(fault("device", 4, 3)) == []


def test_what_is_away_is_hit_no_more_until_it_is_back() -> None:
    one, lost = cluster(), fault("node", 1)
    one.damage(lost)
    assert one.hit(fault("device", 1, 3)) == [] and "not connected" in one.bar(8)
    one.damage(lost)
    one.mend(lost)
    assert one.bar(8), "it was lost twice and is back once"
    one.mend(lost)
    assert not one.bar(8)


def test_free_places_come_as_production_orders_them() -> None:
    one = cluster()
    assert one.free(3)[:2] == (Place("n4", 0), Place("n4", 1))
    one.move({5: Place("n4", 0)})
    assert one.places[5] == Place("n4", 0)
    assert one.free(1)[0] == Place("n5", 0), "a node without a rank goes first"
    assert Place("n0", 5) in one.free(1, near=["n0"])
    everything = one.free(1000)
    short = one.free(2, near=["n0"])
    assert [place for place in everything if place in short] == list(short), "a part of the whole, in its order"
    one.isolated = {Place("n5", -1): "sick"}
    assert all(place.node != "n5" for place in one.free(1000))


def test_broken_devices_are_not_known_by_themselves() -> None:
    one = cluster()
    one.damage(fault("device", 0, 5))
    assert not one.works(Place("n0", 5)) and not one.bar(5)


def test_empty_seats_are_filled_again() -> None:
    one = cluster(spares=0)
    lost = fault("node", 1)
    one.damage(lost)
    one.empty(range(8, 16))
    assert one.fillable() == () and one.vacant == set(range(8, 16))
    one.mend(lost)
    assert one.fillable() == tuple(range(8, 16))
    one.fill(one.fillable())
    assert not one.vacant and one.hit(fault("node", 1)) == list(range(8, 16))


def test_too_few_healthy_places_are_told() -> None:
    one = cluster(spares=1)
    one.isolated = {Place("n4", -1): "sick"}
    assert not one.homeless()
    one.isolated = {Place("n4", -1): "sick", Place("n0", 3): "sick"}
    assert one.homeless().startswith("1 of 32")
