"""The engine behind `torch.distributed.checkpoint`: a StorageWriter and a StorageReader for torch's own planners.

    dcp.save(state, storage_writer=Writer("/checkpoints", step=100))
    dcp.load(state, storage_reader=Reader("/checkpoints"))          # the newest, or step=100

A save is on the disk and committed when `dcp.save` returns, or when the future of `dcp.async_save` is done. A step that
is there is never overwritten. What is not a tensor must be plain data: it is read back by torch's restricted loader, so
that a file from elsewhere cannot run code. Called by torch.
"""

from __future__ import annotations

import dataclasses
import io
import os
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from rerail.checkpoint import catalog, reshard, saving
from rerail.checkpoint.arena import Arena
from rerail.checkpoint.catalog import Step
from rerail.checkpoint.declining import decline
from rerail.checkpoint.dtypes import dtype_of
from rerail.checkpoint.layout import Piece
from rerail.checkpoint.reshard import Wanted
from rerail.checkpoint.retention import Keep
from rerail.checkpoint.saving import Order
from rerail.checkpoint.staging import Stager
from rerail.checkpoint.tiers import tier_at
from rerail.errors import CheckpointError

ROOM = 1 << 20
"""Bytes of plain data that a rank keeps in its manifest; more than that lies beside the tensors."""
_BYTES = "bytes:"
"""In front of the name of plain data that lies beside the tensors."""
_epochs: dict[str, int] = {}
"""By place: the epoch that this process has claimed there. All saves of one job belong to the same."""

_Path = tuple[str | int, ...]
_Root = str | os.PathLike[str]


class _Ticket(msgspec.Struct, frozen=True):
    """What the coordinator tells each rank."""

    epoch: int
    rank: int
    world_size: int


class _Plain(msgspec.Struct, frozen=True):
    """The small state of a rank: all that is not a tensor."""

    dcp: int = 1
    items: dict[str, bytes] = {}
    """By name, as torch.save has written it."""
    paths: dict[str, _Path] = {}
    """Where each name belongs in the nested state dictionary."""


_plain = msgspec.json.Decoder(_Plain)


class Writer(StorageWriter):
    """Saves one step to `root`, a directory or a URL."""

    def __init__(self, root: _Root, step: int, *, keep: Keep | int | None = None, deadline_s: float = 600.0) -> None:
        self._root, self._step, self._deadline_s = os.fspath(root), step, deadline_s
        self._keep = Keep.of(keep)

    @property
    def checkpoint_id(self) -> str:
        return self._root

    def reset(self, checkpoint_id: _Root | None = None) -> None:
        if checkpoint_id is not None:
            self._root = os.fspath(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(
                "use_collectives=False is not possible here: the ranks must agree on what they commit"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        tier = tier_at(self._root)
        if tier.url not in _epochs:
            _epochs[tier.url] = saving.claim_epoch(tier, os.environ.get("TORCHELASTIC_RUN_ID", ""))
        return [
            dataclasses.replace(plan, storage_data=_Ticket(_epochs[tier.url], rank, len(plans)))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        ticket: _Ticket = plan.storage_data
        order = Order(
            version=self._step,
            epoch=ticket.epoch,
            generation=0,
            rank=ticket.rank,
            group=tuple(range(ticket.world_size)),
            world_size=ticket.world_size,
            tiers=(self._root,),
            keep=self._keep,
            versions={"torch": str(torch.__version__)},
            read_back=False,
            deadline_s=self._deadline_s,
        )
        fd = os.memfd_create("rerail-dcp", os.MFD_CLOEXEC)
        try:
            results = _save(order, Arena(fd), plan, planner)
        finally:
            os.close(fd)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing is left to do: COMMIT was written when all ranks had written."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Root) -> bool:
        return isinstance(checkpoint_id, str | os.PathLike)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._root)


class Reader(StorageReader):
    """Reads a step from `root`; without `step` the newest that is whole."""

    def __init__(self, root: _Root, step: int | None = None) -> None:
        self._root, self._step = os.fspath(root), step
        self._opened: Step | None = None
        self._plain = _Plain()

    @property
    def checkpoint_id(self) -> str:
        return self._root

    def reset(self, checkpoint_id: _Root | None = None) -> None:
        self._opened = None
        if checkpoint_id is not None:
            self._root = os.fspath(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._opened = step = _open(self._root, self._step)
        self._plain = _plain_of(step)
        known: dict[str, STORAGE_TYPES] = {name: BytesStorageMetadata() for name in self._plain.items}
        for name, saved in step.tensors().items():
            if name.startswith(_BYTES):
                known[name.removeprefix(_BYTES)] = BytesStorageMetadata()
                continue
            # One chunk, however many parts it was saved in: which bytes are needed is worked out in `reshard`.
            size = torch.Size(saved.shape)
            chunks = [ChunkStorageMetadata(torch.Size([0] * len(size)), size)]
            known[name] = TensorStorageMetadata(TensorProperties(dtype=dtype_of(saved.dtype)), size, chunks)
        return Metadata(known, planner_data=self._plain.paths or None, storage_meta=StorageMeta(self._root))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._opened is None:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=self._step_now().id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        if len({plan.storage_data for plan in plans}) > 1:
            raise CheckpointError(f"a save was finished just now, and the ranks see different steps in {self._root}")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        step = self._step_now()
        saved = step.tensors()
        wanted: list[Wanted] = []
        converted: list[tuple[torch.Tensor, torch.Tensor]] = []
        resolved = []
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                continue
            name = item.storage_index.fqn
            target = into = planner.resolve_tensor(item).detach()
            if target.shape != item.lengths:
                raise CheckpointError(f"{name!r}: {list(item.lengths)} are to be read into {list(target.shape)}")
            if target.dtype != dtype_of(saved[name].dtype):
                into = torch.empty(target.shape, dtype=dtype_of(saved[name].dtype))
                converted.append((target, into))
            wanted.append(Wanted(name, into, saved[name].shape, tuple(item.storage_offsets)))
            resolved.append((item, target))
        reshard.load(step, wanted)
        for target, into in converted:
            target.copy_(into)
        for item, target in resolved:
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._harmless(item.storage_index.fqn))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Root) -> bool:
        return isinstance(checkpoint_id, str | os.PathLike)

    def _step_now(self) -> Step:
        if self._opened is None:
            raise CheckpointError("read_metadata() comes first")
        return self._opened

    def _harmless(self, name: str) -> io.BytesIO:
        """torch's planner unpickles whatever it is given, so it is given what this process has just written itself."""
        data = self._plain.items.get(name)
        if data is None:
            data = reshard.whole_tensor(self._step_now(), _BYTES + name).numpy().tobytes()
        return _written(_read_plain(name, data))


def _collect(plan: SavePlan, planner: SavePlanner) -> tuple[list[Piece], bytes, list[WriteResult]]:
    """What this rank saves: tensors, the rest, and the answer to torch."""
    pieces, items, results = [], dict[str, bytes](), []
    used = 0
    for item in plan.items:
        name, value = item.index.fqn, planner.resolve_data(item)
        if item.type is WriteItemType.BYTE_IO:
            data = value.getvalue()  # type: ignore[union-attr]
            _read_plain(name, data)
            size = len(data)
            if used + size <= ROOM:
                items[name], used = data, used + size
            else:
                beside = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                pieces.append(Piece(_BYTES + name, beside, (size,), (0,), saved=True))
        else:
            described = item.tensor_data
            if described is None or not isinstance(value, torch.Tensor):
                raise CheckpointError(f"{name!r}: the planner does not say which part of the tensor this is")
            whole, start = tuple(described.size), tuple(described.chunk.offsets)
            pieces.append(Piece(name, value.detach(), whole, start, saved=True))
            size = value.numel() * value.element_size()
        results.append(WriteResult(index=item.index, size_in_bytes=size, storage_data=None))
    return pieces, msgspec.json.encode(_Plain(items=items, paths=_paths_of(plan))), results


def _paths_of(plan: SavePlan) -> dict[str, _Path]:
    """What torch's planner wants to know when it puts a nested state dictionary together again."""
    try:
        return msgspec.convert(plan.planner_data or {}, dict[str, _Path])
    except msgspec.ValidationError:
        return {}  # of another planner, which must do without


def _save(order: Order, arena: Arena, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
    try:
        pieces, small, results = _collect(plan, planner)
        Stager(arena, slots=1, overlap=False).stage(order.version, pieces, small)
    except Exception as error:  # whatever it is: the others must not wait for this rank
        decline([tier_at(url) for url in order.tiers], order.id, order.rank, f"{type(error).__name__}: {error}")
        raise
    for outcome in saving.carry_out(order, arena, lambda: {order.id}):
        if not outcome.ok:
            raise CheckpointError("; ".join(outcome.notes) or f"step {order.version} was not saved")
    return results


def _open(root: str, number: int | None) -> Step:
    tier = tier_at(root)
    passed_over: list[str] = []

    def note(found: catalog.Found, error: Exception) -> None:
        passed_over.append(f"; {found.id.folder}: {error}")

    for step in catalog.whole([tier], note, number):
        return step
    what = "no step" if number is None else f"no step {number}"
    raise CheckpointError(f"there is {what} in {tier.url} that can be read{''.join(passed_over)}")


def _plain_of(step: Step) -> _Plain:
    """Of all ranks together; a step that was not saved from here has tensors only."""
    items: dict[str, bytes] = {}
    paths: dict[str, _Path] = {}
    for manifest in step.manifests.values():
        try:
            plain = _plain.decode(manifest.small)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        items.update(plain.items)
        paths.update(plain.paths)
    return _Plain(items=items, paths=paths)


def _read_plain(name: str, data: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises the errors of its unpickler, among others
        raise CheckpointError(
            f"{name!r} is not plain data, which alone can be read without running code from the file: {error}"
        ) from error


def _written(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer
