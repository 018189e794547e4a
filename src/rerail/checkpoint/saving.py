"""One save: turns a sealed slot into a committed step on a tier.

    shard (synced) -> manifest (synced) -> [all ranks' manifests are there] -> COMMIT (synced) -> told

The lowest rank of the group is the coordinator: it waits for the others' manifests and commits. If a rank cannot write,
it says so beside its manifest, the coordinator writes ABORT, and all ranks go to the next tier; where the tier takes not even
that, they see each other there (`checkpoint.agreeing`). Called by `checkpoint.persister` in a thread for each save. Needs
no torch.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from rerail.checkpoint import manifest, names, shards
from rerail.checkpoint.agreeing import CommittedElsewhere, Others, has_left, insist_on_open, let_go
from rerail.checkpoint.arena import Meta
from rerail.checkpoint.catalog import Step, check_whole, folders
from rerail.checkpoint.manifest import Commit, RankEntry, RankManifest
from rerail.checkpoint.names import StepId
from rerail.checkpoint.places import PLAIN, Places
from rerail.checkpoint.reading import mark, verify
from rerail.checkpoint.retention import Keep, prune
from rerail.checkpoint.shards import Part
from rerail.checkpoint.tiers import Source, Tier
from rerail.errors import CheckpointError

GONE_S = 10.0
"""Seconds to wait for the other ranks once this rank itself is gone, in addition to what the save has taken so far: they
may be gone, too, and never have begun it."""
LATE_S = 10.0
"""Seconds, beyond those for a place that hangs, after which a coordinator that saves here has been seen here; and after which
what a rank has written and does not see is gone."""
_LOOK_S = (0.01, 0.5)
"""Seconds between two looks for the others' files: the first, and the longest."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to save, and where to."""

    version: int
    epoch: int
    generation: int
    rank: int
    group: tuple[int, ...]
    """The ranks that save together: all, or those that are there while the job goes on with fewer."""
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
    place: str = ""
    """Not a save, but news of the tier at `url`: `out` or `back`; why, in the first note."""
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


def _newest_reachable(urls: Iterable[str], places: Places = PLAIN) -> int:
    found = [0]
    for url in urls:
        with contextlib.suppress(OSError, CheckpointError):
            found.append(newest_epoch(places.at(url)))
    return max(found)


class Removed(CheckpointError):
    """The folder of a save has been removed: it was given up, and the place took no word of that."""


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
    order: Order,
    held: Held,
    busy: Callable[[], set[StepId]],
    gone: Callable[[], bool] = lambda: False,
    places: Places = PLAIN,
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
        saved = _to_first_tier(order, held, meta, notes, patience, places)
    finally:
        held.unlock(order.version)
    seconds = time.monotonic() - started
    size = meta.file_size if meta.saved else 0
    url = saved.url if saved else ""
    yield Outcome(version=order.version, ok=bool(saved), url=url, seconds=seconds, size=size, notes=tuple(notes))
    if saved:
        _look_after(saved, order, busy, places)


class _Saved(NamedTuple):
    """Where a step was committed, and what this rank wrote there: nothing, if it was on its way elsewhere."""

    url: str
    written: RankManifest | None


def _to_first_tier(
    order: Order, held: Held, meta: Meta, notes: list[str], patience: Patience, places: Places
) -> _Saved | None:
    out = {url: why for url in order.tiers if (why := places.out(url))}
    for url in (url for url in order.tiers if url not in out):
        try:
            heed = Others(order, url, places).heed
            part = Part(places.at(url), order, held, meta, notes, heed, later=url != order.tiers[0])
            written = _save_to(part, patience, places)
            places.saved(url)
            return _Saved(url, written)
        except CommittedElsewhere as found:
            return _Saved(found.url, None)
        except (OSError, CheckpointError) as error:
            places.failed(url, error, meta.file_size)
            notes.append(f"it cannot be saved to {url}: {error}")
    notes.extend(f"{url} is left alone for now, {why}" for url, why in out.items())
    return None


def _look_after(saved: _Saved, order: Order, busy: Callable[[], set[StepId]], places: Places) -> None:
    tier, first = places.at(saved.url), order.rank == min(order.group)
    try:
        if saved.written is not None and order.read_back and tier.lasting:
            verify(tier, order.id.folder, saved.written)
            mark(tier, order.id.folder, order.rank)
    except (OSError, CheckpointError) as error:
        with contextlib.suppress(OSError):
            if names.COMMIT not in tier.names(order.id.folder):
                return  # a newer one has taken its place meanwhile
        what = "read back wrong" if isinstance(error, CheckpointError) else "not marked as read back"
        print(f"rerail: checkpoint of step {order.version} {what}: {error}", file=sys.stderr, flush=True)
    for url in order.tiers[order.tiers.index(saved.url) + 1 :] if first else ():
        with contextlib.suppress(OSError, CheckpointError):
            let_go(places.at(url), order, saved.url)
    with contextlib.suppress(OSError, CheckpointError):
        if first:
            prune(tier, order.keep, order.id, busy())


def _save_to(part: Part, patience: Patience, places: Places) -> RankManifest:
    tier, order = part.tier, part.order
    folder = order.id.folder
    try:
        part.heed()
        tier.make_folder(folder)
        insist_on_open(tier, order, tier.names(folder))
        if part.later:
            tier.put(f"{folder}/{names.here_name(order.rank)}", b"")
        written = shards.write(part)
    except CommittedElsewhere:
        raise
    except Exception as error:  # whatever it is: the others must not wait for this rank
        with contextlib.suppress(OSError):
            tier.put(f"{folder}/{names.failure_name(order.rank)}", str(error).encode())
        if order.rank == min(order.group):
            _abort(tier, folder, f"rank {order.rank}: {error}")
        raise
    if order.rank == min(order.group):
        _commit_when_whole(part, patience, places)
    else:
        _wait_for_commit(part, patience, places)
    return written


def _commit_when_whole(part: Part, patience: Patience, places: Places) -> None:
    tier, order, folder = part.tier, part.order, part.order.id.folder
    wanted = {names.manifest_name(rank): rank for rank in order.group}
    failures = {names.failure_name(rank): rank for rank in order.group}

    def missing() -> list[int]:
        there = set(tier.names(folder))
        if names.ABORT in there:  # by a persister that died: the others have gone on to the next tier
            raise CheckpointError("given up before")
        for name in failures.keys() & there:
            told = tier.get(f"{folder}/{name}", 1 << 16).decode(errors="replace")
            raise CheckpointError(f"rank {failures[name]} could not write: {told}")
        part.heed()
        return [rank for name, rank in wanted.items() if name not in there]

    try:
        patience.until(lambda: not missing(), lambda: f"ranks {missing()} have not saved")
        texts = {rank: tier.get(f"{folder}/{name}", manifest.LARGEST) for name, rank in sorted(wanted.items())}
        entries = {str(rank): RankEntry(len(text), manifest.digest(text)) for rank, text in texts.items()}
        insist_on_newest(order, places)
        commit = Commit(
            epoch=order.epoch,
            step=order.version,
            generation=order.generation,
            world_size=order.world_size,
            vacant=tuple(sorted(set(range(order.world_size)) - set(order.group))),
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


def insist_on_newest(order: Order, places: Places = PLAIN) -> None:
    """An old job must not go on writing, to any of the tiers that can be read."""
    newest = _newest_reachable(order.tiers, places)
    if newest > order.epoch:
        raise CheckpointError(f"another job (epoch {newest}) has begun to write here; this one is epoch {order.epoch}")


def _wait_for_commit(part: Part, patience: Patience, places: Places) -> None:
    tier, order, folder = part.tier, part.order, part.order.id.folder
    late_at = time.monotonic() + places.silence_s + LATE_S
    seen_at = time.monotonic()

    def decided() -> bool:
        nonlocal seen_at
        there = tier.names(folder)
        if names.COMMIT in there:
            return True
        if names.ABORT in there:
            told = tier.get(f"{folder}/{names.ABORT}", 1 << 16).decode(errors="replace")
            raise CheckpointError(f"given up by the coordinator: {told}")
        insist_on_open(tier, order, there)
        part.heed()
        if time.monotonic() > late_at and has_left(part, there):
            raise CheckpointError("the coordinator is not here and saves other steps by now")
        if names.manifest_name(order.rank) in there:
            seen_at = time.monotonic()
            return False
        replaced = _replaced(tier, order.id)
        if not replaced and time.monotonic() > seen_at + LATE_S:
            raise Removed("the coordinator has given it up and removed it")
        return replaced

    try:
        patience.until(decided, lambda: "the coordinator has neither committed nor given up")
    except (CommittedElsewhere, Removed):
        raise
    except CheckpointError as error:  # should it come after all, it need not wait
        with contextlib.suppress(OSError):
            tier.put(f"{folder}/{names.failure_name(order.rank)}", str(error).encode())
        raise


def _replaced(tier: Tier, step: StepId) -> bool:
    """Its folder seems to be gone. Whether that is because a newer step has been committed meanwhile."""
    return any(found.committed and found.id > step for found in folders(tier))


def _abort(tier: Tier, folder: str, why: str) -> None:
    with contextlib.suppress(OSError):
        tier.put(f"{folder}/{names.ABORT}", why.encode())
