"""What the user tracks, seen three ways: large tensors by name, small plain state, and who else holds the same.

Modules and optimizers are large state: it comes from a replica or a snapshot. Schedulers, scalers and the like are
small and written to the step journal at every step. Called by `session.job`, `session.transfer`, `session.pieces`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from rerail.errors import StateError
from rerail.session import plain

Named = dict[str, torch.Tensor]
Entry = tuple[str, str, list[int], str]
"""Name, type, shape and kind of device of one tensor."""


def table_of(tensors: Named) -> list[Entry]:
    """What a receiver must know to make room for these tensors."""
    return [(name, plain.dtype_name(t.dtype), list(t.shape), t.device.type) for name, t in tensors.items()]


class Tracked:
    """The objects given to `job.track()`."""

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.objects: dict[str, Any] = {}
        self.replicated = False
        """The user says that plain, unwrapped state is the same on every rank."""
        self._ddp: list[DistributedDataParallel] | None = None
        self._encoded_state: dict[str, Any] | None = None
        self._encoded = b""
        """What `small_objects` was asked for last, where it is known again at a glance."""

    def add(self, name: str, value: Any) -> None:
        """Sort one tracked object by what it is."""
        if isinstance(value, nn.Module):
            self.modules[name] = value
        elif isinstance(value, torch.optim.Optimizer):
            if is_shared(value) and getattr(value, "_overlap_with_ddp", False):
                raise StateError(
                    f"track({name}=...): ZeroRedundancyOptimizer(overlap_with_ddp=True) updates in the middle of the backward pass, "
                    "so no step of it can be taken back. Make it without overlap_with_ddp"
                )
            self.optimizers[name] = value
        elif callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            self.objects[name] = value
        else:
            raise StateError(
                f"track({name}=...): a {type(value).__name__} has no state_dict() and load_state_dict(), "
                "so its state cannot be kept. Leave it out, or give it both methods."
            )

    # --- large state ---

    def parameters(self) -> Named:
        """Parameters of all modules, local parts only, by name."""
        return {
            f"{name}.{key}": local_part(parameter)
            for name, module in self.modules.items()
            for key, parameter in module.named_parameters()
        }

    def buffers(self) -> Named:
        """Buffers of all modules, those not saved in state_dict() too."""
        return {
            f"{name}.{key}": local_part(buffer)
            for name, module in self.modules.items()
            for key, buffer in module.named_buffers()
        }

    def tensors(self) -> Named:
        """Everything large, in an order that is the same on every rank with the same objects."""
        found = {**self.parameters(), **self.buffers(), **self._optimizer_tensors()}
        for name, value in self.objects.items():
            plain.take_out_tensors(value.state_dict(), name, found)
        return found

    def trained_tensors(self) -> list[torch.Tensor]:
        """Parameters and optimizer state: what replicas must agree on, bit for bit."""
        return [*self.parameters().values(), *self._optimizer_tensors().values()]

    def _optimizer_tensors(self) -> Named:
        found: Named = {}
        for name, optimizer in self.optimizers.items():
            for index, parameter in enumerate(parameters_of(optimizer)):
                for key, value in sorted(keeper(optimizer).state.get(parameter, {}).items()):
                    if isinstance(value, torch.Tensor):
                        found[f"{name}:{index}:{key}"] = local_part(value)
        return found

    def prepare(self, table: list[Entry]) -> list[torch.Tensor]:
        """Tensors to receive into, one for each entry of the sender's table; lazy optimizer state is made."""
        mine = self.tensors()
        result = []
        for entry in table:
            name, dtype, shape, _ = entry
            tensor = mine.get(name)
            if tensor is None:
                tensor = self._make(entry)
            if list(tensor.shape) != shape or plain.dtype_name(tensor.dtype) != dtype:
                raise StateError(
                    f"{name} is {plain.dtype_name(tensor.dtype)}{list(tensor.shape)} here, but {dtype}{shape} in the "
                    "state to restore: the script builds another model than before"
                )
            result.append(tensor)
        return result

    def forget_unnamed(self, names: set[str]) -> None:
        """Drop optimizer state that the state to restore does not have: it is of a version before its first step."""
        for name, optimizer in self.optimizers.items():
            for index, parameter in enumerate(parameters_of(optimizer)):
                state = keeper(optimizer).state.get(parameter, {})
                for key in [key for key, value in state.items() if isinstance(value, torch.Tensor)]:
                    if f"{name}:{index}:{key}" not in names:
                        del state[key]

    def _make(self, entry: Entry) -> torch.Tensor:
        name, dtype, shape, device = entry
        parts = name.split(":")
        if len(parts) != 3 or parts[0] not in self.optimizers:
            return torch.empty(shape, dtype=plain.dtype_of(dtype))
        optimizer = self.optimizers[parts[0]]
        parameter = parameters_of(optimizer)[int(parts[1])]
        like_parameter = list(local_part(parameter).shape) == shape and plain.dtype_name(parameter.dtype) == dtype
        place = parameter.device if device == parameter.device.type else torch.device(device)
        made = (
            torch.empty_like(parameter)
            if like_parameter
            else torch.empty(shape, dtype=plain.dtype_of(dtype), device=place)
        )
        keeper(optimizer).state[parameter][parts[2]] = made
        return local_part(made)

    # --- small state ---

    def small_objects(self, *, scalars: bool) -> bytes:
        """State of schedulers, scalers and the like, and the hyperparameters of the optimizers.

        `scalars` adds what optimizers keep per parameter besides tensors; it goes with the large state, not every step.
        """
        state: dict[str, Any] = {}
        for name, value in self.objects.items():
            state[name] = plain.take_out_tensors(value.state_dict(), name, {})
        for name, optimizer in self.optimizers.items():
            groups = state[f"{name}:groups"] = [dict(group) for group in optimizer.param_groups]
            for group in groups:
                del group["params"]
            if scalars:
                state[f"{name}:scalars"] = {
                    index: rest
                    for index, parameter in enumerate(parameters_of(optimizer))
                    if (rest := _non_tensors(keeper(optimizer).state.get(parameter, {})))
                }
        if state == self._encoded_state:
            return self._encoded
        encoded = plain.encode(state, "a tracked object")
        # Only what cannot change unseen is known again by comparing it: a list or a tensor may be another one inside.
        if not self.objects and not scalars and all(map(_is_constant, _values(state))):
            self._encoded_state, self._encoded = state, encoded
        return encoded

    def load_small_objects(self, data: bytes, tensors: Named) -> None:
        """Put the small state back; `tensors` holds what was taken out of it. What is not there stays as it is."""
        state = plain.decode(data)
        for name, value in self.objects.items():
            if name in state:
                present: Named = {}
                plain.take_out_tensors(value.state_dict(), name, present)
                load_object(value, plain.put_in_tensors(state[name], {**present, **tensors}))
        for name, optimizer in self.optimizers.items():
            for group, saved in zip(optimizer.param_groups, state.get(f"{name}:groups", []), strict=False):
                group.update({key: _like(saved[key], group.get(key)) for key in saved})
            for index, rest in state.get(f"{name}:scalars", {}).items():
                keeper(optimizer).state[parameters_of(optimizer)[index]].update(rest)

    def clear_gradients(self) -> None:
        """A replayed step starts without the gradients of the interrupted one."""
        for module in self.modules.values():
            for parameter in module.parameters():
                parameter.grad = None

    def settle(self) -> None:
        """Let FSDP2 modules forget parameters gathered in an interrupted pass."""
        for module in self.modules.values():
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    # --- who holds the same ---

    def has_scaler(self) -> bool:
        """Whether steps whose gradients overflow are left out by a GradScaler."""
        return any(isinstance(one, torch.amp.GradScaler) for one in self.objects.values())

    def has_ddp(self) -> bool:
        return bool(self.ddp_wrappers())

    def ddp_wrappers(self) -> list[DistributedDataParallel]:
        """Those of tracked modules, and those around them: many scripts track the module they had before they wrapped it."""
        if self._ddp is None:
            parts = [part for module in self.modules.values() for part in module.modules()]
            inside = [part for part in parts if isinstance(part, DistributedDataParallel)]
            self._ddp = inside + (_around(parts) if any(map(_is_bare, self.modules.values())) else [])
        return self._ddp

    def has_fsdp(self) -> bool:
        return any(isinstance(part, FSDPModule) for m in self.modules.values() for part in m.modules())

    def layout(self, world_size: int) -> dict[str, str]:
        """How each module is spread over the ranks, in words, for whoever looks at a checkpoint."""
        return {name: _layout_of(module, world_size, self.ddp_wrappers()) for name, module in self.modules.items()}

    def replicas(self, rank: int, world_size: int) -> tuple[int, ...]:
        """Ranks that hold the very same parameters and optimizer state, this one included."""
        return (rank,) if self.shares_optimizer() else self.alike(rank, world_size)

    def shares_optimizer(self) -> bool:
        """Whether each rank keeps the state of a share of the parameters only."""
        return any(map(is_shared, self.optimizers.values()))

    def alike(self, rank: int, world_size: int) -> tuple[int, ...]:
        """Ranks that hold the very same parameters, this one included."""
        common, covered = set(range(world_size)), self.ddp_members()
        for module in self.modules.values():
            for parameter in module.parameters():
                common &= self.holders(parameter, rank, world_size, covered)
        return tuple(sorted(common | {rank}))

    def ddp_members(self) -> dict[int, set[int]]:
        """By id of a parameter that DDP keeps alike: the ranks it does so on."""
        covered: dict[int, set[int]] = {}
        for wrapper in self.ddp_wrappers():
            members = set(dist.get_process_group_ranks(wrapper.process_group))
            covered.update({id(parameter): members for parameter in wrapper.parameters()})
        return covered

    def holders(self, parameter: torch.Tensor, rank: int, world_size: int, covered: dict[int, set[int]]) -> set[int]:
        """Ranks whose local part of this parameter is the same as here."""
        members = covered.get(id(parameter))
        if members:
            return members
        if isinstance(parameter, DTensor):
            ranks = parameter.device_mesh.mesh
            coordinate = parameter.device_mesh.get_coordinate() or [0] * ranks.dim()
            for dim, placement in reversed(list(enumerate(parameter.placements))):
                if not placement.is_replicate():
                    ranks = ranks.select(dim, coordinate[dim])
            return set(ranks.flatten().tolist())
        return set(range(world_size)) if self.replicated or world_size == 1 else {rank}


def _is_bare(module: nn.Module) -> bool:
    """Whether nothing inside says how it is kept alike; then something outside may."""
    return not any(isinstance(part, DistributedDataParallel | FSDPModule) for part in module.modules())


def _around(parts: list[nn.Module]) -> list[DistributedDataParallel]:
    """Wrappers of these modules that are not among them. It takes a tenth of a second."""
    known = set(map(id, parts))
    # by type, not isinstance(): there are objects that do things when asked what they are
    every = (one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel))
    return [one for one in every if id(one) not in known and id(one.module) in known]


def _layout_of(module: nn.Module, world_size: int, wrappers: list[DistributedDataParallel]) -> str:
    parts = set(map(id, module.modules()))
    if any(id(one) in parts or id(one.module) in parts for one in wrappers):
        return f"DDP over {world_size}"
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            names = mesh.mesh_dim_names or [f"dim {index}" for index in range(mesh.ndim)]
            sizes = ", ".join(f"{name} {size}" for name, size in zip(names, mesh.shape, strict=True))
            fsdp = any(isinstance(part, FSDPModule) for part in module.modules())
            return f"{'FSDP2' if fsdp else 'DTensor'} on a mesh of {sizes}"
    return "plain" if world_size == 1 else f"plain on each of {world_size}"


def load_object(value: Any, state: Any) -> None:
    """load_state_dict, and for a GradScaler also an end to the step it was in."""
    value.load_state_dict(state)
    if isinstance(value, torch.amp.GradScaler) and value.is_enabled() and state.get("scale"):
        value.update(new_scale=float(state["scale"]))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_shared(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each rank updates a share of the parameters, and hands it to the others: ZeroRedundancyOptimizer."""
    return type(optimizer).__name__ == "ZeroRedundancyOptimizer"


def keeper(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that keeps the state: one that is shared has another one for this rank's share."""
    found: torch.optim.Optimizer = optimizer.optim if is_shared(optimizer) else optimizer  # type: ignore[attr-defined]
    return found


def _non_tensors(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}


def _values(state: dict[str, list[dict[str, Any]]]) -> Iterator[Any]:
    """All hyperparameters."""
    for groups in state.values():
        for group in groups:
            yield from group.values()


def _is_constant(value: Any) -> bool:
    """Whether this object can never become another value."""
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return value is None or type(value) in (bool, int, float, str)


def _like(saved: Any, present: Any) -> Any:
    """Lists that were tuples become tuples again; a tensor learning rate stays one."""
    if isinstance(present, tuple) and isinstance(saved, list):
        return tuple(saved)
    if isinstance(present, torch.Tensor) and isinstance(saved, torch.Tensor):
        return saved.to(present.device)
    return saved


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
