"""A rank's parameters outlive its node in the memory of the next one: what is sent, how often, and what a newcomer takes."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest
import torch
from shadowed import FAST, Rank, off, train

from rerail.checkpoint import remote
from rerail.checkpoint.calls import SHADOWS
from rerail.checkpoint.depot import Depot, store_of
from rerail.checkpoint.manifest import digest
from rerail.checkpoint.remote import RemoteTier
from rerail.config import DEPOT_KEY, DEPOTS
from rerail.runtime.plans import Stale
from rerail.session.buddies import Copy, Described
from rerail.session.fabric import fabric

KEY = "the key"


class Node:
    """A depot in a thread of this process."""

    def __init__(self) -> None:
        self.door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.door.getsockname()[1]}"
        self.depot = Depot(self.door, store_of(""), KEY)
        threading.Thread(target=self.depot.serve, daemon=True).start()

    @property
    def tier(self) -> RemoteTier:
        host, _, port = self.address.rpartition(":")
        return RemoteTier(host, int(port), KEY, lasting=False)

    def copies(self) -> list[Copy]:
        return [found for name in self.tier.names(SHADOWS) if (found := Copy.of(name))]

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.door.shutdown(socket.SHUT_RDWR)
        self.door.close()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Node]]:
    found = [Node(), Node()]
    monkeypatch.setenv(DEPOTS, ",".join(node.address for node in found))
    monkeypatch.setenv(DEPOT_KEY, KEY)
    monkeypatch.setattr(fabric, "nodes", (0, 1))
    yield found
    for node in found:
        node.end()


@pytest.fixture
def fds() -> Iterator[list[int]]:
    made = [os.memfd_create(f"arena{number}") for number in range(3)]
    yield made
    for fd in made:
        os.close(fd)


def trained(fd: int, until: int = 17) -> tuple[Rank, dict[int, list[torch.Tensor]]]:
    """A rank that has sent each of its shadows."""
    rank = Rank(fd)
    seen = {}
    for version in range(8, until):
        if version == 10:
            rank.snapshot(version)
        seen[version] = rank.parameters()
        rank.shadow.buddies._next = 0
        rank.step(version)
        rank.shadow.settle()
        rank.shadow.buddies.settle()
    seen[until] = rank.parameters()
    return rank, seen


def test_the_next_node_has_the_newest_one_and_nobody_else_has(nodes: list[Node], fds: list[int]) -> None:
    rank, _ = trained(fds[0])
    assert nodes[0].copies() == [] and nodes[1].copies() == [Copy(0, 1, 0, 16)]
    assert rank.shadow.buddies.sent == 16
    assert sorted(nodes[1].tier.names(nodes[1].copies()[0].folder)) == ["entries", "image"]


def test_a_newcomer_elsewhere_has_its_parameters_from_there(nodes: list[Node], fds: list[int]) -> None:
    _, true = trained(fds[0])
    newcomer = Rank(fds[1])
    assert newcomer.shadow.usable() == (16,)
    newcomer.shadow.load(Stale(at=10, saved=True, way="shadow", version=16), 17)
    assert 0 < off(newcomer.parameters()[:2], true[16][:2]) < 0.02, "in half precision"


def test_what_its_own_arena_holds_comes_first(nodes: list[Node], fds: list[int]) -> None:
    trained(fds[0])
    nodes[1].end()
    assert Rank(fds[0]).shadow.usable() == (13, 16), "and nobody is asked"


@pytest.mark.parametrize(
    ("saves", "why"),
    [((2, -1, 0), "another start of the job"), ((1, -1, 3), "all have gone back since"), ((1, -1, 0), "the same")],
)
def test_only_what_is_of_this_run_of_the_training(
    nodes: list[Node], fds: list[int], saves: tuple[int, int, int], why: str
) -> None:
    trained(fds[0])
    newcomer = Rank(fds[1])
    newcomer.job._checkpoints.saves = saves
    assert newcomer.shadow.usable() == ((16,) if why == "the same" else ()), why


def test_of_another_rank_nothing_is_taken(nodes: list[Node], fds: list[int]) -> None:
    trained(fds[0])
    newcomer = Rank(fds[1])
    newcomer.job.rank = 1
    assert newcomer.shadow.usable() == ()


@pytest.mark.parametrize("damage", ["a chunk", "its end", "its description", "no description", "another model"])
def test_what_is_damaged_is_not_used(
    nodes: list[Node], fds: list[int], damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(fds[0])
    (copy,) = nodes[1].copies()
    kept = nodes[1].depot._shadows._folders[copy.folder.removeprefix(SHADOWS)]
    newcomer = Rank(fds[1])
    if damage == "a chunk":
        kept["image"][100] ^= 1  # type: ignore[index]
    elif damage == "its end":
        kept["image"] = kept["image"][:-200]
    elif damage == "its description":
        kept["entries"] = b"noise"
    elif damage == "no description":
        del kept["entries"]
    else:
        described = msgspec.msgpack.decode(bytes(kept["entries"]), type=Described)
        other = [msgspec.structs.replace(one, shape=(*one.shape, 1)) for one in described.entries]
        kept["entries"] = msgspec.msgpack.encode(msgspec.structs.replace(described, entries=other))
    assert newcomer.shadow.usable() == ()
    told = capsys.readouterr().err
    assert ("cannot be used" in told) is (damage != "no description"), told


def test_a_node_that_does_not_answer_costs_nothing_but_the_copy(
    nodes: list[Node], fds: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    nodes[1].end()
    rank, _ = trained(fds[0])
    assert rank.shadow.usable() == (13, 16) and rank.shadow.buddies.sent == -1
    told = capsys.readouterr().err
    assert told.count("its shadow could not be copied to the next node") == 1, told


def test_without_the_key_nobody_has_anything(
    nodes: list[Node], fds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(fds[0])
    monkeypatch.setenv(DEPOT_KEY, "another one")
    assert Rank(fds[1]).shadow.usable() == ()


def test_a_half_that_is_on_its_way_is_not_filled_anew(nodes: list[Node], fds: list[int]) -> None:
    rank = Rank(fds[0])
    train(rank, 17)
    rank.shadow.buddies.settle()
    rank.shadow.buddies.sending = 13
    rank.step(19)
    rank.shadow.settle()
    assert rank.shadow.usable() == (13, 16), "that of 13 would have been overwritten"
    rank.shadow.buddies.sending = 16
    rank.step(20)
    rank.shadow.settle()
    assert rank.shadow.usable() == (16, 20)


def test_what_was_overwritten_while_it_was_sent_is_no_copy(
    nodes: list[Node], fds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, _ = trained(fds[0])
    shadow = rank.shadow._caster.shadow  # type: ignore[union-attr]
    monkeypatch.setattr(remote, "digest", lambda data: shadow.drop(13) or digest(data))
    rank.shadow.buddies._send(shadow, 13)
    assert nodes[1].copies() == [Copy(0, 1, 0, 16)]


def test_a_job_without_checkpoints_or_of_one_node_sends_none(
    nodes: list[Node], fds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(fds[0])
    rank.job._checkpoints.on = False
    train(rank, 17)
    rank.shadow.buddies.settle()
    monkeypatch.setenv(DEPOTS, nodes[1].address)
    train(Rank(fds[1]), 17)
    assert nodes[0].copies() == nodes[1].copies() == []


def test_how_often_follows_from_what_one_takes(fds: list[int]) -> None:
    rank = Rank(fds[0], msgspec.structs.replace(FAST, shadow_cost=0.01))
    assert rank.shadow.buddies._steps(0.1, 0.0) == 40, "ten steps long, at a quarter of the time"
    assert rank.shadow.buddies._steps(0.1, 0.01) == 100, "a step's worth of the CPU, at a hundredth"
    rank.job.device = torch.device("cuda")
    assert rank.shadow.buddies._steps(0.1, 0.01) == 40, "there the CPU has time"


@pytest.mark.parametrize("name", ["0-1-0", "0-1-0-16-2", "a-1-0-16", "", "0-1-0--16", "../0-1-0-16"])
def test_names_that_are_none(name: str) -> None:
    assert Copy.of(name) is None
