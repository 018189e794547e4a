"""Plans: exact for every rank, or none at all."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rerail.recover.plan import Choice, Infeasible, choose_sources
from rerail.runtime.plans import Source
from rerail.runtime.wire import Parked


def parked(rank: int, version: int = 10, **changes: Any) -> Parked:
    values: dict[str, Any] = {
        "generation": 1, "intact": True, "in_training": True, "small_versions": (version - 1, version), **changes,
    }  # fmt: skip
    return Parked(rank=rank, version=version, **values)


def newcomer(rank: int, version: int = 10, **changes: Any) -> Parked:
    return parked(rank, 0, intact=False, in_training=False, small_versions=(version - 1, version), **changes)


def by_rank(*ranks: Parked) -> dict[int, Parked]:
    return {p.rank: p for p in ranks}


def test_first_generation_begins_as_constructed() -> None:
    choice = choose_sources(by_rank(*(parked(r, 0, in_training=False) for r in range(3))), frozenset())
    assert isinstance(choice, Choice) and choice.version == 0 and choice.sources[2] == Source(kind="initial")


def test_a_newcomer_takes_its_replicas_state_and_survivors_keep_theirs() -> None:
    world = (0, 1, 2)
    found = choose_sources(by_rank(parked(0, replicas=world), parked(1, replicas=world), newcomer(2)), frozenset({2}))
    assert isinstance(found, Choice) and found.version == 10
    assert found.sources == {0: Source(kind="own"), 1: Source(kind="own"), 2: Source(kind="replica", rank=0)}


def test_where_replicas_differ_nothing_later_than_their_agreement_is_resumed_from_whoever_holds_it() -> None:
    """Rank 1 was interrupted before it could hear that they differ; rank 0 had."""
    world = (0, 1)
    heard = parked(0, intact=False, agreed=6, replicas=world, snapshots=(6,), small_versions=(6, 9, 10))
    deaf = parked(1, replicas=world, snapshots=(6, 8), small_versions=(6, 8, 9, 10))
    found = choose_sources(by_rank(heard, deaf), frozenset())
    assert isinstance(found, Choice) and found.version == 6, found
    nothing = choose_sources(by_rank(parked(0, intact=False, agreed=4, replicas=world), deaf), frozenset())
    assert isinstance(nothing, Infeasible)


def test_two_newcomers_load_from_different_replicas() -> None:
    world = (0, 1, 2, 3)
    ranks = by_rank(parked(0, replicas=world), newcomer(1), parked(2, replicas=world), newcomer(3))
    found = choose_sources(ranks, frozenset({1, 3}))
    assert isinstance(found, Choice) and {found.sources[1].rank, found.sources[3].rank} == {0, 2}


def test_ranks_of_a_lost_node_take_their_state_from_replicas_on_another() -> None:
    world = (0, 1, 2, 3)
    survivors = [parked(rank, replicas=world) for rank in (0, 1)]
    found = choose_sources(by_rank(*survivors, newcomer(2), newcomer(3)), frozenset({2, 3}))
    assert isinstance(found, Choice) and {found.sources[rank].rank for rank in (2, 3)} == {0, 1}
    alone = choose_sources(by_rank(parked(0), parked(1), newcomer(2), newcomer(3)), frozenset({2, 3}))
    assert isinstance(alone, Infeasible) and "no replica holds it" in alone.reason


def test_a_survivor_one_step_behind_advances() -> None:
    world = (0, 1)
    behind = parked(1, 10, replicas=world, small_versions=(10, 11))
    found = choose_sources(by_rank(parked(0, 11, replicas=world), behind), frozenset())
    assert isinstance(found, Choice) and found.version == 11 and found.sources[1] == Source(kind="replica", rank=0)


def test_a_torn_update_is_not_a_source() -> None:
    world = (0, 1)
    ranks = by_rank(parked(0, 10, intact=False, replicas=world), parked(1, 10, replicas=world))
    found = choose_sources(ranks, frozenset())
    assert isinstance(found, Choice) and found.sources[0] == Source(kind="replica", rank=1)


def test_shards_go_back_to_the_newest_snapshot_all_have() -> None:
    ranks = by_rank(parked(0, snapshots=(4, 8)), parked(1, snapshots=(4, 8)), newcomer(2, snapshots=(4,)))
    found = choose_sources(ranks, frozenset({2}))
    assert isinstance(found, Choice) and found.version == 4
    assert all(source == Source(kind="snapshot") for source in found.sources.values())


def test_shards_without_a_shared_snapshot_have_no_plan() -> None:
    found = choose_sources(by_rank(parked(0), newcomer(1)), frozenset({1}))
    assert isinstance(found, Infeasible) and "ranks 1" in found.reason


def test_living_shards_need_no_snapshot() -> None:
    found = choose_sources(by_rank(parked(0, snapshots=(4,)), parked(1, snapshots=(4,))), frozenset())
    assert isinstance(found, Choice) and found.version == 10 and found.sources[0] == Source(kind="own")


def test_a_newcomer_without_small_state_has_no_plan() -> None:
    ranks = by_rank(parked(0, replicas=(0, 1)), parked(1, 0, intact=False, in_training=False, small_versions=()))
    assert isinstance(choose_sources(ranks, frozenset({1})), Infeasible)


def test_a_newcomer_among_ranks_that_have_not_trained_has_no_plan() -> None:
    ranks = by_rank(parked(0, 0, in_training=False), newcomer(1))
    assert isinstance(choose_sources(ranks, frozenset({1})), Infeasible)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[dict[int, Parked], frozenset[int]]:
    count = draw(st.integers(1, 5))
    groups = [draw(st.integers(0, 2)) for _ in range(count)]
    versions = st.integers(0, 5)
    ranks: dict[int, Parked] = {}
    new: set[int] = set()
    for rank in range(count):
        fresh = draw(st.booleans())
        if fresh:
            new.add(rank)
        ranks[rank] = Parked(
            rank=rank,
            generation=1,
            version=0 if fresh else draw(versions),
            intact=not fresh and draw(st.booleans()),
            in_training=not fresh and draw(st.integers(0, 4)) > 0,
            small_versions=tuple(sorted(draw(st.sets(versions, max_size=2)))),
            snapshots=tuple(sorted(draw(st.sets(versions, max_size=2)))),
            replicas=tuple(r for r in range(count) if groups[r] == groups[rank]),
        )
    return ranks, frozenset(new)


@settings(max_examples=400, deadline=None)
@given(fleets())
def test_every_source_exists(fleet: tuple[dict[int, Parked], frozenset[int]]) -> None:
    ranks, new = fleet
    choice = choose_sources(ranks, new)
    if isinstance(choice, Infeasible):
        assert choice.reason
        return
    version = choice.version
    assert set(choice.sources) == set(ranks)
    if any(source.kind == "initial" for source in choice.sources.values()):
        assert version == 0 and not new and not any(p.in_training for p in ranks.values())
        return
    held = [p.version for p in ranks.values() if p.intact and p.in_training]
    assert version <= max([*held, *(s for p in ranks.values() for s in p.snapshots)])
    for rank, source in choice.sources.items():
        p = ranks[rank]
        if source.kind == "own":
            assert p.intact and p.in_training and p.version == version
        elif source.kind == "snapshot":
            assert version in p.snapshots
        else:
            giver = ranks[source.rank]
            assert source.rank != rank and rank in giver.replicas
            in_memory = giver.intact and giver.in_training and giver.version == version
            assert in_memory or version in giver.snapshots
            assert version in p.small_versions or (in_memory and version - 1 in p.small_versions)


@settings(max_examples=200, deadline=None)
@given(fleets())
def test_nobody_who_holds_the_version_is_overwritten(fleet: tuple[dict[int, Parked], frozenset[int]]) -> None:
    ranks, new = fleet
    choice = choose_sources(ranks, new)
    if isinstance(choice, Choice) and any(source.kind == "own" for source in choice.sources.values()):
        for rank, p in ranks.items():
            if p.intact and p.in_training and p.version == choice.version:
                assert choice.sources[rank].kind == "own"


def elastic(rank: int, **changes: Any) -> Parked:
    return parked(rank, replicas=(0, 1, 2), elastic=True, **changes)


def test_a_seat_is_left_empty_where_others_hold_the_same() -> None:
    found = choose_sources(by_rank(elastic(0), elastic(2)), frozenset(), frozenset({1}))
    assert isinstance(found, Choice) and found.version == 10
    assert found.sources == {0: Source(kind="own"), 2: Source(kind="own")}


def test_a_seat_is_not_left_empty_where_its_state_would_be_lost_or_its_data_not_dealt() -> None:
    sharded = choose_sources(by_rank(elastic(0), elastic(2)), frozenset(), frozenset({3}))
    assert isinstance(sharded, Infeasible) and sharded.reason == "nobody else holds the state of ranks 3"
    undealt = choose_sources(by_rank(elastic(0), parked(2, replicas=(0, 1, 2))), frozenset(), frozenset({1}))
    assert isinstance(undealt, Infeasible) and "job.deal()" in undealt.reason


def test_who_fills_an_empty_seat_takes_the_small_state_of_its_replica_too() -> None:
    comes = elastic(1, intact=False, small_versions=())
    found = choose_sources(by_rank(elastic(0), comes, elastic(2)), frozenset({1}))
    assert isinstance(found, Choice) and found.sources[1] == Source(kind="replica", rank=0, small=True)
    rigid = choose_sources(by_rank(elastic(0), comes, parked(2, replicas=(0, 1, 2))), frozenset({1}))
    assert isinstance(rigid, Infeasible), "without dealing, each rank has a place in the data of its own"


def test_who_fills_an_empty_seat_goes_back_with_the_others_to_a_snapshot() -> None:
    held = {"intact": False, "small_versions": (6,), "snapshots": (6,)}
    comes = elastic(1, intact=False, small_versions=())
    found = choose_sources(by_rank(elastic(0, **held), comes, elastic(2, **held)), frozenset({1}))
    assert isinstance(found, Choice) and found.version == 6
    assert found.sources[1] == Source(kind="replica", rank=0, small=True)
