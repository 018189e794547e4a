"""Steps saved while some ranks were missing: whole if the others hold everything, and refused if COMMIT does not say who was."""

from __future__ import annotations

import pytest

from rerail.checkpoint import names
from rerail.checkpoint.catalog import Step, check_whole
from rerail.checkpoint.declining import decline
from rerail.checkpoint.manifest import Commit, RankEntry, RankManifest, decode_commit, encode_commit
from rerail.checkpoint.names import StepId
from rerail.checkpoint.tiers import tier_at
from rerail.errors import CheckpointError
from rerail.session.owed import give_up_for

STEP = StepId(1, 5, 0)


def commit(ranks: tuple[int, ...], vacant: tuple[int, ...]) -> Commit:
    entries = {str(rank): RankEntry(0, "") for rank in ranks}
    return Commit(epoch=1, step=5, generation=0, world_size=4, ranks=entries, vacant=vacant, saved_at=0.0)


def manifest(rank: int) -> RankManifest:
    return RankManifest(
        epoch=1, step=5, generation=0, rank=rank, world_size=4, file="", size=0, hashes=(), tensors={}, small=b""
    )


def test_three_of_four_are_enough_where_one_was_not_there(tmp_path: object) -> None:
    three = commit((1, 2, 3), (0,))
    found = decode_commit(encode_commit(three), STEP)
    check_whole(Step(tier_at(str(tmp_path)), STEP, found, {rank: manifest(rank) for rank in (1, 2, 3)}))
    with pytest.raises(CheckpointError, match="2 of 3 ranks are in it"):
        check_whole(Step(tier_at(str(tmp_path)), STEP, found, {rank: manifest(rank) for rank in (1, 2)}))


@pytest.mark.parametrize("vacant", [(1,), (0, 0), (0, 4), (-1,)])
def test_a_commit_that_contradicts_itself_about_who_was_there_is_refused(vacant: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match="not there, of 4"):
        decode_commit(encode_commit(commit((1, 2, 3), vacant)), STEP)


def test_nobody_waits_for_the_part_of_a_rank_that_is_gone_for_now(tmp_path: object) -> None:
    tier = tier_at(str(tmp_path))
    older, later = STEP, StepId(1, 9, 0)
    for step in (older, later):
        tier.make_folder(step.folder)
        tier.put(f"{step.folder}/{names.manifest_name(1)}", b"{}")
    give_up_for([tier], epoch=1, version=7, ranks=[0], coordinator=0)
    assert {names.failure_name(0), names.ABORT} <= set(tier.names(older.folder))
    assert tier.names(later.folder) == [names.manifest_name(1)], "what is saved without that rank is none of its affair"


def test_the_word_of_the_lowest_rank_that_is_there_counts_as_the_coordinator_s(tmp_path: object) -> None:
    tier = tier_at(str(tmp_path))
    decline([tier], STEP, 1, "no room", coordinator=1)
    assert names.ABORT in tier.names(STEP.folder)
