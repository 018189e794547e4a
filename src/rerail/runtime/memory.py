"""The shared memory of a node's ranks: turns a number of slots into step clock pages and snapshot arenas.

The launcher makes it and keeps it open, so that what the ranks left there outlives them and their agent; the agent finds
it by number in its environment. Memory without a name leaves nothing behind, and needs no room in /dev/shm.
Called by `runtime.launcher` and `runtime.agent`.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import NamedTuple

from rerail.runtime.clock import make_page

VARIABLE = "RERAIL_MEMORY"


class SlotMemory(NamedTuple):
    """File descriptors of one slot."""

    clock: int
    arena: int


def make(slots: int) -> list[SlotMemory]:
    """New, empty memory for every slot. The caller owns it."""
    return [SlotMemory(make_page(), os.memfd_create("rerail-arena", os.MFD_CLOEXEC)) for _ in range(slots)]


def describe(memory: list[SlotMemory]) -> str:
    """How a child process that inherits the descriptors is told about them."""
    return ",".join(f"{one.clock}:{one.arena}" for one in memory)


def found(slots: int, environ: MutableMapping[str, str] = os.environ) -> list[SlotMemory]:
    """The memory this process was given, or new one."""
    text = environ.pop(VARIABLE, "")
    if not text:
        return make(slots)
    memory = [SlotMemory(*map(int, pair.split(":"))) for pair in text.split(",")]
    for descriptor in (fd for one in memory for fd in one):
        os.set_inheritable(descriptor, False)
    return memory


def wipe(memory: SlotMemory) -> None:
    """Empty it, for a rank that is not the one whose state lies there. Nobody may have it mapped."""
    for descriptor in memory:
        os.ftruncate(descriptor, 0)
