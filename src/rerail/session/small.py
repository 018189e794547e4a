"""The small exact state of one version: what a step needs besides tensors to be run again bit for bit.

Written to the step journal at the start of every step and into every snapshot. Made and used by `session.job`.
"""

from __future__ import annotations

import msgspec

from rerail.session import rng
from rerail.session.cursor import Position


class Small(msgspec.Struct, frozen=True, array_like=True):
    """Taken between two steps, before the batch of step `version` is fetched."""

    version: int
    random: rng.RandomState
    position: Position
    objects: bytes
    """Schedulers, scalers, optimizer hyperparameters."""
    buffers: dict[str, bytes]
    """Buffers that change in the forward pass."""
    snapshot_every: int
    saves: tuple[int, int, int] = (0, -1, 0)
    """Epoch of the job in its checkpoint root, the version to be saved next, and the generation that saves are counted to."""


Randoms = tuple[rng.RandomState, rng.RandomState | None]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Small)
_randoms_decoder = msgspec.msgpack.Decoder(Randoms)
_BLANK = rng.RandomState(b"", None, b"")
_newest: tuple[rng.RandomState | None, rng.RandomState | None, bytes] = (None, None, b"")
"""Random states as last written down."""


def encode(small: Small) -> bytes:
    return _encoder.encode(small)


def decode(data: bytes) -> Small:
    return _decoder.decode(data)


def to_journal(small: Small) -> tuple[bytes, bytes]:
    """In two parts: what every step changes, and the random states, the same bytes object for as long as they last."""
    global _newest
    now, place = small.random, small.position
    if _newest[0] is not now or _newest[1] is not place.epoch_random:
        _newest = now, place.epoch_random, _encoder.encode((now, place.epoch_random))
    # a tuple encodes like the structs it is read as, and is made faster
    position = (place.epoch, place.index, None, place.loader, place.samples, place.terms)
    body = (small.version, _BLANK, position, small.objects, small.buffers, small.snapshot_every, small.saves)
    return _encoder.encode(body), _newest[2]


def from_journal(parts: tuple[bytes, bytes]) -> Small:
    """What `to_journal` was given."""
    small = _decoder.decode(parts[0])
    now, epoch = _randoms_decoder.decode(parts[1])
    return msgspec.structs.replace(
        small, random=now, position=msgspec.structs.replace(small.position, epoch_random=epoch)
    )
