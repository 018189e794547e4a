"""Faults on purpose, the controller's side: turns a wish (`rerail inject`) into an order for one node, or says why not.

The choice is the seed's where the wish leaves one: the same seed picks the same rank, node and place again. What became of
an order comes back as a Signal, which the controller writes to its journal; whoever asked waits for it here. Called by
`runtime.server` (asks), `runtime.controller` (hears) and `cli.inject` (the list of kinds). How: `runtime.injecting`.
"""

from __future__ import annotations

import asyncio
import random
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from rerail.errors import UsageError, WireError
from rerail.flow import Signal, new_id
from rerail.runtime.fleet import Agent, Fleet, RankState
from rerail.runtime.wire import Inject
from rerail.wording import closest

DONE, OVER, REFUSED = "inject", "inject.over", "inject.refused"
"""Sources of the signals: it was done, its time is over, it could not be done. Notes, never faults."""
ANSWER_S = 60.0
"""Seconds for an order to be carried out: a rank does it in its next step."""
FACTOR = 1.3
"""How much longer the steps of a slow rank take."""
MAX_SIZE = 1 << 30
"""Bytes. What is filled up on purpose must be smaller than this, so that it is somebody's test and not a machine."""
NOT_ALLOWED = (
    "this job does not allow faults to be injected; start it with rerail run --allow-inject ... "
    "(or RERAIL_ALLOW_INJECT=1 in its environment), on every node"
)


class Where(StrEnum):
    """Who carries it out."""

    PROCESS = "process"
    """The agent, on the process of one rank."""
    STEP = "step"
    """The rank itself, in its next step."""
    NODE = "node"
    """The agent, on its machine."""


class Kind(NamedTuple):
    """One kind of fault."""

    where: Where
    what: str
    takes: tuple[str, ...] = ()
    """Options besides --rank, --node, --seed and --after, by their field in `Wanted`."""
    needs: tuple[str, ...] = ()
    for_s: float = 0.0
    """How long it lasts unless told otherwise; 0: for good, or no time at all."""


KINDS = {
    "kill": Kind(Where.PROCESS, "SIGKILL to a rank"),
    "term": Kind(Where.PROCESS, "SIGTERM to a rank"),
    "segv": Kind(Where.PROCESS, "SIGSEGV to a rank"),
    "stop": Kind(Where.PROCESS, "SIGSTOP to a rank; SIGCONT after --for", ("for_s",)),
    "network-cut": Kind(
        Where.PROCESS, "close a rank's TCP connections, and new ones until --for is over", ("for_s", "port")
    ),
    "exception": Kind(Where.STEP, "an exception in a rank's next step, with the text of --line", ("line",)),
    "nan": Kind(Where.STEP, "one element of one gradient becomes NaN before the update"),
    "bitflip": Kind(Where.STEP, "one bit of one parameter flips after an update"),
    "slow": Kind(Where.STEP, "every step of a rank takes --factor times as long", ("for_s", "factor")),
    "hang": Kind(Where.STEP, "a rank sleeps in its step, for good or --for seconds", ("for_s",)),
    "exit": Kind(Where.STEP, "a rank ends in its step, by os._exit(3)"),
    "oom": Kind(Where.STEP, "a rank takes memory until its cgroup's limit kills it", ("max_size",)),
    "kernel-log": Kind(Where.NODE, "a line in the kernel log (needs root)", ("line",), ("line",)),
    "device-lost": Kind(Where.NODE, "a GPU of the stub NVML that RERAIL_STUB_NVML names is lost", ("for_s",)),
    "disk-full": Kind(
        Where.NODE, "fill the file system of --dir, if smaller than --max-size", ("for_s", "folder", "max_size"), ("folder",), 30.0
    ),
    "slow-disk": Kind(
        Where.NODE, "throttle the ranks' cgroup on the disk of --dir to 1 MiB/s", ("for_s", "folder"), ("folder",), 30.0
    ),
    "corrupt-checkpoint": Kind(
        Where.NODE, "flip one byte in a shard of the newest step in --dir", ("folder",), ("folder",)
    ),
}  # fmt: skip

FLAGS = {
    "for_s": "--for",
    "factor": "--factor",
    "line": "--line",
    "folder": "--dir",
    "max_size": "--max-size",
    "port": "--loopback-port",
}
"""Which option a field of `Wanted` is."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `rerail inject` asks for; the body of `POST /inject`."""

    kind: str
    seed: int
    rank: int = -1
    """-1: the seed picks."""
    node: str = ""
    """A node's name or number; empty: the rank's, or what the seed picks."""
    after_s: float = 0.0
    for_s: float = 0.0
    factor: float = 0.0
    line: str = ""
    folder: str = ""
    max_size: int = 0
    port: int = 0


_wanted = msgspec.json.Decoder(Wanted)


def check(wanted: Wanted) -> Kind:
    """The kind asked for, if the wish makes sense by itself; UsageError says what does not."""
    kind = KINDS.get(wanted.kind)
    if kind is None:
        close = closest(wanted.kind, KINDS)
        hint = f"did you mean {close}?" if close else f"kinds: {', '.join(KINDS)}"
        raise UsageError(f"there is no kind {wanted.kind!r} of fault", hint=hint)
    for name, flag in FLAGS.items():
        if getattr(wanted, name) and name not in kind.takes:
            took = ", ".join(FLAGS[one] for one in kind.takes) or "no options of its own"
            raise UsageError(f"{flag} means nothing to {wanted.kind}", hint=f"it takes {took}")
        if name in kind.needs and not getattr(wanted, name):
            raise UsageError(f"{wanted.kind} needs {flag}")
    if wanted.rank >= 0 and wanted.node:
        raise UsageError("--rank and --node exclude one another", hint="the rank is on one node only")
    for name in ("after_s", "for_s", "max_size", "seed"):
        if not 0 <= getattr(wanted, name) < 1 << 63:
            raise UsageError(f"--{name.removesuffix('_s').replace('_', '-')} is {getattr(wanted, name)}: out of range")
    if wanted.factor and not 1.0 < wanted.factor <= 1000.0:
        raise UsageError(
            f"--factor is {wanted.factor:g}", hint="a rank is slower by more than 1 and at most 1000 times"
        )
    if not wanted.line.isprintable() or len(wanted.line) > 800:
        raise UsageError("--line is one line of at most 800 printable characters")
    return kind


def dice(seed: int, what: str) -> random.Random:
    """The same choices for the same seed, here and on every other machine; `what` is being chosen."""
    return random.Random(f"rerail inject {seed} {what}")


class Injections:
    """Orders under way."""

    def __init__(self, fleet: Fleet, *, allowed: bool) -> None:
        self._fleet, self._allowed = fleet, allowed
        self._asking: dict[str, asyncio.Future[Signal]] = {}

    async def ask(self, body: bytes) -> tuple[int, dict[str, Any]]:
        """Have a wish carried out. HTTP status and answer: what was done (200), why not (4xx), or not known (504)."""
        try:
            wanted = _wanted.decode(body)
            if not self._allowed:
                return 403, {"refused": NOT_ALLOWED}
            agent, order = self.order(wanted)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            return 400, {"refused": f"not a wish: {error}"}
        except (UsageError, WireError) as error:
            return 422, {"refused": str(error)}
        answer = self._asking[order.id] = asyncio.get_running_loop().create_future()
        about = {"id": order.id, "kind": order.kind, "seed": order.seed, "node": agent.node, "rank": order.rank}
        agent.send(order)
        try:
            async with asyncio.timeout(order.after_s + ANSWER_S):
                signal = await answer
        except TimeoutError:
            late = f"ordered, and not done within {ANSWER_S:.0f} s; if it is done yet, the journal tells"
            rank = self._fleet.ranks.get(order.rank)
            if KINDS[order.kind].where is Where.STEP and rank is not None and rank.version < 0:
                late = f"{late} (rank {order.rank} has not completed a step yet: it is done in the first)"
            return 504, {**about, "refused": late}
        except asyncio.CancelledError:  # whoever serves this question ends
            return 503, {**about, "refused": "the job ended before it was done"}
        finally:
            self._asking.pop(order.id, None)
        if signal.source == REFUSED:
            return 409, {**about, "refused": signal.payload["message"]}
        return 200, {**about, "step": signal.step, "at": signal.at, "message": signal.payload["message"]}

    def heard(self, signal: Signal) -> None:
        """What became of an order; its first word is the answer."""
        answer = self._asking.get(str(signal.payload.get("order", "")))
        if answer is not None and not answer.done():
            answer.set_result(signal)

    def order(self, wanted: Wanted) -> tuple[Agent, Inject]:
        """Who is to do what. UsageError or WireError if nobody can."""
        kind = check(wanted)
        ranks = self._fleet.ranks
        if not ranks:
            raise WireError("the job has not started yet: it has no ranks")
        node, rank = self._node(wanted.node), wanted.rank
        if rank >= 0 and rank not in ranks:
            raise UsageError(f"there is no rank {rank}", hint=f"this job has ranks 0 to {max(ranks)}")
        if rank < 0:
            there = sorted(one.rank for one in ranks.values() if node in ("", one.node))
            if not there:
                raise UsageError(f"node {node} has no rank", hint="rerail status shows where they are")
            rank = dice(wanted.seed, "rank").choice(there)
        state, agent = ranks[rank].state, self._fleet.agent_of(rank)
        if kind.where is not Where.NODE and state in (RankState.LOST, RankState.EXITED):
            raise WireError(f"rank {rank} is {state.value} at the moment; try again when it is back")
        if not agent.connected:
            raise WireError(f"node {agent.node} is away; try again when it is back")
        return agent, Inject(
            id=new_id("inject"),
            kind=wanted.kind,
            rank=rank,
            seed=wanted.seed,
            after_s=wanted.after_s,
            for_s=wanted.for_s or kind.for_s,
            factor=wanted.factor or FACTOR,
            line=wanted.line,
            folder=wanted.folder,
            max_size=wanted.max_size or MAX_SIZE,
            port=wanted.port,
        )

    def _node(self, asked: str) -> str:
        """A node's name, given that or its number among those with ranks."""
        names = list(self._fleet.placed())
        if not asked or asked in names:
            return asked
        if asked.isdecimal() and int(asked) < len(names):
            return names[int(asked)]
        raise UsageError(f"there is no node {asked!r}", hint=f"nodes, from 0: {', '.join(names)}")
