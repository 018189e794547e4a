"""Faults that other systems have found: turns the JSON they send or drop into checked `Reported` messages, or says what is wrong.

Called by `runtime.server` for `POST /faults` and by `detect.dropbox` for files. A request is taken whole or not at all.

    {"sender": "dcgm", "code": "gpu.xid.79", "node": "", "subject": "gpu3", "text": "fell off the bus", "over": false, "at": 0}

Only `sender` and `code` are needed; a list of such objects will do, too. A fault that the user of the job has switched off
(`fault_levels`) is nobody's mistake: it is passed over, and named in the answer.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import msgspec

from rerail.errors import WireError
from rerail.faults.catalog import Catalog, Fault
from rerail.flow import Role
from rerail.texts import listed
from rerail.wording import closest

MAX_BODY = 64 << 10
MAX_FAULTS = 100
PER_MINUTE = 600
"""Faults taken by one door within a minute: a sender gone wild must not fill the journal."""
AHEAD_S = 300.0
"""How far a sender's clock may be ahead; what is further in the future is not a time in seconds."""
NAME_LIMIT = 128
TEXT_LIMIT = 4096
CLOSED = (
    "this job takes no faults from other systems; to open it, name those that may report in the setting "
    "fault_senders (RERAIL_FAULT_SENDERS=dcgm,gpud)"
)


class Refused(WireError):
    """What another system reported is not taken; the text says why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
        """As HTTP has it."""


class Reported(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault found by another system."""

    sender: str
    code: str
    """In rerail's catalogue, or what another catalogue calls it; the former once it is checked."""
    node: str = ""
    """Empty: the node where it is told."""
    subject: str = ""
    """Of what: `gpu3`, `mlx5_0/1`."""
    text: str = ""
    over: bool = False
    """It is over."""
    at: float = 0.0
    """Wall clock when it was seen, in seconds since the epoch; 0: now."""

    def payload(self) -> dict[str, str | int | float | bool]:
        """Of the signal that is made of it: what a node's own monitor would say."""
        return {
            "code": self.code,
            "detector": f"reported by {self.sender}",
            "subject": self.subject,
            "evidence": self.text or f"reported by {self.sender}",
            "over": self.over,
        }


_reported = msgspec.json.Decoder(Reported)


class Taken(NamedTuple):
    """What became of one request."""

    faults: list[Reported]
    off: list[str]
    """Codes of faults that are switched off in this job."""

    def answer(self) -> dict[str, object]:
        """For whoever sent it."""
        if not self.off:
            return {"accepted": len(self.faults)}
        note = "switched off in this job by the setting fault_levels: neither told nor written down"
        return {"accepted": len(self.faults), "switched_off": self.off, "note": note}


class Desk:
    """Checks what is handed in. `off` holds what the user does not want to hear of."""

    def __init__(self, senders: str, catalog: Catalog, per_minute: int = 0, off: Catalog | None = None) -> None:
        self.senders = frozenset(listed(senders))
        self._catalog, self._per_minute, self._off = catalog, per_minute, off or Catalog(())
        self._minute, self._taken = 0, 0

    def take(self, body: bytes, nodes: Collection[str], here: str, now: float, written: float = 0.0) -> Taken:
        """The faults in it, in the catalogue's own words. `here` is the node meant when none is named, `written` the time
        where none is given: that of the file, else now."""
        if not self.senders:
            raise Refused(403, CLOSED)
        rows = _rows(body)
        faults = [self._checked(row, f"fault {number}: ", nodes, here, now) for number, row in enumerate(rows)]
        faults = [one if one.at else msgspec.structs.replace(one, at=min(written or now, now)) for one in faults]
        if int(now // 60) != self._minute:
            self._minute, self._taken = int(now // 60), 0
        if self._per_minute and self._taken + len(faults) > self._per_minute:
            raise Refused(429, f"more than {self._per_minute} faults in one minute; try again in the next")
        self._taken += len(faults)
        off = {one.code for one in faults if self._off.get(one.code) is not None}
        return Taken([one for one in faults if one.code not in off], sorted(off))

    def _checked(self, row: msgspec.Raw, where: str, nodes: Collection[str], here: str, now: float) -> Reported:
        try:
            given = _reported.decode(row)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise Refused(422, f"{where}{error}") from error
        sender = given.sender.strip()
        if sender not in self.senders:
            raise Refused(403, f"{where}sender {_clean(sender, NAME_LIMIT)!r} is not in the setting fault_senders")
        node = given.node or here
        if node not in nodes:
            known = ", ".join(sorted(nodes)[:8]) or "none yet"
            raise Refused(422, f"{where}{_clean(node, NAME_LIMIT)!r} is not a node of this job (nodes: {known})")
        if given.at < 0 or given.at > now + AHEAD_S:
            raise Refused(
                422, f"{where}at is {given.at:g}; seconds since the epoch that are not in the future are needed"
            )
        return msgspec.structs.replace(
            given,
            sender=_clean(sender, NAME_LIMIT),
            code=self._fault(given.code, where).code,
            node=node,
            subject=_clean(given.subject, NAME_LIMIT),
            text=_clean(given.text, TEXT_LIMIT),
            at=min(given.at, now),
        )

    def _fault(self, word: str, where: str) -> Fault:
        fault = self._catalog.find(word) or self._off.find(word)
        if fault is None:
            word = _clean(word, NAME_LIMIT)
            known = [name for one in self._catalog.faults for name in (one.code, *one.aliases)]
            close = closest(word, known)
            hint = f"did you mean {close}?" if close else "see rerail faults list"
            raise Refused(422, f"{where}there is no fault {word!r} in the catalogue of this job; {hint}")
        if fault.role is Role.CLEAR:
            why = "says that something is over; send the fault itself with over = true"
            raise Refused(422, f"{where}{fault.code} {why}")
        if fault.role is Role.BENIGN:
            raise Refused(422, f"{where}{fault.code} is no fault: {fault.title}")
        return fault


def _rows(body: bytes) -> list[msgspec.Raw]:
    """One object or a list of them, each still to be read: so that what is wrong can be said with its number."""
    if len(body) > MAX_BODY:
        raise Refused(413, f"more than {MAX_BODY >> 10} KiB")
    try:
        many = body.lstrip()[:1] == b"["
        rows = (
            msgspec.json.decode(body, type=list[msgspec.Raw]) if many else [msgspec.json.decode(body, type=msgspec.Raw)]
        )
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise Refused(400, f"not JSON: {error}") from error
    if not rows:
        raise Refused(422, "there is no fault in it")
    if len(rows) > MAX_FAULTS:
        raise Refused(413, f"{len(rows)} faults at once; at most {MAX_FAULTS}")
    return rows


def _clean(text: str, limit: int) -> str:
    """Cut, and without anything that would move a terminal's cursor or begin a new line."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:limit]).strip()
