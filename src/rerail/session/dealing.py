"""Deals a dataset to the ranks so that every update sees the same samples, however many of them are there.

    order of the epoch (seed + epoch) -> global batches of one size -> shared evenly by the seats that are taken

A seat is a rank's number. Which samples make up update k depends on neither the number of seats nor on who sits there, so a
job that goes on with fewer ranks, or starts again with more, loses no sample and repeats none. Made by `job.deal()`, walked by
`session.cursor`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import msgspec
import torch

from rerail.errors import StateError

MOST_SEED = 1 << 62


class Terms(msgspec.Struct, frozen=True, array_like=True):
    """What the order of the samples depends on. A place in the data means the same only under the same terms."""

    length: int
    batch: int
    seed: int
    shuffle: bool


class Dealer:
    """A batch sampler: `DataLoader(dataset, batch_sampler=dealer)` gives this rank's share of every global batch."""

    def __init__(self, dataset: Sized, terms: Terms, rank: int, world_size: int, seats: Callable[[], Sequence[int]]):
        self.terms = terms
        self.weighed = False
        """Whether the script has asked for its weight: without it, uneven shares would be averaged as if they were even."""
        self._dataset = dataset
        self._rank, self._world_size, self._seats = rank, world_size, seats
        self._epoch = self._index = 0
        self._dealt_to: tuple[int, ...] | None = None
        """The seats among which the newest walk shares; batches that were fetched ahead belong to them."""

    def begin(self, epoch: int, index: int) -> None:
        """The next walk starts at this global batch of this epoch. Nothing is read to get there."""
        self._epoch, self._index = epoch, index

    def __iter__(self) -> Iterator[list[int]]:
        if len(self._dataset) != self.terms.length:
            raise StateError(
                f"the dataset had {self.terms.length} samples when job.deal() was called and has {len(self._dataset)} now: "
                "the order of samples would be another one. Give job.deal() a dataset that keeps its length"
            )
        self._dealt_to = tuple(self._seats())
        start, count = share(self.terms.batch, self._dealt_to, self._rank)
        return self._walk(self._epoch, self._index, start, count)

    def __len__(self) -> int:
        """Global batches in an epoch. What does not fill a batch is left out, another part of the data in each epoch."""
        return self.terms.length // self.terms.batch

    @property
    def moved(self) -> bool:
        """Whether the batches at hand were dealt to other seats than are taken now."""
        return self._dealt_to is not None and self._dealt_to != tuple(self._seats())

    @property
    def weight(self) -> float:
        """This rank's share of the global batch, times the number of seats: 1.0 where all shares are alike."""
        return share(self.terms.batch, self._seats(), self._rank)[1] * self._world_size / self.terms.batch

    def check(self, written: Terms | None) -> None:
        """A place in the data that was written down is to be gone to: StateError if it was of another order."""
        if written is not None and written != self.terms:
            raise StateError(
                f"the place in the data was noted under {_said(written)}, and job.deal() has {_said(self.terms)} now: the "
                "samples would come in another order. Give it the same dataset and arguments, or start anew"
            )

    def _walk(self, epoch: int, index: int, start: int, count: int) -> Iterator[list[int]]:
        order = order_of(self.terms, epoch)
        for number in range(index, len(self)):
            first = number * self.terms.batch + start
            yield [int(one) for one in order[first : first + count]]


def deal(
    dataset: Any,
    batch: int,
    seed: int,
    shuffle: bool,
    *,
    rank: int,
    world_size: int,
    seats: Callable[[], Sequence[int]],
) -> Dealer:
    """A dealer, after a look at what it was given."""
    if not callable(getattr(dataset, "__len__", None)):
        raise StateError(
            f"job.deal(): a {type(dataset).__name__} has no length, so there is no fixed order of its samples. "
            "Give it a dataset with len() and [index]"
        )
    batch, seed = _whole("batch", batch), _whole("seed", seed)
    if batch < world_size:
        raise StateError(
            f"job.deal(batch={batch}): the batch of one update is shared by {world_size} ranks, and each needs a sample. "
            f"Give it at least {world_size}; it is the size for all ranks together"
        )
    if len(dataset) < batch:
        raise StateError(f"job.deal(batch={batch}): the dataset has only {len(dataset)} samples")
    if not 0 <= seed < MOST_SEED:
        raise StateError(f"job.deal(seed={seed}): a seed is a whole number from 0 to {MOST_SEED - 1}")
    return Dealer(dataset, Terms(len(dataset), batch, seed, bool(shuffle)), rank, world_size, seats)


def dealer_of(loader: Any) -> Dealer | None:
    """The dealer that this loader takes its batches from, if there is one."""
    for one in (loader, getattr(loader, "batch_sampler", None)):
        if isinstance(one, Dealer):
            return one
    return None


def share(batch: int, seats: Sequence[int], seat: int) -> tuple[int, int]:
    """Where the share of `seat` begins in a batch, and how long it is; shares differ by one at most."""
    size, more = divmod(batch, len(seats))
    place = list(seats).index(seat)
    return place * size + min(place, more), size + (place < more)


def order_of(terms: Terms, epoch: int) -> Sequence[int] | torch.Tensor:
    """All samples of an epoch in their order."""
    if not terms.shuffle:
        return range(terms.length)
    generator = torch.Generator()
    generator.manual_seed(terms.seed + epoch)
    return torch.randperm(terms.length, generator=generator)


def _whole(name: str, value: Any) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise StateError(f"job.deal({name}={value!r}): a whole number is needed")


def _said(terms: Terms) -> str:
    order = f"seed {terms.seed}" if terms.shuffle else "no shuffling"
    return f"{terms.length} samples, batches of {terms.batch} and {order}"
