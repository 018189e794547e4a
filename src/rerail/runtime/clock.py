"""The step clock and step journal: one shared memory page per rank, written by the rank, read by its agent.

The agent makes the page (a memfd, so it outlives the rank and leaves no name behind) and hands it to whichever process
is the rank. The rank writes its step, phase and a beat into it, which costs well under a microsecond each and no system
call; the agent reads them to see hangs. Behind the header lie two slots for the rank's *small* exact state (RNG, data
cursor, scheduler): a dead rank's position is therefore known to its successor.

Called by `session` (writes), `runtime.agent` and `detect.hang` (read). Needs no torch.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
import zlib
from enum import IntEnum

import msgspec

from rerail.errors import StateError

MAGIC = 0x7265_7261_696C_0001
HEADER = 4096
SLOT = 4 << 20
"""Bytes for one small state. The page is sparse: what is not written takes no memory."""
HEARD = 4 << 20
"""Bytes for what the rank heard from its peers while it was built, to be heard again by a successor."""
SIZE = HEADER + 2 * SLOT + HEARD
HISTORY = 64
"""Step durations kept for the learnt threshold and for reports."""

_OFF_MAGIC, _OFF_BEAT, _OFF_STEP, _OFF_PHASE, _OFF_SINCE = 0, 8, 16, 24, 32
_OFF_GENERATION, _OFF_COMM, _OFF_PENDING, _OFF_STEPS_SEEN, _OFF_OWNER = 40, 48, 56, 64, 72
_OFF_NAME, _NAME, _OFF_LEASE = 80, 40, 120
_OFF_HISTORY = 128
_OFF_METRICS = 128 + 8 * HISTORY
_OFF_TOOK = 1024
METRICS = ("loss", "grad_norm")
"""Names of metrics that say something about the health of training."""
_HEARD_AT = HEADER + 2 * SLOT
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")
_PHASE_SINCE = struct.Struct("<QQ")
_TOOK = struct.Struct("<qdddd")
_METRIC = struct.Struct("<qdq")  # version, value, and the version at which it last ceased to be a finite number
_SLOT_HEAD = struct.Struct("<qQQII")  # version, lengths of body and rest, checksum of all of it, that of the rest alone


class Phase(IntEnum):
    """What a rank is doing, as far as its agent needs to know."""

    BUILDING = 0
    """Before its first step: imports, model construction, data set-up."""
    COMPUTE = 1
    """Inside a step."""
    COMM = 2
    """Waiting for a collective."""
    UPDATE = 3
    """Inside optimizer.step(), or behind it."""
    OUTSIDE = 4
    """Between steps: evaluation, logging, loading the next batch."""
    PARKED = 5
    """Waiting for a plan."""
    RUN_OUT = 6
    """Running an interrupted step to its end without peers, to be thrown away."""
    DONE = 7


class Took(msgspec.Struct, frozen=True, array_like=True):
    """Where the seconds of one completed step went."""

    version: int
    data: float
    compute: float
    communication: float
    """Waiting for others."""
    checkpoint: float


class Metric(msgspec.Struct, frozen=True, array_like=True):
    """A number the user's script told."""

    version: int
    value: float
    unsound: int
    """The version at which it last ceased to be a finite number; 0: never."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a clock. Ages in seconds."""

    beat_age: float
    step: int
    """Completed updates, -1 before the rank has tracked anything."""
    phase: Phase
    phase_age: float
    generation: int
    collectives: int
    """Collectives started since the process began."""
    pending_age: float
    """How long the newest collective has been under way; 0 when it is complete."""
    durations: tuple[float, ...]
    """Of the newest steps, oldest first."""
    collective: str = ""
    """What the newest one that took a while was: `allreduce of default`."""


class StepClock:
    """The page, from either side."""

    def __init__(self, fd: int) -> None:
        if os.fstat(fd).st_size < SIZE:
            os.ftruncate(fd, SIZE)
        self._map = mmap.mmap(fd, SIZE)
        self._next_slot = self._steps_seen = -1
        self._rests = [b"", b""]
        """What this process has written to each slot besides the body."""
        self._rest_crcs = [0, 0]
        self._heard_end = 0
        if _U64.unpack_from(self._map, _OFF_MAGIC)[0] != MAGIC:
            _I64.pack_into(self._map, _OFF_STEP, -1)
            _I64.pack_into(self._map, _OFF_OWNER, -1)
            _U64.pack_into(self._map, _OFF_MAGIC, MAGIC)

    def close(self) -> None:
        self._map.close()

    @property
    def owner(self) -> int:
        """The rank whose state lies here, or -1."""
        return int(_I64.unpack_from(self._map, _OFF_OWNER)[0])

    @owner.setter
    def owner(self, rank: int) -> None:
        _I64.pack_into(self._map, _OFF_OWNER, rank)

    def lease(self, until_ns: int) -> None:
        """The agent's side: the rank here may complete steps until then (`now_ns`); 0 is for ever."""
        _U64.pack_into(self._map, _OFF_LEASE, until_ns)

    @property
    def lease_over(self) -> bool:
        """The rank's side: whether its place may have been given to another by now."""
        return is_over(self._u64(_OFF_LEASE))

    # --- the rank's side: no system calls, no allocation worth naming ---

    def reset(self, generation: int) -> None:
        """A new process takes over the page; the small state stays."""
        now = time.monotonic_ns()
        _U64.pack_into(self._map, _OFF_BEAT, now)
        _U64.pack_into(self._map, _OFF_PHASE, Phase.BUILDING)
        _U64.pack_into(self._map, _OFF_SINCE, now)
        _U64.pack_into(self._map, _OFF_GENERATION, generation)
        _U64.pack_into(self._map, _OFF_COMM, 0)
        _U64.pack_into(self._map, _OFF_PENDING, 0)
        self._map[_OFF_METRICS:HEADER] = bytes(HEADER - _OFF_METRICS)

    def beat(self, pending_since_ns: int = 0, collectives: int = 0, name: str = "") -> None:
        """The rank's own watcher thread is alive; `pending_since_ns` when a collective is under way, else 0."""
        if pending_since_ns:
            self._map[_OFF_NAME : _OFF_NAME + _NAME] = name.encode()[:_NAME].ljust(_NAME, b"\0")
        _U64.pack_into(self._map, _OFF_PENDING, pending_since_ns)
        _U64.pack_into(self._map, _OFF_COMM, collectives)
        _U64.pack_into(self._map, _OFF_BEAT, time.monotonic_ns())

    def enter(self, phase: Phase) -> None:
        _PHASE_SINCE.pack_into(self._map, _OFF_PHASE, phase, time.monotonic_ns())

    def set_generation(self, generation: int) -> None:
        _U64.pack_into(self._map, _OFF_GENERATION, generation)

    def set_step(self, step: int) -> None:
        _I64.pack_into(self._map, _OFF_STEP, step)

    def step_took(self, seconds: float, version: int, *phases: float) -> None:
        """Add the duration of a completed step, and where it went (the fields of Took), to the history."""
        if self._steps_seen < 0:
            (self._steps_seen,) = _U64.unpack_from(self._map, _OFF_STEPS_SEEN)
        seen = self._steps_seen
        _U64.pack_into(self._map, _OFF_HISTORY + 8 * (seen % HISTORY), int(seconds * 1e9))
        _TOOK.pack_into(self._map, _OFF_TOOK + 40 * (seen % HISTORY), version, *phases)
        self._steps_seen = seen + 1
        _U64.pack_into(self._map, _OFF_STEPS_SEEN, seen + 1)

    def set_metric(self, index: int, value: float) -> None:
        """The newest value of a metric, and the step it is of. One that is not finite is remembered: nobody looks at every step."""
        at = _OFF_METRICS + _METRIC.size * index
        (step,) = _I64.unpack_from(self._map, _OFF_STEP)
        _, before, unsound = _METRIC.unpack_from(self._map, at)
        if not math.isfinite(value) and math.isfinite(before):
            unsound = step
        _METRIC.pack_into(self._map, at, step, value, unsound)

    def write_small(self, version: int, body: bytes, rest: bytes = b"") -> None:
        """Seal the small state of `version`. Two slots alternate, so a crash in between leaves the older one whole.

        `rest` is the part that seldom changes: the same object as two steps before is not written again.
        """
        if len(body) + len(rest) > SLOT - _SLOT_HEAD.size:
            raise StateError(
                f"the small state of version {version} has {len(body) + len(rest)} bytes; at most "
                f"{SLOT - _SLOT_HEAD.size} fit. "
                "Data loader states belong here, tensors do not: track large objects by a state_dict of tensors."
            )
        slot = self._next_slot
        if slot < 0:  # a successor must not overwrite the newest state it was left
            left = {s: _SLOT_HEAD.unpack_from(self._map, HEADER + s * SLOT)[0] for s in (0, 1)}
            slot = 1 if left[0] > left[1] else 0
        at, end = HEADER + slot * SLOT, HEADER + (slot + 1) * SLOT
        self._next_slot = slot ^ 1
        _I64.pack_into(self._map, at, -1)
        self._map[at + _SLOT_HEAD.size : at + _SLOT_HEAD.size + len(body)] = body
        if rest is not self._rests[slot]:
            self._map[end - len(rest) : end] = rest
            self._rests[slot], self._rest_crcs[slot] = rest, zlib.crc32(rest)
        rest_crc = self._rest_crcs[slot]
        crc = zlib.crc32(body, _seed(version, len(body), len(rest), rest_crc))
        _SLOT_HEAD.pack_into(self._map, at, version, len(body), len(rest), crc, rest_crc)

    def forget_heard(self) -> None:
        """A process that builds among living peers begins the log anew."""
        self._heard_end = 0
        _U32.pack_into(self._map, _HEARD_AT, 0)

    def hear(self, record: bytes) -> bool:
        """Append one record to the log. False when it is full."""
        at = _HEARD_AT + self._heard_end
        if self._heard_end + len(record) + 2 * _U32.size > HEARD:
            return False
        self._map[at + _U32.size : at + _U32.size + len(record)] = record
        _U32.pack_into(self._map, at + _U32.size + len(record), 0)
        _U32.pack_into(self._map, at, len(record))
        self._heard_end += _U32.size + len(record)
        return True

    # --- the reader's side: the agent, or a successor ---

    def read_heard(self) -> list[bytes]:
        """All records of the log, oldest first."""
        found, at = [], _HEARD_AT
        while at + _U32.size <= SIZE:
            (length,) = _U32.unpack_from(self._map, at)
            if not length or at + _U32.size + length > SIZE:
                break
            found.append(bytes(self._map[at + _U32.size : at + _U32.size + length]))
            at += _U32.size + length
        return found

    def newest_small(self) -> int:
        """The version last sealed, or -1; for a look that costs nothing."""
        return max(int(_SLOT_HEAD.unpack_from(self._map, HEADER + slot * SLOT)[0]) for slot in (0, 1))

    def read_small(self) -> dict[int, tuple[bytes, bytes]]:
        """The sealed small states, body and rest, by version. A torn slot is left out."""
        found: dict[int, tuple[bytes, bytes]] = {}
        for slot in (0, 1):
            at, end = HEADER + slot * SLOT, HEADER + (slot + 1) * SLOT
            version, length, rest_length, crc, rest_crc = _SLOT_HEAD.unpack_from(self._map, at)
            if version < 0 or length + rest_length > SLOT - _SLOT_HEAD.size:
                continue
            body = bytes(self._map[at + _SLOT_HEAD.size : at + _SLOT_HEAD.size + length])
            rest = bytes(self._map[end - rest_length : end])
            whole = zlib.crc32(body, _seed(version, length, rest_length, rest_crc)) == crc
            if whole and zlib.crc32(rest) == rest_crc:
                found[version] = body, rest
        return found

    def durations(self) -> tuple[float, ...]:
        (seen,) = _U64.unpack_from(self._map, _OFF_STEPS_SEEN)
        count = min(seen, HISTORY)
        order = range(seen - count, seen)
        return tuple(_U64.unpack_from(self._map, _OFF_HISTORY + 8 * (i % HISTORY))[0] / 1e9 for i in order)

    def took(self, behind: int) -> list[Took]:
        """Completed steps with a version beyond `behind`, oldest first, as far as they are kept."""
        (seen,) = _U64.unpack_from(self._map, _OFF_STEPS_SEEN)
        order = range(seen - min(seen, HISTORY), seen)
        rows = (_TOOK.unpack_from(self._map, _OFF_TOOK + _TOOK.size * (i % HISTORY)) for i in order)
        return [Took(*row) for row in rows if row[0] > max(behind, 0)]

    def metrics(self) -> dict[str, Metric]:
        """Newest metrics by name, those that were ever told."""
        rows = {name: _METRIC.unpack_from(self._map, _OFF_METRICS + _METRIC.size * i) for i, name in enumerate(METRICS)}
        return {name: Metric(*row) for name, row in rows.items() if any(row)}

    def read(self) -> Reading:
        """One consistent-enough look: each field is written whole, the fields not all at one instant."""
        now = time.monotonic_ns()
        beat, since, pending = (self._u64(offset) for offset in (_OFF_BEAT, _OFF_SINCE, _OFF_PENDING))
        return Reading(
            beat_age=max(0, now - beat) / 1e9,
            step=_I64.unpack_from(self._map, _OFF_STEP)[0],
            phase=Phase(min(self._u64(_OFF_PHASE), Phase.DONE)),
            phase_age=max(0, now - since) / 1e9,
            generation=self._u64(_OFF_GENERATION),
            collectives=self._u64(_OFF_COMM),
            pending_age=max(0, now - pending) / 1e9 if pending else 0.0,
            durations=self.durations(),
            collective=bytes(self._map[_OFF_NAME : _OFF_NAME + _NAME]).rstrip(b"\0").decode(errors="replace"),
        )

    def _u64(self, offset: int) -> int:
        return int(_U64.unpack_from(self._map, offset)[0])


def _seed(version: int, length: int, rest_length: int, rest_crc: int) -> int:
    """What a checksum begins with, so that it stands for the head, too."""
    return (0x5EED5EED ^ version * 0x9E3779B1 ^ length * 0x85EBCA77 ^ rest_length * 0xC2B2AE3D ^ rest_crc) & 0xFFFFFFFF


def now_ns() -> int:
    """The clock of leases: it goes on while the machine is asleep."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic_ns()


def is_over(until_ns: int) -> bool:
    """Whether a lease that ends then has ended; 0 is no lease."""
    return until_ns > 0 and now_ns() > until_ns


def make_page() -> int:
    """A new, empty page as a file descriptor. The caller owns it."""
    fd = os.memfd_create("rerail-step-clock", os.MFD_CLOEXEC)
    os.ftruncate(fd, SIZE)
    return fd
