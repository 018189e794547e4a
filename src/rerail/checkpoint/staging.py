"""Copies this rank's state into a slot of its arena, while the step goes on where that is safe.

The layout (`checkpoint.layout`) is planned once. Parameters change in the update alone, so a copy may run beside forward
and backward; `before_update` is where the trainer waits for it. Called by `session.snapshotting`.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Sequence

import torch

from rerail.checkpoint.arena import Arena, Meta, NoRoom
from rerail.checkpoint.background import Background
from rerail.checkpoint.device import DeviceCopy
from rerail.checkpoint.dtypes import view_of
from rerail.checkpoint.layout import Layout, Piece, plan
from rerail.errors import StateError

LARGE = 256 << 20
"""Bytes of a slot from which on making it takes noticeable time."""
SMALL_ROOM = 4 << 20
"""Bytes kept for the small state in each slot."""


class Stager:
    """Fills slots; one at a time."""

    def __init__(
        self,
        arena: Arena,
        *,
        slots: int = 2,
        overlap: bool = True,
        most: int | None = None,
        behind: Callable[[], int] = lambda: 0,
    ) -> None:
        """`most`: bytes that all slots together may take; None for as many as the machine can spare. `behind`: bytes that are
        wanted behind them, asked for whenever room is made; there may be fewer."""
        self.arena, self._slots, self._overlap, self._most, self._behind = arena, slots, overlap, most, behind
        self._layout: Layout | None = None
        self._views: dict[int, list[torch.Tensor]] = {}
        self._room: Layout | None = None
        self._pinned_at = 0
        """The layout that there is memory for."""
        self._making_room = False
        self._slot = -1
        """The slot being filled."""
        self._device: DeviceCopy | None = None
        self._from_device = False
        self._background = Background("rerail-stage")

    @property
    def cpu_s(self) -> float:
        """Seconds of a CPU that the newest copy took beside the training."""
        return self._background.cpu_s

    @property
    def making_room(self) -> bool:
        """Nothing in the arena may be touched meanwhile."""
        return self._making_room and self._background.busy

    def stage(
        self,
        version: int,
        pieces: Sequence[Piece],
        small: bytes,
        *,
        order: bytes = b"",
        pinned: frozenset[int] = frozenset(),
        renew: bool = False,
        sealed: Callable[[int], None] = lambda version: None,
    ) -> bool:
        """Begin to copy; `sealed(version)` is called when the slot is whole.

        False if nothing was copied: every slot is still being read, or a large arena is still being made.
        """
        if self.making_room:
            return False
        self.settle()
        layout = self._plan(pieces)
        if not self._has_room(layout):
            return False
        slot = self.arena.begin(version, pinned, renew=renew)
        if slot is None:
            return False
        meta = Meta(layout.entries, layout.saved, layout.file_size, small, order)

        def finish() -> None:
            self.arena.seal(slot, version, meta)
            sealed(version)

        self._slot = slot
        memory, base = self.arena.slot_image(slot)
        memory[base : base + len(layout.head)] = layout.head
        views = self._views_of(slot, layout)
        now = [index for index, piece in enumerate(layout.order) if pieces[piece].changing]
        later = [index for index, piece in enumerate(layout.order) if not pieces[piece].changing]

        def chosen(some: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            return [views[index] for index in some], [pieces[layout.order[index]].tensor for index in some]

        try:
            if now:
                _copy_all(*chosen(now))
            if later:
                self._copy(*chosen(later), finish)
            else:
                finish()
        except BaseException:
            self.arena.give_up(slot)
            raise
        return True

    def before_update(self) -> None:
        """What is being copied is about to change: wait until it is copied."""
        if self._making_room:
            return
        if self._device is not None and self._from_device:
            self._device.before_update()
        else:
            self._background.wait()

    def settle(self) -> None:
        """Wait until nothing is being copied any more."""
        self._background.wait()
        self._making_room = False
        error = self._background.taken_error()
        if error is not None:
            if isinstance(error, NoRoom):
                raise error
            raise StateError(f"the state could not be copied: {error}") from error

    # --- copying ---

    def _copy(self, views: list[torch.Tensor], tensors: list[torch.Tensor], finish: Callable[[], None]) -> None:
        self._from_device = any(tensor.is_cuda for tensor in tensors)
        if self._from_device:
            self._device = self._device or DeviceCopy()
            wait = self._device.begin(views, tensors)
            if self._overlap:
                self._in_background(wait, finish, tensors)
            else:
                wait()
                finish()
        elif self._overlap:
            self._in_background(lambda: _copy_all(views, tensors), finish)
        else:
            _copy_all(views, tensors)
            finish()

    def _in_background(self, copy: Callable[[], None], finish: Callable[[], None], held: object = None) -> None:
        """`held` is kept alive until the copy is done."""

        def task() -> None:
            copy()
            finish()

        def failed() -> None:
            if self._slot >= 0:
                self.arena.give_up(self._slot)

        self._background.begin(task, held, failed)

    # --- the layout ---

    def _plan(self, pieces: Sequence[Piece]) -> Layout:
        if self._layout is None or not self._layout.fits(pieces):
            self._layout = plan(pieces)
        return self._layout

    def _has_room(self, layout: Layout) -> bool:
        """Memory for this layout; much of it is made beside the training."""
        if self._room is not layout:
            self._views, self._slot, behind = {}, -1, self._behind()
            if layout.image_size <= LARGE or not self._overlap:
                self._make_room(layout, behind)
            else:
                self._making_room = True
                self._in_background(lambda: self._make_room(layout, behind), lambda: None)
        return self._room is layout

    def _make_room(self, layout: Layout, behind: int) -> None:
        table = sum(len(entry.name) + 96 for entry in layout.entries)
        _unpin(self._pinned_at)
        self._pinned_at = 0
        try:
            self.arena.reserve(self._slots, table + SMALL_ROOM, layout.image_size, self._most, behind)
        except NoRoom:
            if not behind:
                raise
            self.arena.reserve(self._slots, table + SMALL_ROOM, layout.image_size, self._most)
        self._pinned_at = _pin(self.arena.slot_image(0)[0])
        self._room = layout

    def _views_of(self, slot: int, layout: Layout) -> list[torch.Tensor]:
        views = self._views.get(slot)
        if views is None:
            memory, base = self.arena.slot_image(slot)
            views = [view_of(memory, entry, base) for entry in layout.entries]
            self._views[slot] = views
        return views


def _copy_all(views: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(views, tensors)


def _pin(memory: mmap.mmap) -> int:
    """Let the device write to this memory directly; without it every copy takes a detour. Where it lies, or 0."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return 0
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    failed = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0)  # type: ignore[no-untyped-call]
    if int(failed):
        # CUDA keeps the error for whoever looks next, and that one would be blamed
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()
        return 0
    return int(whole.data_ptr())


def _unpin(address: int) -> None:
    """Before the memory is mapped anew: what lies at the same place later could not be pinned."""
    if address:
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
