"""What replicas held when they differed, kept until they have computed it again: whoever was further from the result was wrong.

A corrupted replica spoils the gradients of all, so after some steps no first result comes out twice. But in the elements in which the
replicas differ, the spoilt gradients are the same for all, and the corruption itself is only in one. Called by `session.votes`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from rerail.session.fabric import Mode, fabric, hearing

MOST = 256 << 20
"""Bytes of tensors that are kept; the smallest first."""


class Traces:
    """Of one rank: tensors in which its set differed, as they were."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}

    @property
    def count(self) -> int:
        return len(self._kept)

    def keep(
        self, tensors: list[torch.Tensor], each: torch.Tensor, rank: int, world_size: int, peers: list[int]
    ) -> None:
        """All ranks together. `each`: one checksum for each tensor of this rank. `peers`: the ranks that must hold the same."""
        self._kept = {}
        sizes = torch.zeros(world_size, dtype=torch.int64)
        sizes[rank] = len(each)
        with hearing.paused():
            dist.all_reduce(sizes)
            table = torch.zeros(world_size, int(sizes.max()), dtype=torch.int64)
            table[rank, : len(each)] = each
            dist.all_reduce(table)
        if fabric.mode is not Mode.LIVE:
            return
        rows, room = table[peers], MOST
        differing = (rows != rows[0]).any(0).nonzero().flatten().tolist()
        for index in sorted(differing, key=lambda one: tensors[one].numel()):
            room -= tensors[index].nbytes
            if room >= 0:
                self._kept[index] = tensors[index].detach().cpu().clone()

    def distances(self, tensors: list[torch.Tensor], rank: int, peers: list[int]) -> dict[int, float]:
        """The first of the peers hears from all the others how far each was from what they all hold now. Squares."""
        kept, self._kept = self._kept, {}
        found = dict.fromkeys(peers, 0.0)
        with hearing.paused():
            for index, mine in sorted(kept.items()):
                if rank != peers[0]:
                    dist.send(mine, peers[0])
                    continue
                firsts = [mine]
                for peer in peers[1:]:
                    firsts.append(torch.empty_like(mine))
                    dist.recv(firsts[-1], peer)
                far = far_from(torch.stack(firsts), tensors[index].detach().cpu())
                found = {peer: found[peer] + one for peer, one in zip(peers, far, strict=True)}
        return found if rank == peers[0] and kept and fabric.mode is Mode.LIVE else {}


def far_from(firsts: torch.Tensor, truth: torch.Tensor) -> list[float]:
    """Squared distances, in the elements in which the firsts differ in a bit. What is not finite is infinitely far."""
    flat = firsts.flatten(1)
    bits = flat.view(torch.uint8).view(*flat.shape, -1)
    differing = (bits != bits[:1]).any(-1).any(0)
    apart = (flat[:, differing].double() - truth.flatten()[differing].double()) ** 2
    far: list[float] = torch.nan_to_num(apart, nan=torch.inf, posinf=torch.inf).sum(1).tolist()
    return far
