"""What a rank keeps of what it has told others, and what one that does its steps again hears."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rerail.session.heard import LIMIT, Hearing
from rerail.session.hearing_again import Again, Astray, Item
from rerail.session.messages import ALL, STRIKES, Messages


class Group:
    """Of ranks 4, 5 and 6; this one is rank 5."""

    key, own_size, members = "g", 3, (4, 5, 6)


GROUP: Any = Group()


def messages(most: int = 1 << 20, version: int = 0) -> Messages:
    found = Messages(Hearing())
    found.allow(most)
    found.go_on(version)
    return found


def send(log: Messages, value: float, to: int = 2, tag: int = 0, size: int = 1) -> None:
    log.note(GROUP, "send", ([torch.full((size,), value)], to, tag))


def step(log: Messages, version: int, *values: float) -> None:
    log.attempt(version)
    for value in values:
        send(log, value)
    log.committed(version + 1)


def said(log: Messages, since: int, until: int) -> list[tuple[int, float]]:
    return [(version, float(one.tensors[0][0])) for version, one in log.told(since, until)]


def test_messages_are_kept_by_version_with_their_receiver() -> None:
    log = messages()
    step(log, 0, 1.0, 2.0)
    step(log, 1, 3.0)
    assert said(log, 0, 2) == [(0, 1.0), (0, 2.0), (1, 3.0)] and log.since == 0
    (_, first), *_ = log.told(0, 2)
    assert (first.group, first.peer, first.tag) == ("g", 6, 0), "by its number in the job, not in the group"
    assert said(log, 1, 2) == [(1, 3.0)]


def test_what_is_sent_is_copied() -> None:
    log, tensor = messages(), torch.ones(2)
    log.attempt(0)
    log.note(GROUP, "send", ([tensor], 0, 1))
    tensor.zero_()
    log.committed(1)
    assert said(log, 0, 1) == [(0, 1.0)]


def test_a_void_attempt_leaves_nothing() -> None:
    log = messages()
    log.attempt(0)
    send(log, 1.0)
    log.void()
    step(log, 0, 2.0)
    assert said(log, 0, 1) == [(0, 2.0)]


def collective(log: Messages, value: float, name: str = "allreduce", size: int = 1) -> None:
    output = torch.full((size,), value)
    if (complete := log.note(GROUP, name, ([output],))) is not None:
        complete()


def test_what_is_told_between_steps_belongs_to_the_next_version_and_comes_before_its_step() -> None:
    log = messages()
    step(log, 0, 1.0)
    collective(log, 10.0)
    step(log, 1, 2.0)
    collective(log, 20.0)
    assert said(log, 0, 2) == [(0, 1.0), (1, 10.0), (1, 2.0), (2, 20.0)]
    assert said(log, 1, 2) == [(1, 2.0), (2, 20.0)], (
        "who begins with the step of version 1 has done what came before it"
    )
    log.go_on(1)
    assert said(log, 0, 1) == [(0, 1.0), (1, 10.0)], "a snapshot of version 1 was taken behind it"
    step(log, 1, 3.0)
    assert said(log, 0, 2) == [(0, 1.0), (1, 10.0), (1, 3.0)]


def test_messages_between_steps_cannot_be_told_apart_at_the_newest_version() -> None:
    log = messages()
    step(log, 0, 1.0)
    log.note(GROUP, "recv", ([torch.zeros(1)], 0, 0))
    assert log.since == -1
    step(log, 1, 2.0)
    assert log.since == 0, "of older ones it is known in which order they came"


def test_after_going_back_it_begins_anew() -> None:
    log = messages()
    for version in range(4):
        step(log, version, float(version))
    log.go_on(2)
    assert said(log, 0, 2) == [(0, 0.0), (1, 1.0)] and log.since == 0
    log.go_on(9)
    assert said(log, 0, 9) == [] and log.since == 9, "what lies between is not known"


@pytest.mark.parametrize("name, size", [("reduce_scatter", 1), ("allreduce", LIMIT)])
def test_a_step_with_anything_else_in_it_is_not_kept_nor_what_came_before(name: str, size: int) -> None:
    log = messages()
    step(log, 0, 1.0)
    log.attempt(1)
    send(log, 2.0)
    log.note(GROUP, name, ([torch.zeros(size)],))
    send(log, 3.0)
    log.committed(2)
    assert said(log, 0, 2) == [] and log.since == 2
    step(log, 2, 4.0)
    assert said(log, 2, 3) == [(2, 4.0)] and log.since == 2


def test_where_that_is_so_time_and_again_nothing_is_kept_any_more() -> None:
    log = messages()
    for version in range(STRIKES):
        assert log.recording
        log.attempt(version)
        log.note(GROUP, "reduce_scatter", ([torch.zeros(1)],))
        log.committed(version + 1)
    assert not log.recording and log.since == -1
    log.go_on(STRIKES)
    assert not log.recording


def test_a_collective_nobody_waited_for_spoils_its_step() -> None:
    log = messages()
    log.attempt(0)
    assert log.note(GROUP, "allreduce", ([torch.zeros(1)],)) is not None
    log.committed(1)
    assert log.since == 1


def test_no_more_is_kept_than_allowed() -> None:
    log = messages(most=100)
    for version in range(5):
        log.attempt(version)
        send(log, float(version), size=10)
        log.committed(version + 1)
    assert said(log, 0, 5) == [(3, 3.0)] * 1 + [(4, 4.0)] * 1 and log.since == 3
    log.attempt(5)
    send(log, 5.0, size=100)
    log.committed(6)
    assert said(log, 0, 6) == [] and log.since == 6


def test_results_of_collectives_count_as_well() -> None:
    log = messages(most=100)
    for version in range(5):
        log.attempt(version)
        collective(log, float(version), size=10)
        log.committed(version + 1)
    assert said(log, 0, 5) == [(3, 3.0), (4, 4.0)] and log.since == 3


def test_what_nobody_goes_back_to_is_forgotten() -> None:
    log = messages()
    for version in range(4):
        step(log, version, float(version))
    log.drop_before(2)
    assert said(log, 0, 4) == [(2, 2.0), (3, 3.0)] and log.since == 2


def test_nothing_is_kept_where_it_is_not_allowed_and_of_what_is_rerails_own() -> None:
    log = messages(most=0)
    step(log, 0, 1.0)
    assert log.since == -1 and said(log, 0, 1) == []
    hearing = Hearing()
    own = Messages(hearing)
    own.allow(1 << 20)
    own.go_on(0)
    own.attempt(0)
    with hearing.paused():
        send(own, 1.0)
    own.committed(1)
    assert said(own, 0, 1) == [] and own.since == 0


# --- hearing it again ---


def again() -> Again:
    """Rank 5 begins at version 3, ranks 4 and 6 are at 5 and 4."""
    found = Again({4: 5, 5: 3, 6: 4}, 5)
    found.learn(4, Item(3, "g", "send", 5, 0, []), [torch.tensor([1.0])])
    found.learn(4, Item(3, "g", "send", 5, 0, []), [torch.tensor([2.0])])
    found.learn(4, Item(4, "g", "allreduce", ALL, 0, []), [torch.tensor([7.0])])
    return found


def test_messages_come_in_their_order_and_sends_to_those_who_had_them_are_dropped() -> None:
    heard, out = again(), torch.zeros(1)
    for value in (1.0, 2.0):
        assert heard.hear(GROUP, "recv", ([out], 0, 0), 3) is not None and float(out) == value
    assert heard.hear(GROUP, "send", ([out], 2, 0), 3) is not None, "rank 6 has done the step of version 3"
    assert heard.hear(GROUP, "send", ([out], 2, 0), 4) is None, "but not that of version 4"
    assert heard.hear(GROUP, "recv", ([out], 2, 0), 4) is None


def test_what_came_of_a_collective_is_known_if_anybody_has_done_it() -> None:
    heard, out = again(), torch.zeros(1)
    assert heard.hear(GROUP, "allreduce", ([out],), 4) is not None and float(out) == 7.0
    assert heard.hear(GROUP, "allreduce", ([out],), 5) is None, "nobody has done that step"


@pytest.mark.parametrize(
    "name, args, version",
    [
        ("recv", ([torch.zeros(1)], 0, 9), 3),
        ("recv", ([torch.zeros(2)], 0, 0), 3),
        ("recv", ([torch.zeros(1, dtype=torch.int64)], 0, 0), 3),
        ("allreduce", ([torch.zeros(1)],), 3),
        ("broadcast", ([torch.zeros(1)],), 4),
    ],
)
def test_what_was_not_said_before_is_an_error(name: str, args: tuple[Any, ...], version: int) -> None:
    with pytest.raises(Astray):
        again().hear(GROUP, name, args, version)


def test_what_is_said_again_is_kept_for_the_next_one() -> None:
    log = messages(version=3)
    log.go_on(3, again())
    log.attempt(3)
    assert log.doing_again
    out = torch.zeros(1)
    assert log.repeat(GROUP, "recv", ([out], 0, 0)) is not None
    assert log.repeat(GROUP, "send", ([torch.ones(1)], 2, 0)) is not None
    log.committed(4)
    log.attempt(4)
    assert log.repeat(GROUP, "allreduce", ([out],)) is not None
    log.committed(5)
    assert not log.doing_again and said(log, 3, 5) == [(3, 1.0), (4, 7.0)]
    log.attempt(5)
    assert log.again is None and log.since == 3


def test_astray_is_remembered() -> None:
    log = messages(version=3)
    log.go_on(3, again())
    log.attempt(3)
    with pytest.raises(Astray):
        log.repeat(GROUP, "recv", ([torch.zeros(1)], 0, 9))
    assert log.astray
