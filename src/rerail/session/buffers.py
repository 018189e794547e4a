"""Keeps the buffers that a forward pass changes (BatchNorm statistics and the like), so that a step can be replayed.

Which buffers change is learnt in the first steps: those are copied before every step, the others once. Called by
`session.job` around every step.
"""

from __future__ import annotations

import torch

from rerail.session import plain

LEARNING_STEPS = 3
JOURNAL_LIMIT = 1 << 20
"""Bytes of changing buffers that go to the step journal; more than that is left to snapshots."""


class BufferGuard:
    """Copies before, puts back after."""

    def __init__(self, buffers: dict[str, torch.Tensor]) -> None:
        self._buffers = buffers
        self._changing: set[str] = set()
        self._seen = 0
        self._saved: dict[str, torch.Tensor] = {}
        self._ended: dict[str, torch.Tensor] = {}
        self._constant = {name: buffer.clone() for name, buffer in buffers.items()}

    @property
    def learning(self) -> bool:
        """Whether it is not known yet which buffers change."""
        return self._seen < LEARNING_STEPS

    @property
    def too_large(self) -> bool:
        """Whether changing buffers do not fit the step journal, so that they are known to this rank alone."""
        size = sum(self._buffers[name].numel() * self._buffers[name].element_size() for name in self._changing)
        return size > JOURNAL_LIMIT

    def before_step(self) -> None:
        names = self._buffers if self.learning else self._changing
        self._saved = {name: self._buffers[name].clone() for name in names}

    def after_step(self) -> None:
        if not self.learning or not self._buffers:
            return
        self._seen += 1
        for name, before in self._saved.items():
            if not torch.equal(before, self._buffers[name]):
                self._changing.add(name)
                self._constant.pop(name, None)

    def advance(self) -> None:
        """Put the buffers as the interrupted step left them: a replica completed it."""
        for name, after in self._ended.items():
            self._buffers[name].copy_(after)

    def restore(self) -> bool:
        """Put the buffers back as they were before the step. False if one changed that never did before."""
        self._ended = {name: self._buffers[name].clone() for name in self._saved}
        for name, before in self._saved.items():
            self._buffers[name].copy_(before)
        return all(
            name in self._saved or torch.equal(copy, self._buffers[name]) for name, copy in self._constant.items()
        )

    def to_journal(self) -> dict[str, bytes]:
        """The changing buffers right now, small enough for the step journal; else none."""
        names = self._changing if self._seen else self._buffers
        if not names:
            return {}
        size = sum(self._buffers[name].numel() * self._buffers[name].element_size() for name in names)
        return {name: plain.tensor_bytes(self._buffers[name]) for name in names} if size <= JOURNAL_LIMIT else {}

    def from_journal(self, saved: dict[str, bytes]) -> None:
        for name, data in saved.items():
            buffer = self._buffers.get(name)
            if buffer is not None:
                buffer.copy_(plain.tensor_from(data, plain.dtype_name(buffer.dtype), list(buffer.shape)))
