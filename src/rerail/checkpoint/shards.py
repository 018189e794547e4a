"""One rank's part of a save: its shard, then the manifest that describes it.

Called by `checkpoint.saving`. Needs no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rerail.checkpoint import manifest, names
from rerail.checkpoint.arena import Meta
from rerail.checkpoint.manifest import RankManifest, SavedBox, SavedTensor
from rerail.checkpoint.tiers import Source, Tier
from rerail.errors import CheckpointError

if TYPE_CHECKING:
    from rerail.checkpoint.saving import Held, Order

TRIES = 2
"""Times a rank writes its shard to one tier, each time to a new file."""


@dataclass(frozen=True)
class Part:
    """What one rank writes to one tier."""

    tier: Tier
    order: Order
    held: Held
    meta: Meta
    notes: list[str]
    heed: Callable[[], None]
    """Raises CheckpointError once the others save elsewhere."""
    later: bool
    """It is not the first tier: this rank had to leave the ones before."""


def write(part: Part) -> RankManifest:
    """Shard, then manifest. A manifest that is there is never replaced: COMMIT may vouch for it already."""
    tier, order, meta = part.tier, part.order, part.meta
    path = f"{order.id.folder}/{names.manifest_name(order.rank)}"
    if names.manifest_name(order.rank) not in tier.names(order.id.folder):
        written = _described(order, meta, *_write_shard(part))
        with contextlib.suppress(FileExistsError):
            tier.put(path, manifest.encode(written), exclusive=True)
            return written
    # a persister that died had come this far, or a living one carries out the same order
    found = manifest.decode_own(tier.get(path, manifest.LARGEST), order.id, order.rank)
    if found != _described(order, meta, found.file, _hashes(part.held, order, found) if meta.saved else []):
        raise CheckpointError(f"{path} is there already, of another state")
    return found


def _hashes(held: Held, order: Order, found: RankManifest) -> list[str]:
    source, size = held.source(order.version, found.size), found.size
    lengths = ((at, min(found.chunk, size - at)) for at in range(0, size, found.chunk))
    return [manifest.digest(source(at, length)[:length]) for at, length in lengths]


def _write_shard(part: Part) -> tuple[str, list[str]]:
    """Name and checksums of a new file."""
    tier, order, meta = part.tier, part.order, part.meta
    if not meta.saved:
        return "", []
    there = tier.names(order.id.folder)
    free = (name for n in range(1000) if (name := names.shard_name(order.rank, n)) not in there)
    for tries, file in enumerate(free, start=1):
        try:
            source = _heeding(part.held.source(order.version, meta.file_size), part.heed)
            hashes = tier.put_large(f"{order.id.folder}/{file}", source, meta.file_size, manifest.CHUNK)
            break
        except OSError as error:
            if tries == TRIES:
                raise
            part.notes.append(f"{tier.url}: {file}: {error}; tried again")
    else:
        raise CheckpointError(f"{order.id.folder} is full of shards that were never finished")
    if not part.held.holds(order.version):
        raise CheckpointError("the snapshot was overwritten while it was being saved")
    return file, hashes


def _heeding(source: Source, heed: Callable[[], None]) -> Source:
    def heeding(offset: int, size: int) -> memoryview:
        heed()
        return source(offset, size)

    return heeding


def _described(order: Order, meta: Meta, file: str, hashes: Sequence[str]) -> RankManifest:
    tensors: dict[str, SavedTensor] = {}
    for entry in meta.entries[: meta.saved]:
        known = tensors.get(entry.name)
        box = SavedBox(entry.start, entry.shape, entry.at)
        tensors[entry.name] = SavedTensor(entry.dtype, entry.whole, (*(known.boxes if known else ()), box))
    return RankManifest(
        epoch=order.epoch,
        step=order.version,
        generation=order.generation,
        rank=order.rank,
        world_size=order.world_size,
        file=file,
        size=meta.file_size if meta.saved else 0,
        hashes=tuple(hashes),
        tensors=tensors,
        small=meta.small,
    )
