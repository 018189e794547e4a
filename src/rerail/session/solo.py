"""What a collective gives when this rank is alone: as if every peer held what it holds.

Used in two situations. A newcomer builds its model before it may meet its peers. And a step that was interrupted is run
to its end without peers, so that DDP, FSDP2 and pipeline schedules leave it in good order; its values are thrown away.
Called by `session.groups`; every output is written, so that no code downstream reads uninitialised memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensors = list[torch.Tensor]


def carry_out(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, rank: int, size: int) -> Tensors:
    """Carry out collective `name` alone; gives its outputs."""
    return _SOLO[name](list(args) + list(kwargs.values()), rank, size)


def outputs_of(name: str, args: tuple[Any, ...]) -> Tensors:
    """The tensors that collective `name` writes to."""
    if not args or name in ("barrier", "send"):
        return []
    first = args[0]
    if isinstance(first, torch.Tensor):
        return [first]
    return [tensor for item in first for tensor in _listed(item)]


def _listed(value: Any) -> Tensors:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _as_is(args: Sequence[Any], rank: int, size: int) -> Tensors:
    return _listed(args[0])


def _copy_rows(output: torch.Tensor, source: torch.Tensor, size: int) -> None:
    if output.numel() == source.numel() * size:
        output.detach().view(size, -1).copy_(source.detach().reshape(1, -1).expand(size, -1))
    else:
        output.detach().zero_()


def _take_own(output: torch.Tensor, source: torch.Tensor, rank: int) -> None:
    rows = source.detach().reshape(-1)
    count = output.numel()
    if rows.numel() >= (rank + 1) * count:
        output.detach().view(-1).copy_(rows[rank * count : (rank + 1) * count])
    else:
        output.detach().zero_()


def _fill(output: torch.Tensor, source: torch.Tensor) -> None:
    """As much of the source as fits, zeros behind it."""
    flat, rows = output.detach().view(-1), source.detach().reshape(-1)
    count = min(flat.numel(), rows.numel())
    flat[:count].copy_(rows[:count])
    flat[count:].zero_()


def _allgather(args: Sequence[Any], rank: int, size: int) -> Tensors:
    lists, inputs = args[0], _listed(args[1])
    if lists and isinstance(lists[0], torch.Tensor):
        lists = [lists]
    for outputs, source in zip(lists, inputs, strict=False):
        for output in outputs:
            _fill(output, source)
    return [output for outputs in lists for output in outputs]


def _allgather_single(args: Sequence[Any], rank: int, size: int) -> Tensors:
    _copy_rows(args[0], args[1], size)
    return [args[0]]


def _allgather_many(args: Sequence[Any], rank: int, size: int) -> Tensors:
    for output, source in zip(args[0], args[1], strict=True):
        _copy_rows(output, source, size)
    return list(args[0])


def _reduce_scatter(args: Sequence[Any], rank: int, size: int) -> Tensors:
    outputs, lists = _listed(args[0]), args[1]
    if lists and isinstance(lists[0], torch.Tensor):
        lists = [lists]
    for output, inputs in zip(outputs, lists, strict=False):
        _fill(output, inputs[rank])
    return outputs


def _reduce_scatter_single(args: Sequence[Any], rank: int, size: int) -> Tensors:
    _take_own(args[0], args[1], rank)
    return [args[0]]


def _reduce_scatter_many(args: Sequence[Any], rank: int, size: int) -> Tensors:
    for output, source in zip(args[0], args[1], strict=True):
        _take_own(output, source, rank)
    return list(args[0])


def _gather(args: Sequence[Any], rank: int, size: int) -> Tensors:
    return _allgather(args, rank, size) if args[0] else []


def _scatter(args: Sequence[Any], rank: int, size: int) -> Tensors:
    outputs, lists = _listed(args[0]), args[1]
    if lists and isinstance(lists[0], torch.Tensor):
        lists = [lists]
    for index, output in enumerate(outputs):
        _fill(output, lists[index][rank]) if lists else output.detach().zero_()
    return outputs


def _alltoall(args: Sequence[Any], rank: int, size: int) -> Tensors:
    for output, source in zip(args[0], args[1], strict=False):
        _fill(output, source)
    return list(args[0])


def _alltoall_single(args: Sequence[Any], rank: int, size: int) -> Tensors:
    _fill(args[0], args[1])
    return [args[0]]


def _receive(args: Sequence[Any], rank: int, size: int) -> Tensors:
    tensors = _listed(args[0])
    for tensor in tensors:
        tensor.detach().zero_()
    return tensors


def _nothing(args: Sequence[Any], rank: int, size: int) -> Tensors:
    return []


_SOLO: dict[str, Callable[[Sequence[Any], int, int], Tensors]] = {
    "allreduce": _as_is,
    "allreduce_coalesced": _as_is,
    "broadcast": _as_is,
    "reduce": _as_is,
    "send": _as_is,
    "recv": _receive,
    "recv_anysource": _receive,
    "barrier": _nothing,
    "allgather": _allgather,
    "allgather_coalesced": _allgather,
    "_allgather_base": _allgather_single,
    "all_gather_single": _allgather_single,
    "allgather_into_tensor_coalesced": _allgather_many,
    "all_gather_single_coalesced": _allgather_many,
    "reduce_scatter": _reduce_scatter,
    "_reduce_scatter_base": _reduce_scatter_single,
    "reduce_scatter_single": _reduce_scatter_single,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_many,
    "reduce_scatter_single_coalesced": _reduce_scatter_many,
    "gather": _gather,
    "scatter": _scatter,
    "alltoall": _alltoall,
    "alltoall_base": _alltoall_single,
    "all_to_all_single": _alltoall_single,
}

COLLECTIVES = tuple(_SOLO)
"""Every method through which torch reaches a process group; 2.13 renamed some, both names are served."""
