"""The quarantine of a running job, for people: turns requests to `/quarantine` into a listing or a change of the ledger.

Called by `runtime.server`; asked by `cli.quarantine`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from rerail.decide.quarantine import Entry
from rerail.decide.subjects import kind_of, node_of, subject_of
from rerail.errors import UsageError
from rerail.runtime.handling import Handling
from rerail.wording import guess

ADD, RELEASE = "add", "release"
TEXT_LIMIT = 300


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a person wants."""

    action: str
    """`add` or `release`."""
    subject: str
    reason: str = ""
    by: str = ""
    force: bool = False
    """Also where nothing would be left to train on, and where the job has no such node."""


_order = msgspec.json.Decoder(Order)


def listing(handling: Handling) -> dict[str, Any]:
    """Everything that is out of use."""
    entries = sorted(handling.ledger.quarantine.values(), key=lambda entry: (entry.since, entry.subject))
    return {"quarantine": [{**msgspec.to_builtins(entry), "ends": entry.ends} for entry in entries]}


def members_in(state: Mapping[str, Any]) -> frozenset[str]:
    """The nodes and devices that the ranks of a job had, by what its journal keeps."""
    places = [(node, device) for node, device in state.get("placement", [])]
    places += [(node, device) for node, count in state.get("devices", {}).items() for device in range(count)]
    return frozenset(subject for node, device in places for subject in (f"node:{node}", f"device:{node}/{device}"))


def carry_out(handling: Handling, order: Order, members: Collection[str], at: float) -> str:
    """Do it, and say what was done; UsageError with advice where it cannot be."""
    subject = subject_of(order.subject)
    if order.action == RELEASE:
        was = handling.ledger.quarantine.get(subject)
        handling.release(subject)
        since = f" (was out of use: {was.reason})" if was is not None and was.reason else ""
        return f"{subject} may be used again{since}"
    if order.action != ADD:
        raise UsageError(f"there is nothing called {order.action[:40]!r} to do", hint=f"{ADD} or {RELEASE}")
    if not order.reason.strip():
        raise UsageError("a quarantine needs a reason", hint="--reason TEXT: whoever finds it later will want to know")
    if members and not order.force and node_of(subject) not in members:
        names = sorted(one for one in members if kind_of(one) == "node")
        raise UsageError(
            f"this job has no {node_of(subject)}{guess(node_of(subject), names)}",
            hint=f"it has {', '.join(names[:8])}; --force for one that is to come",
        )
    number = subject.rpartition("/")[2]
    if members and not order.force and kind_of(subject) == "device" and number.isdecimal() and subject not in members:
        there = sorted(one for one in members if kind_of(one) == "device" and node_of(one) == node_of(subject))
        raise UsageError(
            f"{node_of(subject)} has no device {number} in this job", hint=f"it has {', '.join(there[:8])}"
        )
    known = handling.ledger.quarantine.get(subject)
    entry = Entry(
        subject=subject,
        reason=_clean(order.reason),
        since=known.since if known is not None else at,
        by=_clean(order.by) or "a person",
        last_fault=at,
    )
    handling.add(entry, members, force=order.force)
    return f"{subject} is out of use until it is released"


def take(handling: Handling, body: bytes, members: Collection[str]) -> tuple[int, dict[str, Any]]:
    """An order as it comes in: the status to answer with, and what."""
    try:
        order = _order.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        return 422, {"refused": f"not understood: {error}"}
    try:
        done = carry_out(handling, order, members, time.time())
    except UsageError as error:
        return 409, {"refused": str(error)}
    return 200, {"done": done, "subject": subject_of(order.subject), **listing(handling)}


def _clean(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text[:TEXT_LIMIT]).strip()
