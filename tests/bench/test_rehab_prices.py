"""How `bench/rehab.py` prices a recovery: on runs whose price is known."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rehab import Reference, recovery, regained, repeated
from rehab_train import SHAPES, Trainer, part

SHAPE = SHAPES["tiny"]._replace(steps=60, batch=4, context=32, layers=4)


@pytest.fixture(scope="module")
def run() -> Reference:
    torch.set_num_threads(1)
    found = Reference(Trainer(SHAPE, 0, torch.device("cpu")), every=10, faults=[28])
    found.run()
    return found


def test_what_is_not_lost_costs_nothing(run: Reference) -> None:
    lost = run.trainer.stage(1, 4)
    found = recovery(run, 28, "replica", lost, 50)
    assert found["lag"] == pytest.approx(0.0, abs=1e-6) and found["jump"] == pytest.approx(0.0, abs=1e-6)
    assert (found["behind"], run.checkpoint(28), run.checkpoint(20)) == (8, 20, 10)


def test_stale_puts_the_lost_part_back_and_nothing_else(run: Reference) -> None:
    lost = run.trainer.slices(1, 4)
    recovery(run, 28, "stale", lost, 28)
    old, true, now = run.states[20].tensors, run.states[28].tensors, run.trainer.tensors()
    for kind in range(3):
        for span in lost:
            assert torch.equal(part(now[kind], span), part(old[kind], span))
            assert torch.equal(
                now[kind][span.tensor].view(-1)[: span.start], true[kind][span.tensor].view(-1)[: span.start]
            )


def test_a_run_that_is_hit_is_the_same_up_to_there(run: Reference) -> None:
    found = repeated(run, 0, "replica", 2, lambda trainer: trainer.stage(0, 4))
    assert found["end"] == pytest.approx(0.0, abs=1e-4) and found["faults"] == 2


def test_stages_have_every_parameter_once(run: Reference) -> None:
    spans = [span for number in range(4) for span in run.trainer.stage(number, 4)]
    assert sorted(span.tensor for span in spans) == list(range(len(run.trainer.parameters)))


def test_the_slope_is_that_of_the_losses_around() -> None:
    curve: Any = SimpleNamespace(valid={step: 5.0 - 0.01 * step for step in range(0, 300, 3)})
    assert Reference.slope(curve, 150) == pytest.approx(0.01)


def test_regain_counts_steps_and_knows_never() -> None:
    before = [2.0] * 10
    assert regained(before, [2.0] * 20) == 0
    assert regained(before, [3.0] * 5 + [1.9] * 20) == 5
    assert regained(before, [3.0] * 20) == 21
    assert not math.isnan(regained(before, [float("inf")] * 12))
