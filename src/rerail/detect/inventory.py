"""All there is to look at: turns the modules of this package into detectors and watchers, and the kernel log's past into lines.

Called by `detect.monitor` and `detect.checkup`.
A module `host_*` has `detectors()`, a vendor's module `detector()`; either may have `watchers()`. They are imported here and
only when asked for: one that cannot be imported or built (a vendor's package is missing) is not supported, and says why.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import msgspec

import rerail.detect
from rerail.detect.detector import Detector, Reading, Watcher
from rerail.detect.kernel_log import KMSG, next_record, parse_record

VENDORS = ("nvidia", "amd", "ascend")
KNOW_PROCESSES = ("nvidia", "amd")
"""Vendors that tell which processes use a device."""
HOST = "host_"
LOG_LINES = 20_000
"""Of the kernel log's past that are looked at: the newest."""


class Unusable:
    """Stands for the detectors of a module that cannot be used here."""

    every_s = 3600.0

    def __init__(self, name: str, why: str) -> None:
        self.name, self._why = name, why

    def supported(self) -> str:
        return self._why

    def check(self) -> list[Reading]:
        return []

    def blind_spots(self) -> list[str]:
        return []


def areas() -> dict[str, str]:
    """Every area of the machine that can be looked at, with the module that does: `cpu` -> `host_cpu`. Imports none of them."""
    there = sorted(module.name for module in pkgutil.iter_modules(rerail.detect.__path__))
    host = {name.removeprefix(HOST): name for name in there if name.startswith(HOST)}
    return host | {name: name for name in VENDORS if name in there}


def detectors_of(area: str, ours: Callable[[int], bool] | None = None) -> list[Detector]:
    """All detectors of one area, whether or not there is something to see for them. `ours`: is this process of our job?"""
    name = areas()[area]
    try:
        return _built(importlib.import_module(f"rerail.detect.{name}"), ours if name in KNOW_PROCESSES else None)
    except Exception as error:  # one module that is broken must not blind all the others
        return [Unusable(name, f"cannot be used: {type(error).__name__}: {error}")]


def all_detectors(ours: Callable[[int], bool] | None = None) -> list[Detector]:
    """All detectors of all areas."""
    return [detector for area in areas() for detector in detectors_of(area, ours)]


def all_watchers() -> list[Watcher]:
    """All watchers but that of the kernel log, which is not bound to an area."""
    found: list[Watcher] = []
    for name in areas().values():
        try:
            module = importlib.import_module(f"rerail.detect.{name}")
            make = getattr(module, "watchers", None)
            if make is not None:
                found += make()
        except Exception:  # as above; its detectors say why
            continue
    return found


def _built(module: ModuleType, ours: Callable[[int], bool] | None) -> list[Detector]:
    make_many, make_one = getattr(module, "detectors", None), getattr(module, "detector", None)
    if make_many is not None:
        return list(make_many())
    if make_one is None:
        return []
    return [make_one(ours) if ours is not None else make_one()]


def kernel_log(path: Path = KMSG) -> tuple[list[tuple[float, str]], str]:
    """What the kernel has said so far, oldest first, each line with its age in seconds; or nothing, and why not."""
    try:
        return [(age, text) for age, text in _records(path) if text][-LOG_LINES:], ""
    except OSError as error:
        lines = _journal()
        return (
            lines,
            "" if lines else f"{path} cannot be read ({error.strerror}; run as root), and the journal has nothing",
        )


def _records(path: Path) -> list[tuple[float, str]]:
    now = time.clock_gettime(time.CLOCK_MONOTONIC)
    found: list[tuple[float, str]] = []
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while record := next_record(descriptor):
            line = parse_record(record, injected=os.environ.get("RERAIL_INJECT", "") == "1")
            if line is not None:
                said_at = int(record.split(b",", 3)[2]) / 1e6
                found.append((max(0.0, now - said_at), line.text))
        return found
    finally:
        os.close(descriptor)


class _Entry(msgspec.Struct):
    at: int = msgspec.field(name="__MONOTONIC_TIMESTAMP")
    text: str = msgspec.field(name="MESSAGE")


_entry = msgspec.json.Decoder(_Entry, strict=False)


def _journal() -> list[tuple[float, str]]:
    program = shutil.which("journalctl")
    if program is None:
        return []
    command = [
        program,
        "--dmesg",
        "--boot",
        f"--lines={LOG_LINES}",
        "--output=json",
        "--output-fields=MESSAGE",
        "--quiet",
    ]
    try:
        text = subprocess.run(command, capture_output=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    now, found = time.clock_gettime(time.CLOCK_MONOTONIC), []
    for line in text.splitlines():
        try:
            entry = _entry.decode(line)
        except msgspec.MsgspecError:
            continue  # a message that is no text is given as a list of bytes
        found.append((max(0.0, now - entry.at / 1e6), entry.text))
    return found
