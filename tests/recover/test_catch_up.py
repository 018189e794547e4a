"""When only those who lost their state go back, and when not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rerail.recover.catch_up import caught_up, longer_s, without_going_back
from rerail.recover.plan import Choice, Infeasible, choose_sources
from rerail.runtime.fleet import Fleet
from rerail.runtime.plans import Back, Plan, Source, Stale
from rerail.runtime.wire import Parked


def rank(number: int, version: int = 33, **changes: Any) -> Parked:
    facts: dict[str, Any] = {
        "intact": True,
        "in_training": True,
        "small_versions": (20, version),
        "snapshots": (10, 20),
        "replicas": (number,),
        "logged": 10,
    }
    return Parked(rank=number, generation=1, version=version, **{**facts, **changes})


def four(changed: dict[int, dict[str, Any]] | None = None) -> dict[int, Parked]:
    """Rank 2 of four is a newcomer."""
    changes: dict[int, dict[str, Any]] = {2: {"intact": False, "logged": -1}}
    for number, more in (changed or {}).items():
        changes[number] = {**changes.get(number, {}), **more}
    return {n: rank(n, **changes.get(n, {})) for n in range(4)}


def starts(parked: dict[int, Parked], newest: int = 33) -> dict[int, int]:
    found = caught_up(parked, newest)
    assert isinstance(found, dict), found
    plan = Plan(generation=1, world_size=4, store_host="", store_port=0, store_rank=0, version=newest, sources=found)
    return plan.starts()


def test_only_the_lost_one_goes_back() -> None:
    parked = four()
    assert starts(parked) == {0: 33, 1: 33, 2: 20, 3: 33}
    found = caught_up(parked, 33)
    assert found == {n: Source(kind="snapshot", at=20) if n == 2 else Source(kind="own") for n in range(4)}


def test_a_survivor_one_step_behind_begins_where_it_is() -> None:
    assert starts(four({3: {"version": 32}})) == {0: 33, 1: 33, 2: 20, 3: 32}


def test_two_lost_ranks_begin_at_a_snapshot_that_both_have() -> None:
    assert starts(four({3: {"intact": False, "snapshots": (10,)}})) == {0: 33, 1: 33, 2: 10, 3: 10}


def test_one_that_was_interrupted_while_it_did_its_steps_again_goes_on_from_there() -> None:
    assert starts(four({2: {"intact": True, "version": 27, "logged": 20}})) == {0: 33, 1: 33, 2: 27, 3: 33}
    both = four({2: {"intact": True, "version": 27, "logged": 20}, 3: {"intact": False}})
    assert starts(both) == {0: 33, 1: 33, 2: 27, 3: 20}, "what it has said again it can tell again"


@pytest.mark.parametrize(
    "changed, why",
    [
        ({0: {"logged": -1}}, "ranks 0 have not kept what they told since step 20"),
        ({3: {"logged": 21}}, "ranks 3 have not kept what they told since step 20"),
        ({2: {"snapshots": ()}}, "ranks 2 have no snapshot in common"),
        ({2: {"snapshots": (40,)}}, "no snapshot in common"),
        ({3: {"intact": False, "snapshots": (15,)}}, "ranks 2, 3 have no snapshot in common"),
        ({1: {"in_guard": True}}, "not to be gone on from"),
        ({1: {"agreed": 20}}, "not to be gone on from"),
        ({2: {"astray": True}}, "were not those that had been done"),
        ({2: {"intact": True, "version": 27, "logged": -1}, 3: {"intact": False}}, "ranks 2 have not kept"),
    ],
)
def test_why_not(changed: dict[int, dict[str, Any]], why: str) -> None:
    found = caught_up(four(changed), 33)
    assert isinstance(found, str) and why in found, found


def test_it_is_taken_where_the_exact_choice_goes_back_and_said_where_it_cannot_be() -> None:
    parked, fleet = four(), Fleet()
    exact = choose_sources(parked, frozenset({2}))
    assert isinstance(exact, Choice) and exact.version == 20
    found = without_going_back(parked, exact, fleet)
    assert isinstance(found, Choice) and found.version == 33 and found.healing is None
    silent = four({0: {"logged": -1}})
    other = without_going_back(silent, exact, fleet)
    assert isinstance(other, Choice) and other.version == 20 and "ranks 0 have not kept" in other.note
    fleet.back = Back(trusted=30)
    distrusted = without_going_back(parked, exact, fleet)
    assert isinstance(distrusted, Choice) and distrusted.version == 20


def test_it_serves_where_there_is_no_snapshot_that_all_share() -> None:
    parked = four({0: {"snapshots": ()}})
    nothing = choose_sources(parked, frozenset({2}))
    assert isinstance(nothing, Infeasible)
    found = without_going_back(parked, nothing, Fleet())
    assert isinstance(found, Choice) and found.version == 33
    assert without_going_back(four({0: {"snapshots": (), "logged": -1}}), nothing, Fleet()) is nothing


def test_what_goes_on_from_the_newest_version_is_left_alone() -> None:
    parked = four({2: {"replicas": (2, 3)}, 3: {"replicas": (2, 3)}})
    replica = choose_sources(msgspec.structs.replace(parked[2], version=33) and parked, frozenset({2}))
    assert isinstance(replica, Choice) and replica.version == 33
    assert without_going_back(parked, replica, Fleet()) is replica


def test_the_others_wait_longer_for_it() -> None:
    sources = {0: Source(kind="own"), 1: Source(kind="snapshot", at=20), 2: Source(kind="stale", stale=Stale(at=5))}
    assert longer_s(sources, 30, 0.5) == 10 * 4 * 0.5
    assert longer_s({0: Source(kind="own")}, 30, 0.5) == 0
