"""Copies a committed step to another tier: what was saved fast is kept safe elsewhere, beside the training.

    COPYING -> shards, checked as they are read -> manifests -> COMMIT, all as they are on the first tier

One process copies for all ranks, one step at a time; of those that wait only the newest is kept. A copy that was broken off
has no COMMIT, counts for nothing and is begun anew. A tier that is out gets the newest step once it is back. Called by `checkpoint.persister` and `rerail ckpt copy`. Needs no torch.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from rerail.checkpoint import catalog, names
from rerail.checkpoint.agreeing import let_go
from rerail.checkpoint.catalog import Step
from rerail.checkpoint.manifest import LARGEST, decode_commit, decode_rank
from rerail.checkpoint.names import StepId
from rerail.checkpoint.places import PLAIN, Places
from rerail.checkpoint.reading import mark, verified, verify
from rerail.checkpoint.retention import prune
from rerail.checkpoint.saving import Order, Outcome, insist_on_newest
from rerail.checkpoint.tiers import Source, Tier
from rerail.errors import CheckpointError


def copy_step(
    step: Step,
    target: Tier,
    *,
    before_commit: Callable[[], None] = lambda: None,
    read_back: bool = True,
    progress: Callable[[int], None] = lambda size: None,
) -> bool:
    """Make `target` have this step, too. False if it has it already, whole. `before_commit` may raise to stop it."""
    folder = step.id.folder
    there = target.names(folder)
    if names.COMMIT in there:
        _insist_on_whole(target, step)
        return False
    if there:
        # of a copy that was broken off before it could say so, only files with hidden names are left
        ours = names.COPYING in there or names.ELSEWHERE in there
        if not ours and any(not name.startswith(".") for name in there):
            raise CheckpointError(f"{target.url}/{folder} is being saved to by a job")
        target.remove(folder)
    try:
        _copy(step, target, before_commit, read_back, progress)
    except BaseException:
        with contextlib.suppress(OSError, CheckpointError):
            if names.COMMIT not in target.names(folder):
                target.remove(folder)
        raise
    return True


def _insist_on_whole(target: Tier, step: Step) -> None:
    try:
        there = catalog.open_step(target, step.id)
        if there.commit != step.commit:
            raise CheckpointError("it was saved by another job")
        for manifest in there.manifests.values():
            verify(target, step.id.folder, manifest)
    except CheckpointError as error:
        raise CheckpointError(f"{target.url}/{step.id.folder} is there, but not as it should be: {error}") from error


def _copy(
    step: Step, target: Tier, before_commit: Callable[[], None], read_back: bool, progress: Callable[[int], None]
) -> None:
    source, folder = step.tier, step.id.folder
    target.make_folder(folder)
    target.put(f"{folder}/{names.COPYING}", source.url.encode())
    commit = source.get(f"{folder}/{names.COMMIT}", LARGEST)
    decode_commit(commit, step.id)
    for rank, manifest in step.manifests.items():
        if manifest.file:
            with verified(source, folder, manifest) as shard:
                path = f"{folder}/{manifest.file}"
                hashes = target.put_large(path, _counted(shard, progress), manifest.size, manifest.chunk)
            if tuple(hashes) != manifest.hashes:
                raise CheckpointError(f"{source.url}/{path} changed while it was copied")
        text = source.get(f"{folder}/{names.manifest_name(rank)}", LARGEST)
        decode_rank(text, step.commit, rank)
        target.put(f"{folder}/{names.manifest_name(rank)}", text)
        if read_back:
            verify(target, folder, manifest)
            mark(target, folder, rank)
    before_commit()
    with contextlib.suppress(FileExistsError):
        target.put(f"{folder}/{names.COMMIT}", commit, exclusive=True)


def _counted(source: Source, progress: Callable[[int], None]) -> Source:
    def counted(offset: int, size: int) -> memoryview:
        found = source(offset, size)
        progress(size)
        return found

    return counted


class _Task(NamedTuple):
    """A committed step, where it lies, and where it is to be copied to."""

    order: Order
    url: str
    targets: tuple[str, ...]


class Copier:
    """Copies what this job's coordinator has committed on to the other tiers, in a thread of its own."""

    def __init__(self, tell: Callable[[Outcome], None], places: Places = PLAIN) -> None:
        self._tell, self._places = tell, places
        self._waiting: _Task | None = None
        self._left_out: list[int] = []
        """Steps that gave way to newer ones since the last copy."""
        self._copying: Order | None = None
        self._newest: tuple[Order, str] | None = None
        self._owed: set[str] = set()
        """Tiers that were out when the newest step was to be copied there."""
        self._closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def offer(self, order: Order, url: str) -> None:
        """`order` was committed to the tier at `url`. A step that still waits gives way to this one."""
        targets = tuple(other for other in order.tiers if other != url)
        with self._changed:
            self._newest, self._owed = (order, url), set()
            if targets:
                self._add(_Task(order, url, targets))

    def back(self, url: str) -> None:
        """A tier works again: it gets the newest step, if that is not there."""
        with self._changed:
            if url in self._owed and self._newest is not None and not self._closing:
                self._owed.discard(url)
                self._add(_Task(*self._newest, (url,)))

    @property
    def steps(self) -> set[StepId]:
        """What is being copied or is to be: it must stay for that long."""
        with self._changed:
            waiting = {self._waiting.order.id} if self._waiting is not None else set()
            return waiting | ({self._copying.id} if self._copying is not None else set())

    def close(self) -> None:
        """Finish what was offered; what is left to be done for tiers that are out is told."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        order, url = self._newest or (None, "")
        for target in sorted(self._owed) if order is not None else ():
            why = self._places.out(target)
            if order is not None and why:
                self._tell(Outcome(version=order.version, ok=False, copied_to=target, url=url, notes=(why,)))

    def _add(self, task: _Task) -> None:
        before = self._waiting
        if before is not None and before.order.id == task.order.id:
            task = task._replace(targets=tuple(dict.fromkeys((*before.targets, *task.targets))))
        elif before is not None:
            self._left_out.append(before.order.version)
        self._waiting = task
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="rerail-copy")
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closing)
                if self._waiting is None:
                    return
                task, self._waiting = self._waiting, None
                left_out, self._left_out = self._left_out, []
                self._copying = task.order
            for target in task.targets:
                self._copy(task, target, left_out)
            with self._changed:
                self._copying = None

    def _copy(self, task: _Task, target: str, left_out: list[int]) -> None:
        outcome = None if self._places.out(target) else copied(task.order, task.url, target, self._places)
        if outcome is None or (not outcome.ok and self._places.out(target)):
            with self._changed:
                if self._newest is not None and self._newest[0].id == task.order.id:
                    self._owed.add(target)
        if outcome is None:
            return
        if left_out:
            steps = ", ".join(map(str, left_out[-8:]))
            note = f"not copied, since this one was there before their turn: {steps}"
            outcome = msgspec.structs.replace(outcome, notes=(*outcome.notes, note))
        self._tell(outcome)


def copied(order: Order, url: str, target_url: str, places: Places = PLAIN) -> Outcome:
    """Copy one step from tier to tier, then thin out the target. What became of it."""
    started, notes, size = time.monotonic(), list[str](), 0
    try:
        step = catalog.open_step(places.at(url), order.id)
        size = step.size
        _copied(step, order, places, target_url)
        places.saved(target_url)
    except Exception as error:  # whatever it is: the rank must hear of it, and the next step must be tried
        notes.append(f"{type(error).__name__}: {error}" if not isinstance(error, CheckpointError) else str(error))
    return Outcome(
        version=order.version,
        ok=not notes,
        copied_to=target_url,
        url=url,
        seconds=time.monotonic() - started,
        size=size,
        notes=tuple(notes),
    )


def _copied(step: Step, order: Order, places: Places, url: str) -> None:
    try:
        target = places.at(url)
        let_go(target, order, step.tier.url)
        before_commit = partial(insist_on_newest, order, places)
        copy_step(step, target, before_commit=before_commit, read_back=order.read_back)
        with contextlib.suppress(OSError, CheckpointError):
            prune(target, order.keep, order.id, set())
    except OSError as error:
        places.failed(url, error, step.size)
        raise
