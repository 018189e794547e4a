"""The random state of this process, of every kind, as one value that can be written down and put back.

Called by `session.job` at every step boundary; kept fast for that reason.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch

from rerail.session.c10d import cuda_in_use

_WORDS = struct.Struct("625I")
_MARK = 36
"""Bytes by which a Mersenne Twister is known again: its position, which every draw moves, and eight of its words."""

_TORCH_LEGACY_HEAD, _TORCH_SEARCHED = 24, 512
"""Where the words begin in what torch gives out as state, and how far into the object they are looked for."""
_TORCH_POSITION, _TORCH_KEPT = 12, 28
"""Bytes before the words, which every draw changes, and behind them, where a normal number may be kept back."""

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
    """A state as last taken down, and by what each generator is known to be the same still."""

    state: RandomState
    torch_mark: bytes
    python_mark: bytes
    numpy_mark: bytes


_seen: _Seen | None = None


def capture() -> RandomState:
    """The state right now; the very object given last time, if nothing was drawn since.

    Most steps draw from one generator or none, and ten kilobytes need not be copied and written down for the others.
    """
    global _seen
    torch_mark, python_mark, numpy_mark = _torch_mark(), _python_mark(), _numpy_mark()
    last, gauss = _seen, _python.gauss_next
    devices = tuple(_bytes(state) for state in torch.cuda.get_rng_state_all()) if cuda_in_use() else ()
    if last is None:
        state = RandomState(
            _python_words(), gauss, _bytes(torch.default_generator.get_state()), _numpy_state(), devices
        )
        _seen = _Seen(state, torch_mark, python_mark, numpy_mark)
        return state
    old = last.state
    same_torch, same_python = last.torch_mark == torch_mark, last.python_mark == python_mark
    same_numpy = last.numpy_mark == numpy_mark and not _keeps_back(old)
    if same_torch and same_python and same_numpy and old.python_gauss == gauss and old.devices == devices:
        return old
    state = RandomState(
        old.python if same_python else _python_words(),
        gauss,
        old.torch_cpu if same_torch else _bytes(torch.default_generator.get_state()),
        old.numpy if same_numpy else _numpy_state(),
        devices,
    )
    state = old if state == old else state
    _seen = _Seen(state, torch_mark, python_mark, numpy_mark)
    return state


def _bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous CPU tensor; works without NumPy."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _keeps_back(state: RandomState) -> bool:
    """Whether NumPy's normal distribution keeps a number back, which shows in no mark."""
    return state.numpy is not None and bool(state.numpy[2])


def _view(address: int, size: int = _MARK) -> memoryview:
    """The mark at this address, to be read again and again: many times as fast as asking ctypes each time."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


_python_view = _view(id(_python) + object.__basicsize__) if _python_words is _from_memory else None


class _NumpyView(NamedTuple):
    """NumPy's generator, how to ask whether it is still that one, and the mark in its memory: 624 words, the position."""

    ask: Callable[[], Any]
    generator: Any
    mark: memoryview


_numpy_view: _NumpyView | None = None


def _torch_views(generator: torch.Generator) -> tuple[memoryview, memoryview] | None:
    """Where in memory a generator has its position and first words, and the normal number that it keeps back.

    None where it is not laid out as expected.
    """
    words = struct.unpack_from("=8Q", _bytes(generator.get_state()), _TORCH_LEGACY_HEAD)
    begin: int = getattr(generator, "_cdata", 0)
    at = ctypes.string_at(begin, _TORCH_SEARCHED).find(struct.pack("=8I", *words)) if begin else -1
    if at < _TORCH_POSITION:
        return None
    address = begin + at
    return _view(address - _TORCH_POSITION, _TORCH_POSITION + 32), _view(address + 4 * 624, _TORCH_KEPT)


def _torch_marks_hold() -> bool:
    """Whether what is read from memory changes whenever a generator does; tried with one of our own."""
    trial = torch.Generator().manual_seed(7)
    views = _torch_views(trial)
    if views is None:
        return False
    seen: dict[bytes, bytes] = {}
    for draw in range(12):
        mark, state = b"".join(view.tobytes() for view in views), _bytes(trial.get_state())
        if seen.setdefault(mark, state) != state:
            return False
        kind = torch.float64 if draw % 3 == 2 else torch.float32
        torch.randn(1, generator=trial, dtype=kind) if draw < 8 else torch.rand(624, generator=trial)
    return len(seen) == 12


_torch_view = _torch_views(torch.default_generator) if _torch_marks_hold() else None


def _torch_mark() -> bytes:
    if _torch_view is None:
        return _bytes(torch.default_generator.get_state())
    return _torch_view[0].tobytes() + _torch_view[1].tobytes()


def _python_mark() -> bytes:
    return _by_asking() if _python_view is None else _python_view.tobytes()


def _numpy_generator() -> Any:
    """NumPy's global generator, if NumPy is in use and it is the usual kind."""
    numpy = sys.modules.get("numpy")
    generator: Any = numpy.random.get_bit_generator() if numpy is not None else None
    return generator if type(generator).__name__ == "MT19937" else None


def _numpy_mark() -> bytes:
    global _numpy_view
    if _numpy_view is None or _numpy_view.ask() is not _numpy_view.generator:
        generator = _numpy_generator()
        if generator is None:
            return b""
        mark = _view(generator.ctypes.state_address + _WORDS.size - _MARK)
        _numpy_view = _NumpyView(sys.modules["numpy"].random.get_bit_generator, generator, mark)
    return _numpy_view.mark.tobytes()


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


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
