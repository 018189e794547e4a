"""Casts parameters to half precision into the shadow of this rank, while the step goes on.

    on a device   cast there -> [the update may begin] -> copy over the link to the host, in one piece
    on a CPU      cast in another thread -> [the update may begin]

What is of two bytes or less already stays as it is. On a device the casts take as much memory as the shadow, if half of what is free
allows for that; else they go in rounds, and the update waits for all of them. Called by `session.shadowing`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from rerail.checkpoint.arena import Entry
from rerail.checkpoint.background import Background
from rerail.checkpoint.device import SHARE
from rerail.checkpoint.dtypes import code_of, dtype_of, view_of
from rerail.checkpoint.layout import ALIGN
from rerail.checkpoint.shadow import Shadow, describe, room_for
from rerail.errors import StateError

Named = Mapping[str, torch.Tensor]


class Mold(NamedTuple):
    """Where each tensor goes."""

    key: tuple[object, ...]
    entries: list[Entry]
    described: bytes
    size: int

    @property
    def room(self) -> int:
        """Bytes that it takes behind the slots of an arena."""
        return room_for(self.described, self.size)


def mold_of(tensors: Named) -> Mold:
    """How these tensors lie in a half."""
    entries, at = [], 0
    for name, tensor in tensors.items():
        kept = tensor.dtype if tensor.element_size() <= 2 else torch.bfloat16
        shape = tuple(tensor.shape)
        entries.append(Entry(name, code_of(kept), shape, tensor.device.type, at, shape, (0,) * len(shape)))
        at += -(-tensor.numel() * kept.itemsize // ALIGN) * ALIGN
    return Mold(_key(tensors), entries, describe(entries), at)


def _key(tensors: Named) -> tuple[object, ...]:
    return tuple((name, one.dtype, one.shape, one.device) for name, one in tensors.items())


class Caster:
    """Fills the halves of one shadow, one at a time."""

    def __init__(self, shadow: Shadow) -> None:
        self.shadow = shadow
        self._mold: Mold | None = None
        self._background = Background("rerail-shadow")
        self._device: _DeviceCast | None = None
        self._copying = False

    @property
    def cpu_s(self) -> float:
        """Seconds of a CPU that the newest copy took beside the training."""
        return self._background.cpu_s

    @property
    def busy(self) -> bool:
        return self._background.busy

    def mold(self, tensors: Named) -> Mold:
        """The same as before, where the tensors are alike."""
        if self._mold is None or self._mold.key != _key(tensors):
            self._mold = mold_of(tensors)
        return self._mold

    def take(
        self, version: int, tensors: Named, whole: Callable[[Shadow, int], None] = lambda shadow, version: None
    ) -> bool:
        """Begin to copy; the half is sealed when it is whole, and `whole` is told. False: there is no room. There has to be at least one tensor."""
        self.settle()
        here = list(tensors.values())
        if len({tensor.device for tensor in here}) > 1:
            raise StateError("parameters of one rank lie on several devices")
        on_device, mold = here[0].is_cuda, self.mold(tensors)
        half = self.shadow.begin(version, mold.described, mold.size)
        if half is None:
            return False
        memory, base = self.shadow.place(half, mold.described)
        if on_device:
            self._device = self._device or _DeviceCast(here[0].device)
            image = torch.frombuffer(memory, dtype=torch.uint8, count=mold.size, offset=base)
            cast = self._device.begin(image, mold, here)
        else:
            views = [view_of(memory, entry, base) for entry in mold.entries]

            def cast() -> None:
                with torch.no_grad():
                    torch._foreach_copy_(views, here)

        def task() -> None:
            cast()
            self.shadow.seal(half, version, mold.described)
            whole(self.shadow, version)

        self._copying = on_device
        self._background.begin(task, here)
        return True

    def before_update(self) -> None:
        """What is being copied is about to change."""
        if self._device is not None and self._copying:
            self._copying = False
            self._device.before_update()
        elif self._device is None:
            self._background.wait()

    def settle(self) -> None:
        """Wait until nothing is being copied any more."""
        self._background.wait()
        error = self._background.taken_error()
        if error is not None:
            raise StateError(f"the parameters could not be copied: {error}") from error


class _DeviceCast:
    """One cast at a time, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._on = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffer: torch.Tensor | None = None
        self._may_update = _event()
        self._issued = threading.Event()
        """Everything the update has to wait for is in the device's hands."""

    def begin(self, image: torch.Tensor, mold: Mold, tensors: list[torch.Tensor]) -> Callable[[], None]:
        """Note where the step stands; what is returned does the rest and waits for its end, in another thread."""
        rounds = self._rounds(mold)
        now, done = _event(), _event()
        now.record(torch.cuda.current_stream(self._on))
        self._may_update = _event()
        self._issued.clear()

        def issue() -> None:
            with torch.cuda.stream(self._side), torch.no_grad():
                self._side.wait_event(now)
                for first, last in rounds:
                    entries = mold.entries[first:last]
                    start, end = entries[0].at, mold.entries[last].at if last < len(mold.entries) else mold.size
                    torch._foreach_copy_([self._part(entry, start) for entry in entries], tensors[first:last])
                    if last == len(tensors):
                        self._may_update.record(self._side)
                        self._issued.set()
                    assert self._buffer is not None
                    image[start:end].copy_(self._buffer[: end - start], non_blocking=True)
                done.record(self._side)

        def cast() -> None:
            try:
                issue()
            finally:
                self._issued.set()
            done.synchronize()

        return cast

    def before_update(self) -> None:
        """Queue the update behind the casts. Waits on the device, hardly here."""
        self._issued.wait()
        torch.cuda.current_stream(self._on).wait_event(self._may_update)

    def _rounds(self, mold: Mold) -> list[tuple[int, int]]:
        """From which tensor to which is cast at once: all of them, if the device has memory for that."""
        have = self._buffer.numel() if self._buffer is not None else 0
        if have < mold.size:
            largest = max(_padded(entry) for entry in mold.entries)
            wanted = min(mold.size, max(have, largest, int(SHARE * torch.cuda.mem_get_info(self._on)[0])))
            if wanted > have:
                self._buffer = None
                try:
                    self._buffer = torch.empty(wanted, dtype=torch.uint8, device=self._on)
                except torch.cuda.OutOfMemoryError as error:
                    raise StateError(f"the device has no {wanted >> 20} MiB to cast parameters in") from error
        assert self._buffer is not None
        found, first = [], 0
        for index, entry in enumerate(mold.entries):
            if entry.at + _padded(entry) - mold.entries[first].at > self._buffer.numel():
                found.append((first, index))
                first = index
        return [*found, (first, len(mold.entries))]

    def _part(self, entry: Entry, start: int) -> torch.Tensor:
        assert self._buffer is not None
        at, dtype = entry.at - start, dtype_of(entry.dtype)
        return self._buffer[at : at + entry.size].view(dtype).view(entry.shape)


def _padded(entry: Entry) -> int:
    return -(-entry.size // ALIGN) * ALIGN


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
