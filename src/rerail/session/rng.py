"""The random state of this process, of every kind, as one value that can be written down and put back.

Called by `session.job` at every step boundary; kept fast for that reason.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from array import array
from typing import Any, NamedTuple

import msgspec
import torch

from rerail.session.c10d import cuda_in_use

_WORDS = struct.Struct("625I")
_MARK = 36
"""Bytes by which a Mersenne Twister is known again: its position, which every draw moves, and eight of its words."""

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


class _Seen(NamedTuple):
    """A state as last taken down, and by what it is known to be the same still."""

    state: RandomState
    python_mark: bytes
    numpy_mark: bytes


_seen: _Seen | None = None


def capture() -> RandomState:
    """The state right now; the very object given last time, if nothing was drawn since.

    Most steps draw from one generator or none, and ten kilobytes need not be copied and written down for the others.
    """
    global _seen
    torch_cpu = _torch_state()
    devices = tuple(_bytes(state) for state in torch.cuda.get_rng_state_all()) if cuda_in_use() else ()
    python_mark, numpy_mark = _python_mark(), _numpy_mark()
    last = _seen
    python = last.state.python if last is not None and last.python_mark == python_mark else _python_words()
    same_numpy = last is not None and last.numpy_mark == numpy_mark and not _keeps_back(last.state)
    numpy = last.state.numpy if last is not None and same_numpy else _numpy_state()
    state = RandomState(python, _python.gauss_next, torch_cpu, numpy, devices)
    if last is not None and state == last.state:
        return last.state
    _seen = _Seen(state, python_mark, numpy_mark)
    return state


def _keeps_back(state: RandomState) -> bool:
    """Whether NumPy's normal distribution keeps a number back, which shows in no mark."""
    return state.numpy is not None and bool(state.numpy[2])


def _view(address: int) -> memoryview:
    """The mark at this address, to be read again and again: many times as fast as asking ctypes each time."""
    return memoryview((ctypes.c_char * _MARK).from_address(address)).cast("B")


_python_view = _view(id(_python) + object.__basicsize__) if _python_words is _from_memory else None
_numpy_view: tuple[object, memoryview] | None = None
"""NumPy's generator, and the mark in its memory, which holds 624 words and then the position."""


_torch_view: tuple[int, memoryview] | None = None


def _torch_state() -> bytes:
    """torch makes a tensor of it, nearly always at the same address: the view of it is made once."""
    global _torch_view
    state = torch.default_generator.get_state()
    address = state.data_ptr()
    if _torch_view is None or _torch_view[0] != address or len(_torch_view[1]) != state.numel():
        _torch_view = address, memoryview((ctypes.c_char * state.numel()).from_address(address)).cast("B")
    return _torch_view[1].tobytes()


def _python_mark() -> bytes:
    return _by_asking() if _python_view is None else _python_view.tobytes()


def _numpy_generator() -> Any:
    """NumPy's global generator, if NumPy is in use and it is the usual kind."""
    numpy = sys.modules.get("numpy")
    generator: Any = numpy.random.get_bit_generator() if numpy is not None else None
    return generator if type(generator).__name__ == "MT19937" else None


def _numpy_mark() -> bytes:
    global _numpy_view
    generator = _numpy_generator()
    if generator is None:
        return b""
    if _numpy_view is None or _numpy_view[0] is not generator:
        _numpy_view = generator, _view(generator.ctypes.state_address + _WORDS.size - _MARK)
    return _numpy_view[1].tobytes()


def restore(state: RandomState) -> None:
    """Put a captured state back."""
    global _seen
    _seen = None
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
    if _numpy_generator() is None:
        return None
    import numpy

    state = numpy.random.get_state(legacy=False)
    inner = state["state"]
    return inner["key"].tobytes(), int(inner["pos"]), int(state["has_gauss"]), float(state["gauss"])


def _bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous CPU tensor; works without NumPy."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
