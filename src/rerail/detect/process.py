"""Turns the end of a rank's process (status, error file, last stderr lines) into the payload of a `process.exit` signal.

Called by `runtime.agent`. The only I/O is reading the error file that the process left behind.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

SOURCE = "process.exit"
MAX_TEXT = 16 << 10
"""Bytes of traceback or evidence that travel; the log files have all."""

Payload = dict[str, str | int | float | bool]


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; real-time signals have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_payload(status: int, error_file: Path, stderr_tail: str) -> Payload:
    """What is known of an end with `status` (exit code, or minus the signal that killed it)."""
    payload: Payload = {"exit_code": status} if status >= 0 else {"signal": signal_name(-status)}
    payload |= read_error_file(error_file)
    if stderr_tail:
        payload["evidence"] = stderr_tail[-MAX_TEXT:]
    return payload


def read_error_file(path: Path) -> Payload:
    """Exception, message and traceback from torchelastic's error file; empty if there is none or it is unreadable."""
    try:
        body = json.loads(path.read_text(errors="replace"))
    except (OSError, ValueError):
        return {}
    if not isinstance(body, dict):
        return {}
    found: Payload = {}
    message, trace = _message_of(body.get("message"))
    if message:
        exception = str(body.get("exception") or message.split(":", 1)[0].strip())
        # "ValueError: bad" says the type once more
        found["message"] = message.removeprefix(f"{exception.rpartition('.')[2]}: ")[:MAX_TEXT]
        found["exception"] = exception
    if trace:
        found["traceback"] = trace[-MAX_TEXT:]
    return found


def _message_of(field: Any) -> tuple[str, str]:
    """torchelastic writes either a plain text or {"message", "extraInfo": {"py_callstack"}}."""
    if isinstance(field, str):
        return field, ""
    if not isinstance(field, dict):
        return "", ""
    extra = field.get("extraInfo")
    trace = extra.get("py_callstack", "") if isinstance(extra, dict) else ""
    return str(field.get("message", "")), str(trace)
