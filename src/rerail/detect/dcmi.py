"""Turns DCMI (Huawei's libdcmi.so, by ctypes) into samples of Ascend NPUs; for `detect.ascend` alone.

Functions and structures as in dcmi_interface_api.h. What a driver does not know is left out.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from rerail.detect.accelerators import Absent, Accelerator, Lost, Sample, Unreachable, on_bus

PCI_VENDOR = "0x19e5"
LIBRARY = "libdcmi.so"
NETWORK_DEADLINE_S = 1.0
HEALTH = {0: "ok", 1: "warning", 2: "alarm", 3: "critical"}
NETWORK = {
    0: "ok",
    1: "socket_failed",
    2: "no_answer",
    3: "unreachable",
    4: "time_exceeded",
    5: "fault",
    7: "thread_failed",
}
"""Results of the test packets an NPU sends to a neighbour; 6 and 8 are states of starting up."""
NOT_THERE = {-8007, -8008}
"""Return codes: invalid device, device does not exist."""
NOT_SUPPORTED = -8255
HBM, VDIE, HCCS, HCCS_COUNTS = 2, 1, 16, 3
_VIRTUAL = re.compile(r"vir\d", re.IGNORECASE)


class _ChipInfo(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_char * 32),
        ("name", ctypes.c_char * 32),
        ("version", ctypes.c_char * 32),
        ("cores", ctypes.c_uint),
    ]


class _Pcie(ctypes.Structure):
    _fields_ = [
        ("ids", ctypes.c_uint * 4),
        ("domain", ctypes.c_int),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("function", ctypes.c_uint),
        ("reserve", ctypes.c_ubyte * 32),
    ]


class _Ecc(ctypes.Structure):
    _fields_ = [
        ("enabled", ctypes.c_int),
        ("corrected", ctypes.c_uint),
        ("uncorrected", ctypes.c_uint),
        ("corrected_lifetime", ctypes.c_uint),
        ("uncorrected_lifetime", ctypes.c_uint),
        ("corrected_pages", ctypes.c_uint),
        ("uncorrected_pages", ctypes.c_uint),
        ("corrected_pages_next", ctypes.c_uint),
        ("uncorrected_pages_next", ctypes.c_uint),
        ("later", ctypes.c_uint * 23),  # room for drivers whose structure has grown
    ]


class _Hbm(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_ulonglong),
        ("frequency", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("heat", ctypes.c_int),
        ("bandwidth", ctypes.c_uint),
        ("later", ctypes.c_uint * 16),
    ]


class _Hccs(ctypes.Structure):
    _fields_ = [
        ("sent", ctypes.c_uint * 16),
        ("received", ctypes.c_uint * 16),
        ("crc_errors", ctypes.c_uint * 16),
        ("retries", ctypes.c_uint * 16),
        ("reserved", ctypes.c_uint * 64),
    ]


class Dcmi:
    """NPUs through Huawei's library: card and device number name a chip."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        result = self._call("dcmi_init")
        if result != 0:
            if not on_bus(PCI_VENDOR):
                raise Absent(f"no Ascend NPU can be seen: dcmi_init gives {result}")
            raise Unreachable(f"DCMI: dcmi_init gives {result}")
        self._places: dict[str, tuple[int, int]] = {}
        self._waiting: dict[str, threading.Thread] = {}

    def devices(self) -> list[Accelerator]:
        count, cards = ctypes.c_int(), (ctypes.c_int * 64)()
        result = self._call("dcmi_get_card_list", ctypes.byref(count), cards, 64)
        if result != 0:
            raise Unreachable(f"DCMI: dcmi_get_card_list gives {result}")
        found: list[Accelerator] = []
        for card in cards[: max(0, min(count.value, 64))]:
            chips, mcu, cpu = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
            refs = (ctypes.byref(chips), ctypes.byref(mcu), ctypes.byref(cpu))
            if self._call("dcmi_get_device_id_in_card", card, *refs) == 0:
                found += [self._identify(card, chip, len(found) + chip) for chip in range(chips.value)]
        return found

    def sample(self, device: Accelerator) -> Iterator[Sample]:
        place = self._places[device.key]
        health = self._number("dcmi_get_device_health", place, ctypes.c_uint)
        if health == 0xFFFFFFFF:
            raise Lost("DCMI: the device does not exist or has not started")
        if health is not None:
            yield Sample("npu.health", HEALTH.get(health, str(health)))
        yield from self._codes(place)
        for name, function, scale in (
            ("npu.temperature", "dcmi_get_device_temperature", 1),
            ("npu.power_w", "dcmi_get_device_power_info", 10),
        ):
            value = self._number(function, place, ctypes.c_int)
            if value is not None:
                yield Sample(name, value / scale if scale > 1 else value)
        yield from self._memory(place)
        counts, size = _Hccs(), ctypes.c_uint(ctypes.sizeof(_Hccs))
        if self._ok("dcmi_get_device_info", *place, HCCS, HCCS_COUNTS, ctypes.byref(counts), ctypes.byref(size)):
            yield Sample("npu.hccs.crc_errors", sum(counts.crc_errors))
            yield Sample("npu.hccs.retries", sum(counts.retries))
        network = self._network(device.key, place)
        if network in NETWORK:
            yield Sample("npu.network", NETWORK[network])

    def _identify(self, card: int, chip: int, index: int) -> Accelerator:
        info, pcie, die, number = _ChipInfo(), _Pcie(), (ctypes.c_uint * 5)(), ctypes.c_int(index)
        named = self._call("dcmi_get_device_chip_info", card, chip, ctypes.byref(info)) == 0
        has_die = self._call("dcmi_get_device_die_v2", card, chip, VDIE, ctypes.byref(die)) == 0
        on_pcie = self._call("dcmi_get_device_pcie_info_v2", card, chip, ctypes.byref(pcie)) == 0
        self._call("dcmi_get_device_logic_id", ctypes.byref(number), card, chip)
        name = f"{_words(info.type)} {_words(info.name)}".strip() if named else "Ascend NPU"
        uuid = "-".join(f"{word:08X}" for word in die) if has_die and any(die) else f"card {card} chip {chip}"
        bus = f"{pcie.domain:04x}:{pcie.bus:02x}:{pcie.device:02x}.{pcie.function}" if on_pcie else ""
        device = Accelerator(number.value, name, uuid, bus, "", virtual(name))
        self._places[device.key] = (card, chip)
        return device

    def _codes(self, place: tuple[int, int]) -> Iterator[Sample]:
        count, codes = ctypes.c_int(), (ctypes.c_uint * 128)()
        if self._ok("dcmi_get_device_errorcode_v2", *place, ctypes.byref(count), codes, 128):
            active = codes[: max(0, min(count.value, 128))]
            yield Sample("npu.fault_codes", len(active))
            yield from fault_codes(f"{code:08X}" for code in active)

    def _memory(self, place: tuple[int, int]) -> Iterator[Sample]:
        ecc = _Ecc()
        if self._ok("dcmi_get_device_ecc_info", *place, HBM, ctypes.byref(ecc)) and ecc.enabled:
            for word in ("corrected", "uncorrected", "corrected_lifetime", "uncorrected_lifetime"):
                yield Sample(f"npu.ecc.{word}", getattr(ecc, word))
            yield Sample("npu.isolated_pages", ecc.corrected_pages + ecc.uncorrected_pages)
            yield Sample("npu.isolated_pages.pending", ecc.corrected_pages_next + ecc.uncorrected_pages_next)
        memory = _Hbm()
        if self._ok("dcmi_get_device_hbm_info", *place, ctypes.byref(memory)) and memory.heat:
            yield Sample("npu.temperature.memory", memory.heat)

    def _network(self, key: str, place: tuple[int, int]) -> int | None:
        """Asked in a thread: after a card has dropped, this one call may not come back for long."""
        if key in self._waiting and self._waiting[key].is_alive():
            return None
        answers: list[int] = []

        def ask() -> None:
            result = ctypes.c_int()
            if self._call("dcmi_get_device_network_health", *place, ctypes.byref(result)) == 0:
                answers.append(result.value)

        self._waiting[key] = threading.Thread(target=ask, name=f"dcmi-network-{key}", daemon=True)
        self._waiting[key].start()
        self._waiting[key].join(NETWORK_DEADLINE_S)
        return answers[0] if answers else None

    def _number(self, function: str, place: tuple[int, int], kind: Any) -> int | None:
        value = kind()
        return int(value.value) if self._ok(function, *place, ctypes.byref(value)) else None

    def _ok(self, function: str, *arguments: Any) -> bool:
        """Whether there is an answer. Raises Lost."""
        result = self._call(function, *arguments)
        if result in NOT_THERE:
            raise Lost(f"DCMI: {function} gives {result}: the device does not exist")
        return result == 0

    def _call(self, function: str, *arguments: Any) -> int:
        try:
            return int(getattr(self._library, function)(*arguments))
        except AttributeError:  # the driver is older than the function
            return NOT_SUPPORTED


def load() -> ctypes.CDLL | None:
    """The library, if it is here."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None


def virtual(name: str) -> str:
    """`vNPU` for the chip names of virtual ones: `310P3vir04`."""
    return "vNPU" if _VIRTUAL.search(name) else ""


def fault_codes(codes: Iterable[str], note: str = "") -> Iterator[Sample]:
    """Each under a subject of its own, so that one can end while another lasts."""
    return (Sample("npu.fault_code", code, code, note) for code in codes)


def _words(value: bytes) -> str:
    return value.decode(errors="replace").strip()
