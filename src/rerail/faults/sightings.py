"""Turns one raw log line into the faults it shows. Pure. Called by `detect.logs`, `detect.monitor` and `diagnose.classify`."""

from __future__ import annotations

import re

import msgspec

from rerail.faults.anchors import compiled
from rerail.faults.catalog import Fault
from rerail.faults.lines import Line, take_apart
from rerail.faults.matcher import Matcher
from rerail.faults.quotes import is_spoken_of, unquoted
from rerail.flow import Role

TOLD_AT_INFO = ("numerics", "scheduler", "node", "npu", "nic", "process")
"""Classes whose faults programs report without calling them errors: a loss that is nan, a job that is cancelled."""
_DAEMON = re.compile(
    r"systemd(?:-[\w-]+)?|\S+\.desktop|(?i:networkmanager|modemmanager|networkd-dispatcher|dbus\S*|udisksd|polkitd"
    r"|avahi-\w+|rsyslogd|crond?|anacron|sshd|sudo|su|login|snapd|apport|fwupd\w*|smartd|rtkit-daemon|accounts-daemon"
    r"|wpa_supplicant|dhclient|chronyd|ntpd|cupsd|bluetoothd|pulseaudio|pipewire|wireplumber|tlp|tumblerd|packagekitd"
    r"|tracker-\S+|gdm\S*|gnome-\S+|gsd-\S+|kdeinit\d?|xorg)"
)
"""Programs of the machine itself: a word that in a script would be an error means nothing in their journal lines."""
_DEVICE = re.compile(r"\b(?:PCI:)?([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2})(?:\.\d)?\b", re.IGNORECASE)


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """A fault, and where it was seen."""

    fault: Fault
    text: str = ""
    file: str = ""
    line: int = 0
    rank: int = -1
    device: str = ""
    """Bus address, where the line names one."""
    time: float = -1.0
    """Seconds, or -1."""
    clock: str = ""
    """Since when: as in `faults.lines`, or `uptime` of the machine."""
    order: int = 0
    """Place among all that was read: later in a file is larger."""
    summary: str = ""
    """Where a launcher's closing summary shows it: `listed` among the failures, or as the `root` of them."""


def sightings(matcher: Matcher, raw: str, *, file: str = "", number: int = 0, rank: int = -1) -> list[Sighting]:
    """All that this line shows."""
    line = take_apart(raw)
    device = _DEVICE.search(line.text)
    time, clock = (line.uptime, "uptime") if not line.clock and line.uptime >= 0 else (line.time, line.clock)
    return [
        Sighting(
            fault=fault,
            text=line.raw.strip(),
            file=file,
            line=number,
            rank=line.rank if line.rank >= 0 else rank,
            device=device[1].lower() if device else "",
            time=time,
            clock=clock,
        )
        for fault in faults_in(matcher, line)
    ]


def faults_in(matcher: Matcher, line: Line) -> list[Fault]:
    """Faults that a line shows, its level considered: what is told for information or only quoted is no alarm."""
    if line.data:
        return []
    text, raw = unquoted(line.text), unquoted(line.raw)
    found = list(matcher.match(text) or (matcher.match(raw) if text != raw else ()))
    found = [fault for fault in found if not _is_spoken_of(fault, text) or not _is_spoken_of(fault, raw)]
    if line.level in ("debug", "info") and not line.kernel:
        found = [fault for fault in found if _told_at_info(fault)]
    if line.program and _DAEMON.fullmatch(line.program.rpartition("/")[2]):
        found = [fault for fault in found if fault.seen != ("script",)]
    return [fault for fault in found if not fault.unless or not compiled(fault.unless).search(line.raw)]


def _is_spoken_of(fault: Fault, text: str) -> bool:
    """Whether the line talks about this fault wherever it names it."""
    return all(is_spoken_of(text, *found.span()) for found in compiled(fault.pattern).finditer(text))


def _told_at_info(fault: Fault) -> bool:
    by_machine = any(place in fault.seen for place in ("kernel", "vendor", "bmc"))
    return fault.kind in TOLD_AT_INFO or by_machine or fault.role in (Role.CLEAR, Role.BENIGN)
