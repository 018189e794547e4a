"""Brings this rank's state to the version a plan names, from its own memory, a replica, or its arena.

Called by `session.rejoin` while a generation is formed, and at the start of a process whose predecessor left snapshots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from rerail.checkpoint.arena import Entry
from rerail.checkpoint.catalog import Saved
from rerail.checkpoint.dtypes import code_of, view_of
from rerail.checkpoint.layout import Piece
from rerail.checkpoint.names import owned_name, owner_and_name
from rerail.errors import StateError
from rerail.runtime.plans import Plan, Source
from rerail.session import rng, transfer
from rerail.session.fabric import fabric, hearing
from rerail.session.pieces import Pieces
from rerail.session.small import Small, decode

if TYPE_CHECKING:
    from rerail.session.job import Job
    from rerail.session.mending import Mender


def by_plan(job: Job, plan: Plan, inherited: dict[int, Small], mender: Mender) -> None:
    """Take part in all transfers of the plan, then be at its version."""
    source, start = plan.sources[job.rank], plan.starts()[job.rank]
    if source.kind == "snapshot":
        tensors(job, start)
    elif source.stale is not None:
        mender.lay_base(source.stale)
    received = transfer.exchange(plan, job, lambda: _small_of(job, plan, inherited), mender.learn)
    if source.stale is not None:
        mender.renew(source.stale, plan.version)
    if received is not None:
        _take_place(job, received)
    elif source.stale is not None and source.stale.schedule >= 0:
        _advance(job)
    elif source.stale is not None:
        schedule = _written(job, plan.version, inherited).objects
        _jump(job, plan.version, inherited)
        job._tracked.load_small_objects(schedule, {})
    elif source.kind == "behind":
        _advance(job)
    elif source.kind != "snapshot" and start == job._version and job._has_batch and job._small is not None:
        replay(job)
        job._buffers.from_journal(job._small.buffers)
        if source.kind == "own":
            job._tracked.load_small_objects(job._small.objects, {})
        else:  # a newcomer wrote down the schedule that it was built with; the true one came with the replica's state
            job._small = msgspec.structs.replace(job._small, objects=job._tracked.small_objects(scalars=False))
    elif (
        source.kind == "replica"
        and plan.version == job._version + 1
        and job._ran_out == job._version
        and plan.version not in inherited
    ):
        _advance(job)
    elif source.kind != "own":
        _jump(job, start, inherited)
    elif start != job._version:
        raise StateError(f"rank {job.rank} holds version {job._version}, but is to go on from its own {start}")
    if job._cursor.stale:  # this rank stays where it is, but not with the batch it has, or would take next
        small(job, at_hand(job), fresh=True)
    if job._dealer is not None and job._dealer.moved:
        _deal_anew(job)
    job._tracked.clear_gradients()
    if any(one.kind == "snapshot" and one.at < 0 for one in plan.sources.values()):
        job._checkpoints.went_back(plan.generation)


def at_hand(job: Job) -> Small:
    """This rank's small state of the version it is at: as written down before its batch was fetched, if it was."""
    return job._small if job._has_batch and job._small is not None else job._small_now()


def replay(job: Job) -> None:
    """The same batch again, under the random state that followed its fetching."""
    rng.restore(job._random_after)


def _small_of(job: Job, plan: Plan, inherited: dict[int, Small]) -> Small:
    """This rank's small state of the plan's version, for one who has none."""
    if plan.sources[job.rank].kind == "own" and not job._has_batch:
        return job._small_now()
    return _written(job, plan.version, inherited)


def _take_place(job: Job, state: Small) -> None:
    """In a seat that was empty: where the sender is, with the random state that the script itself has come to."""
    random = job._small.random if job._small is not None else rng.capture()
    small(job, msgspec.structs.replace(state, random=random), fresh=True)


def _deal_anew(job: Job) -> None:
    """Others share the data now: what was fetched for this version, and ahead of it, is thrown away and dealt once more."""
    if job._has_batch and job._small is not None:
        small(job, job._small, fresh=True)
    else:
        job._cursor.go_back(job._version, job._cursor.position(), fresh=True)


def _advance(job: Job) -> None:
    """This rank ran the step out without peers; a replica completed it. Go on behind it."""
    rng.restore(job._random_end)
    job._buffers.advance()
    job._version += 1
    job._has_batch, job._batch = False, None


def _jump(job: Job, version: int, inherited: dict[int, Small]) -> None:
    """To a version whose small state is written down."""
    small(job, _written(job, version, inherited), fresh=job._small is None)


def _written(job: Job, version: int, inherited: dict[int, Small]) -> Small:
    """The small state of a version, where it is written down: in memory, in the step journal, or in the arena."""
    found = inherited.get(version)
    if found is None and job._small is not None and job._small.version == version:
        found = job._small
    arena = job._snapshots.arena
    if found is None and arena is not None and version in job._snapshots.small_versions():
        found = decode(arena.meta(version).small)
    if found is None:
        raise StateError(f"rank {job.rank} cannot go to version {version}: its small state is not known here")
    return found


def small(job: Job, state: Small, *, fresh: bool) -> None:
    """Random state, place in the data, buffers and interval of `state`; the batch at hand is dropped."""
    job._version = state.version
    job._has_batch, job._batch = False, None
    job._small = None
    job._cursor.go_back(state.version, state.position, fresh=fresh)
    job._buffers.from_journal(state.buffers)
    job._snapshots.drop_later(state.version)
    job._snapshots.adopt(state.snapshot_every)
    job._checkpoints.adopt(*state.saves)
    rng.restore(state.random)


def tensors(job: Job, version: int) -> None:
    """Large state from this rank's arena, and the schedulers and scalers that go with it."""
    arena = job._snapshots.arena
    if arena is None:
        raise StateError(f"rank {job.rank} has no snapshots, but version {version} is to come from one")
    meta, image = arena.meta(version), arena.image(version)
    kept = {entry.name: entry for entry in meta.entries}
    saved = {name: Saved(entry.dtype, entry.whole, []) for name, entry in kept.items()}
    pieces = Pieces(job._tracked, job.rank, job.world_size)
    pieces.make_room(saved)
    pieces.forget_unsaved(saved)
    objects = pieces.object_names()
    with torch.no_grad():
        for piece in pieces.all():
            found = entry_of(piece, kept, job.rank)
            if owner_and_name(piece.name)[1] in objects:
                continue
            if found is None or (found.dtype, found.shape) != (code_of(piece.tensor.dtype), tuple(piece.tensor.shape)):
                raise StateError(f"{piece.name} is not in the snapshot as it is here: the script builds another model")
            piece.tensor.copy_(view_of(image, found))
    # Before anything is sent on: who takes this rank's state takes its schedule, too.
    named = {owner_and_name(name)[1]: view_of(image, entry) for name, entry in kept.items()}
    job._tracked.load_small_objects(decode(meta.small).objects, named)


def entry_of(piece: Piece, kept: dict[str, Entry], rank: int) -> Entry | None:
    """Where a piece lies in a snapshot: under its name, or under this rank's own."""
    return kept.get(piece.name) or kept.get(owned_name(rank, piece.name))


def from_arenas(job: Job) -> bool:
    """All processes are new but the arenas are not: load the newest version that everyone can have. False: there is none."""
    arena = job._snapshots.arena
    mine = {
        "whole": list(job._snapshots.versions()),
        "small": list(job._snapshots.small_versions()),
        "replicas": list(job._tracked.replicas(job.rank, job.world_size)),
    }
    meeting = fabric.store.target
    meeting.set(f"arena/{job.rank}", msgspec.json.encode(mine).decode())
    told = meeting.multi_get([f"arena/{rank}" for rank in range(job.world_size)])
    plan = _newest_common([msgspec.json.decode(one, type=dict[str, list[int]]) for one in told])
    if plan is None or arena is None:
        return False
    if plan.sources[job.rank].kind == "snapshot":
        tensors(job, plan.version)
    with hearing.paused():
        transfer.exchange(plan, job, lambda: decode(arena.meta(plan.version).small), lambda lesson: None)
    small(job, decode(arena.meta(plan.version).small), fresh=True)
    return True


def _newest_common(everyone: list[dict[str, list[int]]]) -> Plan | None:
    common = set(everyone[0]["small"]).intersection(*(set(one["small"]) for one in everyone))
    for version in sorted(common, reverse=True):
        sources: dict[int, Source] = {}
        for rank, one in enumerate(everyone):
            if version in one["whole"]:
                sources[rank] = Source(kind="snapshot")
                continue
            keeper = next((r for r in one["replicas"] if version in everyone[r]["whole"]), None)
            if keeper is not None:
                sources[rank] = Source(kind="replica", rank=keeper)
        if len(sources) == len(everyone):
            return Plan(
                generation=0,
                world_size=len(everyone),
                store_host="",
                store_port=0,
                store_rank=0,
                version=version,
                sources=sources,
            )
    return None
