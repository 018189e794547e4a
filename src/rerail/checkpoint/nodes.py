"""The nodes of a job as one place for checkpoints, `nodes://`: each keeps its own and what the one before it would lose.

A rank's shard goes to its own node and to the next, in memory or on their disks; small files (manifests, COMMIT) go to
the first two nodes. So any one node may be lost. Where a file lies is found by asking: after a restart nodes may come in
another order. Called through `checkpoint.tiers`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from rerail.checkpoint.files import FileTier
from rerail.checkpoint.remote import RemoteTier
from rerail.checkpoint.tiers import Read, Source, Tier
from rerail.config import DEPOT_KEY, DEPOTS, settings_of_rank
from rerail.errors import CheckpointError
from rerail.texts import node_memory

URL = "nodes://"
_ASKED_AT_ONCE = 16
_T = TypeVar("_T")


def of_this_job(env: Mapping[str, str] = os.environ) -> NodesTier:
    """The nodes of the job that this process is part of."""
    depots, store = env.get(DEPOTS, ""), settings_of_rank(env).node_store
    if store and not depots:
        raise CheckpointError("nodes:// is a place inside a job: only `rerail run` makes the nodes keep checkpoints")
    if not store:
        raise CheckpointError(
            "nodes:// is a place inside a job: set RERAIL_NODE_STORE=memory:8GiB, or to a directory that every node has, "
            "for rerail run"
        )
    lasting, own = not node_memory(store), int(env.get("GROUP_RANK", "0"))
    tiers: list[Tier] = []
    for depot in depots.split(","):
        host, _, port = depot.rpartition(":")
        tiers.append(RemoteTier(host, int(port), env.get(DEPOT_KEY, ""), lasting=lasting))
    if lasting and own < len(tiers):
        tiers[own] = FileTier(store)  # a disk of this very node needs no network
    return NodesTier(tiers, own, lasting=lasting)


class NodesTier:
    """Several tiers, one on each node."""

    def __init__(self, nodes: Sequence[Tier], own: int, *, lasting: bool) -> None:
        self.url = URL
        self.lasting = lasting
        self._nodes = list(nodes)
        own %= len(self._nodes)
        following = (own + 1) % len(self._nodes)
        self._homes = self._nodes[:2]
        """Of small files; the first is the one that decides who came first."""
        self._holders = [self._nodes[at] for at in sorted({own, following})]
        self._own = self._nodes[own]

    # --- reading: from whoever has it ---

    def names(self, folder: str = "") -> list[str]:
        if folder:
            found = self._union(self._homes, folder)
            if found:
                return found
        return self._union(self._nodes, folder)

    def size(self, path: str) -> int:
        return self._where(path)[1]

    def get(self, path: str, limit: int) -> bytes:
        return _first(self._nodes, path, lambda node: node.get(path, limit))

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[Read]:
        with self._where(path)[0].reading(path) as read:
            yield read

    # --- writing ---

    def make_folder(self, folder: str) -> None:
        for node in self._homes:
            node.make_folder(folder)

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        first, *others = self._homes
        first.put(path, data, exclusive=exclusive)
        for node in others:
            node.put(path, data)

    def put_large(self, path: str, source: Source, size: int, chunk: int) -> list[str]:
        folder = path.partition("/")[0]
        hashes: list[str] = []
        for node in self._holders:
            node.make_folder(folder)
            hashes = node.put_large(path, source, size, chunk)
        return hashes

    def remove(self, folder: str) -> None:
        self._ask_all(self._nodes, lambda node: node.remove(folder))

    # --- who has it ---

    def _union(self, nodes: Sequence[Tier], folder: str) -> list[str]:
        answers = self._ask_all(nodes, lambda node: node.names(folder))
        return sorted({name for names in answers for name in names})

    def _where(self, path: str) -> tuple[Tier, int]:
        """A node that has the file, this one if possible, and how long it is."""
        others = [node for node in self._nodes if node is not self._own]
        return _first([self._own, *others], path, lambda node: (node, node.size(path)))

    def _ask_all(self, nodes: Sequence[Tier], question: Callable[[Tier], _T]) -> list[_T]:
        """The answers of those who can be reached; OSError if nobody can."""
        answers: list[_T] = []
        problem: OSError | None = None
        with contextlib.ExitStack() as opened:
            ask: Callable[[Callable[[Tier], _T | OSError], Sequence[Tier]], Iterable[_T | OSError]] = map
            if len(nodes) > len(self._homes):
                ask = opened.enter_context(ThreadPoolExecutor(_ASKED_AT_ONCE, thread_name_prefix="rerail-nodes")).map
            for answer in ask(partial(_answer, question), nodes):
                if isinstance(answer, OSError):
                    problem = answer
                else:
                    answers.append(answer)
        if problem is not None and not answers:
            raise problem
        return answers


def _first(nodes: Sequence[Tier], path: str, question: Callable[[Tier], _T]) -> _T:
    """The answer of the first that has the file. What went wrong elsewhere if none has it."""
    problem: OSError = FileNotFoundError(2, "no node has it", path)
    for node in nodes:
        try:
            return question(node)
        except FileNotFoundError:
            continue
        except OSError as error:
            problem = error
    raise problem


def _answer(question: Callable[[Tier], _T], node: Tier) -> _T | OSError:
    try:
        return question(node)
    except OSError as error:
        return error
