"""Turns a Signal into an Event by the fault catalogue. Pure. Called by `runtime.controller` for every signal."""

from __future__ import annotations

from rerail.faults.catalog import Catalog, Fault
from rerail.flow import Event, Signal, new_id

MESSAGE_LIMIT = 200
"""Characters of an exception's text that fit into a line for people; the whole text stays in the evidence."""


def classify(signal: Signal, catalog: Catalog) -> Event:
    """The event this signal shows."""
    fault = catalog.match(signal)
    return Event(
        id=new_id("event"),
        job=signal.job,
        at=signal.at,
        cause_id=signal.id,
        code=fault.code,
        node=signal.node,
        rank=signal.rank,
        generation=signal.generation,
        step=signal.step,
        severity=fault.severity,
        role=fault.role,
        transient=fault.transient,
        message=_line(fault, signal),
        evidence=_evidence(signal),
        first_seen=signal.at,
        last_seen=signal.at,
    )


def _line(fault: Fault, signal: Signal) -> str:
    payload = signal.payload
    words = {
        "rank": signal.rank,
        "node": signal.node,
        "signal": payload.get("signal", ""),
        "exit_code": payload.get("exit_code", ""),
        "exception": str(payload.get("exception", "")).removeprefix("builtins.") or "an error",
        "message": _first_line(str(payload.get("message", ""))),
        "stalled_s": f"{float(payload.get('stalled_s', 0.0)):.1f}",
    }
    return fault.message.format(**words).rstrip(" :")


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= MESSAGE_LIMIT else line[: MESSAGE_LIMIT - 1] + "…"


def _evidence(signal: Signal) -> str:
    payload = signal.payload
    for name in ("traceback", "evidence", "message"):
        text = str(payload.get(name, "")).strip()
        if text:
            return text
    if "signal" in payload:
        return f"process ended by {payload['signal']}"
    if "exit_code" in payload:
        return f"process ended with exit code {payload['exit_code']}"
    return ""
