"""Moves the state of a living replica into a rank that lost it, over the groups of the new generation.

Called by `session.job` on every rank while a generation is formed: each knows all pairs from the plan and takes part
in its own, in one order that is the same everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist

from rerail.runtime.wire import Plan
from rerail.session import plain
from rerail.session.tracked import Entry, Tracked, table_of

if TYPE_CHECKING:
    from rerail.session.job import Job


class Header(msgspec.Struct, frozen=True, array_like=True):
    """What the sender is about to send: what each tensor is, and the small objects."""

    table: list[Entry]
    objects: bytes
    snapshot_every: int


def exchange(plan: Plan, job: Job) -> None:
    """Send to those who take their state from this rank; receive if this rank is one of them."""
    for receiver, source in sorted(plan.sources.items()):
        if source.kind != "replica":
            continue
        if source.rank == job.rank:
            _send(receiver, job._tracked, job._snapshots.every)
        elif receiver == job.rank:
            job._snapshots.every = _receive(source.rank, job._tracked)


def _send(receiver: int, tracked: Tracked, snapshot_every: int) -> None:
    tensors = tracked.tensors()
    head = msgspec.msgpack.encode(Header(table_of(tensors), tracked.small_objects(scalars=True), snapshot_every))
    dist.send(torch.tensor([len(head)], dtype=torch.int64), receiver)
    dist.send(torch.frombuffer(bytearray(head), dtype=torch.uint8), receiver)
    for tensor in tensors.values():
        if tensor.numel():
            dist.send(tensor.contiguous(), receiver)


def _receive(sender: int, tracked: Tracked) -> int:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, sender)
    head = torch.empty(int(length.item()), dtype=torch.uint8)
    dist.recv(head, sender)
    header = msgspec.msgpack.decode(plain.tensor_bytes(head), type=Header)
    received = tracked.prepare(header.table)
    for tensor in received:
        if not tensor.numel():
            continue
        if tensor.is_contiguous():
            dist.recv(tensor, sender)
        else:
            whole = tensor.contiguous()
            dist.recv(whole, sender)
            tensor.copy_(whole)
    tracked.forget_unnamed({name for name, *_ in header.table})
    named = {name: tensor for (name, *_), tensor in zip(header.table, received, strict=True)}
    tracked.load_small_objects(header.objects, named)
    return header.snapshot_every
