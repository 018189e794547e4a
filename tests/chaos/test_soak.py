"""A short chaos soak: sixty faults of every kind in one job, also two at a time and during repairs. `make soak` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos import Plan, differences, network, schedule, soak, together
from chaos_faults import KINDS
from chaos_job import Size

SIZE = Size(nodes=3, spares=1, per_node=2)


@pytest.mark.timeout(1500)
def test_a_job_comes_back_from_sixty_faults_exact_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with network(SIZE) as wires:
        figures, wrong = soak(tmp_path, SIZE, wires, Plan(faults=60, seed=1))
    print(figures)
    assert not wrong, "\n".join([figures, *wrong])


def test_a_schedule_is_the_seeds_and_has_every_kind() -> None:
    faults = schedule(7, 60, KINDS, SIZE)
    assert faults == schedule(7, 60, KINDS, SIZE) != schedule(8, 60, KINDS, SIZE)
    assert {fault.kind for fault in faults} == set(KINDS)
    assert len(KINDS) >= 15


def test_a_schedule_has_faults_that_come_together_and_into_a_repair() -> None:
    groups = together(schedule(7, 400, KINDS, SIZE))
    assert sum(map(len, groups)) == 400
    assert {len(group) for group in groups} == {1, 2}
    behind = [group[1].behind_s for group in groups if len(group) == 2]
    assert 0.0 in behind and any(0.05 <= one <= 0.5 for one in behind)
    assert all(group[0].behind_s < 0 for group in groups)


def test_a_step_with_other_weights_is_found() -> None:
    wanted = {(rank, step): f"{step}" for rank in range(2) for step in range(1, 4)}
    assert differences(wanted, wanted) == []
    assert differences(wanted | {(1, 2): "other"}, wanted) == ["rank 1 holds other weights at step 2"]
    assert differences({place: one for place, one in wanted.items() if place != (0, 3)}, wanted) == [
        "rank 0 never told of step 3"
    ]
