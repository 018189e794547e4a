"""Replicas vote on their state: the majority is right, two that differ are a tie, and computing again shows who was wrong."""

from __future__ import annotations

from rerail.diagnose.vote import Ballot, Replay, compare, count

THREE = (0, 4, 8)
GOOD = (11, 22, 33)
BAD = (11, 22, 34)


def test_all_agree() -> None:
    ballot = count(7, {8: GOOD, 0: GOOD, 4: GOOD})
    assert ballot == Ballot(version=7, voters=THREE) and not ballot.suspects and not ballot.tie


def test_the_minority_is_named_with_the_groups_that_differ() -> None:
    ballot = count(7, {0: GOOD, 4: (11, 99, 34), 8: GOOD})
    assert ballot == Ballot(version=7, voters=THREE, suspects=(4,), groups=(1, 2))


def test_each_group_has_its_own_majority() -> None:
    ballot = count(7, {0: (1, 22, 33), 4: (11, 2, 33), 8: GOOD})
    assert ballot == Ballot(version=7, voters=THREE, suspects=(0, 4), groups=(0, 1))


def test_two_that_differ_are_a_tie() -> None:
    ballot = count(7, {3: GOOD, 1: BAD})
    assert ballot == Ballot(version=7, voters=(1, 3), suspects=(1, 3), groups=(2,), tie=True)


def test_half_against_half_and_a_mere_plurality_are_ties() -> None:
    for others in ([(5,), (5,), (6,), (6,)], [(5,), (5,), (6,), (7,), (8,)]):
        ballot = count(1, dict(enumerate(others)))
        assert ballot.tie and ballot.suspects == tuple(range(len(others)))


def test_a_vote_with_fewer_groups_differs_in_the_rest() -> None:
    ballot = count(7, {0: GOOD, 4: GOOD, 8: GOOD[:2]})
    assert (ballot.suspects, ballot.groups) == ((8,), (2,))


def test_whoever_had_another_result_the_first_time_was_wrong() -> None:
    assert compare({0: GOOD, 1: BAD}, {0: GOOD, 1: GOOD}) == Replay(suspects=(1,))
    assert compare({0: BAD, 1: GOOD}, {0: GOOD, 1: GOOD}) == Replay(suspects=(0,))
    assert compare({0: GOOD, 1: BAD, 2: GOOD, 3: BAD}, dict.fromkeys(range(4), GOOD)) == Replay(suspects=(1, 3))


def test_who_differs_again_has_no_passing_fault() -> None:
    assert compare({0: GOOD, 1: BAD}, {0: GOOD, 1: BAD}) == Replay(again=True)
    assert compare({0: GOOD, 1: BAD}, {0: GOOD, 1: (0, 0, 0)}) == Replay(again=True)


def test_whoever_was_clearly_further_from_the_result_was_wrong() -> None:
    again = dict.fromkeys((0, 1), (9, 9, 9))
    assert compare({0: GOOD, 1: BAD}, again, {0: 1e-9, 1: 1e-3}) == Replay(suspects=(1,))
    assert compare({0: GOOD, 1: BAD}, again, {0: float("inf"), 1: 1e-3}) == Replay(suspects=(0,))
    assert compare({0: GOOD, 1: BAD}, again, {0: 1e-3, 1: 2e-3}) == Replay(), "too close to tell"
    assert compare({0: GOOD, 1: BAD}, again, {0: 0.0, 1: 0.0}) == Replay()
    assert compare({0: GOOD, 1: BAD}, again, {0: float("inf"), 1: float("inf")}) == Replay()


def test_nobody_is_named_where_no_result_comes_out_twice() -> None:
    assert compare({0: GOOD, 1: BAD}, dict.fromkeys((0, 1), (9, 9, 9))) == Replay()
