"""The founding reference beside the model and rerail: turns a size into the seconds that each says a fault costs. Pure.

The reference: one server with eight processors, a GPT-3 of 3 or 15 billion parameters, a shared store that writes 2.7 GB/s and reads
4.8 GB/s. Its two sizes give a straight line: a flush takes 7.5 s and 20.25 bytes for each parameter, which meets both because it was
drawn through them. What it calls load does not lie on a line through zero (3 s and 90 s: the smaller one came out of memory, the
larger one reached 70 % of the store's speed), so loads are modelled as bytes over speed, 63.3 s for the larger.
Called by `rerail plan --reference`.
"""

from __future__ import annotations

import msgspec

WRITE, READ = 2.7e9, 4.8e9
FLUSH_S, BYTES = 7.5, 20.25
DETECT_S, HANDLE_S = 5.0, 30.0
START_S, START_PER_PARAM = 53.75, 4.4167e-9
"""What a restart takes besides loading: 67 s with 3 billion parameters, 120 s with 15."""

OWN_BYTES = 12.0
"""fp32 parameters and Adam's two moments."""
OWN_WRITE = 0.85
"""Of what the disk can do: the bar that rerail's saves are measured against."""
OWN_START_S = 5.6
"""Start of the process to the first step without loading, measured on one H200 with 3 billion parameters."""
OWN_DETECT_S, OWN_HANDLE_S, OWN_REPLACE_S = 0.5, 0.5, 2.0
"""A process that ends is seen at once; a hang after a few steps. Replacing one rank in the soak: 1.84 s."""


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds."""

    flush: float
    detect: float
    handle: float
    restart: float
    """All of it, load included."""
    load: float

    def fault(self, interval_s: float) -> float:
        """T of one fault with saves so far apart: T0 = half of it."""
        return interval_s / 2 + self.detect + self.handle + self.restart


PUBLISHED = {
    3e9: Times(flush=30.0, detect=5.0, handle=30.0, restart=70.0, load=3.0),
    15e9: Times(flush=120.0, detect=5.0, handle=30.0, restart=210.0, load=90.0),
}


def modelled(params: float) -> Times:
    """The founding system, by its own two sizes."""
    load = params * BYTES / READ
    return Times(
        flush=FLUSH_S + params * BYTES / WRITE,
        detect=DETECT_S,
        handle=HANDLE_S,
        restart=START_S + START_PER_PARAM * params + load,
        load=load,
    )


def expected(params: float) -> Times:
    """rerail on the same server, all ranks started anew from the store."""
    state = params * OWN_BYTES
    load = state / READ
    return Times(
        flush=state / (WRITE * OWN_WRITE),
        detect=OWN_DETECT_S,
        handle=OWN_HANDLE_S,
        restart=OWN_START_S + load,
        load=load,
    )


def replaced(params: float) -> Times:
    """rerail where one rank is replaced and loads its own share from the memory of the host; the flush is that of a snapshot."""
    copy = params * OWN_BYTES / 8 / 25e9
    return Times(flush=copy, detect=OWN_DETECT_S, handle=0.0, restart=OWN_REPLACE_S + copy, load=copy)
