"""The vendor-neutral half of watching accelerators: turns what a vendor's library says of each device into Readings.

A `Vendor` (`detect.nvidia`, `detect.amd`, `detect.ascend`) only lists and samples its devices. Here is what holds for all
of them: how subjects are named, when a device counts as gone, and when not the devices are gone but the way to them.
The detector is run by `detect.monitor`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import msgspec

from rerail.detect.detector import Reading, Value

PCI = Path("/sys/bus/pci/devices")
REOPEN_AFTER = 6
"""Looks between two attempts to reconnect while a device is gone: only a new connection sees that it is back."""
BUSY_PERCENT = 90
SLOW_CLOCK = 0.6
IDLE_POWER = 0.4


class Accelerator(msgspec.Struct, frozen=True):
    """One device as its vendor's library lists it."""

    index: int
    """Its number in that library. Not the number a process sees that was given only some of the devices."""
    name: str
    uuid: str = ""
    bus: str = ""
    serial: str = ""
    virtual: str = ""
    """Empty for a whole device, else what it is instead: `MIG slice`, `vGPU`, `vNPU`, `partition`."""

    @property
    def named(self) -> bool:
        """Whether it can be told from others: one that is broken from the start may not even give its address."""
        return bool(self.uuid or self.bus)

    @property
    def key(self) -> str:
        """What stays the same when the library counts anew."""
        return self.uuid or self.bus or f"number {self.index}"

    def __str__(self) -> str:
        serial = self.serial and f"serial {self.serial}"
        return ", ".join(word for word in (self.name, self.bus, serial, self.virtual) if word)


class Sample(msgspec.Struct, frozen=True):
    """One value of one device, or of a part of it."""

    name: str
    value: Value
    part: str = ""
    """`link3`, `umc`: makes the subject `gpu0/link3`."""
    note: str = ""


class Absent(Exception):
    """There is nothing of this vendor here, or no library to look with."""


class Unreachable(Exception):
    """The devices may be well, but library or driver does not answer."""


class Lost(Exception):
    """This one device does not answer any more."""


class Vendor(Protocol):
    """What a vendor's module gives."""

    name: str
    """`nvidia`"""
    word: str
    """What one of its devices is called in readings: `gpu` or `npu`."""

    def open(self) -> list[Accelerator]:
        """Connect, or connect again, and list the devices. Raises Absent or Unreachable."""

    def sample(self, device: Accelerator) -> Iterable[Sample]:
        """Everything that can be read of it now. What cannot is left out. Raises Lost or Unreachable."""

    def machine(self) -> Iterable[Sample]:
        """What belongs to no single device: services, kernel modules."""

    def blind_spots(self, device: Accelerator) -> list[str]:
        """What cannot be seen of it, for people."""

    def close(self) -> None:
        """Let go of the devices, so that they can be reset."""


class AcceleratorDetector:
    """The detector over one vendor's devices."""

    def __init__(self, vendor: Vendor, *, expected: int = 0, every_s: float = 10.0) -> None:
        self.name = vendor.name
        self.every_s = every_s
        self._vendor = vendor
        self._expected = expected
        """Devices this machine should have; 0: as many as at the first look."""
        self._known: dict[str, Accelerator] = {}
        """All ever seen, with the number they had at first."""
        self._listed: dict[str, Accelerator] = {}
        """Those of the present connection, with the numbers of this connection."""
        self._connected = False
        self._looks_with_loss = 0

    def supported(self) -> str:
        """Hardware whose driver does not answer is supported: that is what there is to see."""
        try:
            self._connect()
        except Absent as reason:
            return str(reason)
        except Unreachable:
            return ""
        return "" if self._known or self._expected else f"no device of {self._vendor.name} here"

    def check(self) -> list[Reading]:
        try:
            self._connect()
            lost, readings = self._look()
        except (Absent, Unreachable) as reason:
            self.close()
            return [self._monitor(str(reason))]
        if self._all_gone(lost):
            self.close()
            return [self._monitor(f"all {len(self._known)} devices vanished at once: {next(iter(lost.values()))}")]
        readings += [self._monitor("")]
        readings += [self._presence(key, first, lost.get(key)) for key, first in self._known.items()]
        if self._expected:
            missing = max(0, self._expected - (len(self._known) - len(lost)))
            readings.append(Reading(f"{self._vendor.word}.missing", self._vendor.word, missing))
        self._looks_with_loss = self._looks_with_loss + 1 if lost else 0
        if self._looks_with_loss >= REOPEN_AFTER:
            self.close()
        return readings

    def blind_spots(self) -> list[str]:
        try:
            self._connect()
        except (Absent, Unreachable) as reason:
            return [f"{self._vendor.name}: nothing can be seen: {reason}"]
        return [
            f"{self._subject(self._known[key])}: {text}"
            for key, device in self._listed.items()
            for text in self._vendor.blind_spots(device)
        ]

    def devices(self) -> list[Accelerator]:
        """All devices ever seen, by the number their readings carry."""
        return sorted(self._known.values(), key=lambda device: device.index)

    def close(self) -> None:
        """Let go of the devices: before they are reset, and to see afresh what is there. The next look connects again."""
        self._vendor.close()
        self._connected, self._looks_with_loss = False, 0

    def _connect(self) -> None:
        if self._connected:
            return
        self._listed = {device.key: device for device in self._vendor.open()}
        self._connected, first = True, not self._known
        for key, device in self._listed.items():
            if key not in self._known and (device.named or first):
                self._known.pop(f"number {device.index}", None)
                self._known[key] = self._numbered(device)

    def _numbered(self, device: Accelerator) -> Accelerator:
        """A library that lost a device counts the others anew; a number once given stays with its device."""
        taken = {known.index for known in self._known.values()}
        if device.index not in taken:
            return device
        return msgspec.structs.replace(device, index=max(taken) + 1)

    def _look(self) -> tuple[dict[str, str], list[Reading]]:
        """Which devices do not answer and why, and what the others say."""
        lost: dict[str, str] = {}
        readings: list[Reading] = []
        for key, first in self._known.items():
            if key not in self._listed:
                lost[key] = NOT_LISTED
                continue
            try:
                samples = list(self._vendor.sample(self._listed[key]))
            except Lost as reason:
                lost[key] = str(reason) or "lost"
                continue
            readings += _readings(self._subject(first), str(first), [*samples, *derived(samples, self._vendor.word)])
        if self._known:
            readings += _readings(self._vendor.word, "", self._vendor.machine())
        return lost, readings

    def _all_gone(self, lost: dict[str, str]) -> bool:
        """Many devices do not die in the same second. A machine's only device may, if its driver says so itself."""
        if not lost or len(lost) < len(self._known):
            return False
        return len(lost) > 1 or NOT_LISTED in lost.values()

    def _monitor(self, reason: str) -> Reading:
        return Reading("accelerator.monitor_down", self._vendor.name, int(bool(reason)), reason)

    def _presence(self, key: str, first: Accelerator, reason: str | None) -> Reading:
        note = f"{first}: {reason}" if reason else str(first)
        return Reading(f"{self._vendor.word}.present", self._subject(first), int(reason is None), note)

    def _subject(self, device: Accelerator) -> str:
        return f"{self._vendor.word}{device.index}"


NOT_LISTED = "no longer listed"


def derived(samples: Iterable[Sample], word: str) -> list[Sample]:
    """What only several values together say: a clock that is low without a reason, a device that is busy with nothing."""
    values = {sample.name: sample.value for sample in samples if not sample.part}
    busy = values.get(f"{word}.utilization")
    if not isinstance(busy, int | float):
        return []
    found: list[Sample] = []
    clock = values.get(f"{word}.clock_ratio")
    if isinstance(clock, int | float):
        throttled = any(value for name, value in values.items() if name.startswith(f"{word}.throttle."))
        stuck = busy > BUSY_PERCENT and clock < SLOW_CLOCK and not throttled
        found.append(
            Sample(f"{word}.clock_stuck", int(stuck), note=f"{clock:.0%} of the highest clock at {busy} % load")
        )
    power = values.get(f"{word}.power_ratio")
    if isinstance(power, int | float):
        spinning = busy >= 99 and power < IDLE_POWER
        found.append(Sample(f"{word}.busy_at_idle_power", int(spinning), note=f"{power:.0%} of the power limit"))
    return found


def on_bus(vendor: str) -> int:
    """Accelerators of this PCI vendor id that the kernel sees, whether or not their driver works."""
    found = 0
    for device in PCI.glob("*"):
        try:
            if (device / "vendor").read_text().strip() != vendor:
                continue
            kind = (device / "class").read_text().strip()
        except OSError:
            continue  # taken out while we looked
        found += kind.startswith(("0x0300", "0x0302", "0x0380", "0x1200"))
    return found


def _readings(subject: str, note: str, samples: Iterable[Sample]) -> list[Reading]:
    return [
        Reading(one.name, f"{subject}/{one.part}" if one.part else subject, one.value, one.note or note)
        for one in samples
    ]
