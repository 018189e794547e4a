"""How `bench/rehab.py` prices a recovery: on runs whose price is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rehab_models import Shape
from rehab_runs import METHODS, Reference, choice, learn, recovery, regained, repeated
from rehab_tables import better, records
from rehab_train import SHAPES, Span, Trainer, part
from rerail.rehab.vitp import Vitp

SHAPE = SHAPES["tiny"]._replace(steps=60, batch=4, context=32, layers=4)


@pytest.fixture(scope="module")
def run() -> Reference:
    torch.set_num_threads(1)
    return _trained(SHAPE, lambda trainer: trainer.stage(1, 4))


def _trained(shape: Shape, lost: Callable[[Trainer], list[Span]]) -> Reference:
    trainer = Trainer(shape, 0, torch.device("cpu"))
    found = Reference(trainer, every=10, faults=[38], lost=lost(trainer))
    found.run()
    return found


def test_what_is_not_lost_costs_nothing(run: Reference) -> None:
    found = recovery(run, 38, "replica", 58)
    assert found["lag"] == pytest.approx(0.0, abs=1e-6) and found["jump"] == pytest.approx(0.0, abs=1e-6)
    assert (found["behind"], run.checkpoint(38), run.checkpoint(30)) == (8, 30, 20)


def test_stale_puts_the_lost_part_back_and_nothing_else() -> None:
    run = _trained(SHAPE._replace(steps=40), lambda trainer: trainer.slices(1, 4))
    recovery(run, 38, "stale", 38)
    old, true, now = run.checkpoints[30], run.states[38].tensors, run.trainer.tensors()
    for kind in range(3):
        for at, span in enumerate(run.lost):
            assert torch.equal(part(now[kind], span), old[kind][at])
            before, kept = now[kind][span.tensor].view(-1), true[kind][span.tensor].view(-1)
            assert torch.equal(before[: span.start], kept[: span.start])
            assert torch.equal(before[span.end :], kept[span.end :])


@pytest.mark.parametrize("name", ["linear, moments too", "vitp, moments too"])
def test_moments_are_guessed_too_and_the_second_is_never_negative(run: Reference, name: str) -> None:
    run.trainer.put(run.states[38])
    METHODS[name](run, 38)
    old, now = run.checkpoints[30], run.trainer.tensors()
    for kind in (1, 2):
        assert any(not torch.equal(part(now[kind], span), old[kind][at]) for at, span in enumerate(run.lost))
    assert all(bool((part(now[2], span) >= 0).all()) for span in run.lost)


def test_a_net_is_trained_once_for_a_fault_and_is_a_candidate(run: Reference) -> None:
    first = learn(run, 38, Vitp())
    assert learn(run, 38, Vitp()) is first
    assert {"stale", "linear", "linear over 2", "least squares", "vitp", "vitp, drift"} == set(choice(run, 38).costs)
    told = METHODS["chosen"](run, 38)
    assert told["chose"] in choice(run, 38).costs


def test_of_a_lean_shape_only_what_is_asked_for_is_kept() -> None:
    run = _trained(SHAPE._replace(lean=True), lambda trainer: trainer.stage(1, 4))
    assert sorted(run.checkpoints) == [0, 10, 20, 30] and list(run.states) == [38]
    assert [len(run.checkpoints[step]) for step in (0, 10, 20, 30)] == [1, 1, 1, 3]
    assert recovery(run, 38, "chosen", 58)["behind"] == 8


def test_a_run_that_is_hit_is_the_same_up_to_there(run: Reference) -> None:
    found = repeated(run, "replica", 2)
    assert found["end"] == pytest.approx(0.0, abs=1e-4) and found["faults"] == 2


def test_whoever_chose_stale_is_its_equal() -> None:
    stale = {(0, 5): 2.0, (0, 9): 2.0}
    runs = [{"method": "chosen", "seed": 0, "fault": 5, "lag": 1.9, "chose": "stale"}]
    runs += [{"method": "chosen", "seed": 0, "fault": 9, "lag": 1.0, "chose": "linear"}]
    assert better(runs, stale) == "1 of 2, 1 equal"


def test_a_line_that_was_cut_off_is_left_out() -> None:
    assert records(['{"lag": 1}\n', "noise\n", '{"lag": 2, "va']) == [{"lag": 1}]


def test_stages_have_every_parameter_once(run: Reference) -> None:
    spans = [span for number in range(4) for span in run.trainer.stage(number, 4)]
    assert sorted(span.tensor for span in spans) == list(range(len(run.trainer.parameters)))


def test_the_slope_is_that_of_the_losses_around() -> None:
    curve: Any = SimpleNamespace(every=40, valid={step: 5.0 - 0.01 * step for step in range(0, 300, 3)})
    assert Reference.slope(curve, 150) == pytest.approx(0.01)


def test_regain_counts_steps_and_knows_never() -> None:
    before = [2.0] * 10
    assert regained(before, [2.0] * 20) == 0
    assert regained(before, [3.0] * 5 + [1.9] * 20) == 5
    assert regained(before, [3.0] * 20) == 21
    assert not math.isnan(regained(before, [float("inf")] * 12))
