"""A node is lost for a while: the others share its work, and give it back, without losing or repeating a sample."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from edge_helpers import HERE, Run, free_port, running

from rerail.session.dealing import Terms, order_of

pytestmark = pytest.mark.timeout(300)

SCRIPT = str(HERE / "scripts" / "elastic.py")
LENGTH, BATCH, UNTIL = 100, 14, 200


def node(folder: Path, home: str, number: int, ranks: int, port: int, *extra: str, flags: tuple[str, ...] = ()) -> Any:
    flags += ("--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", str(ranks), "--rdzv-id", "elastic")
    place = ("--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", f"127.0.0.{number + 1}", "--standbys", "1")
    env = {"RERAIL_TOKEN": "the same on both", "RERAIL_NODE": f"node{number}"}
    return running(folder / home, *flags, *place, SCRIPT, str(folder), *extra, env=env)


@contextlib.contextmanager
def pair(folder: Path, shape: tuple[int, int], *extra: str) -> Iterator[tuple[Run, Run, int]]:
    port = free_port()
    with node(folder, "0", 0, shape[0], port, *extra) as first, node(folder, "1", 1, shape[1], port, *extra) as second:
        first.ports.add(port)
        yield first, second, port


def trained(folder: Path) -> dict[int, list[int]]:
    """The samples of every update, in their order, as the ranks have written them down. Of several attempts the last counts."""
    logs: dict[int, dict[int, dict[str, Any]]] = {}
    for path in folder.glob("rank[0-9]"):
        for line in path.read_text().splitlines():
            attempt = json.loads(line)
            logs.setdefault(attempt["step"], {})[int(path.name[4:])] = attempt
    found = {}
    for step, ranks in logs.items():
        seats = max(ranks.values(), key=lambda attempt: attempt["at"])["seats"]
        assert all(ranks[seat]["seats"] == seats for seat in seats), f"step {step} was shared in two ways: {ranks}"
        found[step] = [sample for seat in seats for sample in ranks[seat]["samples"]]
    return found


def reference(until: int) -> tuple[dict[int, list[int]], list[torch.Tensor]]:
    """What one process comes to that takes the whole batch of every update."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    terms, taken = Terms(LENGTH, BATCH, 5, True), {}
    per_epoch = LENGTH // BATCH
    for step in range(until):
        order = list(map(int, order_of(terms, step // per_epoch)))
        numbers = torch.tensor(order[step % per_epoch * BATCH :][:BATCH])
        batch = torch.sin(torch.arange(8, dtype=torch.float64) * (numbers.unsqueeze(1) + 1))
        loss = ((model(batch).squeeze(1) - numbers / LENGTH) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        taken[step] = numbers.tolist()
    return taken, [parameter.detach() for parameter in model.parameters()]


def ends_as_if_nothing_had_been(folder: Path, *runs: Run) -> None:
    (folder / "go").touch()
    for run in runs:
        assert run.ended() == 0, run.story()
        run.leaves_nothing()
    samples, weights = reference(UNTIL)
    assert trained(folder) == samples, runs[0].story()
    for path in folder.glob("weights[0-9]"):
        for mine, expected in zip(torch.load(path), weights, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_four_ranks_become_three_and_four_again(tmp_path: Path, workers: str) -> None:
    with pair(tmp_path, (3, 1), "--workers", workers) as (first, second, port):
        survivors = [first.rank_pid(rank) for rank in range(3)]
        second.rank_pid(3)
        second.signal(signal.SIGKILL)  # of its launcher: everything of that node goes
        (left,) = first.reports(1)
        assert left.ok and left.rung == "shrink" and left.ranks == (3,) and left.attempts == 1, first.story()
        with node(tmp_path, "2", 1, 1, port, "--workers", workers) as third:
            back = first.reports(2)[1]
            assert back.ok and back.rung == "grow" and back.attempts == 1, first.story() + third.story()
            assert set(survivors) <= set(first.alive())
            ends_as_if_nothing_had_been(tmp_path, first, third)
        assert {len(seats) for seats in seats_of(tmp_path)} == {3, 4}


def test_a_job_that_lost_rank_0_saves_goes_on_to_its_end_and_is_gone_on_with_by_fewer(tmp_path: Path) -> None:
    """Rank 0 is where scripts and checkpoints have their root; here it is on a node without the controller."""
    port, save = free_port(), ("--save", str(tmp_path / "saved"))
    until = ("--until", str(UNTIL // 2))
    host = ("--rdzv-backend", "c10d", "--rdzv-conf")
    with (
        node(tmp_path, "0", 0, 1, port, *save, *until, flags=(*host, "is_host=false")) as second,
        node(tmp_path, "1", 1, 3, port, *save, *until, flags=(*host, "is_host=true")) as first,
    ):
        first.ports.add(port)
        first.rank_pid(3)
        second.rank_pid(0)
        second.signal(signal.SIGKILL)
        (left,) = first.reports(1)
        assert left.ok and left.rung == "shrink" and left.ranks == (0,), first.story()
        (tmp_path / "go").touch()
        assert first.ended() == 0, first.story()
        first.line(rf"checkpoint of step {UNTIL // 2} saved to")
        first.leaves_nothing()
    for path in tmp_path.glob("weights*"):
        path.unlink()
    alone = ("--nproc-per-node", "2", SCRIPT, str(tmp_path), *save, "--until", str(UNTIL))
    with running(tmp_path / "2", *alone) as later:
        ends_as_if_nothing_had_been(tmp_path, later)
        later.line(rf"starts from the checkpoint of step {UNTIL // 2} in")


def seats_of(folder: Path) -> list[list[int]]:
    return [json.loads(line)["seats"] for line in (folder / "rank0").read_text().splitlines()]
