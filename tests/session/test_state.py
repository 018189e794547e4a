"""Small parts of the session: state as bytes, random state, solo collectives, buffers, the step journal, the heard log."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from rerail.errors import StateError
from rerail.runtime.clock import HEADER, SLOT, StepClock, make_page
from rerail.session import plain, rng, solo
from rerail.session.buffers import BufferGuard
from rerail.session.cursor import Position
from rerail.session.heard import Hearing
from rerail.session.small import Small, from_journal, to_journal
from rerail.session.tracked import Tracked, table_of


@pytest.fixture
def clock() -> Iterator[StepClock]:
    fd = make_page()
    page = StepClock(fd)
    os.close(fd)
    yield page
    page.close()


def test_plain_state_survives_without_pickle() -> None:
    state = {"a": [1, 2.5, None, "x"], 3: {"t": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)}, "b": b"raw"}
    back = plain.decode(plain.encode(state, "it"))
    assert back["a"] == state["a"] and torch.equal(back[3]["t"], state[3]["t"])  # type: ignore[index]


def test_state_that_cannot_be_written_down_is_named() -> None:
    with pytest.raises(StateError, match=r"scheduler holds a builtins\.function"):
        plain.encode({"f": lambda: 0}, "scheduler")


def test_every_random_generator_is_put_back() -> None:
    before = rng.capture()
    drawn = (random.random(), torch.rand(2).tolist())
    rng.restore(before)
    assert (random.random(), torch.rand(2).tolist()) == drawn


def test_alone_a_gather_gives_copies_and_a_receive_zeros() -> None:
    outputs = [torch.empty(2), torch.empty(2)]
    solo.carry_out("allgather", ([outputs], [torch.ones(2)]), {}, rank=1, size=2)
    assert all(output.tolist() == [1.0, 1.0] for output in outputs)
    own = torch.empty(2)
    solo.carry_out("_reduce_scatter_base", (own, torch.arange(4.0)), {}, rank=1, size=2)
    assert own.tolist() == [2.0, 3.0]
    received = torch.full((3,), 7.0)
    solo.carry_out("recv", ([received], 0, 0), {}, rank=1, size=2)
    assert received.tolist() == [0.0, 0.0, 0.0]


def test_buffers_that_change_are_learnt_and_put_back() -> None:
    buffers = {"mean": torch.zeros(2), "mask": torch.ones(2)}
    guard = BufferGuard(buffers)
    for _ in range(3):
        guard.before_step()
        buffers["mean"] += 1
        guard.after_step()
    assert set(guard.to_journal()) == {"mean"}
    guard.before_step()
    buffers["mean"] += 10
    assert guard.restore() and buffers["mean"].tolist() == [3.0, 3.0]
    guard.advance()
    assert buffers["mean"].tolist() == [13.0, 13.0]
    buffers["mask"] += 1
    guard.before_step()
    assert not guard.restore(), "a buffer that never changed before has changed: the state is not known to be whole"


def test_the_step_journal_keeps_two_versions_and_a_successor_overwrites_the_older(clock: StepClock) -> None:
    clock.write_small(7, b"seven", b"rest")
    clock.write_small(8, b"eight", b"rest")
    clock._next_slot = -1  # as in a new process
    clock.write_small(9, b"nine", b"another rest")
    assert clock.read_small() == {8: (b"eight", b"rest"), 9: (b"nine", b"another rest")}


def test_random_states_that_stay_the_same_are_written_once_and_read_every_time(clock: StepClock) -> None:
    journalled: dict[int, Small] = {}
    for version in range(8):
        if version in (3, 4, 6):
            torch.rand(1)
        now, epoch = rng.capture(), rng.capture() if version > 5 else None
        small = Small(version, now, Position(1, version, epoch, b"loader"), b"o" * version, {}, 2)
        clock.write_small(version, *to_journal(small))
        journalled[version] = small
        for kept, parts in clock.read_small().items():
            assert from_journal(parts) == journalled[kept]


def test_a_torn_slot_of_the_step_journal_is_left_out(clock: StepClock) -> None:
    clock.write_small(7, b"seven", b"rest")
    clock.write_small(8, b"eight", b"rest")
    for at in (HEADER + 1, HEADER + 9, HEADER + 17, HEADER + 25, HEADER + 29, HEADER + 34, HEADER + SLOT - 1):
        kept = clock._map[at]
        clock._map[at] = kept ^ 1
        assert clock.read_small() == {8: (b"eight", b"rest")}, at
        clock._map[at] = kept
    assert set(clock.read_small()) == {7, 8}


def test_what_was_heard_is_heard_again_by_the_successor(clock: StepClock) -> None:
    first, second = Hearing(), Hearing()
    first.record(clock)
    number = first.number("0", "broadcast")
    first.write("0", "broadcast", number, [torch.tensor([4, 2])])
    second.play_back(clock)
    output = torch.zeros(2, dtype=torch.int64)
    second.play("0", "broadcast", second.number("0", "broadcast"), [output])
    assert output.tolist() == [4, 2]
    unheard = torch.zeros(2, dtype=torch.int64)
    second.play("0", "broadcast", second.number("0", "broadcast"), [unheard])
    assert unheard.tolist() == [0, 0]


def test_lazy_optimizer_state_is_made_for_a_newcomer() -> None:
    def trained() -> Tracked:
        tracked, model = Tracked(), nn.Linear(3, 2)
        tracked.add("model", model)
        tracked.add("optimizer", torch.optim.AdamW(model.parameters()))
        return tracked

    giver, taker = trained(), trained()
    giver.modules["model"](torch.ones(1, 3)).sum().backward()
    giver.optimizers["optimizer"].step()
    sent = giver.tensors()
    for target, tensor in zip(taker.prepare(table_of(sent)), sent.values(), strict=True):
        target.copy_(tensor)
    taker.forget_unnamed(set(sent))
    assert all(torch.equal(sent[name], tensor) for name, tensor in taker.tensors().items())
    taker.forget_unnamed(set())
    assert not any(taker.optimizers["optimizer"].state[p] for p in taker.modules["model"].parameters())


def test_an_object_without_state_is_refused_with_its_name() -> None:
    with pytest.raises(StateError, match="sampler"):
        Tracked().add("sampler", object())


def test_hyperparameters_are_written_anew_whenever_they_change() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([{"params": [weight], "lr": 0.1, "marks": [1]}])
    tracked = Tracked()
    tracked.add("optimizer", optimizer)

    def written() -> Any:
        return plain.decode(tracked.small_objects(scalars=False))["optimizer:groups"][0]

    group = optimizer.param_groups[0]
    assert written()["lr"] == 0.1 and written()["marks"] == [1]
    group["marks"].append(2)  # the same list, with something else in it
    assert written()["marks"] == [1, 2]
    del group["marks"]
    assert tracked.small_objects(scalars=False) is tracked.small_objects(scalars=False), "it is known again"
    for value in (0.2, torch.tensor(0.3), None):
        group["lr"] = value
        assert written()["lr"] == value
    group["lr"] = torch.tensor(0.3)
    assert written()["lr"] == group["lr"]
    group["lr"].fill_(0.4)
    assert written()["lr"] == torch.tensor(0.4)
