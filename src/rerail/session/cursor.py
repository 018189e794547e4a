"""Where this rank is in its data, and how to get back there.

    position = epoch, batches taken in it, random state at its start [, the loader's own state]

A loader with state_dict() is restored by it, one that is dealt to (`session.dealing`) begins anywhere; any other is run again
from the start of the epoch under the same random state, which gives the same batches. Recent batches are kept, so that a survivor that goes back a few steps need not ask
its loader again. Called by `session.job`.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import torch

from rerail.session import plain, rng
from rerail.session.dealing import Terms, dealer_of
from rerail.session.waiting import idling

KEEP_BYTES = 512 << 20
"""Memory that recent batches may take."""
SLOW_SKIP = 1000
"""Batches to be read again at which a loader without state deserves a word."""


class Position(msgspec.Struct, frozen=True, array_like=True):
    """A place in the data, before the batch at `index` is taken."""

    epoch: int = 0
    index: int = 0
    epoch_random: rng.RandomState | None = None
    """Random state before the epoch's iterator was made; None before the first."""
    loader: bytes | None = None
    samples: int = 0
    """Taken by this rank in all epochs, as far as batches can be counted: the length of their first tensor."""
    terms: Terms | None = None
    """Where the data are dealt: `index` counts batches of the whole job, whatever its size, under these terms."""


class _Kept(msgspec.Struct):
    version: int
    position: Position
    batch: Any
    random_after: rng.RandomState
    size: int


class Cursor:
    """An endless walk over the loader's epochs, or over step numbers when there is none."""

    def __init__(self, loader: Iterable[Any] | None, endless: bool) -> None:
        self._loader = loader
        self._endless = endless
        self._iterator: Iterator[Any] | None = None
        self._epoch = self._index = self._samples = 0
        self._epoch_random: rng.RandomState | None = None
        self._kept: deque[_Kept] = deque()
        self._kept_bytes = 0
        self._again: deque[_Kept] = deque()
        self._skips: dict[int, int] = {}
        """Batches to be passed over before that of a version."""
        self.stale = False
        """What was kept, and what comes next, is not what is to be taken: the place has to be found again."""
        self.on_skip: Callable[[int, list[tuple[int, int]]], None] = lambda version, places: None
        self._aside = bool(getattr(loader, "num_workers", 0))
        """Other processes read the data: to ask for a batch is to wait for one."""
        self._dealer = dealer_of(loader)
        self._stateful = (
            self._dealer is None
            and callable(getattr(loader, "state_dict", None))
            and callable(getattr(loader, "load_state_dict", None))
        )

    def warn_if_stateless(self) -> None:
        """Loudly, once, before it matters: what a start in the middle of an epoch will cost with this loader."""
        known = self._stateful or self._dealer is not None
        if self._loader is None or known or isinstance(self._loader, list | tuple | range):
            return
        print(
            f"rerail: WARNING: the data loader ({type(self._loader).__name__}) has no state_dict(): a start in the middle of "
            "an epoch reads its batches again from the beginning. Exact, but slow; torchdata's StatefulDataLoader is there "
            "at once",
            file=sys.stderr,
            flush=True,
        )

    def leave_out(self, skips: dict[int, int]) -> None:
        """From now on these batches are passed over, whenever their version is reached."""
        self.stale = self.stale or skips != self._skips
        self._skips = dict(skips)

    def position(self) -> Position:
        """Where the next batch comes from."""
        if self._again:
            return self._again[0].position
        state = None
        if self._stateful and self._iterator is not None:
            state = plain.encode(self._loader.state_dict(), "the data loader")  # type: ignore[union-attr]
        return self._here(state)

    def _here(self, state: bytes | None = None) -> Position:
        terms = self._dealer.terms if self._dealer is not None else None
        return Position(self._epoch, self._index, self._epoch_random, state, self._samples, terms)

    def take(
        self, version: int, random_before: rng.RandomState, position: Position | None = None
    ) -> tuple[Any, rng.RandomState]:
        """The batch of step `version` and the random state after it. StopIteration at the end of the last epoch.

        `position`: what `position()` has just said, if it was asked.
        """
        if self._loader is None:
            self._pass_over(version)
            return version + self._index, random_before
        if self._again:
            kept = self._again.popleft()
            rng.restore(kept.random_after)
            self._keep(kept)
            return kept.batch, kept.random_after
        # with the loader's own state: who gets here once more, from memory, is asked where this is, and others have to find it
        position = position or self.position()
        self._pass_over(version)
        batch = self._from_loader()
        self._samples += _samples(batch)
        random_after = rng.capture()
        self._keep(_Kept(version, position, batch, random_after, _size(batch)))
        return batch, random_after

    def go_back(self, version: int, position: Position, *, fresh: bool) -> None:
        """Make `version`'s batch the next one; `fresh` when this process has not read the data up to here."""
        fresh, self.stale = fresh or self.stale, False
        if self._loader is None:
            self._index = position.index
            return
        everything = [*self._kept, *self._again]
        again = [kept for kept in everything if kept.version >= version]
        if not fresh and again and again[0].version == version:
            self._again, self._kept = deque(again), deque(k for k in everything if k.version < version)
        else:
            self._kept.clear()
            self._again.clear()
            self._seek(position)
        self._kept_bytes = sum(kept.size for kept in self._kept)

    def drop_before(self, version: int) -> None:
        """No recovery goes back further than this any more."""
        while self._kept and self._kept[0].version < version:
            self._kept_bytes -= self._kept.popleft().size

    def _pass_over(self, version: int) -> None:
        """The position of a version is that before this, so that whoever gets there does the same."""
        places = []
        for _ in range(self._skips.get(version, 0)):
            if self._loader is None:
                places.append((0, version + self._index))
                self._index += 1
            else:
                self._from_loader()
                places.append((self._epoch, self._index - 1))
        if places:
            self.on_skip(version, places)

    def _from_loader(self) -> Any:
        while True:
            if self._iterator is None:
                self._start_epoch()
            try:
                with idling() if self._aside else contextlib.nullcontext():
                    batch = next(self._iterator)  # type: ignore[arg-type]
            except StopIteration:
                if not self._endless or self._index == 0:
                    raise
                self._epoch, self._index, self._iterator = self._epoch + 1, 0, None
                continue
            self._index += 1
            return batch

    def _start_epoch(self) -> None:
        self._epoch_random = rng.capture()
        if self._dealer is not None:
            self._dealer.begin(self._epoch, self._index)
        for owner in (self._loader, getattr(self._loader, "sampler", None)):
            if callable(getattr(owner, "set_epoch", None)):
                owner.set_epoch(self._epoch)  # type: ignore[union-attr]
        self._iterator = iter(self._loader)  # type: ignore[arg-type]

    def _seek(self, position: Position) -> None:
        self._iterator, self._epoch, self._index = None, position.epoch, 0
        self._samples = position.samples
        now = rng.capture()
        if self._dealer is not None:
            self._dealer.check(position.terms)
            self._index = position.index
            if position.epoch_random is not None and position.index > 0:
                rng.restore(position.epoch_random)
                self._start_epoch()
        elif position.loader is not None and self._stateful:
            self._loader.load_state_dict(plain.decode(position.loader))  # type: ignore[union-attr]
            self._start_epoch()
            self._epoch_random = position.epoch_random
            self._index = position.index
        elif position.index > 0 and position.epoch_random is not None:
            if position.index >= SLOW_SKIP:
                print(
                    f"rerail: reading {position.index} batches again to find the place; a loader with state_dict() "
                    "(torchdata's StatefulDataLoader) would be there at once",
                    file=sys.stderr,
                )
            rng.restore(position.epoch_random)
            self._start_epoch()
            self._skip(position.index)
        rng.restore(now)

    def _skip(self, batches: int) -> None:
        for self._index in range(1, batches + 1):
            try:
                next(self._iterator)  # type: ignore[arg-type]
            except StopIteration:  # with another number of ranks the epoch may be shorter here, and is over
                self._epoch, self._index, self._iterator = self._epoch + 1, 0, None
                return

    def _keep(self, kept: _Kept) -> None:
        self._kept.append(kept)
        self._kept_bytes += kept.size
        while len(self._kept) > 1 and self._kept_bytes > KEEP_BYTES:
            self._kept_bytes -= self._kept.popleft().size


def _samples(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 1
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return next((count for part in parts if (count := _samples(part))), 0)


def _size(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()
    if isinstance(batch, dict):
        return sum(_size(item) for item in batch.values())
    if isinstance(batch, list | tuple):
        return sum(_size(item) for item in batch)
    return 64
