"""Checksums of the state: every bit counts, whatever the type, shape and place of a tensor."""

from __future__ import annotations

import pytest
import torch

from rerail.runtime.clock import METRICS, Metric, StepClock, make_page
from rerail.session.votes import GROUPS, go_back_to, sums

TENSORS = [
    torch.randn(37, 11),
    torch.randn(1001)[3:],  # does not begin at a multiple of eight bytes
    torch.randn(5, dtype=torch.bfloat16),
    torch.tensor(3),
    torch.randn(16, 16).t(),
    torch.zeros(0),
    torch.arange(7, dtype=torch.uint8),
]


@pytest.mark.parametrize("index", [i for i, tensor in enumerate(TENSORS) if tensor.numel()])
def test_one_flipped_bit_changes_one_group(index: int) -> None:
    state = [tensor.clone() for tensor in TENSORS]
    before = sums(state)
    flat = state[index].contiguous().view(-1)
    body = flat.view(torch.uint8)
    for at in (0, body.numel() // 2, body.numel() - 1):
        for bit in (0, 7):
            body[at] ^= 1 << bit
            changed = (sums([*state[:index], flat, *state[index + 1 :]]) != before).nonzero().flatten().tolist()
            assert changed == [index * GROUPS // len(state)]
            body[at] ^= 1 << bit
    assert torch.equal(sums(state), before)


def test_the_same_state_has_the_same_sums_wherever_it_lies() -> None:
    assert torch.equal(sums(TENSORS), sums([tensor.contiguous().clone() for tensor in TENSORS]))


def test_the_clock_keeps_what_was_measured() -> None:
    clock = StepClock(make_page())
    clock.reset(0)
    assert clock.took(-1) == [] and clock.metrics() == {}
    for version in range(1, 101):
        clock.set_step(version)
        clock.step_took(0.1, version, 0.01, 0.06, 0.02, 0.01)
    assert [took.version for took in clock.took(90)] == list(range(91, 101)) and len(clock.took(-1)) == 64
    clock.set_metric(METRICS.index("loss"), 2.5)
    assert clock.metrics() == {"loss": Metric(100, 2.5, 0)}
    clock.set_metric(METRICS.index("loss"), float("nan"))
    clock.set_step(101)
    clock.set_metric(METRICS.index("loss"), 2.4)
    assert clock.metrics() == {"loss": Metric(101, 2.4, 100)}
    clock.reset(1)
    assert clock.took(-1) == []


def test_a_newcomer_that_has_not_voted_does_not_keep_a_flipped_bit_from_being_repaired() -> None:
    assert go_back_to([40, 50, 40], saved=False) == 40
    assert go_back_to([40, -1, 40], saved=True) == 40, "it has none of its own: a checkpoint of before will do"
    assert go_back_to([40, -1, 40], saved=False) == -1, "there would be nothing to start from"
    assert go_back_to([-1, -1], saved=True) == -1 and go_back_to([], saved=True) == -1
