"""The random state of this process, of every kind, as one value that can be written down and put back.

Called by `session.job` at every step boundary; kept fast for that reason.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from array import array
from typing import Any

import msgspec
import torch

from rerail.session.c10d import cuda_in_use

_WORDS = struct.Struct("625I")
_NUMPY_WORDS = 625 * 4
"""Bytes of NumPy's Mersenne Twister in memory: 624 words and the position."""
_numpy_seen: tuple[bytes, tuple[bytes, int, int, float]] | None = None
"""NumPy's state as last taken down: as it lay in memory, and what it meant."""


_python: Any = random.getstate.__self__  # type: ignore[attr-defined]
"""The generator behind `random.random()` and its like."""


def _from_memory() -> bytes:
    """Python's Mersenne Twister as it lies in memory behind the object's head: position, then 624 words."""
    memory = ctypes.string_at(id(_python) + object.__basicsize__, _WORDS.size)
    return memory[4:] + memory[:4]


def _by_asking() -> bytes:
    return _WORDS.pack(*random.getstate()[1])


_python_words = _from_memory if _from_memory() == _by_asking() else _by_asking
"""Asking makes 625 Python numbers, in every step; the memory is read instead where it is laid out as expected."""


class RandomState(msgspec.Struct, frozen=True, array_like=True):
    """Python's, NumPy's, torch's CPU and torch's accelerator generators."""

    python: bytes
    python_gauss: float | None
    torch_cpu: bytes
    numpy: tuple[bytes, int, int, float] | None = None
    devices: tuple[bytes, ...] = ()


def capture() -> RandomState:
    """The state right now."""
    return RandomState(
        _python_words(),
        _python.gauss_next,
        _bytes(torch.get_rng_state()),
        _numpy_state(),
        tuple(_bytes(state) for state in torch.cuda.get_rng_state_all()) if cuda_in_use() else (),
    )


def restore(state: RandomState) -> None:
    """Put a captured state back."""
    global _numpy_seen
    _numpy_seen = None
    words = array("I")
    words.frombytes(state.python)
    random.setstate((3, tuple(words), state.python_gauss))
    torch.set_rng_state(_tensor(state.torch_cpu))
    if state.numpy is not None and "numpy" in sys.modules:
        import numpy

        key, position, has_gauss, cached = state.numpy
        words_of_key = numpy.frombuffer(key, dtype=numpy.uint32)
        numpy.random.set_state(("MT19937", words_of_key, position, has_gauss, cached))
    for index, device_state in enumerate(state.devices):
        if index < torch.cuda.device_count():
            torch.cuda.set_rng_state(_tensor(device_state), index)


def _numpy_state() -> tuple[bytes, int, int, float] | None:
    """Asking NumPy takes longer than all the rest, so it is asked only when its memory has changed.

    A number kept back by its normal distribution is not part of that memory; while there is one, NumPy is always asked.
    """
    global _numpy_seen
    if "numpy" not in sys.modules:
        return None
    import numpy

    generator: Any = numpy.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator).__name__ != "MT19937":
        return None
    memory = ctypes.string_at(generator.ctypes.state_address, _NUMPY_WORDS)
    if _numpy_seen is not None and _numpy_seen[0] == memory and not _numpy_seen[1][2]:
        return _numpy_seen[1]
    state = numpy.random.get_state(legacy=False)
    inner = state["state"]
    found = inner["key"].tobytes(), int(inner["pos"]), int(state["has_gauss"]), float(state["gauss"])
    _numpy_seen = memory, found
    return found


def _bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous CPU tensor; works without NumPy."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
