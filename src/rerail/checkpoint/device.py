"""Copies tensors from a device to memory on a stream of its own, so that the step hardly waits for it.

    clone the tail on the device -> copy the rest -> [the update may begin] -> copy the tail from its clones

The link to the host is some fifty times slower than the device's memory. What it cannot carry before the update begins is
cloned on the device first, if there is room; how much that is has been learnt from the copies before. Called by
`checkpoint.staging`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

MARGIN = 1.1
"""How much more is cloned than the last copy says is needed."""
AHEAD = 32
"""Copies that are queued at once."""
SHARE = 0.5
"""Share of the device's free memory that clones may take."""


class DeviceCopy:
    """One copy at a time."""

    def __init__(self) -> None:
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._buffer: torch.Tensor | None = None
        self._rate = self._window_s = 0.0
        self._may_update = _event()
        self._issued = threading.Event()
        """Everything the update has to wait for is in the device's hands."""
        self._copying = False
        self._began = self._reached = self._done = _event()
        self._was_reached = False
        self._size = 0

    def begin(self, views: list[torch.Tensor], tensors: list[torch.Tensor]) -> Callable[[], None]:
        """Note where the step stands; what is returned does the copying and waits for its end, best in another thread.

        A device takes about a thousand copies ahead of time and then lets the caller wait.
        """
        self._size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        # those on the CPU (step counts) first: the tail is to be of the device
        order = sorted(range(len(tensors)), key=lambda index: tensors[index].is_cuda)
        views, tensors = [views[index] for index in order], [tensors[index] for index in order]
        direct, clones = self._split(tensors)
        self._began, self._reached, self._done, self._was_reached = _event(), _event(), _event(), False
        self._issued.clear()
        self._copying = True
        now = _event()
        now.record(torch.cuda.current_stream())

        def copy() -> None:
            try:
                self._issue(now, views, tensors, direct, clones)
            finally:
                self._issued.set()
            self._finish()

        return copy

    def _issue(
        self,
        now: torch.cuda.Event,
        views: list[torch.Tensor],
        tensors: list[torch.Tensor],
        direct: int,
        clones: list[torch.Tensor],
    ) -> None:
        with torch.cuda.stream(self._side), torch.no_grad():
            self._side.wait_event(now)
            self._began.record(self._side)
            for clone, tensor in zip(clones, tensors[direct:], strict=True):
                clone.copy_(tensor)
            self._copy(views[:direct], tensors[:direct])
            self._may_update.record(self._side)
            self._issued.set()
            self._copy(views[direct:], clones)
            self._done.record(self._side)

    def _copy(self, views: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
        """A few at a time: a full queue would keep the training's own work from being queued."""
        before: torch.cuda.Event | None = None
        for first in range(0, len(views), AHEAD):
            for view, tensor in zip(views[first : first + AHEAD], tensors[first : first + AHEAD], strict=True):
                view.copy_(tensor, non_blocking=True)
            here = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            here.record(self._side)
            if before is not None:
                before.synchronize()
            before = here

    def before_update(self) -> None:
        """Queue the update behind the copies from the tensors themselves. Waits on the device, hardly here."""
        if self._copying:
            self._copying = False
            stream = torch.cuda.current_stream()
            self._reached.record(stream)
            self._was_reached = True
            self._issued.wait()
            stream.wait_event(self._may_update)

    def _finish(self) -> None:
        self._done.synchronize()
        seconds = self._began.elapsed_time(self._done) / 1000
        self._rate = self._size / max(seconds, 1e-6)
        # an update that had not been reached when all was copied leaves time enough
        reached = self._was_reached and bool(self._reached.query())  # type: ignore[no-untyped-call]
        self._window_s = self._began.elapsed_time(self._reached) / 1000 if reached else seconds

    def _split(self, tensors: list[torch.Tensor]) -> tuple[int, list[torch.Tensor]]:
        """How many tensors are copied directly, and room for clones of the rest."""
        wanted = (self._size - self._rate * self._window_s) * MARGIN if self._rate else 0.0
        free = torch.cuda.mem_get_info()[0] if wanted > 0 else 0
        room = min(wanted, SHARE * free + (self._buffer.numel() if self._buffer is not None else 0))
        direct, taken = len(tensors), 0
        while direct > 0 and taken < room:
            size = _padded(tensors[direct - 1])
            if taken + size > room or not tensors[direct - 1].is_cuda:
                break
            direct, taken = direct - 1, taken + size
        if self._buffer is None or self._buffer.numel() < taken:
            self._buffer = None
            try:
                self._buffer = torch.empty(taken, dtype=torch.uint8, device=tensors[-1].device) if taken else None
            except torch.cuda.OutOfMemoryError:
                return len(tensors), []
        return direct, self._places(tensors[direct:])

    def _places(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        found, at = [], 0
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            assert self._buffer is not None
            found.append(self._buffer[at : at + size].view(tensor.dtype).view(tensor.shape))
            at += _padded(tensor)
        return found


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // 256) * 256


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
