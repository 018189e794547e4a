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


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Small)


def encode(small: Small) -> bytes:
    return _encoder.encode(small)


def decode(data: bytes) -> Small:
    return _decoder.decode(data)
