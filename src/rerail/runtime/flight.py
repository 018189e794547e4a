"""Asks the ranks of this node for torch's flight recorder when one hangs: turns their files into lines of evidence.

A question is a file next to the rank's error file, the answer another (see `session.flight`). Called by `runtime.agent`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from rerail.diagnose.flight import read, tell
from rerail.runtime import stacks
from rerail.runtime.slots import Slot

ANSWER_S = 0.5
"""A rank looks at every beat and then reads some 2000 entries. What comes later is not waited for."""
LOOK_EVERY_S = 0.02
SILENT_S = 0.5
"""A rank whose beat is older runs no Python any more, and will not answer."""


async def where(slot: Slot, slots: Sequence[Slot]) -> str:
    """Where a rank that hangs stands: what the others of the node wait for, then its frames, innermost first."""
    if slot.child is None or not slot.joined or slot.error_file == Path():
        return ""
    told, frames = await asyncio.gather(ask(slots), stacks.ask(slot.child.pid, slot.error_file))
    return "\n".join(part for part in (told, frames) if part)


async def ask(slots: Sequence[Slot]) -> str:
    """What the flight recorders of these ranks say; empty if they say nothing, or torch has none."""
    asked: dict[int, Path] = {}
    awaited: list[Path] = []
    for slot in slots:
        path = slot.error_file.with_name(stacks.FLIGHT) if slot.error_file != Path() else slot.error_file
        if not slot.running or not slot.joined or not path.is_file():
            continue
        with contextlib.suppress(OSError):
            path.write_bytes(b"")
            path.with_name(stacks.FLIGHT_ASK).touch()
            asked[slot.rank] = path
            if slot.clock.read().beat_age < SILENT_S:
                awaited.append(path)
    until = time.monotonic() + ANSWER_S
    while not all(map(_size, awaited)) and time.monotonic() < until:
        await asyncio.sleep(LOOK_EVERY_S)
    answers = {rank: read(_content(path)) for rank, path in asked.items()}
    records = {rank: record for rank, record in answers.items() if record is not None}
    return "\n".join(tell(records, [rank for rank in asked if rank not in records]))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
