"""What can be put into quarantine: turns words of people and monitors into subjects and back. Pure.

    node:n1         a machine
    device:n1/3     an accelerator of it, by number, or by PCI address where only that is known: device:n1/0000:3b:00
    link:n1/eth0    a link of it, by name

Called by `decide.escalate`, `decide.quarantine`, `runtime.handling` and the commands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice

from rerail.errors import UsageError

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_PCI = r"(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?"
_SUBJECT = re.compile(rf"(?:(node|device|link):)?({_NAME})(?:/({_PCI}|{_NAME}))?", re.ASCII)
_DEVICE = re.compile(r"(?:gpu|npu|device|accelerator)?(\d{1,4})")
KINDS = ("node", "device", "link")
FORMS = "node:NODE, device:NODE/NUMBER, link:NODE/NAME"


def subject_of(text: str) -> str:
    """A subject from what a person writes: `n1`, `n1/3`, `n1/gpu3`, `n1/eth0`, or the whole of it."""
    found = _SUBJECT.fullmatch(text.strip())
    kind, node, part = found.groups() if found else ("", "", "")
    number = _DEVICE.fullmatch(part or "")
    if node and not part and kind in (None, "node"):
        return f"node:{node}"
    if node and number and kind in (None, "device"):
        return f"device:{node}/{int(number[1])}"
    if node and part and kind in (None, "device") and re.fullmatch(_PCI, part):
        return f"device:{node}/{part}"
    if node and part and kind in (None, "link"):
        return f"link:{node}/{part}"
    raise UsageError(f"{text[:200]!r} names nothing that can be in quarantine", hint=f"use {FORMS}")


def of_sighting(node: str, subject: str, scope: str) -> str:
    """The subject of what a monitor tells: `gpu3/link1` is a matter of the device, `eth0` one of a link, the rest of the node."""
    first, _, _ = subject.partition("/")
    number = _DEVICE.fullmatch(first)
    if number and not first.isdigit() and scope != "node":
        return f"device:{node}/{int(number[1])}"
    if scope in ("device", "link") and re.fullmatch(_PCI, first.lower()):
        return f"device:{node}/{first.lower()}"
    if scope == "link" and re.fullmatch(_NAME, first, re.ASCII):
        return f"link:{node}/{first}"
    return f"node:{node}"


def node_of(subject: str) -> str:
    """The node a subject is, or is part of."""
    return "node:" + subject.partition(":")[2].partition("/")[0]


def kind_of(subject: str) -> str:
    """`node`, `device` or `link`."""
    return subject.partition(":")[0]


def several(members: Iterable[str], kind: str, count: int) -> bool:
    """Whether there are at least so many of a kind; of a large job not all are looked at."""
    return len(list(islice((one for one in members if kind_of(one) == kind), count))) >= count
