"""Moves the state of a living replica into a rank that lost it, over the groups of the new generation.

Called by `session.job` on every rank while a generation is formed: each knows all pairs from the plan and takes part
in its own, in one order that is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist

from rerail.rehab.teaching import NETS
from rerail.runtime.plans import REPLICA, Plan, Stale
from rerail.session import plain
from rerail.session.fabric import fabric
from rerail.session.small import Small, decode, encode
from rerail.session.tracked import Entry, table_of

if TYPE_CHECKING:
    from rerail.session.job import Job


PARCEL = 16 << 20
"""Bytes sent at once, unless a single tensor is larger."""


class Header(msgspec.Struct, frozen=True, array_like=True):
    """What the sender is about to send: what each tensor is, and the small objects."""

    table: list[Entry]
    objects: bytes
    snapshot_every: int
    next_save: int
    agreed: int = -1
    """The newest version on which the replicas agreed."""
    small: bytes = b""
    """The sender's small state of this version, where the receiver has none of its own."""


_header = msgspec.msgpack.Decoder(Header)


def exchange(plan: Plan, job: Job, own_small: Callable[[], Small], learn: Callable[[bytes], None]) -> Small | None:
    """Send to those who take their state from this rank; receive if this rank is one of them.

    Where the plan says that the receiver has no small state of its own, the sender's comes along and is given back here. `learn`: is
    given what this rank is taught.
    """
    received = None
    for receiver, source in sorted(plan.sources.items()):
        if source.stale is not None:
            _what_it_lacks(source.stale, receiver, job, learn)
        if source.kind != "replica":
            continue
        if source.rank == job.rank:
            _send(receiver, job, encode(own_small()) if source.small else b"")
        elif receiver == job.rank:
            received = _receive(source.rank, job)
    return received


def _what_it_lacks(stale: Stale, receiver: int, job: Job, learn: Callable[[bytes], None]) -> None:
    """Whatever others have for a shard that is put together: parameters, a net, learning rates and the like of the version at hand."""
    if stale.way == REPLICA:
        parameters = list(job._tracked.parameters().values())
        if job.rank == stale.rank:
            _send_all(parameters, receiver)
        elif job.rank == receiver:
            _receive_all(parameters, stale.rank)
    elif stale.way in NETS:
        if job.rank == stale.rank:
            send_bytes(job._snapshots.foretelling.lesson(stale.way), receiver)
        elif job.rank == receiver:
            learn(receive_bytes(stale.rank))
    if job.rank == stale.schedule:
        known = job._small.objects if job._has_batch and job._small is not None else None
        send_bytes(known or job._tracked.small_objects(scalars=False), receiver)
    elif job.rank == receiver and stale.schedule >= 0:
        job._tracked.load_small_objects(receive_bytes(stale.schedule), {})


def _send(receiver: int, job: Job, told: bytes) -> None:
    tensors = job._tracked.tensors()
    objects = job._tracked.small_objects(scalars=True)
    small = job._small if job._has_batch else None
    # of this version, not what a void attempt at its step has agreed on: that will be agreed on once more, by all
    every = small.snapshot_every if small is not None else job._snapshots.every
    next_save = small.saves[1] if small is not None else job._checkpoints.next_save
    header = Header(table_of(tensors), objects, every, next_save, job._votes.agreed, told)
    send_bytes(msgspec.msgpack.encode(header), receiver)
    _send_all(list(tensors.values()), receiver)


def _send_all(tensors: list[torch.Tensor], receiver: int) -> None:
    for parcel in _parcels(tensors):
        whole = parcel[0].contiguous() if len(parcel) == 1 else torch.cat([tensor.reshape(-1) for tensor in parcel])
        dist.send(whole.cpu() if _by_host(whole) else whole, receiver)


def _receive(sender: int, job: Job) -> Small | None:
    tracked = job._tracked
    header = _header.decode(receive_bytes(sender))
    received = tracked.prepare(header.table)
    _receive_all(received, sender)
    tracked.forget_unnamed({name for name, *_ in header.table})
    named = {name: tensor for (name, *_), tensor in zip(header.table, received, strict=True)}
    tracked.load_small_objects(header.objects, named)
    job._snapshots.every, job._checkpoints.next_save = header.snapshot_every, header.next_save
    job._votes.agreed = max(job._votes.agreed, header.agreed)
    return decode(header.small) if header.small else None


@torch.no_grad()
def _receive_all(tensors: list[torch.Tensor], sender: int) -> None:
    for parcel in _parcels(tensors):
        if len(parcel) == 1 and parcel[0].is_contiguous() and not _by_host(parcel[0]):
            dist.recv(parcel[0], sender)
            continue
        device = torch.device("cpu") if _by_host(parcel[0]) else parcel[0].device
        whole = torch.empty(sum(t.numel() for t in parcel), dtype=parcel[0].dtype, device=device)
        dist.recv(whole, sender)
        at = 0
        for tensor in parcel:
            tensor.copy_(whole[at : at + tensor.numel()].view(tensor.shape))
            at += tensor.numel()


def send_bytes(data: bytes, receiver: int) -> None:
    """What `receive_bytes` gives there."""
    dist.send(torch.tensor([len(data)], dtype=torch.int64), receiver)
    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), receiver)


def receive_bytes(sender: int) -> bytes:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, sender)
    data = torch.empty(int(length.item()), dtype=torch.uint8)
    dist.recv(data, sender)
    return plain.tensor_bytes(data)


def _by_host(tensor: torch.Tensor) -> bool:
    """gloo sends no messages out of a GPU's memory, nor into it."""
    return tensor.is_cuda and "nccl" not in fabric.inner_backend


def _parcels(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one type and device travel together: hundreds of small sends would cost more than their bytes."""
    parcel: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        bytes_ = tensor.numel() * tensor.element_size()
        alike = parcel and (tensor.dtype, tensor.device) == (parcel[0].dtype, parcel[0].device)
        if parcel and (not alike or size + bytes_ > PARCEL):
            yield parcel
            parcel, size = [], 0
        parcel.append(tensor)
        size += bytes_
    if parcel:
        yield parcel
