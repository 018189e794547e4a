"""Compares the state of replicas while they train, and stops them where it differs: silent data corruption.

Every `vote_every` steps, and whenever a snapshot or a checkpoint is taken, each rank adds up the bits of its parameters and
optimizer state, and all see each other's sums. Snapshots on which the replicas agreed are what a job can safely go back to.
When they differ, the controller has all ranks go back to one and compute the same steps again. Called by `session.job`, and by
`session.rejoin` for each new generation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rerail.config import settings_of_rank
from rerail.runtime.clock import Phase
from rerail.runtime.wire import Voted
from rerail.session.fabric import Mode, fabric, hearing
from rerail.session.soundness import wait_to_go_back
from rerail.session.traces import Traces

if TYPE_CHECKING:
    from rerail.session.job import Job
    from rerail.session.link import AgentLink

GROUPS = 8
"""Checksums in one vote: each covers an eighth of the tensors."""
WORD = 8
"""Bytes that are added up at a time. Narrower words are ten times as slow."""
EXCHANGE_S = 0.0005
"""Seconds that one small all-reduce takes, about."""
TRIES = 5
"""Times to go back before it counts as vain. Once is enough where all come to the same different results again."""
_SET, _BACK, _DISPUTED, _SAME, _TRIES, _TRACES, _HEAD = range(7)
"""Columns before the sums: first rank of the set; version to go back to, or -1; version last disputed, or -1; whether this rank says the
same as it did then; how often all went back; tensors kept of what was disputed."""


class Votes:
    """The votes of one rank."""

    def __init__(self, job: Job, link: AgentLink | None) -> None:
        self._job, self._link = job, link
        self._every = settings_of_rank().vote_every if link is not None and job.world_size > 1 else 0
        self._replicas: tuple[int, ...] | None = None
        self.cost_s = 0.0
        """What the newest vote cost this rank; to wait for others is no cost, they would be waited for anyway."""
        self.agreed = -1
        """The newest version on which all replicas agreed."""
        self._disputed = -1
        """The version at which they differed last, and what this rank said then."""
        self._first: tuple[int, ...] = ()
        self._tries = 0
        """How often all went back since they agreed beyond that; TRIES once it is clear that this does not help."""
        self._traces = Traces()
        self._told = False

    def due(self) -> bool:
        """By the small state of this version, not by what a void attempt has agreed: a newcomer knows only the former.

        A version that was disputed is voted on again whatever the interval of snapshots has come to since: only there does it show who
        was wrong. All know of it alike (`meet`).
        """
        small, version = self._job._small, self._job._version
        if not self._every or small is None or self._job.rehearsing or fabric.interrupted:
            return False
        if version % self._every == 0 or version == self._disputed:
            return True
        return version % max(1, small.snapshot_every) == 0 or version == small.saves[1]

    def meet(self) -> None:
        """While a generation is formed, on every rank: hear of the version that was disputed.

        A newcomer does not know it, nor does a rank whose last vote a fault broke off; whether a vote is due must be the same for all.
        """
        if self._every:
            newest = torch.tensor([self._disputed], dtype=torch.int64)
            with hearing.paused():
                dist.all_reduce(newest, dist.ReduceOp.MAX)
            if fabric.mode is Mode.LIVE:
                self._disputed = int(newest.item())

    def agree_at_the_end(self) -> bool:
        """Before the last step is saved. False when all go back, or a fault elsewhere needs this rank."""
        if self._every and not fabric.interrupted:
            fabric.shield(True)
            self._job._enter(Phase.COMPUTE)
            try:
                self._agree()
            finally:
                fabric.shield(False)
                self._job._enter(Phase.OUTSIDE)
        return not fabric.interrupted

    def agree(self) -> None:
        """At the beginning of a step: are the replicas alike? If not, wait to be sent back."""
        if self.due():
            self._agree()

    def _agree(self) -> None:
        table = self._exchange()
        if table is None:
            return
        job, version, sets = self._job, self._job._version, _sets(table)
        rows = list(table.values())
        differ = {first: votes for first, votes in sets.items() if len(set(votes.values())) > 1}
        again = version == max(row[_DISPUTED] for row in rows)
        tries = max(row[_TRIES] for row in rows)
        if again and differ and all(table[rank][_SAME] for votes in differ.values() for rank in votes):
            tries = TRIES
        safe = [row[_BACK] for row in rows] if differ and tries < TRIES else []
        back = go_back_to(safe, saved=job._checkpoints.on)
        peers = sorted(sets.get(table[job.rank][_SET], {}))
        far: dict[int, float] = {}
        if back >= 0:
            tensors = job._tracked.trained_tensors() if peers else []
            self._traces.keep(tensors, each_sum(tensors).cpu(), job.rank, job.world_size, peers)
        elif again and not differ and peers and len({table[peer][_TRACES] for peer in peers}) == 1:
            far = self._traces.distances(job._tracked.trained_tensors(), job.rank, peers)
        told = differ or (sets if again else {})
        word = None
        if job.rank in told and (back >= 0 or again or not self._told):
            word = Voted(generation=fabric.generation, version=version, sums=told[job.rank], back=back, far=far)
        self._told = bool(differ)
        if not differ:
            self.agreed = version
            self._tries = 0 if self._tries < TRIES and version >= self._disputed else self._tries
        elif back >= 0:
            self._disputed, self._first, self._tries = version, tuple(table[job.rank][_HEAD:]), tries + 1
            self._wait_to_go_back(word, max(self.agreed, back))
            return
        else:
            self._tries = tries
        if word is not None and self._link is not None:
            self._link.send(word)

    def _exchange(self) -> dict[int, list[int]] | None:
        """What every rank that is there says; None if a fault got in between."""
        job = self._job
        if self._replicas is None:
            self._replicas = job._tracked.replicas(job.rank, job.world_size)
        peers = [rank for rank in self._replicas if rank in job.seats]
        votes, began = torch.zeros(GROUPS, dtype=torch.int64), time.monotonic()
        if len(peers) > 1:
            votes = sums(job._tracked.trained_tensors())
        self.cost_s = time.monotonic() - began + EXCHANGE_S
        votes = votes.cpu()
        same = job._version == self._disputed and tuple(votes.tolist()) == self._first
        head = [peers[0], self._safe(), self._disputed, int(same), self._tries, self._traces.count]
        table = torch.zeros(job.world_size, _HEAD + GROUPS, dtype=torch.int64)
        table[job.rank] = torch.cat([torch.tensor(head, dtype=torch.int64), votes])
        with hearing.paused():
            dist.all_reduce(table)
        found: list[list[int]] = table.tolist()
        return {rank: found[rank] for rank in job.seats} if fabric.mode is Mode.LIVE else None

    def _safe(self) -> int:
        """The newest version to which this rank can go back and on which the replicas agreed."""
        kept = self._job._snapshots.small_versions()
        return max((version for version in kept if version <= self.agreed), default=-1)

    def _wait_to_go_back(self, word: Voted | None, agreed: int) -> None:
        """What this rank holds is not to be trusted, nor what it has kept of it since they agreed."""
        job, link = self._job, self._link
        if job._rejoin is None or link is None:
            return
        job._rejoin.distrust(agreed)
        wait_to_go_back(job, link, word)


def go_back_to(safe: Sequence[int], *, saved: bool) -> int:
    """Where all go back to, by what each of them can; -1: they stay.

    A process that has not voted yet knows of no such version. Where the job is saved it has no veto: it may have been left what it needs,
    and if not, all start again from a checkpoint of before.
    """
    known = [version for version in safe if version >= 0]
    return min(known, default=-1) if saved or len(known) == len(safe) else -1


def _sets(table: dict[int, list[int]]) -> dict[int, dict[int, tuple[int, ...]]]:
    """The votes of every set of replicas, by the first rank of the set."""
    found: dict[int, dict[int, tuple[int, ...]]] = {}
    for rank, row in table.items():
        found.setdefault(row[_SET], {})[rank] = tuple(row[_HEAD:])
    return {first: votes for first, votes in found.items() if len(votes) > 1}


def sums(tensors: list[torch.Tensor]) -> torch.Tensor:
    """GROUPS sums over the bits of all tensors, in order. One flipped bit anywhere changes its group's sum for certain."""
    each = each_sum(tensors)
    group = torch.arange(len(tensors), device=each.device) * GROUPS // max(1, len(tensors))
    return torch.zeros(GROUPS, dtype=torch.int64, device=each.device).index_add_(0, group, each)


def each_sum(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One sum for each tensor."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    device = tensors[0].device
    with torch.no_grad():
        return torch.stack([_sum(tensor).to(device) for tensor in tensors])


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sums wrap around, and one flipped bit still changes them by a power of two."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % WORD:
        flat = flat.clone()
    whole = flat.numel() // WORD * WORD
    head = flat[:whole].view(torch.int64).sum()
    return head + flat[whole:].sum(dtype=torch.int64) if whole < flat.numel() else head
