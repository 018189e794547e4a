"""When a lost shard may come from its snapshot while all others keep what they have, and when not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rerail.config import Settings
from rerail.recover.plan import Choice, Infeasible, choose_sources
from rerail.recover.rehabilitate import Limits, carried_on, given_up, rehabilitated, resumed
from rerail.report.compose import source_in_words
from rerail.runtime.fleet import Fleet, Rank
from rerail.runtime.plans import Back, Healing, Source
from rerail.runtime.wire import Parked

FREE = Limits(share=0.25, first_step=10)


def rank(number: int, version: int = 33, **changes: Any) -> Parked:
    facts: dict[str, Any] = {
        "intact": True,
        "in_training": True,
        "small_versions": (20, version),
        "snapshots": (20,),
        "replicas": (number,),
        "loss": (1.0, 0.1),
    }
    return Parked(rank=number, generation=1, version=version, **{**facts, **changes})


def four(**of_lost: Any) -> dict[int, Parked]:
    """Rank 2 of four is a newcomer."""
    return {n: rank(n, **({"intact": False, "loss": None, **of_lost} if n == 2 else {})) for n in range(4)}


def exact(parked: dict[int, Parked]) -> Choice:
    found = choose_sources(parked, frozenset({2}))
    assert isinstance(found, Choice), found
    return found


def test_survivors_keep_what_they_have() -> None:
    parked = four()
    assert exact(parked).version == 20, "an exact repair goes back"
    found = rehabilitated(parked, exact(parked), FREE)
    assert isinstance(found, Choice) and found.version == 33
    assert {n: source.kind for n, source in found.sources.items()} == {0: "own", 1: "own", 2: "stale", 3: "own"}
    assert found.sources[2].at == 20
    assert found.healing == Healing(judge=0, loss=1.0, spread=0.1, target=20, since=33, until=46)


def test_one_that_is_a_step_behind_keeps_its_own() -> None:
    parked = {**four(), 1: rank(1, 32, small_versions=(20, 32, 33))}
    found = rehabilitated(parked, exact(parked), FREE)
    assert isinstance(found, Choice) and found.sources[1] == Source(kind="behind")


def straight(worth: tuple[float, float, float], kept: tuple[int, ...]) -> int:
    """What the survivors expect of a straight line, what the lost rank's arena holds; where that line begins."""
    parked = four(snapshots=kept)
    for number, cost in zip((0, 1, 3), worth, strict=True):
        parked[number] = msgspec.structs.replace(parked[number], straight=cost)
    found = rehabilitated(parked, exact(parked), FREE)
    assert isinstance(found, Choice) and found.sources[2].at == 20
    return found.sources[2].before


def test_parameters_go_on_on_a_straight_line_where_the_survivors_own_have_shown_that_to_pay() -> None:
    assert straight((0.6, 0.7, 1.2), (5, 20)) == 5
    assert straight((0.6, 1.0, 1.2), (5, 20)) == -1, "not for most of them"
    assert straight((1.0, 1.0, 1.0), (5, 20)) == -1, "nobody knows"
    assert straight((0.6, 0.6, 0.6), (20,)) == -1, "there is only one"
    assert straight((0.6, 0.6, 0.6), (10, 20)) == -1, "further than it was seen to go"


def shadowed(shadows: tuple[int, ...], **changes: Any) -> tuple[int, int]:
    """From which shadow the lost parameters come, and from which other one a straight line through it."""
    parked = four(shadows=shadows, **changes)
    found = rehabilitated(parked, exact(parked), FREE)
    assert isinstance(found, Choice) and (found.sources[2].kind, found.sources[2].at) == ("stale", 20)
    return found.sources[2].shadow, found.sources[2].before


def test_parameters_come_from_the_newest_shadow_and_go_on_through_both() -> None:
    assert shadowed((28, 31)) == (31, 28)
    assert shadowed((28, 33)) == (33, -1), "there is nowhere to go on to"
    assert shadowed((29, 30)) == (30, -1), "further than it was seen to go"
    assert shadowed((31,)) == (31, -1), "there is only one"
    assert shadowed((18, 26)) == (26, 18), "a line may begin before the snapshot"
    assert shadowed((31, 34)) == (31, -1), "the lost rank was a step ahead"


def test_a_shadow_that_is_no_newer_than_the_snapshot_is_none() -> None:
    assert shadowed((17, 20)) == (-1, -1)
    assert shadowed((34, 37)) == (-1, -1)
    assert shadowed((), snapshots=(5, 20)) == (-1, -1), "whether a line from the snapshots pays, nobody has said"


def test_an_exact_repair_knows_of_no_shadow() -> None:
    parked = four(shadows=(28, 31))
    for settings in (Settings(), Settings(fidelity="fast", rehab_from=50)):
        found = resumed(parked, exact(parked), Fleet(), settings)
        assert isinstance(found, Choice) and found.version == 20
        assert all(source.shadow == -1 for source in found.sources.values())


@pytest.mark.parametrize(
    ("changed", "limits", "why"),
    [
        ({3: rank(3, intact=False)}, FREE, "2 of 4 ranks are more than rehab_share"),
        ({}, FREE._replace(first_step=34), "before rehab_from"),
        ({2: rank(2, 33, intact=False, small_versions=(20,))}, FREE, "rank 2 cannot be brought to step 33"),
        ({2: rank(2, 32, intact=False, small_versions=(20, 33))}, FREE, "rank 2 cannot be brought to step 33"),
        ({1: rank(1, 30)}, FREE, "rank 1 cannot be brought to step 33"),
        ({n: rank(n, loss=None) for n in (0, 1, 3)}, FREE, "no rank tells its loss"),
        ({0: rank(0, agreed=20)}, FREE, "not to be gone on from"),
        ({n: rank(n, 21, intact=n != 2) for n in range(4)}, FREE, "costs next to nothing"),
    ],
)
def test_where_all_have_to_go_back(changed: dict[int, Parked], limits: Limits, why: str) -> None:
    parked = {**four(), **changed}
    found = rehabilitated(parked, Choice(version=20, sources={}), limits)
    assert isinstance(found, str) and why in found


def test_only_where_it_is_asked_for() -> None:
    parked, fleet, fast = four(), Fleet(), Settings(fidelity="fast", rehab_from=10)

    def version(settings: Settings = fast) -> int:
        found = resumed(parked, exact(parked), fleet, settings)
        assert isinstance(found, Choice)
        return found.version

    assert version(Settings()) == 20 and version() == 33
    fleet.back = Back(exact=True)
    assert version() == 20, "it has not healed once: from then on repairs are exact"
    fleet.back = Back(trusted=20)
    assert version() == 20, "what is later is not to be trusted"
    assert resumed(parked, Infeasible(reason="no"), Fleet(), fast) == Infeasible(reason="no")


def test_the_report_says_why_not() -> None:
    parked = {**four(), 3: rank(3, intact=False)}
    found = resumed(parked, exact(parked), Fleet(), Settings(fidelity="fast", rehab_from=10))
    assert isinstance(found, Choice) and "not from now: 2 of 4 ranks" in found.note


def test_the_guard_goes_on_through_other_repairs() -> None:
    healing = Healing(judge=0, loss=1.0, spread=0.1, target=20, until=46)
    parked = four()
    own = {n: Source(kind="own") for n in (1, 2, 3)}
    here = Choice(version=36, sources={0: Source(kind="own"), **own})
    assert carried_on(healing, here, parked) == healing
    other = Choice(version=36, sources={0: Source(kind="replica", rank=1), **own})
    moved = carried_on(healing, other, parked)
    assert moved is not None and moved.judge == 1
    assert carried_on(healing, msgspec.structs.replace(here, version=20), parked) is None, "all is exact again"
    assert carried_on(healing, msgspec.structs.replace(here, version=46), parked) is None, "its time is over"


@pytest.mark.parametrize(("newest", "trusted"), [(40, 20), (46, -1)])
def test_a_restart_in_the_middle_of_healing_is_exact(newest: int, trusted: int) -> None:
    fleet = Fleet()
    fleet.ranks = {0: Rank(rank=0, node="n", local_rank=0, version=newest)}
    fleet.healing = Healing(judge=0, loss=1.0, spread=0.1, target=20, until=46)
    given_up(fleet)
    assert fleet.back.trusted == trusted and fleet.healing is None


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Source(kind="stale", at=20, shadow=31), "its shadow of step 31, moments of step 20 (not exact)"),
        (
            Source(kind="stale", at=20, shadow=31, before=28),
            "its shadow of step 31, on in a straight line from that of step 28, moments of step 20 (not exact)",
        ),
        (Source(kind="stale", at=20), "its snapshot of step 20 (not exact)"),
    ],
)
def test_the_report_says_where_a_lost_shard_came_from(source: Source, words: str) -> None:
    assert source_in_words(source) == words
