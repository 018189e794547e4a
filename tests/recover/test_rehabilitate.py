"""When a lost shard may come from its snapshot while all others keep what they have, and when not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rerail.config import Settings
from rerail.recover.plan import Choice, Infeasible, choose_sources
from rerail.recover.rehabilitate import Limits, as_they_are, carried_on, given_up, rehabilitated, resumed
from rerail.report.compose import source_in_words
from rerail.runtime.fleet import Fleet, Rank
from rerail.runtime.plans import Back, Healing, Source, Stale
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
    assert found.sources[2].stale == Stale(at=20, expected=0.4)
    assert found.healing == Healing(
        judge=0,
        loss=1.0,
        spread=0.1,
        target=20,
        since=33,
        until=46,
        ways={2: "kept"},
        tellers=(0, 1, 3),
        expected=0.4 * 13,
    )


def test_one_that_is_a_step_behind_keeps_its_own() -> None:
    parked = {**four(), 1: rank(1, 32, small_versions=(20, 32, 33))}
    found = rehabilitated(parked, exact(parked), FREE)
    assert isinstance(found, Choice) and found.sources[1] == Source(kind="behind")


def test_who_was_left_the_step_before_hears_the_schedule_from_another() -> None:
    parked = {
        **four(),
        0: rank(0, 32, small_versions=(20, 32, 33)),
        2: rank(2, 32, intact=False, small_versions=(20, 32, 33)),
    }
    assert of_rank_2(rehabilitated(parked, Choice(version=20, sources={}), FREE)).schedule == 1


def of_rank_2(found: Choice | str) -> Stale:
    """How the lost rank is put together."""
    assert isinstance(found, Choice), found
    stale = found.sources[2].stale
    assert found.sources[2].kind == "stale" and stale is not None
    return stale


def straight(worth: tuple[float, float, float], kept: tuple[int, ...]) -> int:
    """What the survivors expect of a straight line, what the lost rank's arena holds; where that line begins."""
    parked = four(snapshots=kept)
    for number, cost in zip((0, 1, 3), worth, strict=True):
        parked[number] = msgspec.structs.replace(parked[number], straight=cost)
    found = rehabilitated(parked, exact(parked), FREE)
    stale = of_rank_2(found)
    assert stale.at == 20 and (stale.way == "linear") is (stale.before >= 0)
    return stale.before


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
    stale = of_rank_2(found)
    assert stale.at == 20 and stale.way in ("shadow", "kept")
    return stale.version, stale.before


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
        assert all(source.stale is None for source in found.sources.values())


@pytest.mark.parametrize(
    ("changed", "limits", "why"),
    [
        ({3: rank(3, intact=False)}, FREE, "2 of 4 ranks are more than rehab_share"),
        ({}, FREE._replace(first_step=34), "before rehab_from"),
        ({2: rank(2, 33, intact=False, small_versions=(20,))}, FREE, "rank 2 cannot be brought to step 33"),
        ({2: rank(2, 31, intact=False, small_versions=(20, 32))}, FREE, "rank 2 cannot be brought to step 33"),
        ({2: rank(2, 31, intact=False, small_versions=(20, 33))}, FREE, "rank 2 cannot be brought to step 33"),
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
    assert resumed(parked, Infeasible(reason="no"), Fleet(), Settings()) == Infeasible(reason="no")


def lost_with_its_node(**changes: Any) -> dict[int, Parked]:
    return four(snapshots=(), small_versions=(33,), **changes)


NOTHING = Infeasible(reason="no snapshot is shared by all")


def test_a_shard_that_is_lost_with_its_node_comes_from_a_checkpoint() -> None:
    found = rehabilitated(lost_with_its_node(saved=(4, 12)), NOTHING, FREE)
    assert of_rank_2(found) == Stale(at=12, saved=True, expected=0.4)
    assert isinstance(found, Choice) and found.healing is not None
    assert (found.healing.target, found.healing.saved, found.healing.until) == (12, True, 54)


def test_without_a_checkpoint_there_is_no_way_back_and_so_none_on() -> None:
    found = rehabilitated(lost_with_its_node(), NOTHING, FREE)
    assert isinstance(found, str) and "no checkpoint for rank 2" in found
    told = resumed(lost_with_its_node(), NOTHING, Fleet(), Settings(fidelity="fast", rehab_from=10))
    assert isinstance(told, Infeasible) and told.reason.startswith(NOTHING.reason) and found in told.reason


def guessed(*told: tuple[float, int] | None, saved: tuple[int, ...] = (4, 8, 12)) -> Stale:
    """What three survivors say of one predictor."""
    parked = lost_with_its_node(saved=saved)
    for number, one in zip((0, 1, 3), told, strict=True):
        if one is not None:
            parked[number] = msgspec.structs.replace(parked[number], guesses={"vitp": one, "linear": (0.9, 2)})
    return of_rank_2(rehabilitated(parked, NOTHING, FREE))


def test_parameters_are_guessed_where_most_survivors_have_seen_that_pay() -> None:
    assert guessed((0.5, 3), (0.7, 3), (2.0, 3)) == Stale(at=12, saved=True, way="vitp", rank=0, expected=0.28)
    assert guessed(None, (0.5, 3), None) == Stale(at=12, saved=True, way="vitp", rank=1, expected=0.2)
    assert guessed((0.5, 4), (0.5, 3), (0.5, 3)).way == "linear", "the net needs four checkpoints, and there are three"
    assert guessed((3.0, 3), (0.7, 3), (2.0, 3)).way == "linear", "most of them lose by it"
    assert guessed((0.5, 3), (0.5, 3), (0.5, 3), saved=(12,)).way == "kept", "one checkpoint shows no movement"
    assert guessed(None, None, None).way == "kept", "nobody knows"


def test_a_shadow_is_better_than_any_guess_and_parameters_that_are_elsewhere_are_best() -> None:
    tried = {n: rank(n, guesses={"vitp": (0.5, 3)}) for n in (0, 1, 3)}
    shadowed = lost_with_its_node(saved=(4, 8, 12), shadows=(30,)) | tried
    found = of_rank_2(rehabilitated(shadowed, NOTHING, FREE))
    assert found == Stale(at=12, saved=True, way="shadow", version=30, expected=0.09)
    held = four(weights=(1, 2, 3), shadows=(30,))
    assert of_rank_2(rehabilitated(held, exact(held), FREE)) == Stale(at=20, way="replica", rank=1, expected=0.03)
    held[1] = rank(1, 32, small_versions=(20, 32, 33))
    assert of_rank_2(rehabilitated(held, exact(held), FREE)).rank == 3, "rank 1 is a step behind"


def test_what_was_refused_is_not_tried_again_and_going_back_comes_last() -> None:
    parked = four(shadows=(28, 31))
    first = rehabilitated(parked, exact(parked), FREE)
    assert isinstance(first, Choice) and first.healing is not None and first.healing.ways == {2: "shadow"}
    refused = msgspec.structs.replace(first.healing, refused=("shadow",))
    second = rehabilitated(parked, exact(parked), FREE, refused)
    assert of_rank_2(second).way == "kept"
    assert isinstance(second, Choice) and second.healing is not None and second.healing.refused == ("shadow",)
    last = rehabilitated(parked, exact(parked), FREE, msgspec.structs.replace(refused, refused=("shadow", "kept")))
    assert isinstance(last, str) and "in a way that has not been refused" in last
    elsewhere = msgspec.structs.replace(refused, since=30)
    assert of_rank_2(rehabilitated(parked, exact(parked), FREE, elsewhere)).way == "shadow", "that was another fault"


def test_a_shard_that_was_refused_is_lost_as_before() -> None:
    healing = Healing(judge=0, loss=1.0, spread=0.1, target=20, since=33, until=46, ways={2: "shadow"})
    whole = {n: rank(n) for n in range(4)}
    assert as_they_are(whole, None) == as_they_are(whole, healing) == whole
    found = as_they_are(whole, healing.all_refused())
    assert [n for n, p in found.items() if not p.intact] == [2]
    later = {n: rank(n, 34) for n in range(4)}
    assert as_they_are(later, healing.all_refused()) == later, "a step has been completed since"


def test_what_was_kept_in_the_middle_of_healing_is_no_place_to_go_back_to() -> None:
    healing = Healing(judge=0, loss=1.0, spread=0.1, target=12, since=17, until=40)
    parked = four()
    found = rehabilitated(parked, exact(parked), FREE, healing)
    assert of_rank_2(found).at == 20
    assert isinstance(found, Choice) and found.healing is not None and found.healing.target == 12
    over = rehabilitated(parked, exact(parked), FREE, msgspec.structs.replace(healing, until=33))
    assert isinstance(over, Choice) and over.healing is not None and over.healing.target == 20


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
    ("stale", "words"),
    [
        (Stale(at=20, way="shadow", version=31), "its shadow of step 31, all else from its snapshot of step 20"),
        (
            Stale(at=20, way="shadow", version=31, before=28),
            "its shadow of step 31, on in a straight line from that of step 28, all else from its snapshot of step 20",
        ),
        (
            Stale(at=20, way="linear", before=10),
            "its snapshot of step 20, parameters on in a straight line from that of step 10",
        ),
        (Stale(at=20), "its snapshot of step 20"),
        (Stale(at=20, saved=True), "the checkpoint of step 20"),
        (Stale(at=20, saved=True, way="vitp"), "the checkpoint of step 20, parameters on as by predictor vitp"),
        (Stale(at=20, way="replica", rank=3), "parameters of rank 3, all else from its snapshot of step 20"),
    ],
)
def test_the_report_says_where_a_lost_shard_came_from(stale: Stale, words: str) -> None:
    assert source_in_words(Source(kind="stale", stale=stale)) == f"{words} (not exact)"
