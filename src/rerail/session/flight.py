"""Gives the agent torch's own record of this rank's newest collectives when it asks: a file for a file.

torch keeps that record by itself (the flight recorder: the newest 2000, see TORCH_FR_BUFFER_SIZE), so a step costs nothing
more. It is read through torch's control-plane handlers, as JSON: they run without Python's lock, so that a recorder that
does not answer holds up nobody but the thread that asked. Called by the beat thread of `session.link`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from torch._C import _distributed_c10d as _c10d

from rerail.runtime import stacks
from rerail.session.fabric import fabric

QUIET_BEATS = 3
"""Nobody asks a rank that begins collectives: only after so many beats without a new one the question is looked for."""
HANDLERS = {"gloo": "fr_trace_json", "nccl": "dump_nccl_trace_json"}
"""torch's names for the handlers; gloo and NCCL have a recorder each."""

Dump = Callable[[], bytes]


class Answerer:
    """Looks for the agent's question at every quiet beat."""

    def __init__(self, error_file: str, dumps: Callable[[], dict[str, Dump]]) -> None:
        self._ask = str(Path(error_file).with_name(stacks.FLIGHT_ASK))
        self._path = Path(error_file).with_name(stacks.FLIGHT)
        self._dumps = dumps
        self._begun, self._quiet = -1, 0
        self._answering: threading.Thread | None = None
        self._path.touch()  # tells the agent that this rank answers

    def look(self, begun: int) -> None:
        """`begun` collectives so far. Returns at once: a dump has a thread of its own."""
        if begun != self._begun:
            self._begun, self._quiet = begun, 0
            return
        self._quiet += 1
        if self._quiet < QUIET_BEATS or not os.path.exists(self._ask):
            return
        if self._answering is None or not self._answering.is_alive():
            self._answering = threading.Thread(target=self._answer, name="rerail-flight", daemon=True)
            self._answering.start()

    def _answer(self) -> None:
        traces: dict[str, msgspec.Raw] = {}
        for name, dump in self._dumps().items():
            with contextlib.suppress(Exception):  # a recorder that torch offers in another way than we know is none
                traces[name] = msgspec.Raw(dump())
        with contextlib.suppress(OSError, ValueError):
            os.unlink(self._ask)
            if not traces:
                return
            answer = {
                "formed_ns": fabric.formed_ns,
                "groups": {group.key: group.members for group in fabric.groups},
                "traces": traces,
            }
            draft = self._path.with_suffix(".tmp")
            draft.write_bytes(msgspec.json.encode(answer))
            draft.replace(self._path)


def answer(error_file: str) -> Callable[[int], None] | None:
    """What is to be called at every beat; None where torch has nothing to give."""
    known = {name: dump for name, torchs in HANDLERS.items() if (dump := handler(torchs)) is not None}
    if not error_file or not known:
        return None

    def dumps() -> dict[str, Dump]:
        # NCCL's recorder asks CUDA events whether they are over, and those of aborted wires may be gone.
        return {name: dump for name, dump in known.items() if name != "nccl" or not fabric.aborted}

    try:
        return Answerer(error_file, dumps).look
    except OSError:
        return None


def handler(name: str) -> Dump | None:
    """One of torch's control-plane handlers as a function; None where this torch does not have it."""
    found: Any = None
    with contextlib.suppress(AttributeError, RuntimeError, ValueError):
        found = getattr(_c10d, "_get_handler")(name)  # noqa: B009 - the stub file does not know it
    if found is None:
        return None

    def dump() -> bytes:
        response = _Response()
        found(_Request(), response)
        return response.content

    return dump


class _Request(_c10d._Request):
    """Asks for everything: the default of both handlers."""

    def __init__(self) -> None:
        super().__init__()

    def body(self) -> bytes:
        return b""

    def params(self) -> dict[str, str]:
        return {}

    def get_param(self, name: str) -> str:
        return ""


class _Response(_c10d._Response):
    def __init__(self) -> None:
        super().__init__()
        self.content = b""

    def set_content(self, content: str | bytes, content_type: str) -> None:
        self.content = content.encode() if isinstance(content, str) else content

    def set_status(self, status: int) -> None:
        if status >= 400:
            raise RuntimeError(f"the flight recorder answers {status}")
