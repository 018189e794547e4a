"""Copies of this rank's shadow in the memory of the next node, and what is left there of a rank that was lost with its node.

    a shadow is whole  ->  a thread of its own  ->  depot of the next node:  <rank>-<epoch>-<generation>-<version>/image, entries
    a newcomer         ->  asks every depot     ->  the newest of this run of the training

`entries` is written last: a copy without it is none. One copy is kept, and one may be on its way. How often is planned by what a copy
takes: the link is busy with them for a quarter of the time at most. Kept by `session.shadowing`; needs `checkpoint.depot` on every node.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import statistics
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from rerail.checkpoint.arena import Entry
from rerail.checkpoint.background import Background
from rerail.checkpoint.calls import SHADOWS
from rerail.checkpoint.casting import Mold
from rerail.checkpoint.dtypes import view_of
from rerail.checkpoint.header import to_page
from rerail.checkpoint.manifest import LARGEST, digest
from rerail.checkpoint.remote import RemoteTier
from rerail.checkpoint.shadow import Shadow
from rerail.config import DEPOT_KEY, DEPOTS
from rerail.errors import CheckpointError, StateError
from rerail.session.fabric import fabric

if TYPE_CHECKING:
    from rerail.session.job import Job

CHUNK = 4 << 20
LINK_SHARE = 0.25
"""Of the time, that copies may be on their way."""
AFTER_ERROR = 100
"""Steps after which it is tried again."""
_NAME = re.compile(r"(\d{1,9})-(\d{1,9})-(\d{1,9})-(\d{1,12})", re.ASCII)


class Copy(NamedTuple):
    """Of which version of which rank's parameters, in which run of the training: where all have gone back another one begins."""

    rank: int
    epoch: int
    generation: int
    version: int

    @property
    def folder(self) -> str:
        return SHADOWS + "-".join(map(str, self))

    @classmethod
    def of(cls, name: str) -> Copy | None:
        found = _NAME.fullmatch(name)
        return cls(*map(int, found.groups())) if found else None


class Described(msgspec.Struct, frozen=True, array_like=True):
    """What an image holds, and the checksum of each of its chunks."""

    entries: list[Entry]
    size: int
    hashes: list[str]


_described = msgspec.msgpack.Decoder(Described)


class Buddies:
    """Of one rank."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._thread = Background("rerail-buddy")
        self._next = 0
        """The version from which on a copy is due again."""
        self.sending = -1
        """The version that is on its way: its half is not to be filled anew."""
        self.sent = -1
        """The newest whose copy is whole."""
        self._told = False

    # --- sending ---

    def offer(self, shadow: Shadow, version: int) -> None:
        """A shadow of this version is whole. From the thread that made it."""
        if self._thread.busy or version < self._next or not self._job._checkpoints.on or len(_depots()) < 2:
            return
        self.sending = version
        self._thread.begin(partial(self._try, shadow, version))

    def settle(self) -> None:
        """Wait until nothing is on its way any more."""
        self._thread.wait()

    def _try(self, shadow: Shadow, version: int) -> None:
        began, used = time.monotonic(), time.thread_time()
        try:
            self._send(shadow, version)
            self._next = version + self._steps(time.monotonic() - began, time.thread_time() - used)
        except (OSError, CheckpointError, StateError) as error:
            self._next = version + AFTER_ERROR
            if not self._told:
                self._told = True
                text = f"its shadow could not be copied to the next node: {error}; were this node lost, it would be too"
                print(f"rerail: rank {self._job.rank}: {text}", file=sys.stderr, flush=True)
        finally:
            self.sending = -1

    def _send(self, shadow: Shadow, version: int) -> None:
        copy, tier = self._copy(version), self._next_node()
        entries, image = shadow.entries(version), shadow.image(version)
        size = max(entry.at + entry.size for entry in entries)
        before = [one for name in tier.names(SHADOWS) if (one := Copy.of(name)) and one.rank == copy.rank]
        if copy in before:
            return
        tier.make_folder(copy.folder)
        hashes = tier.put_large(f"{copy.folder}/image", lambda offset, here: image[offset : offset + here], size, CHUNK)
        if version not in shadow.versions() or copy != self._copy(version):
            tier.remove(copy.folder)  # it was overwritten meanwhile, or is of a past that never was
            return
        tier.put(f"{copy.folder}/entries", msgspec.msgpack.encode(Described(entries, size, hashes)))
        for older in before:
            tier.remove(older.folder)
        self.sent = version

    def _steps(self, took_s: float, cpu_s: float) -> int:
        """Until the next one. Where the CPU is what trains, it counts, too."""
        job = self._job
        step_s = statistics.median(job._durations) if job._durations else 0.0
        share = job._snapshots.shadow.share
        wanted = max(took_s / LINK_SHARE, cpu_s / share if job.device.type == "cpu" and share > 0 else 0.0)
        return math.ceil(wanted / step_s) if step_s > 0 else 1

    def _copy(self, version: int) -> Copy:
        epoch, _, generation = self._job._checkpoints.saves
        return Copy(self._job.rank, epoch, generation, version)

    def _next_node(self) -> RemoteTier:
        depots = _depots()
        own = fabric.nodes[self._job.rank] if fabric.nodes else 0
        return _tier(depots[(own + 1) % len(depots)])

    # --- what is left of a rank ---

    def fetch(self, mold: Mold) -> tuple[int, dict[str, torch.Tensor]] | None:
        """The newest copy that some node has of this rank's parameters, by name; None: there is none that fits."""
        like = self._copy(0)
        for depot in _depots() if self._job._checkpoints.on else ():
            try:
                tier = _tier(depot)
                copies = [one for name in tier.names(SHADOWS) if (one := Copy.of(name))]
                for copy in sorted((one for one in copies if one[:3] == like[:3]), reverse=True):
                    if "entries" in tier.names(copy.folder):
                        return copy.version, _read(tier, copy, mold)
            except (OSError, CheckpointError) as error:
                text = f"what the depot at {depot} has of its parameters cannot be used: {error}"
                print(f"rerail: rank {self._job.rank}: {text}", file=sys.stderr, flush=True)
        return None


def _read(tier: RemoteTier, copy: Copy, mold: Mold) -> dict[str, torch.Tensor]:
    """Every byte checked before any of it is used."""
    try:
        described = _described.decode(tier.get(f"{copy.folder}/entries", LARGEST))
    except msgspec.DecodeError as error:
        raise CheckpointError(f"its description cannot be read: {error}") from error
    wanted = [(entry.name, entry.dtype, entry.shape, entry.at) for entry in mold.entries]
    if [(entry.name, entry.dtype, entry.shape, entry.at) for entry in described.entries] != wanted:
        raise CheckpointError("it is of another model than the script builds")
    size = max(entry.at + entry.size for entry in mold.entries)
    if described.size != size or len(described.hashes) != -(-size // CHUNK):
        raise CheckpointError(f"it has {described.size} bytes in {len(described.hashes)} chunks, not {size}")
    room = memoryview(mmap.mmap(-1, to_page(size) + CHUNK))
    with tier.reading(f"{copy.folder}/image") as read:
        for number, known in enumerate(described.hashes):
            at, here = number * CHUNK, min(CHUNK, size - number * CHUNK)
            read(at, room[at : at + here], here)
            if digest(room[at : at + here]) != known:
                raise CheckpointError(f"chunk {number} does not match its checksum")
    return {entry.name: view_of(room, entry) for entry in mold.entries}


def _depots() -> list[str]:
    return [depot for depot in os.environ.get(DEPOTS, "").split(",") if depot]


def _tier(depot: str) -> RemoteTier:
    host, _, port = depot.rpartition(":")
    return RemoteTier(host, int(port), os.environ.get(DEPOT_KEY, ""), lasting=False)
