"""What a collective means where some seats of its group are empty: turns it into one among those who are there.

    reductions              over those who are there; a mean is theirs
    broadcast, reduce       from and to the lowest seat that is taken, if the root's is empty
    gathers                 zeros for empty seats
    send, receive           to and from seats that are taken
    all others              refused: what an empty seat would have given or got cannot be made up

The group keeps its size and its ranks their numbers, so DDP goes on dividing by the number of seats. Called by
`session.groups` for every collective of such a group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from rerail.errors import StateError

Args = list[Any]


class Call(NamedTuple):
    """A collective of the inner group."""

    name: str
    args: Args


def among(name: str, args: Args, taken: Sequence[int]) -> Call:
    """The collective to be carried out by those who are there. `taken`: their ranks in the group, lowest first."""
    if name in _AS_IS:
        return Call(name, args)
    translate = _TRANSLATED.get(name)
    if translate is None:
        raise StateError(f"{_spoken(name)} needs every rank of its group, and only {_those(taken)} are there. {ADVICE}")
    return translate(name, args, taken)


ADVICE = (
    "The job goes on with fewer ranks, which is for data-parallel scripts: all_reduce, broadcast, all_gather, barrier, and "
    "messages between ranks in job.seats"
)
_AS_IS = ("allreduce", "allreduce_coalesced", "barrier")


def _broadcast(name: str, args: Args, taken: Sequence[int]) -> Call:
    given = args[1]
    if given.rootRank not in taken and _for_objects():
        raise StateError(
            f"rank {given.rootRank} of the group is not there, and nobody else knows the objects that it would have told. "
            "Take src=job.seats[0], the lowest rank that is there"
        )
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = _root(given.rootRank, taken), given.rootTensor
    options.timeout, options.asyncOp = given.timeout, given.asyncOp
    return Call(name, [args[0], options])


def _reduce(name: str, args: Args, taken: Sequence[int]) -> Call:
    given, options = args[1], dist.ReduceOptions()
    options.reduceOp, options.rootTensor = given.reduceOp, given.rootTensor
    options.rootRank, options.timeout, options.asyncOp = _root(given.rootRank, taken), given.timeout, given.asyncOp
    return Call(name, [args[0], options])


def _root(rank: int, taken: Sequence[int]) -> int:
    """In the inner group: this rank, or the lowest."""
    return list(taken).index(rank) if rank in taken else 0


def _allgather(name: str, args: Args, taken: Sequence[int]) -> Call:
    _refuse_objects(taken)
    lists = [args[0]] if args[0] and isinstance(args[0][0], torch.Tensor) else args[0]
    found = []
    for outputs in lists:
        for rank in set(range(len(outputs))) - set(taken):
            outputs[rank].detach().zero_()
        found.append([outputs[rank] for rank in taken])
    return Call("allgather", [found, *args[1:]])


def _allgather_coalesced(name: str, args: Args, taken: Sequence[int]) -> Call:
    for rank in set(range(len(args[0]))) - set(taken):
        for output in args[0][rank]:
            output.detach().zero_()
    return Call(name, [[args[0][rank] for rank in taken], *args[1:]])


def _allgather_single(name: str, args: Args, taken: Sequence[int]) -> Call:
    output, source = args[0], args[1]
    rows = output.detach().view(-1, *source.shape)
    return _allgather("allgather", [[list(rows.unbind(0))], [source], *args[2:]], taken)


def _gather(name: str, args: Args, taken: Sequence[int]) -> Call:
    _refuse_objects(taken)
    given, options = args[2], dist.GatherOptions()
    if given.rootRank not in taken:
        raise StateError(
            f"gather to rank {given.rootRank} of a group of which only {_those(taken)} are there. {ADVICE}"
        )
    options.rootRank, options.timeout, options.asyncOp = _root(given.rootRank, taken), given.timeout, given.asyncOp
    outputs = _allgather("allgather", [args[0]], taken).args[0] if args[0] else args[0]
    return Call(name, [outputs, args[1], options])


def _message(name: str, args: Args, taken: Sequence[int]) -> Call:
    if args[1] not in taken:
        raise StateError(f"{name}: rank {args[1]} of the group is not there, only {_those(taken)} are. {ADVICE}")
    return Call(name, [args[0], list(taken).index(args[1]), *args[2:]])


_TRANSLATED: dict[str, Callable[[str, Args, Sequence[int]], Call]] = {
    "broadcast": _broadcast,
    "reduce": _reduce,
    "allgather": _allgather,
    "allgather_coalesced": _allgather_coalesced,
    "_allgather_base": _allgather_single,
    "all_gather_single": _allgather_single,
    "gather": _gather,
    "send": _message,
    "recv": _message,
}


def _refuse_objects(taken: Sequence[int]) -> None:
    if _for_objects():
        raise StateError(f"objects of all ranks cannot be gathered while only {_those(taken)} are there. {ADVICE}")


def _for_objects() -> bool:
    """Whether torch carries objects by this collective: it makes room for them by what the others say of their size."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name in _OBJECTS and frame.f_globals.get("__name__") == dist.distributed_c10d.__name__:
            return True
    return False


_OBJECTS = ("broadcast_object_list", "all_gather_object", "gather_object")


def _spoken(name: str) -> str:
    return name.strip("_").replace("_base", "")


def _those(taken: Sequence[int]) -> str:
    return ", ".join(map(str, taken))
