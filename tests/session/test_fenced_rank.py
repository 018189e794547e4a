"""A rank whose lease is over changes nothing any more, even if nobody is there to end it."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import torch
from rerail.runtime.clock import StepClock, make_page, now_ns
from rerail.session.attempt import Attempt
clock = StepClock(make_page())
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=1.0)
attempt = Attempt(clock)
attempt.watch(optimizer)
for until in {leases}:
    attempt.begin()
    weight.grad = torch.ones(2)
    clock.lease(now_ns() + until if until else 0)
    optimizer.step()
    if {late}:
        clock.lease(1)
    assert attempt.end(None)
    print("done", flush=True)
"""


@pytest.mark.parametrize(
    ("leases", "late", "steps", "code"),
    [
        ("(0, 0)", False, 2, 0),
        ("(10**12, 10**12)", False, 2, 0),
        ("(10**12, -1)", False, 1, 75),
        ("(10**12,)", True, 0, 75),
    ],
)
def test_a_rank_completes_no_step_after_its_lease(leases: str, late: bool, steps: int, code: int) -> None:
    told = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(leases=leases, late=late)], capture_output=True, text=True, timeout=120
    )
    assert told.returncode == code, told.stderr
    assert told.stdout.count("done") == steps, told.stdout + told.stderr
    assert ("cut off from the job" in told.stderr) == (code == 75)
