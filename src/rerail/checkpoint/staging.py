"""Copies this rank's state into a slot of its arena, while the step goes on where that is safe.

The layout is planned once: a safetensors header, what this rank saves in the order of the file, then what it keeps in
memory only. Parameters change in the update alone, so a copy may run beside forward and backward; `before_update` is
where the trainer waits for it. Called by `session.snapshotting`.
"""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from rerail.checkpoint import header
from rerail.checkpoint.arena import Arena, Entry, Meta
from rerail.checkpoint.device import DeviceCopy
from rerail.checkpoint.dtypes import code_of, view_of
from rerail.errors import StateError

ALIGN = 64
LARGE = 256 << 20
"""Bytes of a slot from which on making it takes noticeable time."""
SMALL_ROOM = 4 << 20
"""Bytes kept for the small state in each slot."""


class Piece(NamedTuple):
    """A tensor of this rank: its local part, which box of the whole it is, and whether this rank is the one to save it."""

    name: str
    tensor: torch.Tensor
    whole: tuple[int, ...]
    start: tuple[int, ...]
    saved: bool
    changing: bool = False
    """Changes in a forward pass, so that it is copied at once."""


class _Layout(NamedTuple):
    pieces: Sequence[Piece]
    key: list[Any]
    order: list[int]
    """Which piece each entry is."""
    entries: list[Entry]
    saved: int
    file_size: int
    image_size: int
    head: bytes


class Stager:
    """Fills slots; one at a time."""

    def __init__(self, arena: Arena, *, slots: int = 2, overlap: bool = True) -> None:
        self.arena, self._slots, self._overlap = arena, slots, overlap
        self._layout: _Layout | None = None
        self._views: dict[int, list[torch.Tensor]] = {}
        self._room: _Layout | None = None
        """The layout that there is memory for."""
        self._making_room = False
        self._slot = -1
        """The slot being filled."""
        self._device: DeviceCopy | None = None
        self._from_device = False
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], object]] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._error: BaseException | None = None
        self.cpu_s = 0.0
        """Seconds of a CPU that the newest copy took beside the training."""
        self._thread: threading.Thread | None = None

    def stage(
        self,
        version: int,
        pieces: Sequence[Piece],
        small: bytes,
        *,
        order: bytes = b"",
        pinned: frozenset[int] = frozenset(),
        sealed: Callable[[int], None] = lambda version: None,
    ) -> bool:
        """Begin to copy; `sealed(version)` is called when the slot is whole.

        False if nothing was copied: every slot is still being read, or a large arena is still being made.
        """
        if self._making_room and not self._idle.is_set():
            return False
        self.settle()
        layout = self._plan(pieces)
        if not self._has_room(layout):
            return False
        slot = self.arena.begin(version, pinned)
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
        elif not self._idle.is_set():
            self._idle.wait()

    def settle(self) -> None:
        """Wait until nothing is being copied any more."""
        self._idle.wait()
        self._making_room = False
        if self._error is not None:
            error, self._error = self._error, None
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

        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="rerail-stage", daemon=True)
            self._thread.start()
        self._idle.clear()
        self._tasks.put((task, held))

    def _work(self) -> None:
        while True:
            task, held = self._tasks.get()
            started = time.thread_time()
            try:
                task()
            except BaseException as error:
                self._error = error
                if self._slot >= 0:
                    self.arena.give_up(self._slot)
            del task, held
            self.cpu_s = time.thread_time() - started
            self._idle.set()

    # --- the layout ---

    def _plan(self, pieces: Sequence[Piece]) -> _Layout:
        if self._layout is not None and self._layout.pieces is pieces:
            return self._layout
        key = [
            (p.name, p.tensor.dtype, p.tensor.shape, p.tensor.device.type, p.whole, p.start, p.saved) for p in pieces
        ]
        if self._layout is not None and self._layout.key == key:
            return self._layout
        saved = [index for index, piece in enumerate(pieces) if piece.saved]
        # wide types first: everything is aligned without a gap, which safetensors does not allow
        saved.sort(key=lambda index: -pieces[index].tensor.element_size())
        names = _unique([pieces[index].name for index in saved])
        described = [
            (name, code_of(pieces[index].tensor.dtype), tuple(pieces[index].tensor.shape))
            for name, index in zip(names, saved, strict=True)
        ]
        head, placed = header.build(described, {"format": "pt"})
        file_size = placed[-1].at + placed[-1].size if placed else len(head)
        at, places = file_size, [tensor.at for tensor in placed]
        rest = [index for index, piece in enumerate(pieces) if not piece.saved]
        for index in rest:
            at = -(-at // ALIGN) * ALIGN
            places.append(at)
            at += pieces[index].tensor.numel() * pieces[index].tensor.element_size()
        entries = [_entry(pieces[index], place) for index, place in zip([*saved, *rest], places, strict=True)]
        self._layout = _Layout(pieces, key, [*saved, *rest], entries, len(saved), file_size, at, head)
        return self._layout

    def _has_room(self, layout: _Layout) -> bool:
        """Memory for this layout; much of it is made beside the training."""
        if self._room is not layout:
            self._views, self._slot = {}, -1
            if layout.image_size <= LARGE or not self._overlap:
                self._make_room(layout)
            else:
                self._making_room = True
                self._in_background(lambda: self._make_room(layout), lambda: None)
        return self._room is layout

    def _make_room(self, layout: _Layout) -> None:
        table = sum(len(entry.name) + 96 for entry in layout.entries)
        self.arena.reserve(self._slots, table + SMALL_ROOM, layout.image_size)
        _pin(self.arena.slot_image(0)[0])
        self._room = layout

    def _views_of(self, slot: int, layout: _Layout) -> list[torch.Tensor]:
        views = self._views.get(slot)
        if views is None:
            memory, base = self.arena.slot_image(slot)
            views = [view_of(memory, entry, base) for entry in layout.entries]
            self._views[slot] = views
        return views


def _copy_all(views: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(views, tensors)


def _pin(memory: mmap.mmap) -> None:
    """Let the device write to this memory directly; without it every copy takes a detour."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0)  # type: ignore[no-untyped-call]


def _entry(piece: Piece, at: int) -> Entry:
    tensor = piece.tensor
    return Entry(
        piece.name, code_of(tensor.dtype), tuple(tensor.shape), tensor.device.type, at, piece.whole, piece.start
    )


def _unique(names: list[str]) -> list[str]:
    """Keys for the file: a second part of the same tensor gets a number."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        count = seen.get(name, 0)
        seen[name] = count + 1
        found.append(name if not count else f"{name}#{count}")
    return found
