"""What every detector is: something that can say whether it sees anything here, and then look, again and again.

A detector only reads. It turns a part of the machine into `Reading`s (a name, a subject, a value) or into log lines;
what of that is a fault is said by the catalogue (`rerail.faults`), so a new fault needs no new code.
Run by `detect.monitor`, each in a thread of its own, so that one that hangs stops nobody else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import msgspec

Value = int | float | str


class Reading(msgspec.Struct, frozen=True):
    """One number or word read from the machine."""

    name: str
    """What is measured: `gpu.ecc.uncorrected`, `nic.link_downed`. The catalogue refers to it."""
    subject: str
    """Of what: `gpu3`, `mlx5_0/1`, `/dev/shm`, `cpu`. Stable over a boot."""
    value: Value
    note: str = ""
    """For people: serial number, bus address, the raw text."""
    momentary: bool = False
    """It happened, and is no state that lasts: told each time, never over."""


class Line(msgspec.Struct, frozen=True):
    """One line of a log that the machine writes."""

    source: str
    """Where the catalogue says it is seen: `kernel`, `fabric`, `bmc`, `notice`."""
    text: str
    seq: int = -1
    """Its number in the log, where it has one."""


class Told(msgspec.Struct, frozen=True):
    """A fault that another system on this machine has found."""

    code: str
    """Of the catalogue."""
    subject: str
    text: str
    over: bool
    sender: str
    at: float
    """Wall clock when it was seen."""


@runtime_checkable
class Detector(Protocol):
    """Looks from time to time."""

    name: str
    """Unique and stable: settings switch detectors by it."""
    every_s: float
    """Seconds between two looks."""

    def supported(self) -> str:
        """Empty if there is something to see on this machine, else the reason why not, for people."""

    def check(self) -> list[Reading]:
        """One look. What cannot be read is left out, never guessed; raises only if the detector itself is broken."""

    def blind_spots(self) -> list[str]:
        """What cannot be seen here, for people: counters a virtual machine hides, a MIG slice without ECC. Often empty."""


@runtime_checkable
class Watcher(Protocol):
    """Waits for things to happen."""

    name: str

    def supported(self) -> str:
        """Empty if there is something to watch on this machine, else the reason why not."""

    def watch(self) -> Iterator[Line | Reading | Told]:
        """Blocks until there is something to say; ends when the source is gone for good."""

    def blind_spots(self) -> list[str]: ...
