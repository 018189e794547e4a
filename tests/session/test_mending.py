"""How a lost shard is put together from two snapshots, or from checkpoints and what another rank has learnt."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from rerail.checkpoint import catalog
from rerail.checkpoint.arena import Arena
from rerail.checkpoint.catalog import Step
from rerail.checkpoint.files import FileTier
from rerail.checkpoint.saving import Order, carry_out
from rerail.checkpoint.staging import Stager
from rerail.errors import CheckpointError, StateError
from rerail.rehab.predictors import Times, Window
from rerail.rehab.teaching import NETS, Lesson, lesson_of, plain, taught
from rerail.rehab.vitp import Vitp
from rerail.runtime.plans import Stale
from rerail.session import mending, past, rng, small
from rerail.session.cursor import Position
from rerail.session.mending import Mender
from rerail.session.pieces import Pieces
from rerail.session.small import Small
from rerail.session.tracked import Tracked

FACTORS = {10: 1.0, 20: 2.0, 30: 3.0, 40: 4.0}


class Lost:
    """A rank that is alone with its shard: a model all of whose numbers are a multiple of what they were at step 10."""

    def __init__(self, root: Path) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50), nn.Linear(50, 10))
        self.tracked = Tracked()
        self.tracked.add("model", self.model)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.tracked.add("optimizer", self.optimizer)
        self.model(torch.randn(8, 40)).sum().backward()
        self.optimizer.step()
        self.first = {name: one.clone() for name, one in self.tracked.parameters().items()}
        self.fd = os.memfd_create("arena")
        self.stager = Stager(Arena(self.fd), overlap=False)
        snapshots: Any = SimpleNamespace(arena=self.stager.arena, versions=lambda: (), foretelling=None)
        checkpoints: Any = SimpleNamespace(on=True, tiers=[FileTier(root)])
        self.job: Any = SimpleNamespace(
            _snapshots=snapshots, _tracked=self.tracked, _checkpoints=checkpoints, rank=0, world_size=1
        )
        self.mender = Mender(self.job)
        self.mender._on = True
        self.root = root

    def at(self, version: int) -> None:
        factor = FACTORS[version]
        with torch.no_grad():
            for name, one in self.tracked.parameters().items():
                one.copy_(self.first[name] * factor)
            self.model[1].running_mean.fill_(factor)
            self.optimizer.state[self.model[0].weight]["exp_avg"].fill_(factor)

    def pieces(self) -> Any:
        return Pieces(self.tracked, 0, 1).all()

    def snapshot(self, version: int) -> None:
        self.at(version)
        assert self.stager.stage(version, self.pieces(), b"")

    def save(self, version: int) -> None:
        self.at(version)
        state = Small(version, rng.capture(), Position(), self.tracked.small_objects(scalars=True), {}, 1)
        assert self.stager.stage(version, self.pieces(), small.encode(state))
        order = Order(version=version, epoch=1, generation=0, rank=0, group=(0,), world_size=1, tiers=(str(self.root),))
        (outcome,) = carry_out(order, self.stager.arena, set)
        assert outcome.ok, outcome.notes

    def factor(self) -> float:
        """Of all parameters, if it is the same."""
        found = [one / self.first[name] for name, one in self.tracked.parameters().items()]
        factors = torch.cat(
            [one[self.first[name] != 0].reshape(-1) for name, one in zip(self.first, found, strict=True)]
        )
        assert float(factors.max() - factors.min()) < 1e-2, "they have moved alike"
        return float(factors.mean())

    def rest(self) -> tuple[float, float]:
        """A buffer and a moment."""
        return float(self.model[1].running_mean[0]), float(self.optimizer.state[self.model[0].weight]["exp_avg"][0, 0])


@pytest.fixture
def lost(tmp_path: Path) -> Iterator[Lost]:
    made = Lost(tmp_path / "root")
    yield made
    os.close(made.fd)


def test_parameters_go_on_as_they_moved_from_snapshot_to_snapshot_and_all_else_stays_as_it_was_kept(lost: Lost) -> None:
    lost.snapshot(10)
    lost.snapshot(20)
    lost.mender.renew(Stale(at=20, way="linear", before=10), 25)
    assert lost.factor() == pytest.approx(2.5, abs=1e-3) and lost.rest() == (2.0, 2.0)


def saved(lost: Lost, *versions: int) -> None:
    for version in versions:
        lost.save(version)
    lost.at(10)
    with torch.no_grad():
        for one in lost.tracked.parameters().values():
            one.fill_(-7.0)


def test_what_there_is_of_it_is_told_oldest_first(lost: Lost, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lost.mender.saved() == ()
    saved(lost, 10, 20, 30, 40)
    assert lost.mender.saved() == (10, 20, 30, 40)
    monkeypatch.setattr(mending, "KNOWN", 2)
    assert lost.mender.saved() == (30, 40)
    lost.mender._on = False
    assert lost.mender.saved() == (), "an exact job does not look"


def test_as_it_was_saved(lost: Lost) -> None:
    saved(lost, 10, 20)
    assert lost.mender.saved()
    stale = Stale(at=20, saved=True)
    lost.mender.lay_base(stale)
    lost.mender.renew(stale, 25)
    assert lost.factor() == pytest.approx(2.0) and lost.rest() == (2.0, 2.0)


@pytest.mark.parametrize(("way", "room"), [("linear", 1 << 20), ("linear over 2", 1 << 20), ("least squares", 6000)])
def test_on_by_a_predictor_however_little_is_looked_at_at_once(
    lost: Lost, way: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past.windows, "__defaults__", (room,))
    saved(lost, 10, 20, 30, 40)
    assert lost.mender.saved()
    stale = Stale(at=30, saved=True, way=way)
    lost.mender.lay_base(stale)
    lost.mender.renew(stale, 35)
    assert lost.factor() == pytest.approx(3.5, abs=1e-2), "what was saved later is not looked at"
    assert lost.rest() == (3.0, 3.0)


def test_no_more_is_held_than_there_is_room_for(lost: Lost) -> None:
    saved(lost, 10, 20)
    assert lost.mender.saved()
    steps = list(lost.mender._steps.values())
    sizes = [window.rows.numel() for _, window in past.windows(lost.job, steps, 25, room=4096)]
    whole = sum(one.numel() for one in lost.tracked.parameters().values())
    assert sum(sizes) == 2 * whole and max(sizes) * 8 <= 4096


def learnt(target: str) -> Vitp:
    chance = torch.Generator().manual_seed(0)
    drift = torch.randn(2000, generator=chance)
    rows = torch.stack([at * drift + 0.1 * torch.randn(2000, generator=chance) for at in range(6)])
    net = Vitp(target=target)
    windows = [Window(rows, Times(tuple(map(float, range(6))), 6.0))]
    net.train(windows, steps=30)
    net.tune(windows)
    return net


@pytest.mark.parametrize("target", ["next", "drift"])
def test_as_a_net_says_that_another_rank_has_taught(lost: Lost, target: str) -> None:
    saved(lost, 10, 20, 30)
    assert lost.mender.saved()
    net = learnt(target)
    stale = Stale(at=30, saved=True, way=net.name, rank=1)
    lost.mender.lay_base(stale)
    lost.mender.learn(lesson_of(net))
    lost.mender.renew(stale, 35)
    window = Window(
        torch.stack([lost.first["model.0.weight"].reshape(-1) * FACTORS[at] for at in (10, 20, 30)]),
        Times((10.0, 20.0, 30.0), 35.0),
    )
    found = lost.tracked.parameters()["model.0.weight"].reshape(-1)
    assert torch.allclose(found, net.predict(*window), atol=1e-5), "as that rank itself would have guessed"
    assert not torch.equal(found, window.rows[-1])


@pytest.mark.parametrize(
    ("way", "why"),
    [("linear over 2", "what that needs is not here"), ("vitp", "is not here"), ("magic", "no predictor")],
)
def test_what_it_cannot_do_is_an_error_and_not_a_worse_guess(lost: Lost, way: str, why: str) -> None:
    saved(lost, 10, 20)
    assert lost.mender.saved()
    with pytest.raises(StateError, match=why):
        lost.mender.renew(Stale(at=20, saved=True, way=way), 25)


def test_a_checkpoint_that_was_not_looked_at_is_not_used(lost: Lost) -> None:
    saved(lost, 10, 20)
    with pytest.raises(StateError, match="step 20 was not looked at"):
        lost.mender.lay_base(Stale(at=20, saved=True))


def test_a_damaged_checkpoint_ends_it(lost: Lost) -> None:
    saved(lost, 10, 20)
    assert lost.mender.saved()
    step: Step = lost.mender._steps[20]
    path = lost.root / step.id.folder / step.manifests[0].file
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="checksum"):
        lost.mender.lay_base(Stale(at=20, saved=True))


def test_steps_that_were_saved_again_count_once(lost: Lost) -> None:
    def step(epoch: int, number: int) -> Any:
        return SimpleNamespace(id=catalog.StepId(epoch, number, 0))

    every = [step(2, 30), step(2, 20), step(1, 40), step(1, 20), step(1, 10)]
    assert [one.id.step for one in mending._falling(every)] == [30, 20, 10]


# --- what is taught ---


@pytest.mark.parametrize(
    ("lesson", "why"),
    [
        (b"noise", "cannot be read"),
        (b"", "cannot be read"),
        (msgspec.msgpack.encode(Lesson("linear", 1.0, b"")), "no net that is known"),
        (msgspec.msgpack.encode(Lesson(NETS[0], 1.0, b"abc")), "no net that is known"),
        (msgspec.msgpack.encode(Lesson(NETS[0], 1.0, bytes(40))), "10 numbers are not what"),
        (msgspec.msgpack.encode(Lesson(NETS[0], float("nan"), bytes(40))), "a gain of nan"),
        (msgspec.msgpack.encode(Lesson(NETS[0], -1.0, bytes(40))), "a gain of -1"),
        (msgspec.msgpack.encode(Lesson(NETS[0], 1e9, bytes(40))), "a gain of 1000000000"),
    ],
)
def test_a_lesson_that_is_none(lesson: bytes, why: str) -> None:
    with pytest.raises(StateError, match=why):
        taught(lesson)


def test_numbers_that_are_none_are_not_learnt() -> None:
    net = learnt("next")
    vector = net.vector()
    vector[3] = float("nan")
    with pytest.raises(StateError, match="are not what"):
        net.adopt(vector)
    assert plain("linear").name == "linear"
