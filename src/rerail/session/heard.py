"""What a rank hears from its peers while it is built, written down so that its successor can hear it again.

Construction and the first step exchange small control messages: object broadcasts, shapes between pipeline stages, seeds.
A newcomer builds alone, so its collectives give what its predecessor got, in the same order, where that is known and
small; large tensors are left to the restore that follows. Called by `session.groups` for every collective until the rank
is warm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
import torch

from rerail.runtime.clock import StepClock
from rerail.session import plain

LIMIT = 64 << 10
"""Bytes of one collective's outputs; more is state, not control."""


class Heard(msgspec.Struct, frozen=True, array_like=True):
    """The outputs of one collective: the n-th of this name in this group."""

    group: str
    name: str
    number: int
    outputs: list[tuple[str, list[int], bytes]]


_heard = msgspec.msgpack.Decoder(Heard)


class Hearing:
    """Writes the log of a rank among peers, or plays back a predecessor's."""

    def __init__(self) -> None:
        self._clock: StepClock | None = None
        self._known: dict[tuple[str, str, int], Heard] = {}
        self._numbers: dict[tuple[str, str], int] = {}
        self.active = False
        self.own = False
        """What is said now is rerail's own affair."""

    def record(self, clock: StepClock) -> None:
        """This rank builds among living peers."""
        clock.forget_heard()
        self._clock, self.active = clock, True

    def play_back(self, clock: StepClock) -> None:
        """This rank builds alone, as its predecessor did among peers."""
        found = [_heard.decode(record) for record in clock.read_heard()]
        self._known = {(heard.group, heard.name, heard.number): heard for heard in found}
        self.active = True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Collectives of rerail's own are not part of what the script hears."""
        before = self.active, self.own
        self.active, self.own = False, True
        try:
            yield
        finally:
            self.active, self.own = before

    def stop(self) -> None:
        """The rank is warm."""
        self.active = False
        self._clock = None
        self._known, self._numbers = {}, {}

    def number(self, group: str, name: str) -> int:
        """Count one more collective of this name in this group."""
        count = self._numbers.get((group, name), 0)
        self._numbers[group, name] = count + 1
        return count

    def write(self, group: str, name: str, number: int, outputs: list[torch.Tensor]) -> None:
        """The collective is complete: keep its outputs if they are small."""
        if self._clock is None or sum(t.numel() * t.element_size() for t in outputs) > LIMIT:
            return
        packed = [(plain.dtype_name(t.dtype), list(t.shape), plain.tensor_bytes(t)) for t in outputs]
        if not self._clock.hear(msgspec.msgpack.encode(Heard(group, name, number, packed))):
            self._clock = None  # full: what was heard so far is better than nothing

    def play(self, group: str, name: str, number: int, outputs: list[torch.Tensor]) -> None:
        """Overwrite the outputs of a collective carried out alone by what the predecessor got, if it fits."""
        heard = self._known.get((group, name, number))
        if heard is None or len(heard.outputs) != len(outputs):
            return
        for tensor, (dtype, shape, data) in zip(outputs, heard.outputs, strict=True):
            if plain.dtype_name(tensor.dtype) == dtype and list(tensor.shape) == shape:
                tensor.detach().copy_(plain.tensor_from(data, dtype, shape))
