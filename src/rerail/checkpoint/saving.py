"""One save: turns a sealed slot into a committed step on a tier.

    shard (synced) -> manifest (synced) -> [all ranks' manifests are there] -> COMMIT (synced) -> told

The lowest rank of the group is the coordinator: it waits for the others' manifests and commits. If a rank cannot write,
it says so beside its manifest, the coordinator writes ABORT, and all ranks go to the next tier together. Called by
`checkpoint.persister` in a thread for each save. Needs no torch.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import msgspec

from rerail.checkpoint import manifest, names
from rerail.checkpoint.arena import Meta
from rerail.checkpoint.catalog import Step, check_whole, folders
from rerail.checkpoint.manifest import Commit, RankEntry, RankManifest, SavedBox, SavedTensor
from rerail.checkpoint.names import StepId
from rerail.checkpoint.reading import mark, verify
from rerail.checkpoint.retention import Keep, prune
from rerail.checkpoint.tiers import Source, Tier, tier_at
from rerail.errors import CheckpointError

TRIES = 2
"""Times a rank writes its shard to one tier, each time to a new file."""
GONE_S = 10.0
"""Seconds to wait for the other ranks once this rank itself is gone, in addition to what the save has taken so far: they
may be gone, too, and never have begun it."""
_LOOK_S = (0.01, 0.5)
"""Seconds between two looks for the others' files: the first, and the longest."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to save, and where to."""

    version: int
    epoch: int
    generation: int
    rank: int
    group: tuple[int, ...]
    """The ranks that save together."""
    world_size: int
    tiers: tuple[str, ...]
    """Where to, in order; the next one only if the one before failed. Those behind get copies."""
    depots: str = ""
    """What `config.DEPOTS` is by now: a node that was lost may be back elsewhere."""
    keep: Keep = Keep()
    job: str = ""
    layout: dict[str, str] = {}
    """How each tracked module is spread over the ranks, in words."""
    metrics: dict[str, float | None] = {}
    """None is what JSON makes of a number that is none."""
    versions: dict[str, str] = {}
    read_back: bool = True
    """Read the shard from the disk again once it is committed, at low priority."""
    deadline_s: float = 600.0
    """Seconds that the slowest rank may take after this one."""

    @property
    def id(self) -> StepId:
        return StepId(self.epoch, self.version, self.generation)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an order."""

    version: int
    ok: bool
    url: str = ""
    """The tier it was committed to."""
    copied_to: str = ""
    """Not a save, but a copy of one: the tier it was to be copied to."""
    seconds: float = 0.0
    size: int = 0
    notes: tuple[str, ...] = ()
    """What went wrong on the way, whether or not it was saved in the end."""


class Held(Protocol):
    """The state that is to be saved: in an arena, or still in the tensors of the rank."""

    def lock_for_reading(self, version: int) -> bool: ...

    def unlock(self, version: int) -> None: ...

    def meta(self, version: int) -> Meta: ...

    def source(self, version: int, size: int) -> Source: ...

    def holds(self, version: int) -> bool:
        """Whether it has been there all the while."""


def claim_epoch(tier: Tier, job: str, others: Sequence[Tier] = ()) -> int:
    """A number for this job that is greater than that of any job that wrote here, or to the other tiers, before.

    Another tier that cannot be reached is left out: a job must be able to start without it.
    """
    tier.make_folder("")
    elsewhere = _newest_reachable(other.url for other in others)
    while True:
        epoch = max(newest_epoch(tier), elsewhere) + 1
        body = msgspec.json.encode({"job": job, "claimed_at": time.time()})
        with contextlib.suppress(FileExistsError):
            tier.put(names.epoch_name(epoch), body, exclusive=True)
            return epoch


def newest_epoch(tier: Tier) -> int:
    """The newest that was claimed or has saved here."""
    claimed = [epoch for name in tier.names() if (epoch := names.epoch_of(name)) is not None]
    saved = [step.epoch for name in tier.names() if (step := names.step_of(name)) is not None]
    return max([*claimed, *saved], default=0)


def _newest_reachable(urls: Iterable[str]) -> int:
    found = [0]
    for url in urls:
        with contextlib.suppress(OSError, CheckpointError):
            found.append(newest_epoch(tier_at(url)))
    return max(found)


class Patience:
    """How long one save waits for the other ranks."""

    def __init__(self, limit_s: float, gone: Callable[[], bool]) -> None:
        self._limit_s, self._gone = limit_s, gone
        self._began, self._gone_at = time.monotonic(), 0.0

    def until(self, condition: Callable[[], bool], what: Callable[[], str]) -> None:
        """Look until the condition holds. CheckpointError when that takes too long."""
        since, pause = time.monotonic(), _LOOK_S[0]
        while not condition():
            now = time.monotonic()
            if self._gone() and not self._gone_at:
                self._gone_at = now
            if now - since > self._limit_s:
                raise CheckpointError(f"{what()} after {self._limit_s:.0f} s")
            if self._gone_at and now - self._gone_at > GONE_S + self._gone_at - self._began:
                raise CheckpointError(f"{what()} {now - self._gone_at:.0f} s after this rank was gone")
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_S[1])


def carry_out(
    order: Order, held: Held, busy: Callable[[], set[StepId]], gone: Callable[[], bool] = lambda: False
) -> Iterator[Outcome]:
    """Save to the first tier that takes it, then look after what is there.

    `busy`: saves under way, whose folders are not to be tidied up. `gone`: whether the rank has ended meanwhile.
    """
    started, notes = time.monotonic(), list[str]()
    patience = Patience(order.deadline_s, gone)
    if not held.lock_for_reading(order.version):
        notes.append("the snapshot was overwritten before it could be saved")
        yield Outcome(version=order.version, ok=False, notes=tuple(notes))
        return
    try:
        meta = held.meta(order.version)
        saved = _to_first_tier(order, held, meta, notes, patience)
    finally:
        held.unlock(order.version)
    seconds = time.monotonic() - started
    size = meta.file_size if meta.saved else 0
    url = saved[0].url if saved else ""
    yield Outcome(version=order.version, ok=bool(saved), url=url, seconds=seconds, size=size, notes=tuple(notes))
    if saved:
        _look_after(*saved, order, busy)


def _to_first_tier(
    order: Order, held: Held, meta: Meta, notes: list[str], patience: Patience
) -> tuple[Tier, RankManifest] | None:
    for url in order.tiers:
        try:
            tier = tier_at(url)
            return tier, _save_to(tier, order, held, meta, notes, patience)
        except (OSError, CheckpointError) as error:
            notes.append(f"it cannot be saved to {url}: {error}")
    return None


def _look_after(tier: Tier, written: RankManifest, order: Order, busy: Callable[[], set[StepId]]) -> None:
    try:
        if order.read_back and tier.lasting:
            verify(tier, order.id.folder, written)
            mark(tier, order.id.folder, order.rank)
    except (OSError, CheckpointError) as error:
        with contextlib.suppress(OSError):
            if names.COMMIT not in tier.names(order.id.folder):
                return  # a newer one has taken its place meanwhile
        print(f"rerail: checkpoint of step {order.version} read back wrong: {error}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError, CheckpointError):
        if order.rank == min(order.group):
            prune(tier, order.keep, order.id, busy())


def _save_to(tier: Tier, order: Order, held: Held, meta: Meta, notes: list[str], patience: Patience) -> RankManifest:
    folder = order.id.folder
    try:
        tier.make_folder(folder)
        written = _write_rank(tier, order, held, meta, notes)
    except Exception as error:  # whatever it is: the others must not wait for this rank
        with contextlib.suppress(OSError):
            tier.put(f"{folder}/{names.failure_name(order.rank)}", str(error).encode())
        if order.rank == min(order.group):
            _abort(tier, folder, f"rank {order.rank}: {error}")
        raise
    if order.rank == min(order.group):
        _commit_when_whole(tier, order, patience)
    else:
        _wait_for_commit(tier, order, patience)
    return written


def _write_rank(tier: Tier, order: Order, held: Held, meta: Meta, notes: list[str]) -> RankManifest:
    """Shard, then manifest. A manifest that is there is never replaced: COMMIT may vouch for it already."""
    path = f"{order.id.folder}/{names.manifest_name(order.rank)}"
    if names.manifest_name(order.rank) not in tier.names(order.id.folder):
        written = _described(order, meta, *_write_shard(tier, order, held, meta, notes))
        with contextlib.suppress(FileExistsError):
            tier.put(path, manifest.encode(written), exclusive=True)
            return written
    # a persister that died had come this far, or a living one carries out the same order
    found = manifest.decode_own(tier.get(path, manifest.LARGEST), order.id, order.rank)
    if found != _described(order, meta, found.file, _hashes(held, order, found) if meta.saved else []):
        raise CheckpointError(f"{path} is there already, of another state")
    return found


def _hashes(held: Held, order: Order, found: RankManifest) -> list[str]:
    source, size = held.source(order.version, found.size), found.size
    lengths = ((at, min(found.chunk, size - at)) for at in range(0, size, found.chunk))
    return [manifest.digest(source(at, length)[:length]) for at, length in lengths]


def _write_shard(tier: Tier, order: Order, held: Held, meta: Meta, notes: list[str]) -> tuple[str, list[str]]:
    """Name and checksums of a new file."""
    if not meta.saved:
        return "", []
    there = tier.names(order.id.folder)
    free = (name for n in range(1000) if (name := names.shard_name(order.rank, n)) not in there)
    for tries, file in enumerate(free, start=1):
        try:
            source = held.source(order.version, meta.file_size)
            hashes = tier.put_large(f"{order.id.folder}/{file}", source, meta.file_size, manifest.CHUNK)
            break
        except OSError as error:
            if tries == TRIES:
                raise
            notes.append(f"{tier.url}: {file}: {error}; tried again")
    else:
        raise CheckpointError(f"{order.id.folder} is full of shards that were never finished")
    if not held.holds(order.version):
        raise CheckpointError("the snapshot was overwritten while it was being saved")
    return file, hashes


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


def _commit_when_whole(tier: Tier, order: Order, patience: Patience) -> None:
    folder = order.id.folder
    wanted = {names.manifest_name(rank): rank for rank in order.group}
    failures = {names.failure_name(rank): rank for rank in order.group}

    def missing() -> list[int]:
        there = set(tier.names(folder))
        if names.ABORT in there:  # by a persister that died: the others have gone on to the next tier
            raise CheckpointError("given up before")
        for name in failures.keys() & there:
            told = tier.get(f"{folder}/{name}", 1 << 16).decode(errors="replace")
            raise CheckpointError(f"rank {failures[name]} could not write: {told}")
        return [rank for name, rank in wanted.items() if name not in there]

    try:
        patience.until(lambda: not missing(), lambda: f"ranks {missing()} have not saved")
        texts = {rank: tier.get(f"{folder}/{name}", manifest.LARGEST) for name, rank in sorted(wanted.items())}
        entries = {str(rank): RankEntry(len(text), manifest.digest(text)) for rank, text in texts.items()}
        insist_on_newest(order)
        commit = Commit(
            epoch=order.epoch,
            step=order.version,
            generation=order.generation,
            world_size=order.world_size,
            ranks=entries,
            saved_at=time.time(),
            job=order.job,
            metrics={name: x for name, x in order.metrics.items() if x is not None and math.isfinite(x)},
            versions=order.versions,
            layout=order.layout,
        )
        # what could not be loaded is not committed
        manifests = {rank: manifest.decode_rank(text, commit, rank) for rank, text in texts.items()}
        check_whole(Step(tier, order.id, commit, manifests))
        _commit(tier, commit)
    except (OSError, CheckpointError) as error:
        _abort(tier, folder, str(error))
        raise


def _commit(tier: Tier, commit: Commit) -> None:
    path, data = f"{commit.id.folder}/{names.COMMIT}", manifest.encode_commit(commit)
    manifest.decode_commit(data, commit.id)
    try:
        tier.put(path, data, exclusive=True)
    except FileExistsError:
        found = manifest.decode_commit(tier.get(path, manifest.LARGEST), commit.id)
        if (found.world_size, found.ranks) != (commit.world_size, commit.ranks):
            raise CheckpointError(f"{path} is there already, of another state") from None


def insist_on_newest(order: Order) -> None:
    """An old job must not go on writing, to any of the tiers that can be read."""
    newest = _newest_reachable(order.tiers)
    if newest > order.epoch:
        raise CheckpointError(f"another job (epoch {newest}) has begun to write here; this one is epoch {order.epoch}")


def _wait_for_commit(tier: Tier, order: Order, patience: Patience) -> None:
    folder = order.id.folder

    def decided() -> bool:
        there = tier.names(folder)
        if names.COMMIT in there:
            return True
        if names.ABORT in there:
            told = tier.get(f"{folder}/{names.ABORT}", 1 << 16).decode(errors="replace")
            raise CheckpointError(f"given up by the coordinator: {told}")
        return names.manifest_name(order.rank) not in there and _replaced(tier, order.id)

    patience.until(decided, lambda: "the coordinator has neither committed nor given up")


def _replaced(tier: Tier, step: StepId) -> bool:
    """Its folder seems to be gone. Whether that is because a newer step has been committed meanwhile."""
    return any(found.committed and found.id > step for found in folders(tier))


def _abort(tier: Tier, folder: str, why: str) -> None:
    with contextlib.suppress(OSError):
        tier.put(f"{folder}/{names.ABORT}", why.encode())
