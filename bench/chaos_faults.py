"""What goes wrong in the chaos soak: turns one line of the schedule into harm, and says how to tell that it is repaired.

Each kind is a function that does the harm and returns an `Effect`. Faults inside a rank's step go through `rerail inject`'s own
door; everything else is done from outside, as the world would: signals, wires, disks. Called by `bench/chaos.py`.
"""

from __future__ import annotations

import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from chaos_job import LOST_S, ChaosJob, signal_all
from rerail.cli.inject import ask
from rerail.cli.rundir import to_controller
from rerail.errors import UsageError
from rerail.runtime.injections import Wanted
from rerail.runtime.quarantining import ADD, RELEASE, Order

ASK_S = 60.0
"""Seconds for which somebody tries to reach a controller that is just being replaced."""

BOOT_S = 3.5
"""Seconds, at least, before a node that has lost its power is there again. No machine is quicker, and in the first three a second
node of the same name is taken for a mistake."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the schedule."""

    index: int
    kind: str
    rank: int
    node: int
    seed: int
    behind_s: float = -1.0
    """Seconds behind the fault before it; -1: when that one is repaired."""


class Nothing(Exception):
    """There is nothing there to be hurt; the text says what is missing."""


class Effect(NamedTuple):
    """When it is repaired: all ranks have completed a step since then, by other processes, in a newer generation."""

    since_ns: int
    gone: dict[int, int] = {}
    """Ranks and their processes that have to be others."""
    generation: int = -1
    """The one that has to be over; -1: no matter."""

    def over(self, job: ChaosJob) -> bool:
        return (
            job.whole_since(self.since_ns)
            and all(job.last[rank].pid != pid for rank, pid in self.gone.items())
            and (self.generation < 0 or min(step.generation for step in job.last.values()) > self.generation)
        )


class Kind(NamedTuple):
    """One kind of fault."""

    do: Callable[[ChaosJob, Fault], Effect]
    weight: int
    """How often, among the others."""
    needs: str = ""
    """`wires`: network namespaces; `disks`: file systems of its own; `spare`: a spare node."""


def now(gone: dict[int, int] | None = None, generation: int = -1) -> Effect:
    return Effect(time.monotonic_ns(), gone or {}, generation)


# --- ranks ---


def _signalled(signum: int) -> Callable[[ChaosJob, Fault], Effect]:
    def do(job: ChaosJob, fault: Fault) -> Effect:
        pid = job.last[fault.rank].pid
        effect = now({fault.rank: pid})
        signal_all([pid], signum)
        return effect

    return do


def _injected(kind: str, *, replaced: bool = False, repaired: bool = True, **more: Any) -> Callable[..., Effect]:
    def do(job: ChaosJob, fault: Fault) -> Effect:
        wanted = Wanted(kind=kind, seed=fault.seed, rank=fault.rank, **more)
        pid, generation = job.last[fault.rank].pid, job.generation
        patiently(job, lambda: ask(job.run0, wanted))
        return now({fault.rank: pid} if replaced else None, generation if repaired else -1)

    return do


def nan(job: ChaosJob, fault: Fault) -> Effect:
    """Never at the step of the last one: what goes wrong twice at the same place is taken for bad data, and left out."""
    job.wait(lambda: job.done > job.sick_at + 2, ASK_S)
    effect = _injected("nan")(job, fault)
    job.look()
    job.sick_at = job.high
    return effect


# --- rerail's own processes ---


def _helper(module: str) -> Callable[[ChaosJob, Fault], Effect]:
    def do(job: ChaosJob, fault: Fault) -> Effect:
        pids = job.pids(fault.node, module) or job.pids(-1, module)
        if not pids:
            raise Nothing(f"no process of {module}")
        effect = now()
        signal_all(pids[:1], signal.SIGKILL)
        return effect

    return do


def _agent(signum: int, then: Callable[[ChaosJob, list[int]], None] = lambda job, pids: None) -> Callable[..., Effect]:
    def do(job: ChaosJob, fault: Fault) -> Effect:
        pids = job.pids(fault.node, "rerail.runtime.agent")
        if not pids:
            raise Nothing(f"no agent on node {fault.node}")
        effect = now(job.ranks_on(fault.node))
        signal_all(pids, signum)
        then(job, pids)
        return effect

    return do


def _wake(job: ChaosJob, pids: list[int]) -> None:
    """Frozen for longer than its lease: its ranks are ended by somebody else."""
    job.later(LOST_S + 1.0, lambda: signal_all(pids, signal.SIGCONT))


def standby(job: ChaosJob, fault: Fault) -> Effect:
    ranks = {step.pid for step in job.last.values()}
    pids = [pid for pid in job.pids(fault.node, "rerail.runtime.bootstrap") if pid not in ranks]
    if not pids:
        raise Nothing(f"no standby on node {fault.node}")
    effect = now()
    signal_all(pids, signal.SIGKILL)
    return effect


# --- nodes ---


def _node_dies(*, launcher_only: bool) -> Callable[[ChaosJob, Fault], Effect]:
    def do(job: ChaosJob, fault: Fault) -> Effect:
        node = fault.node
        if node == 0 and launcher_only:
            raise Nothing("the launcher of the controller's node ends the job, and is meant to")
        if node in job.down:
            raise Nothing(f"node {node} is dead already")
        effect = now({step.rank: step.pid for step in job.last.values()} if node == 0 else job.ranks_on(node))
        job.kill_node(node, launcher_only=launcher_only)
        job.later((0.5 if launcher_only else BOOT_S) + fault.seed % 20 / 10, lambda: job.revive(node))
        return effect

    return do


def _node_stops(seconds: float, *, lost: bool) -> Callable[[ChaosJob, Fault], Effect]:
    def do(job: ChaosJob, fault: Fault) -> Effect:
        pids = [pid for pid in job.pids(fault.node) if pid != job.launchers[fault.node].pid]
        effect = now(_cut_off(job, fault.node) if lost else None)
        signal_all(pids, signal.SIGSTOP)
        job.later(seconds, lambda: signal_all(pids, signal.SIGCONT))
        return effect if lost else effect._replace(since_ns=effect.since_ns + int(seconds * 1e9))

    return do


# --- wires ---


def _cut_off(job: ChaosJob, node: int) -> dict[int, int]:
    """Ranks that have to end when this node hears nothing from the others: its own, or all but the controller's."""
    mine = job.ranks_on(node)
    return mine if node else {step.rank: step.pid for step in job.last.values() if step.rank not in mine}


def _cut(seconds: float, *, lost: bool, carrier: bool = False) -> Callable[[ChaosJob, Fault], Effect]:
    def do(job: ChaosJob, fault: Fault) -> Effect:
        assert job.wires is not None
        wires, node = job.wires, fault.node
        if node in job.down:
            raise Nothing(f"node {node} is dead")
        effect = now(_cut_off(job, node) if lost else None)
        wires.cut(node, carrier=carrier)
        job.later(seconds, lambda: None if node in job.down else wires.restore(node))
        return effect if lost else effect._replace(since_ns=effect.since_ns + int(seconds * 1e9))

    return do


def flap(job: ChaosJob, fault: Fault) -> Effect:
    assert job.wires is not None
    wires, node = job.wires, fault.node
    for turn in range(4):
        job.later(0.5 * turn, lambda: None if node in job.down else wires.cut(node, carrier=True))
        job.later(0.5 * turn + 0.3, lambda: None if node in job.down else wires.restore(node))
    return now()._replace(since_ns=time.monotonic_ns() + int(1.8e9))


def slow_link(job: ChaosJob, fault: Fault) -> Effect:
    assert job.wires is not None
    wires, node = job.wires, fault.node
    if node in job.down:
        raise Nothing(f"node {node} is dead")
    wires.slow(node, "1mbit")
    job.later(1.5, lambda: None if node in job.down else wires.restore(node))
    return now()


# --- disks and places ---


def _disk_full(which: str) -> Callable[[ChaosJob, Fault], Effect]:
    def do(job: ChaosJob, fault: Fault) -> Effect:
        folder = str(job.saved if which == "saved" else job.run0)
        wanted = Wanted(kind="disk-full", seed=fault.seed, rank=fault.rank, folder=folder, for_s=1.5)
        patiently(job, lambda: ask(job.run0, wanted))
        return now()._replace(since_ns=time.monotonic_ns() + int(1.5e9))

    return do


def corrupt(job: ChaosJob, fault: Fault) -> Effect:
    wanted = Wanted(kind="corrupt-checkpoint", seed=fault.seed, rank=fault.rank, folder=str(job.saved))
    patiently(job, lambda: ask(job.run0, wanted))
    return now()


def switched(job: ChaosJob, fault: Fault) -> Effect:
    """A person takes a node out of use while it trains: a spare one takes its ranks, and it becomes the spare one."""
    gone = job.ranks_on(fault.node)
    waiting = [node for node in range(job.size.all_nodes) if not job.ranks_on(node) and node not in job.down]
    if not gone or not waiting:
        raise Nothing(f"node {fault.node} has no ranks, or there is no spare node")
    effect = now(gone)
    subject = f"node:node{fault.node}"
    patiently(job, lambda: _quarantine(job, Order(action=ADD, subject=subject, reason="chaos", by="chaos")))

    def release() -> None:
        if effect.over(job):
            patiently(job, lambda: _quarantine(job, Order(action=RELEASE, subject=subject, by="chaos")))
        else:
            job.later(0.2, release)

    job.later(0.2, release)
    return effect


def _quarantine(job: ChaosJob, order: Order) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(
            to_controller(job.run0, "/quarantine", msgspec.json.encode(order)), timeout=15
        ) as answer:
            return dict(msgspec.json.decode(answer.read()))
    except urllib.error.HTTPError as error:
        with error:
            return dict(msgspec.json.decode(error.read()))
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError("no controller answers") from None


AGAIN = (
    "is away",
    "not running",
    "at the moment",
    "has not reached",
    "went away",
    "no process on this node",
    "no ranks",
)


def patiently(job: ChaosJob, question: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The answer of the controller, which may just be being replaced; Nothing if it will not."""
    deadline, why = time.monotonic() + ASK_S, ""
    while time.monotonic() < deadline:
        try:
            answer = job.ask(question)
        except UsageError as error:
            answer = {"refused": f"{error}; not running"}
        why = str(answer.get("refused", ""))
        if not why:
            return dict(answer)
        if not any(word in why for word in AGAIN):
            break
        job.look()
        time.sleep(0.1)
    raise Nothing(f"refused: {why}")


KINDS: dict[str, Kind] = {
    "kill": Kind(_signalled(signal.SIGKILL), 10),
    "segv": Kind(_signalled(signal.SIGSEGV), 6),
    "term": Kind(_signalled(signal.SIGTERM), 6),
    "abort": Kind(_signalled(signal.SIGABRT), 4),
    "stop": Kind(_signalled(signal.SIGSTOP), 4),
    "exit": Kind(_injected("exit", replaced=True), 6),
    "exception": Kind(_injected("exception"), 8),
    "hang": Kind(_injected("hang", replaced=True), 4),
    "nan": Kind(nan, 6),
    "bitflip": Kind(_injected("bitflip"), 5),
    "network-cut": Kind(_injected("network-cut"), 5),
    "slow-rank": Kind(_injected("slow", repaired=False, for_s=0.5, factor=2.0), 3),
    "kill-agent": Kind(_agent(signal.SIGKILL), 4),
    "freeze-agent": Kind(_agent(signal.SIGSTOP, _wake), 1),
    "kill-controller": Kind(_helper("rerail.runtime.controller"), 5),
    "kill-monitor": Kind(_helper("rerail.detect.monitor"), 3),
    "kill-persister": Kind(_helper("rerail.checkpoint.persister"), 4),
    "kill-standby": Kind(standby, 4),
    "node-dies": Kind(_node_dies(launcher_only=False), 3),
    "kill-launcher": Kind(_node_dies(launcher_only=True), 2),
    "node-pauses": Kind(_node_stops(0.5, lost=False), 2),
    "node-freezes": Kind(_node_stops(LOST_S + 1.5, lost=True), 1),
    "cut-short": Kind(_cut(1.0, lost=False), 3, "wires"),
    "cut-long": Kind(_cut(LOST_S + 2.0, lost=True), 2, "wires"),
    "unplugged": Kind(_cut(LOST_S + 2.0, lost=True, carrier=True), 1, "wires"),
    "flap": Kind(flap, 2, "wires"),
    "slow-link": Kind(slow_link, 2, "wires"),
    "hot-switch": Kind(switched, 4, "spare"),
    "disk-full": Kind(_disk_full("saved"), 2, "disks"),
    "journal-full": Kind(_disk_full("run0"), 2, "disks"),
    "corrupt-checkpoint": Kind(corrupt, 3),
}


def possible(job: ChaosJob) -> dict[str, Kind]:
    """The kinds that can be done here."""
    there = {"": True, "wires": job.wires is not None, "disks": len(job.disks) == 2, "spare": job.size.spares > 0}
    return {name: kind for name, kind in KINDS.items() if there[kind.needs]}


def own_process(kind: str, node: int) -> tuple[str, int] | None:
    """The process of rerail that its launcher starts again, but not without end: whose turn has to be awaited."""
    if kind == "kill-agent":
        return "agent", node
    return ("controller", 0) if kind == "kill-controller" else None
