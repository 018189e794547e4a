"""Process groups whose wires can be replaced while torch, DDP and FSDP2 hold on to the group object.

torch makes them through the backend name `rerail` (`Backend.register_backend`, a public extension point). Each passes
its collectives to an inner group of stock gloo or NCCL, built anew for every generation. Called by torch; driven by
`session.fabric`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName

from rerail.errors import StateError
from rerail.session import sockets, solo, vacant, waiting
from rerail.session.c10d import PrefixStore, Store, finished_work, gloo_options
from rerail.session.fabric import Mode, fabric, hearing, messages

BACKEND = "rerail"
AS_A_WHOLE = ("send", "recv", "recv_anysource", *(name for name in solo.COLLECTIVES if "reduce_scatter" in name))
"""gloo waits for these as long as it takes, whatever the limit; nor does it ever call a reduce-scatter completed."""
_Type = ProcessGroup.BackendType


class RelayedWork(dist.Work):
    """A collective under way. Inside a step, waiting for it never raises: a broken one voids the attempt instead.

    The step then runs out on meaningless values and ends at optimizer.step(), before anything is changed. That way DDP,
    FSDP2 and pipeline schedules never meet an exception in the middle of a pass.
    """

    def __init__(self, inner: Any, name: str, args: tuple[Any, ...], group: ReplaceableGroup | None) -> None:
        super().__init__()
        self._inner = inner
        self._name, self._args = name, args
        self._group = group
        """None where NCCL does the work: its waits neither block nor break."""
        self.on_success: list[Callable[[], None]] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            if self._group is None:
                self._inner.wait() if timeout is None else self._inner.wait(timeout)
            elif self._name in AS_A_WHOLE:
                waiting.wait_aside(self._inner, timeout, self._group.stuck)
            else:
                waiting.wait(self._inner, timeout, self._group.stuck)
        except RuntimeError as error:
            broke = fabric.failed if self._group is None else self._group.broke
            broke(error)
            fabric.alone_or_raise()
        else:
            fabric.ended(self._inner)
            for done in self.on_success:
                done()
        return True

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())

    def is_success(self) -> bool:
        return bool(self._inner.is_success())

    def exception(self) -> Any:
        return self._inner.exception()

    def result(self) -> list[torch.Tensor]:
        return list(self._inner.result())

    def source_rank(self) -> int:
        return int(self._inner.source_rank())

    def get_future(self) -> Any:
        """DDP's reducer waits for futures: a broken gloo collective gives the tensors as they are, not an error."""
        future, group = self._inner.get_future(), self._group
        if group is None or self._name != "allreduce":
            return future
        return fabric.promises.promise(future, self._args[0], group)

    getFuture = get_future


class Wires(NamedTuple):
    """What carries one group's collectives in one generation."""

    inner: ProcessGroup
    connections: set[tuple[int, int]]
    nccl: Any
    taken: list[int]
    """The group's ranks that are there."""


class ReplaceableGroup(ProcessGroup):
    """One group: default or sub-group."""

    def __init__(self, key: str, rank: int, size: int, members: list[int], timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the form meant for Python subclasses
        self.key, self.own_rank, self.own_size = key, rank, size
        self.members = members or list(range(size))
        self._timeout = timeout
        self._inner: ProcessGroup | None = None
        self._connections: set[tuple[int, int]] = set()
        self._severed: set[tuple[int, int]] = set()
        self._nccl: Any = None
        self._calls: dict[str, Callable[..., Any]] = {}
        self._taken = list(range(size))
        self._name = self._desc = ""

    # --- wires ---

    def connect(self, store: Store) -> Wires:
        """Build wires for this group; blocks until every member does the same. They are not used before `adopt`."""
        taken = [rank for rank, member in enumerate(self.members) if not fabric.seats or member in fabric.seats]
        inner = ProcessGroup(store, taken.index(self.own_rank), len(taken))
        nccl: Any = None
        connections: set[tuple[int, int]] = set()
        parts = _inner_parts(fabric.inner_backend)
        for device, name in parts:
            prefixed = PrefixStore(device, store)
            if name == "nccl":
                nccl = _nccl(prefixed, self, taken)
                inner._register_backend(torch.device(device), _Type.NCCL, nccl)
            else:
                backend, connections = self._gloo(prefixed, taken.index(self.own_rank), len(taken))
                for device_type in [device] if len(parts) > 1 else ["cpu", "cuda"]:
                    inner._register_backend(torch.device(device_type), _Type.GLOO, backend)
        inner._set_default_backend(_Type.NCCL if nccl is not None else _Type.GLOO)
        inner._set_group_name(GroupName(self.key))  # by which the flight recorder knows it
        return Wires(inner, connections, nccl, taken)

    def adopt(self, wires: Wires) -> None:
        """Use these from now on."""
        self._inner, self._connections, self._nccl, self._taken = wires
        self._calls = {}
        self._severed = set()

    def _gloo(self, store: Store, rank: int, size: int) -> tuple[Any, set[tuple[int, int]]]:
        """A gloo backend and its connections, so that we can cut them and no others."""
        before = sockets.open_sockets()
        options = gloo_options()
        options._timeout = self._timeout
        options._devices = [_gloo_device()]
        options._threads = 2
        backend = dist.ProcessGroupGloo(store, rank, size, options)
        if size == 1:
            return backend, set()
        opened = sockets.open_sockets() - before
        ports = sockets.listening_ports(opened)
        store.set(f"ports/{rank}", ",".join(map(str, ports)))
        told = store.multi_get([f"ports/{one}" for one in range(size)])
        everyones = {int(port) for text in told for port in text.decode().split(",") if port}
        return backend, sockets.connections(opened, everyones)

    def cut(self) -> None:
        """Free everyone who waits in this group, from any thread."""
        connections, self._connections = self._connections, set()
        self._severed |= connections
        sockets.cut(connections)
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            fabric.aborted = True
            with contextlib.suppress(RuntimeError):
                nccl.abort()

    def stuck(self) -> waiting.Stuck:
        """To be asked whether what is still under way after a cut will never end."""
        return waiting.Stuck(fabric.cut_since, lambda: not sockets.still_open(self._severed))

    def broke(self, error: RuntimeError) -> None:
        """A collective of this group failed, or was left behind."""
        if isinstance(error, waiting.LeftBehind) and self._inner is not None:
            fabric.leave(self._inner)
        fabric.failed(error)

    def disconnect(self) -> None:
        """Let the wires of an older generation go."""
        self.cut()
        if self._inner is not None:
            fabric.retire(self._inner)
        self._inner, self._calls = None, {}

    def shutdown(self) -> None:
        """torch is done with this group."""
        if self in fabric.groups:
            fabric.groups.remove(self)
        self.disconnect()

    abort = shutdown

    # --- collectives ---

    def run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry one collective to the peers, or carry it out alone."""
        inner = self._inner
        if messages.again is not None and fabric.mode is Mode.LIVE:
            try:
                known = messages.repeat(self, name, args)
            except RuntimeError as error:
                fabric.failed(error)
            else:
                if known is not None:
                    return finished_work(known)
        if fabric.mode is Mode.LIVE and inner is not None:
            asked, given = name, args
            if len(self._taken) < self.own_size:
                asked, wanted = vacant.among(name, [*args, *kwargs.values()], self._taken)
                given, kwargs = tuple(wanted), {}
            try:
                call = self._calls.get(asked)
                if call is None:
                    call = self._calls[asked] = getattr(inner, asked)
                work = call(*given, **kwargs)
            except RuntimeError as error:
                fabric.failed(error)
            else:
                fabric.begin(work, name, self.key)
                if work is None:  # NCCL gives none where the caller does not want to wait
                    return finished_work(solo.outputs_of(name, args))
                relayed = RelayedWork(work, name, args, self if self._nccl is None or _on_cpu(args) else None)
                if messages.recording and (keep := messages.note(self, name, args)) is not None:
                    relayed.on_success.append(keep)
                if hearing.active:
                    number = hearing.number(self.key, name)
                    outputs = solo.outputs_of(name, args)
                    relayed.on_success.append(lambda: hearing.write(self.key, name, number, outputs))
                return relayed
        fabric.alone_or_raise()
        outputs = solo.carry_out(name, args, kwargs, rank=self.own_rank, size=self.own_size)
        if hearing.active:
            hearing.play(self.key, name, hearing.number(self.key, name), solo.outputs_of(name, args))
        return finished_work(outputs)

    # --- what torch asks of a group ---

    def getBackendName(self) -> str:
        return BACKEND

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:
        return self._desc


def _collective(name: str) -> Callable[..., Any]:
    def run(self: ReplaceableGroup, *args: Any, **kwargs: Any) -> Any:
        return self.run(name, args, kwargs)

    run.__name__ = name
    return run


for _name in solo.COLLECTIVES:
    setattr(ReplaceableGroup, _name, _collective(_name))


def _create(options: Any, backend_options: Any) -> ReplaceableGroup:
    """torch wants a group. Among living peers it is wired at once; alone it waits for the first `form()`."""
    group = ReplaceableGroup(
        options.group_id, options.group_rank, options.group_size, list(options.global_ranks_in_group), options.timeout
    )
    if fabric.mode is Mode.LIVE and fabric.seats:
        raise StateError(
            f"a process group cannot be made while only ranks {', '.join(map(str, fabric.seats))} are there: make all groups "
            "before the first job.steps()"
        )
    fabric.groups.append(group)
    if fabric.mode is Mode.LIVE:
        group.adopt(group.connect(PrefixStore(f"made/{fabric.generation}", options.store)))
    return group


def _on_cpu(args: tuple[Any, ...]) -> bool:
    """Whether the first tensor of a collective's arguments is on the CPU."""
    first = args[0] if args else None
    while isinstance(first, list | tuple) and first:
        first = first[0]
    return isinstance(first, torch.Tensor) and first.device.type == "cpu"


def _inner_parts(backend: str) -> list[tuple[str, str]]:
    """`gloo` or `cpu:gloo,cuda:nccl` as (device, backend) pairs."""
    if ":" not in backend:
        return [("cuda" if backend == "nccl" else "cpu", backend)]
    pairs = [part.split(":", 1) for part in backend.split(",")]
    return [(device, name) for device, name in pairs]


def _gloo_device() -> Any:
    """Listen where this rank was told to, unless the user names an interface."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface.split(",")[0], lazy_init=False)
    return dist.ProcessGroupGloo.create_device(hostname=fabric.address, lazy_init=False)


def _nccl(store: Store, group: ReplaceableGroup, taken: list[int]) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = group._timeout
    options.global_ranks_in_group = [group.members[rank] for rank in taken]
    options.group_name = GroupName(group.key)
    return dist.ProcessGroupNCCL(store, taken.index(group.own_rank), len(taken), options)


def register() -> None:
    """Make the backend name known to torch, once per process."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
