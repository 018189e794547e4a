"""What a survivor tells a lost rank, so that it can guess its parameters as the survivors would: a predictor by name, and what it has learnt.

Turns a trained net into bytes and back; every other predictor is known by its name alone. No pickle: numbers in a row, checked.
Used by `session.foretelling` on one side and `session.mending` on the other.
"""

from __future__ import annotations

import math

import msgspec
import torch

from rerail.errors import StateError
from rerail.rehab.predictors import LeastSquares, Linear, Predictor
from rerail.rehab.vitp import GREATEST_GAIN, Vitp

PLAIN: tuple[Predictor, ...] = (Linear(), Linear("linear over 2", 2), LeastSquares())
"""Those that need not learn anything."""
TARGETS = ("next", "drift")
NETS = tuple(Vitp(target=target).name for target in TARGETS)


class Lesson(msgspec.Struct, frozen=True, array_like=True):
    """What a net has learnt."""

    name: str
    gain: float
    numbers: bytes
    """As 32-bit floats, lowest byte first."""


_lesson = msgspec.msgpack.Decoder(Lesson)


def lesson_of(net: Vitp) -> bytes:
    """What `taught` gives back."""
    numbers = net.vector().to(torch.float32).contiguous()
    return msgspec.msgpack.encode(Lesson(net.name, net.gain, bytes(numbers.view(torch.uint8).tolist())))


def taught(data: bytes) -> Predictor:
    """StateError where this is nothing that a net has learnt."""
    try:
        lesson = _lesson.decode(data)
    except msgspec.DecodeError as error:
        raise StateError(f"what another rank has learnt cannot be read: {error}") from error
    if lesson.name not in NETS or len(lesson.numbers) % 4:
        raise StateError(f"{lesson.name[:100]!r} with {len(lesson.numbers)} bytes is no net that is known here")
    if not (math.isfinite(lesson.gain) and 0 <= lesson.gain <= GREATEST_GAIN):
        raise StateError(f"a gain of {lesson.gain} is not what a {lesson.name} has learnt")
    net = Vitp(target=TARGETS[NETS.index(lesson.name)])
    net.adopt(torch.frombuffer(bytearray(lesson.numbers), dtype=torch.float32), lesson.gain)
    return net


def plain(name: str) -> Predictor:
    """One that need not learn, by its name."""
    for one in PLAIN:
        if one.name == name:
            return one
    raise StateError(f"there is no predictor called {name!r}")
