"""What this rank has told the others, kept for as long as a lost rank may have to hear it again.

    a message      a copy of what was sent, for its receiver alone
    a collective   what came of it, where that is small and the same for all of its group

A rank that is lost goes back to its own snapshot and does its steps again while the others stay where they are: what they had told its
predecessor it hears from here, what it says to them they have heard already (`session.hearing_again`). Kept by version, from the
oldest snapshot on, in the memory of the host, and not beyond a limit. A step with anything else in it (a large sum, a scattered one)
cannot be done again like that, and nothing is kept of it; where that is so time and again, nothing is kept any more.
Called by `session.groups` for every collective among living peers, and by `session.job`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rerail.session import solo
from rerail.session.heard import LIMIT, Hearing

if TYPE_CHECKING:
    from rerail.session.hearing_again import Again

SAME_FOR_ALL = frozenset(
    {
        "allreduce",
        "allreduce_coalesced",
        "broadcast",
        "allgather",
        "allgather_coalesced",
        "_allgather_base",
        "all_gather_single",
        "allgather_into_tensor_coalesced",
        "all_gather_single_coalesced",
        "barrier",
    }
)
"""Collectives that leave every member of the group with the same."""
STRIKES = 8
"""Steps in a row that cannot be kept, after which it is not tried any more."""
SEND, RECEIVE = "send", "recv"
ALL = -1
"""In the place of a receiver: the whole group."""


class Told(NamedTuple):
    """One message, or what came of one collective."""

    group: str
    name: str
    peer: int
    """The rank that it was for, or `ALL`."""
    tag: int
    tensors: list[torch.Tensor]


class Messages:
    """One per process."""

    def __init__(self, hearing: Hearing) -> None:
        self._hearing = hearing
        self._most = 0
        self._first = -1
        """From this version on everything is kept."""
        self._kept: dict[int, list[Told | None]] = {}
        self._before: dict[int, int] = {}
        """By version: how much of that was told before its step began. Snapshots are taken between the two."""
        self._bytes = self._strikes = 0
        self._version = self._spoilt = self._between = -1
        self._inside = False
        self.again: Again | None = None
        """What others have told a predecessor of this rank, while this rank does its steps again."""
        self.recording = self.astray = False

    # --- versions ---

    def allow(self, most: int) -> None:
        """Keep so many bytes at most; 0: nothing."""
        self._most = most

    def go_on(self, version: int, again: Again | None = None) -> None:
        """The training goes on from here: what was told of later versions is void."""
        kept = self._first >= 0 and self._first <= version <= self._version
        self._kept = {at: told for at, told in self._kept.items() if kept and at <= version}
        self._before = {at: count for at, count in self._before.items() if at in self._kept}
        self._first = self._first if kept else version
        if version in self._before:
            del self._kept[version][self._before[version] :]
        self._version, self._inside, self._spoilt = version, False, -1
        self._bytes = sum(_size(one) for told in self._kept.values() for one in told)
        self.again, self.recording = again, self._most > 0 and self._strikes < STRIKES

    def pause(self) -> None:
        """A fault: whatever is said from here on is no part of the training."""
        self.recording, self.again = False, None

    def forget(self) -> None:
        """What was told last may be told twice, and nobody could say which is which."""
        self._kept.clear()
        self._before.clear()
        self._first, self._bytes = self._version + 1, 0

    def attempt(self, version: int) -> None:
        """A step begins."""
        if self.again is not None and version >= self.again.until:
            self.again = None
        self._version, self._inside = version, True
        self._before.setdefault(version, len(self._kept.setdefault(version, [])))

    def void(self) -> None:
        """The attempt came to nothing."""
        told, before = self._kept.get(self._version, []), self._before.get(self._version, 0)
        self._bytes -= sum(map(_size, told[before:]))
        del told[before:]
        self._inside = False

    def committed(self, version: int) -> None:
        """The step is complete, and led to this version."""
        told = self._kept.get(self._version, [])
        if self.recording and self._spoilt != self._version:
            self._strikes = 0
            if None in told:  # nobody waited for it
                self._spoil()
        self._version, self._inside = version, False

    def drop_before(self, version: int) -> None:
        """Nobody goes back further than this."""
        for at in [at for at in self._kept if at < version]:
            self._bytes -= sum(map(_size, self._kept.pop(at)))
            self._before.pop(at, None)
        if self._first >= 0:
            self._first = max(self._first, min(version, self._version))

    @property
    def since(self) -> int:
        """From which version on everything up to this one is kept; -1: nobody can be told."""
        whole = self._most > 0 and self._strikes < STRIKES and self._between != self._version
        return self._first if whole and 0 <= self._first <= self._version else -1

    @property
    def doing_again(self) -> bool:
        """Whether this rank is still behind the others."""
        return self.again is not None and self._version < self.again.until

    def told(self, since: int, until: int) -> Iterator[tuple[int, Told]]:
        """Everything from the step of version `since` on, up to that of version `until`."""
        for version in range(since, until + 1):
            from_step = self._before.get(version, 0) if version == since else 0
            for one in self._kept.get(version, [])[from_step:]:
                if one is not None:
                    yield version, one

    # --- every collective ---

    def note(self, group: Any, name: str, args: Sequence[Any]) -> Callable[[], None] | None:
        """Keep this one; what is given is to be called when it is complete."""
        if not self.recording or self._hearing.own or self._spoilt == self._version:
            return None
        if name in (SEND, RECEIVE):
            if not self._inside:
                self._between = self._version
            if name == SEND:
                self._keep(Told(group.key, name, group.members[args[1]], args[2], [_copy(one) for one in args[0]]))
            return None
        outputs = solo.outputs_of(name, tuple(args))
        if group.own_size == 1:
            return None
        if name not in SAME_FOR_ALL or sum(one.numel() * one.element_size() for one in outputs) > LIMIT:
            self._spoil()
            return None
        told, at, version = self._kept.setdefault(self._version, []), len(self._kept[self._version]), self._version
        told.append(None)

        def complete() -> None:
            if self._kept.get(version) is told and at < len(told) and told[at] is None:
                told[at] = one = Told(group.key, name, ALL, 0, [_copy(output) for output in outputs])
                self._weigh(one)

        return complete

    def repeat(self, group: Any, name: str, args: Sequence[Any]) -> list[torch.Tensor] | None:
        """While steps are done again: what the others have told already; None: it is new to them, too."""
        if self.again is None or self._hearing.own:
            return None
        try:
            found = self.again.hear(group, name, args, self._version)
        except RuntimeError:
            self.astray = True
            raise
        if found is not None and (complete := self.note(group, name, args)) is not None:
            complete()
        return found

    def _keep(self, one: Told) -> None:
        self._kept.setdefault(self._version, []).append(one)
        self._weigh(one)

    def _weigh(self, one: Told) -> None:
        """Make room for what is kept now, by what is oldest."""
        self._bytes += _size(one)
        while self._bytes > self._most and len(self._kept) > 1:
            self.drop_before(min(self._kept) + 1)
        if self._bytes > self._most:
            self._spoil()

    def _spoil(self) -> None:
        """This version cannot be done again by one alone; nothing before it is of use, then."""
        self._spoilt = self._version
        self._strikes += 1
        self.forget()
        self.recording = self._strikes < STRIKES


def _size(one: Told | None) -> int:
    return 0 if one is None else sum(tensor.numel() * tensor.element_size() for tensor in one.tensors)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """On the host; of a GPU's it is there when the device is next waited for."""
    if not tensor.is_cuda:
        return tensor.detach().clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor.detach(), non_blocking=True)
    return host
