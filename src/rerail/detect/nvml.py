"""Turns calls of NVML (`nvidia-ml-py`, imported late) into answers, `None`, or one of three errors; for `detect.nvidia` alone.

Every call may be unknown to this driver or this device. Such a call is made once and then not again.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterable
from typing import Any

from rerail.detect.accelerators import Absent, Lost, Unreachable, on_bus

PCI_VENDOR = "0x10de"

# Return codes of NVML, by what they mean for us.
UNREACHABLE = {1, 9, 12, 18}  # uninitialized, driver not loaded, library not found, library and driver differ
LOST = {15, 28}  # GPU is lost, GPU not found
NEVER = {3, 4, 13, 22, 25, 26}  # not supported, no permission, function not found, no ECC on vGPU, version, deprecated
TELLING = {
    8: "gpu.insufficient_power",
    11: "gpu.interrupt_problem",
    14: "gpu.inforom_corrupt",
    16: "gpu.reset_required",
}
"""Codes that are findings in themselves, whatever was asked."""

_VALUE_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class Gpu:
    """One device of a connection, to be asked."""

    def __init__(self, lib: Any, handle: Any, told: Iterable[int] = ()) -> None:
        self.lib = lib
        self.handle = handle
        """None: NVML knows that it is there, and not more."""
        self.told = set(told)
        """Telling return codes since they were last looked at."""
        self._never: set[object] = set()
        """Calls and fields that it does not know."""

    def ask(self, function: str, *arguments: Any, key: object = None) -> Any:
        """The answer, or None if there is none. Raises Lost or Unreachable."""
        key = key or (function, arguments)
        if key in self._never:
            return None
        try:
            return getattr(self.lib, function)(self.handle, *arguments)
        except AttributeError:  # the package is older than the function
            self._never.add(key)
        except self.lib.NVMLError as error:
            if error.value in LOST:
                raise Lost(str(error)) from None
            if error.value in UNREACHABLE - {12}:
                raise Unreachable(f"NVML: {error}") from None
            if error.value in NEVER:
                self._never.add(key)
            elif error.value in TELLING:
                self.told.add(error.value)
        return None

    def either(self, *calls: tuple[Any, ...]) -> Any:
        """The first answer: newer functions stand before those they replace."""
        return next((answer for call in calls if (answer := self.ask(*call)) is not None), None)

    def filled(self, function: str, *kinds: str) -> Any:
        """The first of these structures that the call fills in, or None."""
        for kind in kinds:
            if hasattr(self.lib, kind):
                value = getattr(self.lib, kind)()
                if self.ask(function, ctypes.byref(value), key=(function, kind)) is not None:
                    return value
        return None

    def fields(self, wanted: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Any]:
        """Field values by (field, link), all in one call."""
        asked = [one for one in wanted if one[0] not in self._never and one not in self._never]
        values = self.ask("nvmlDeviceGetFieldValues", asked, key="fields") if asked else None
        found = {}
        for one, value in zip(asked, values or (), strict=False):
            if value.nvmlReturn == 0:
                found[one] = getattr(value.value, _VALUE_TYPES[value.valueType])
            elif value.nvmlReturn in LOST:
                raise Lost(f"field {one[0]}: GPU is lost")
            elif value.nvmlReturn in NEVER | {2}:  # an older driver calls a field it does not know an invalid argument
                self._never.add(one[0] if one[1] == 0 else one)
        return found

    def knows_field(self, field: int) -> bool:
        return field not in self._never


def connect() -> Any:
    """NVML, ready for use. Raises Absent or Unreachable."""
    try:
        lib = importlib.import_module("pynvml")
    except ImportError:
        raise Absent("the package nvidia-ml-py is not installed") from None
    try:
        lib.nvmlInit()
    except lib.NVMLError as error:
        if error.value == lib.NVML_ERROR_LIBRARY_NOT_FOUND or not on_bus(PCI_VENDOR):
            raise Absent(f"no NVIDIA GPU can be seen: {error}") from None
        raise Unreachable(f"NVML: {error}") from None
    return lib


def disconnect(lib: Any) -> None:
    """The other half of `connect`."""
    try:
        lib.nvmlShutdown()
    except lib.NVMLError:
        pass  # it is down already


def text(value: Any) -> str:
    """Strings are bytes in older packages; None is empty."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
