"""Root causes: the earliest cause, not the first line."""

from __future__ import annotations

import pytest

from rerail.diagnose.rootcause import Facts, diagnose
from rerail.diagnose.stall import behind, counts_of
from rerail.flow import Event, Role


def event(code: str, rank: int, at: float, role: Role = Role.ROOT, message: str = "", step: int = 5) -> Event:
    text = message or f"rank {rank} {code}"
    return Event(
        id=f"{code}-{rank}", job="j", at=at, code=code, node="n", rank=rank, role=role, message=text, first_seen=at, step=step,
        evidence="\n".join(f"line {i}" for i in range(9)),
    )  # fmt: skip


ECHO = [event("collective.failed", rank, 1.0 + rank / 10, Role.SYMPTOM) for rank in (0, 1)]


def test_echoes_alone_wait_for_a_root() -> None:
    assert diagnose(ECHO, Facts(), at=2.0, waited=False) is None


def test_echoes_alone_are_a_failed_collective_after_the_wait() -> None:
    found = diagnose(ECHO, Facts(), at=2.0, waited=True)
    assert found is not None and found.rule == "collective-alone" and found.lost == () and found.confidence == "low"


def test_a_death_beats_echoes_that_came_first() -> None:
    found = diagnose([*ECHO, event("process.killed", 3, 9.0)], Facts(gone=frozenset({3})), at=9.0, waited=False)
    assert found is not None and (found.code, found.ranks, found.lost) == ("process.killed", (3,), (3,))
    assert set(found.echoes) == {"collective.failed-0", "collective.failed-1"}
    assert found.evidence[-1] == "line 8" and len(found.evidence) == 6


def test_exit_by_a_lost_connection_is_an_echo_but_its_rank_is_gone_too() -> None:
    echo = event("collective.peer_lost", 1, 1.0, Role.SYMPTOM)
    found = diagnose([echo, event("process.killed", 3, 2.0)], Facts(gone=frozenset({1, 3})), at=2.0, waited=False)
    assert found is not None and found.root == "process.killed-3" and found.lost == (1, 3)


def test_same_error_everywhere_is_one_error() -> None:
    events = [event("script.raised", r, 1.0, message=f"rank {r} raised ValueError: x") for r in (2, 0, 1)]
    found = diagnose(events, Facts(), at=2.0, waited=False)
    assert found is not None and found.rule == "same-error-everywhere" and found.ranks == (0,)
    assert found.summary == "rank 0 raised ValueError: x (the same on 3 ranks)"


def test_a_lost_node_explains_the_rest() -> None:
    events = [event("process.killed", 3, 1.0), event("node.lost", -1, 2.0)]
    found = diagnose(events, Facts(gone=frozenset({2, 3})), at=2.0, waited=False)
    assert found is not None and found.rule == "node-lost" and found.ranks == (2, 3)


def test_two_different_faults_are_both_broken() -> None:
    events = [event("process.stopped", 1, 2.0), event("script.raised", 2, 1.0)]
    found = diagnose(events, Facts(gone=frozenset({1})), at=3.0, waited=False)
    assert found is not None and found.root == "script.raised-2" and found.ranks == (1, 2) and found.lost == (1,)


def test_a_stall_everywhere_names_the_rank_that_is_behind() -> None:
    events = [event("collective.stalled", 3, 2.0, Role.SYMPTOM), *ECHO]
    found = diagnose(events, Facts(), at=3.0, waited=True)
    assert found is not None and found.rule == "fewest-collectives" and found.ranks == (3,) and found.lost == ()
    assert "rank 3 is behind" in found.summary and found.confidence == "low"


def test_a_death_beats_a_stall() -> None:
    events = [event("collective.stalled", 3, 1.0, Role.SYMPTOM), event("process.killed", 1, 2.0)]
    found = diagnose(events, Facts(gone=frozenset({1})), at=3.0, waited=True)
    assert found is not None and found.ranks == (1,)


@pytest.mark.parametrize(
    ("counts", "rank"),
    [({}, -1), ({0: 7, 1: 7}, -1), ({0: 7, 1: 7, 2: 6, 3: 7}, 2), ({0: 9, 1: 5, 2: 5}, 1)],
)
def test_the_rank_with_the_fewest_collectives_is_behind(counts: dict[int, int], rank: int) -> None:
    assert behind(counts) == rank


def test_counts_survive_their_way() -> None:
    assert counts_of("0:118,1:120") == {0: 118, 1: 120}
    assert counts_of("") == {} and counts_of("x,1:,2:5") == {2: 5}
