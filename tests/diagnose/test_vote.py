"""Replicas vote on their state: the majority is right, two that differ are a tie."""

from __future__ import annotations

import random

from rerail.diagnose.vote import SETS, VERSIONS, Ballot, VoteBox

THREE = (0, 4, 8)
GOOD = (11, 22, 33)


def vote(
    box: VoteBox, version: int, votes: dict[int, tuple[int, ...]], replicas: tuple[int, ...] = THREE
) -> Ballot | None:
    """All votes but the last show nothing."""
    *first, last = [box.take(rank, version, sums, replicas) for rank, sums in votes.items()]
    assert first == [None] * len(first)
    return last


def test_all_agree() -> None:
    ballot = vote(VoteBox(), 7, {8: GOOD, 0: GOOD, 4: GOOD})
    assert ballot == Ballot(version=7, voters=THREE) and not ballot.suspects and not ballot.tie


def test_the_minority_is_named_with_the_groups_that_differ() -> None:
    ballot = vote(VoteBox(), 7, {0: GOOD, 4: (11, 99, 34), 8: GOOD})
    assert ballot == Ballot(version=7, voters=THREE, suspects=(4,), groups=(1, 2))


def test_each_group_has_its_own_majority() -> None:
    ballot = vote(VoteBox(), 7, {0: (1, 22, 33), 4: (11, 2, 33), 8: GOOD})
    assert ballot == Ballot(version=7, voters=THREE, suspects=(0, 4), groups=(0, 1))


def test_two_that_differ_are_a_tie() -> None:
    ballot = vote(VoteBox(), 7, {3: GOOD, 1: (11, 22, 0)}, (1, 3))
    assert ballot == Ballot(version=7, voters=(1, 3), suspects=(1, 3), groups=(2,), tie=True)


def test_half_against_half_and_a_mere_plurality_are_ties() -> None:
    for others in ([(5,), (5,), (6,), (6,)], [(5,), (5,), (6,), (7,), (8,)]):
        ranks = tuple(range(len(others)))
        ballot = vote(VoteBox(), 1, dict(zip(ranks, others, strict=True)), ranks)
        assert ballot is not None and ballot.tie and ballot.suspects == ranks


def test_a_vote_with_fewer_groups_differs_in_the_rest() -> None:
    ballot = vote(VoteBox(), 7, {0: GOOD, 4: GOOD, 8: GOOD[:2]})
    assert ballot is not None and (ballot.suspects, ballot.groups) == ((8,), (2,))


def test_versions_and_sets_are_interleaved_and_replicas_come_in_any_order() -> None:
    box, rng = VoteBox(), random.Random(3)
    sets = [(0, 1, 2), (3, 4, 5), (6, 7)]
    votes = [(rank, version, replicas) for replicas in sets for version in range(8) for rank in replicas]
    rng.shuffle(votes)
    ballots = {}
    for rank, version, replicas in votes:
        sums = (version, 66 if (rank, version) == (4, 5) else 0)
        ballot = box.take(rank, version, sums, tuple(rng.sample(replicas, len(replicas))))
        if ballot is not None:
            assert (replicas, version) not in ballots
            ballots[replicas, version] = ballot
    assert len(ballots) == 24
    assert {key: ballot.suspects for key, ballot in ballots.items() if ballot.suspects} == {((3, 4, 5), 5): (4,)}


def test_the_others_do_not_wait_for_a_rank_that_is_gone() -> None:
    box = VoteBox()
    for rank in (0, 1, 2):
        assert box.take(rank, 7, GOOD if rank else (0, 0, 0), (0, 1, 2, 3)) is None
    assert box.forget(3) == [Ballot(version=7, voters=(0, 1, 2), suspects=(0,), groups=(0, 1, 2))]
    assert box.forget(3) == [] and box.forget(3) == []
    ballot = vote(box, 8, dict.fromkeys((0, 1, 2), GOOD), (0, 1, 2, 3))
    assert ballot is not None and ballot.voters == (0, 1, 2)


def test_a_vote_goes_with_its_rank() -> None:
    box = VoteBox()
    assert box.take(0, 7, (1, 1, 1), THREE) is None
    assert box.forget(0) == []
    ballot = vote(box, 7, {4: GOOD, 8: GOOD})
    assert ballot == Ballot(version=7, voters=(4, 8))


def test_a_replaced_rank_votes_again_on_the_same_version() -> None:
    box = VoteBox()
    first = vote(box, 7, {0: GOOD, 4: (0, 0, 0), 8: GOOD})
    assert first is not None and first.suspects == (4,)
    assert box.forget(4) == []
    assert box.take(4, 7, GOOD, THREE) == Ballot(version=7, voters=THREE)


def test_the_same_vote_twice_is_one_vote() -> None:
    box = VoteBox()
    assert box.take(0, 7, GOOD, THREE) is None and box.take(0, 7, GOOD, THREE) is None
    assert vote(box, 7, {4: GOOD, 8: GOOD}) is not None
    assert box.take(8, 7, GOOD, THREE) is None


def test_a_version_made_again_is_not_held_against_the_old_one() -> None:
    box, again = VoteBox(), (44, 55, 66)
    assert vote(box, 7, dict.fromkeys(THREE, GOOD)) is not None
    assert vote(box, 7, dict.fromkeys(THREE, again)) == Ballot(version=7, voters=THREE)
    box.rewind(6)
    assert vote(box, 7, dict.fromkeys(THREE, again)) == Ballot(version=7, voters=THREE)


def test_one_alone_has_nothing_to_be_compared_with() -> None:
    box = VoteBox()
    assert box.take(0, 7, GOOD, (0, 1)) is None and box.forget(1) == []
    assert box.take(5, 7, GOOD, (5,)) is None


def test_strangers_do_not_vote() -> None:
    box = VoteBox()
    assert box.take(9, 7, (0, 0, 0), THREE) is None
    assert vote(box, 7, dict.fromkeys(THREE, GOOD)) == Ballot(version=7, voters=THREE)


def test_memory_is_bounded() -> None:
    box = VoteBox()
    for version in range(VERSIONS + 5):
        assert box.take(0, version, GOOD, (0, 1)) is None
    assert box.take(1, 4, GOOD, (0, 1)) is None, "dropped"
    assert box.take(1, VERSIONS, GOOD, (0, 1)) is not None
    for number in range(SETS):
        assert box.take(0, 0, GOOD, (0, number + 2)) is None
    assert box.take(0, VERSIONS + 1, (0,), (0, 1)) is None, "the oldest set is dropped"
    assert len(box._sets) == SETS and all(len(one) <= VERSIONS for one in box._sets.values())
