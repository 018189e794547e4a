"""Turns a Signal into an Event by the fault catalogue. Pure. Called by `runtime.controller` for every signal.

What a process said when it ended or raised is read like any other log; where it said nothing that is known, the way it
ended counts.
"""

from __future__ import annotations

from rerail.diagnose.cascade import judge
from rerail.faults.catalog import Catalog, Fault, Payload
from rerail.faults.matcher import Matcher
from rerail.faults.sightings import sightings
from rerail.flow import Event, Role, Signal, new_id

MESSAGE_LIMIT = 200
"""Characters of an exception's text that fit into a line for people; the whole text stays in the evidence."""
WITH_WORDS = ("process.exit", "step.raised")
KILLED = "SIGKILL"
BACK = "back"
"""In the payload of a signal of training that asks for a repair: the newest version to be trusted."""
RAISED = "rank {rank} raised {exception}: {message}"
ENDED = "rank {rank} ended with {exception}: {message}"


class Classifier:
    """A catalogue, ready to name signals."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._matcher = Matcher(catalog.faults)
        structured = [fault for fault in catalog.faults if fault.sources]
        self._structured = sorted(structured, key=lambda fault: not (fault.signals or fault.states or fault.raised))

    def classify(self, signal: Signal) -> Event:
        """The event this signal shows."""
        fault = self.fault_of(signal)
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
            role=_role(fault, signal),
            transient=fault.may_pass,
            message=_line(fault, signal),
            evidence=_evidence(signal),
            first_seen=signal.at,
            last_seen=signal.at,
            trusted=int(signal.payload.get(BACK, -1)),
        )

    def fault_of(self, signal: Signal) -> Fault:
        """A detector that has read the catalogue says the code itself; a process says it in its own words; else how it ended."""
        told = self.catalog.get(str(signal.payload.get("code", "")))
        if told is not None:
            return told
        by_end = next((fault for fault in self._structured if _fits(fault, signal)), None)
        if signal.source in WITH_WORDS and signal.payload.get("signal") != KILLED:
            said = judge(one for line in words(signal.payload) for one in sightings(self._matcher, line)).root
            if said is not None:
                return said.fault
        return by_end or self.catalog.unknown


def _role(fault: Fault, signal: Signal) -> Role:
    """Of a log, an exit status is the consequence of something. Here we know of this very process that it has ended, and
    only a broken collective means that another one did first."""
    if signal.source in WITH_WORDS and fault.role is Role.SYMPTOM and fault.kind != "collective":
        return Role.ROOT
    return fault.role


def words(payload: Payload) -> list[str]:
    """The lines that are read: the exception if there is one, else the last lines the process wrote.

    Not both: the last lines may speak of faults long repaired, the exception speaks of this one.
    """
    exception, message = str(payload.get("exception", "")), str(payload.get("message", ""))
    if exception or message:
        return f"{exception}: {message}".splitlines()
    return str(payload.get("evidence", "")).splitlines()


def _fits(fault: Fault, signal: Signal) -> bool:
    payload = signal.payload
    return (
        signal.source in fault.sources
        and (not fault.signals or payload.get("signal") in fault.signals)
        and (not fault.raised or "exception" in payload)
        and (not fault.states or str(payload.get("state", "")) in fault.states)
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
    return _template(fault, signal).format(**words).rstrip(" :")


def _template(fault: Fault, signal: Signal) -> str:
    if fault.message:
        return fault.message
    if signal.payload.get("exception"):
        return RAISED if signal.source == "step.raised" else ENDED
    part = str(signal.payload.get("subject", "")) if signal.rank < 0 else ""
    who = "rank {rank}" if signal.rank >= 0 else f"{{node}} {_plain(part)}".rstrip()
    return f"{who}: {_plain(fault.title)}"


def _plain(text: str) -> str:
    """For a template: what is in braces is no name of a value."""
    return text.replace("{", "{{").replace("}", "}}")


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
