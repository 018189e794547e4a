"""What each rank saves under which name: turns the tracked objects into pieces of the job's tensors.

Names do not depend on wrappers, ranks or layout, so that a step saved under FSDP2 can be read under DDP. Of ranks that
hold the same part the lowest one that is there saves it. State that is known to belong to one rank alone carries that rank in its name.
Called by `session.snapshotting` and `session.loading`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping, Sized
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from rerail.checkpoint.catalog import Saved
from rerail.checkpoint.dtypes import dtype_of
from rerail.checkpoint.layout import Piece
from rerail.checkpoint.names import owned_name, owner_and_name
from rerail.errors import StateError
from rerail.session import plain
from rerail.session.tracked import Tracked, is_shared, keeper, local_part, parameters_of

WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Names that torch.compile and activation checkpointing put between a module and its own."""


class _Place(NamedTuple):
    """Where a tensor is kept, so that it can be seen whether it is still the same one."""

    name: str
    container: MutableMapping[str, Any]
    key: str
    tensor: torch.Tensor
    owner: torch.Tensor
    """The parameter it goes with; for a parameter, itself."""
    changing: bool
    """Changed by a forward pass: a buffer."""
    alone: bool = False
    """Held by this rank alone, whoever else has the parameter: its share of an optimizer that is shared."""

    def holds(self, address: int) -> bool:
        return self.container.get(self.key) is self.tensor and _address(self.tensor) == address


class Pieces:
    """The pieces of one job on one rank."""

    def __init__(self, tracked: Tracked, rank: int, world_size: int) -> None:
        self._tracked, self._rank, self._world = tracked, rank, world_size
        self._covered: dict[int, set[int]] = {}
        self._places: list[tuple[_Place, int]] = []
        self._sizes: list[tuple[Sized, int]] = []
        """Of everything that a tensor may be added to, the empty ones included: optimizers begin without any state."""
        self._empty: list[tuple[Mapping[Any, Any], Any]] = []
        """Places that hold something else, such as None."""
        self._found: list[Piece] = []
        self._own_buffers = False
        self._seats: tuple[int, ...] = ()

    def all(self, *, own_buffers: bool = False, seats: tuple[int, ...] = ()) -> list[Piece]:
        """Everything large. `own_buffers`: each rank's buffers are its own, because they change without the others.
        `seats`: the ranks that are there; empty: all.

        The very same list as before, if every tensor is where it was.
        """
        asked = (own_buffers, seats or tuple(range(self._world)))
        if asked == (self._own_buffers, self._seats) and self._still_there() and not self._tracked.objects:
            return self._found
        self._own_buffers, self._seats = asked
        self._covered = self._tracked.ddp_members()
        places = list(self._walk())
        self._places = [(place, _address(place.tensor)) for place in places]
        holding, counted = self._containers()
        self._sizes = [(container, len(container)) for container in (*holding, *counted)]
        self._empty = [
            (container, key)
            for container in holding
            for key, value in container.items()
            if not isinstance(value, torch.Tensor)
        ]
        self._found = [self._at(place) for place in places]
        everyone = set(self._tracked.replicas(self._rank, self._world))
        for name, tensor in self._object_tensors().items():
            self._found.append(self._piece(name, tensor, everyone, changing=True))
        return self._found

    def make_room(self, saved: dict[str, Saved]) -> None:
        """Create optimizer state that does not exist before the first step, as the checkpoint has it."""
        homes = {
            place: (keeper(optimizer), parameter)
            for name, optimizer in self._tracked.optimizers.items()
            for place, parameter in self._kept_here(name, optimizer)
        }
        for full, tensor in saved.items():
            place, _, key = owner_and_name(full)[1].rpartition(".")
            if place not in homes:
                continue
            optimizer, parameter = homes[place]
            if not isinstance(optimizer.state[parameter].get(key), torch.Tensor):
                optimizer.state[parameter][key] = _made(parameter, tensor, _counts_on_device(optimizer, parameter))

    def forget_unsaved(self, saved: dict[str, Saved]) -> None:
        """Drop optimizer state that the step does not have: it was saved before the first update."""
        known = {owner_and_name(name)[1] for name in saved}
        for name, optimizer in self._tracked.optimizers.items():
            for place, parameter in self._kept_here(name, optimizer):
                state = keeper(optimizer).state.get(parameter, {})
                for key in [key for key, value in state.items() if isinstance(value, torch.Tensor)]:
                    if f"{place}.{key}" not in known:
                        del state[key]

    def object_names(self) -> set[str]:
        """Names of tensors that belong to tracked objects other than modules and optimizers."""
        return set(self._object_tensors())

    # --- one tensor ---

    def _at(self, place: _Place) -> Piece:
        tensor, owner = place.tensor, place.owner
        if (place.changing and self._own_buffers) or place.alone:
            holders = {self._rank}
        elif isinstance(owner, DTensor) and not isinstance(tensor, DTensor):
            # a step count or a buffer is the same wherever the parameter is; anything longer is this rank's own affair
            alike = place.changing or tensor.numel() == 1
            holders = self._all_with(owner) if alike else {self._rank}
        else:
            holders = self._holders(owner)
        return self._piece(place.name, tensor, holders, changing=place.changing)

    def _piece(self, name: str, tensor: torch.Tensor, holders: set[int], *, changing: bool) -> Piece:
        part = local_part(tensor)
        whole, start, shards = tuple(tensor.shape), (0,) * tensor.dim(), 1
        ranks = set(holders)
        if isinstance(tensor, DTensor):
            mesh, placements = tensor.device_mesh, tensor.placements
            _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
            start = tuple(min(begin, length) for begin, length in zip(offset, whole, strict=True))
            shards = math.prod(mesh.size(dim) for dim, one in enumerate(placements) if not one.is_replicate())
            ranks |= set(mesh.mesh.flatten().tolist())
        if len(holders) * shards != self._world:
            name = owned_name(min(ranks), name)
        saved = self._rank == min(rank for rank in holders if rank in self._seats) and (part.numel() > 0 or shards == 1)
        return Piece(name, part, whole, start, saved, changing)

    def _holders(self, parameter: torch.Tensor) -> set[int]:
        return self._tracked.holders(parameter, self._rank, self._world, self._covered)

    def _all_with(self, parameter: DTensor) -> set[int]:
        return set(parameter.device_mesh.mesh.flatten().tolist()) | self._holders(parameter)

    # --- where tensors are ---

    def _still_there(self) -> bool:
        return bool(self._places) and (
            all(place.holds(address) for place, address in self._places)
            and all(len(container) == size for container, size in self._sizes)
            and not any(isinstance(container.get(key), torch.Tensor) for container, key in self._empty)
        )

    def _containers(self) -> tuple[list[Mapping[Any, Any]], list[Sized]]:
        """What holds tensors, and what holds what holds them."""
        holding: list[Mapping[Any, Any]] = []
        counted: list[Sized] = []
        for module in self._tracked.modules.values():
            for part in module.modules():
                holding += [part._parameters, part._buffers]
                counted.append(part._modules)
        for optimizer in map(keeper, self._tracked.optimizers.values()):
            holding += optimizer.state.values()
            counted += [optimizer.state, *(group["params"] for group in optimizer.param_groups)]
        return holding, counted

    def _walk(self) -> Iterator[_Place]:
        seen: set[int] = set()
        for name, module in self._tracked.modules.items():
            first = next(module.parameters(), None)
            for prefix, part in module.named_modules():
                for key, parameter in part._parameters.items():
                    if parameter is not None and id(parameter) not in seen:
                        seen.add(id(parameter))
                        full = f"{name}.{_plain_name(module, f'{prefix}.{key}' if prefix else key)}"
                        yield _Place(full, part._parameters, key, parameter, parameter, changing=False)
                for key, buffer in part._buffers.items():
                    if buffer is not None and id(buffer) not in seen:
                        seen.add(id(buffer))
                        full = f"{name}.{_plain_name(module, f'{prefix}.{key}' if prefix else key)}"
                        owner = buffer if first is None else first
                        yield _Place(full, part._buffers, key, buffer, owner, changing=True)
        for name, optimizer in self._tracked.optimizers.items():
            alone = is_shared(optimizer)
            for place, parameter in self._kept_here(name, optimizer):
                state = keeper(optimizer).state.get(parameter, {})
                for key, value in sorted(state.items()):
                    if isinstance(value, torch.Tensor):
                        yield _Place(f"{place}.{key}", state, key, value, parameter, changing=False, alone=alone)

    def _kept_here(self, name: str, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters whose state this rank keeps: of an optimizer that is shared, its share."""
        mine = set(map(id, parameters_of(keeper(optimizer))))
        return (one for one in self._named_parameters(name, optimizer) if id(one[1]) in mine)

    def _named_parameters(self, name: str, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        known = {
            id(parameter): f"{module_name}.{_plain_name(module, key)}"
            for module_name, module in self._tracked.modules.items()
            for key, parameter in module.named_parameters()
        }
        for index, parameter in enumerate(parameters_of(optimizer)):
            yield f"{name}.state.{known.get(id(parameter), f'#{index}')}", parameter

    def _object_tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, value in self._tracked.objects.items():
            plain.take_out_tensors(value.state_dict(), name, found)
        return found


def _plain_name(module: nn.Module, key: str) -> str:
    """A parameter's name without the wrappers around it."""
    kept, here = [], module
    parts = key.split(".")
    for index, part in enumerate(parts):
        wrapped = part in WRAPPERS or (part == "module" and isinstance(here, DistributedDataParallel))
        if not wrapped:
            kept.append(part)
        if index + 1 < len(parts):
            here = here.get_submodule(part)
    return ".".join(kept)


def _address(tensor: torch.Tensor) -> int:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr()


def _counts_on_device(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Whether this optimizer keeps its step counts beside the parameters instead of on the CPU."""
    group = next(g for g in optimizer.param_groups if any(one is parameter for one in g["params"]))
    return bool(group.get("capturable") or group.get("fused"))


def _made(parameter: torch.Tensor, saved: Saved, counts_on_device: bool) -> torch.Tensor:
    dtype = dtype_of(saved.dtype)
    if saved.shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if isinstance(parameter, DTensor) and math.prod(saved.shape) != 1:
        raise StateError(
            f"optimizer state of shape {list(saved.shape)} does not fit a parameter of shape {list(parameter.shape)}"
        )
    on_cpu = math.prod(saved.shape) == 1 and not counts_on_device
    device = torch.device("cpu") if on_cpu else parameter.device
    return torch.empty(saved.shape, dtype=dtype, device=device)
