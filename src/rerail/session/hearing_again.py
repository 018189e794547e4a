"""Lets a rank that is behind the others do its steps again: brings it what they have told its predecessor.

In a plan whose ranks begin at different versions, each goes on from what it has. For the step from version v on:

    a rank that has done it     is not asked again: what it said is played back, what is said to it is dropped
    a rank that has not         is talked to as ever

So a lost stage of a pipeline computes its steps alone, with what its neighbours had sent, while they wait; and a neighbour that was
interrupted one step before the others does that one, with the new process. Called by `session.rejoin` on every rank while such a
generation is formed.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from rerail.runtime.plans import Plan
from rerail.session import plain, solo
from rerail.session.c10d import cuda_in_use
from rerail.session.fabric import fabric, messages
from rerail.session.messages import ALL, RECEIVE, SEND, Told
from rerail.session.transfer import receive_bytes, send_bytes

if TYPE_CHECKING:
    from rerail.session.job import Job

LOOK_S = 0.005
"""Between two looks whether the others have come this far."""


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One message as it travels, ahead of its tensors."""

    version: int
    group: str
    name: str
    peer: int
    tag: int
    tensors: list[tuple[str, list[int]]]


class Parcel(msgspec.Struct, frozen=True, array_like=True):
    """All that one rank has for another."""

    items: list[Item]
    snapshot_every: int
    next_save: int
    agreed: int


_parcel = msgspec.msgpack.Decoder(Parcel)


class Astray(RuntimeError):
    """The steps that are done again are not those that were done: the script is not the same each time."""


class Again:
    """What others had told, and how far each of them is."""

    def __init__(self, starts: Mapping[int, int], until: int) -> None:
        self.starts, self.until = dict(starts), until
        self.schedule: Parcel | None = None
        self._known: dict[tuple[int, str, str, int, int], deque[list[torch.Tensor]]] = defaultdict(deque)

    def learn(self, sender: int, item: Item, tensors: list[torch.Tensor]) -> None:
        who = ALL if item.peer == ALL else sender
        name = item.name if item.peer == ALL else RECEIVE
        self._known[item.version, item.group, name, who, item.tag].append(tensors)

    def hear(self, group: Any, name: str, args: Sequence[Any], version: int) -> list[torch.Tensor] | None:
        """The outputs of a collective that others have done already; None: it is to be done with them."""
        if name == SEND:
            done = self.starts[group.members[args[1]]] > version
            return list(args[0]) if done else None
        if name == RECEIVE:
            peer = group.members[args[1]]
            known = self._known.get((version, group.key, RECEIVE, peer, args[2]))
            done, outputs, whom = self.starts[peer] > version, list(args[0]), f"rank {peer}"
        else:
            known = self._known.get((version, group.key, name, ALL, 0))
            done = any(self.starts[member] > version for member in group.members)
            outputs, whom = solo.outputs_of(name, tuple(args)), f"group {group.key}"
        if not known:
            if done:
                raise Astray(f"{name} with {whom} at step {version + 1} was not part of that step before")
            return None
        _fill(outputs, known.popleft(), f"{name} with {whom} at step {version + 1}")
        return outputs


def exchange(plan: Plan, job: Job) -> Again | None:
    """Tell those that are further back what they have missed; None where this rank is not one of them."""
    starts = plan.starts()
    if min(starts.values()) == plan.version:
        return None
    again = Again(starts, plan.version)
    if cuda_in_use():
        torch.cuda.synchronize()
    for giver in sorted(starts):
        for taker in sorted(starts):
            if starts[giver] <= starts[taker]:
                continue
            if job.rank == giver:
                _give(job, taker, starts)
            elif job.rank == taker:
                _take(again, giver, starts[giver] == plan.version)
    return again if starts[job.rank] < plan.version else None


def reached(version: int, rank: int) -> None:
    """Tell those that begin here that this rank has come this far."""
    fabric.store.target.set(f"reached/{version}/{rank}", "1")


def wait_for_those_behind(plan: Plan, rank: int) -> None:
    """Until every rank that begins further back has come to where this one begins. RuntimeError: a newer generation is wanted."""
    starts, store = plan.starts(), fabric.store.target
    keys = [f"reached/{starts[rank]}/{other}" for other, start in sorted(starts.items()) if start < starts[rank]]
    while keys and not store.check(keys):
        if fabric.interrupted:
            raise RuntimeError("a fault came while others did their steps again")
        time.sleep(LOOK_S)


def _give(job: Job, taker: int, starts: Mapping[int, int]) -> None:
    small = job._small if job._has_batch else None
    speaks = {group.key: _speaks(job.rank, taker, group.members, starts) for group in fabric.groups}
    chosen = [
        (version, told)
        for version, told in messages.told(starts[taker], starts[job.rank])
        if told.peer == taker or (told.peer == ALL and speaks.get(told.group, False))
    ]
    parcel = Parcel(
        [_item(version, told) for version, told in chosen],
        small.snapshot_every if small is not None else job._snapshots.every,
        small.saves[1] if small is not None else job._checkpoints.next_save,
        job._votes.agreed,
    )
    send_bytes(msgspec.msgpack.encode(parcel), taker)
    for _, told in chosen:
        for tensor in told.tensors:
            if tensor.numel():
                dist.send(tensor.contiguous(), taker)


def _take(again: Again, giver: int, newest: bool) -> None:
    parcel = _parcel.decode(receive_bytes(giver))
    if newest and again.schedule is None:
        again.schedule = parcel
    for item in parcel.items:
        tensors = [torch.empty(shape, dtype=plain.dtype_of(dtype)) for dtype, shape in item.tensors]
        for tensor in tensors:
            if tensor.numel():
                dist.recv(tensor, giver)
        again.learn(giver, item, tensors)


def _speaks(rank: int, taker: int, members: Sequence[int], starts: Mapping[int, int]) -> bool:
    """One of those who know most tells what came of a group's collectives."""
    furthest = max(starts[member] for member in members)
    return taker in members and rank == min(member for member in members if starts[member] == furthest)


def _item(version: int, told: Told) -> Item:
    shapes = [(plain.dtype_name(tensor.dtype), list(tensor.shape)) for tensor in told.tensors]
    return Item(version, told.group, told.name, told.peer, told.tag, shapes)


def _fill(outputs: list[torch.Tensor], told: list[torch.Tensor], what: str) -> None:
    if [(one.dtype, one.shape) for one in outputs] != [(one.dtype, one.shape) for one in told]:
        raise Astray(f"{what} was of another shape before")
    with torch.no_grad():
        for output, tensor in zip(outputs, told, strict=True):
            output.copy_(tensor)
