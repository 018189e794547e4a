"""What a fault looks like to rerail: turns a simulated fault into the Signals that detectors of a real job would have made.

Called by `sim.desk`. Of thousands of ranks that complain of a broken collective a few are enough: the diagnosis folds them anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from rerail.detect.kernel_log import KernelLog
from rerail.detect.monitor import SOURCE as MACHINE
from rerail.diagnose.classify import BACK
from rerail.faults.catalog import Payload
from rerail.flow import Place, Signal
from rerail.sim.faults import Fault

EPOCH = 1_700_000_000.0
"""Wall clock of the beginning of every simulated job."""
JOB = "simulated"
BEFORE_S = 0.05
"""The kernel says it before the process is gone."""
ECHO_S = 0.05
"""Between a fault and the first complaint of somebody else."""


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """Where and when it is seen."""

    at: float
    """Seconds since the job began."""
    version: int
    generation: int
    ranks: tuple[int, ...]
    """Those that it hit."""
    places: dict[int, Place]
    """Of all ranks."""
    echoes: int
    trusted: int = -1


def machine(fault: Fault, scene: Scene, node: str) -> Iterator[Signal]:
    """What the monitor of its node tells, if it tells anything."""
    if fault.seen != "explicit" or fault.silent_root:
        return
    subject = f"gpu{fault.device}" if fault.scope == "device" else ""
    told: Payload = {
        "code": fault.code,
        "subject": subject,
        "detector": KernelLog.name,
        "evidence": f"simulated: {fault.code}",
    }
    yield _signal(MACHINE, node, -1, msgspec.structs.replace(scene, at=scene.at - BEFORE_S), told)


def seen(fault: Fault, scene: Scene) -> list[Signal]:
    """What ranks and agents tell, the cause first."""
    return [*_roots(fault, scene), *_echoes(fault, scene)]


def _roots(fault: Fault, scene: Scene) -> Iterator[Signal]:
    if fault.scope in ("node", "batch"):
        for node in sorted({scene.places[rank].node for rank in scene.ranks}):
            yield _signal("agent.lost", node, -1, scene, {"message": "no word for 10.0 s"})
        return
    for rank in scene.ranks:
        source, told = _words(fault, rank, scene)
        yield _signal(source, scene.places[rank].node, rank, scene, told)


def _words(fault: Fault, rank: int, scene: Scene) -> tuple[str, Payload]:
    """Which detector sees a broken rank, and what it says."""
    if fault.seen == "silent":
        return "training.vote", {"state": "differs", "message": f"rank {rank} differs", BACK: scene.trusted}
    if fault.silent_root:
        return "collective.stalled", {"message": "begun the fewest collectives"}
    if fault.seen == "hang":
        return "step.hang", {"state": "R", "stalled_s": 60.0}
    if fault.seen == "raised":
        told = {"exception": "RuntimeError", "message": f"simulated fault {fault.number}", "code": fault.code}
        return "step.raised", told
    return "process.exit", {"signal": "SIGABRT"}


def not_parked(rank: int, scene: Scene) -> Signal:
    """A rank did not leave its step when all were asked to."""
    return _signal("park.timeout", scene.places[rank].node, rank, scene, {"stalled_s": 30.0})


def back(node: str, scene: Scene) -> Signal:
    """Empty seats can be filled again."""
    return _signal("node.back", node, -1, scene, {})


def _echoes(fault: Fault, scene: Scene) -> Iterator[Signal]:
    """Neighbours complain, whoever is nearest first."""
    if fault.seen in ("silent", "raised") or not scene.ranks:
        return
    hit, first, told = set(scene.ranks), scene.ranks[-1], 0
    for step in range(1, len(scene.places)):
        rank = (first + step) % len(scene.places)
        if told >= scene.echoes:
            return
        if rank not in hit and rank in scene.places:
            told += 1
            later = msgspec.structs.replace(scene, at=scene.at + ECHO_S)
            yield _signal("collective.failed", scene.places[rank].node, rank, later, {})


def _signal(source: str, node: str, rank: int, scene: Scene, payload: Payload) -> Signal:
    return Signal(
        id=f"signal-{source}-{rank}-{scene.at:.3f}",
        job=JOB,
        at=EPOCH + scene.at,
        source=source,
        node=node,
        rank=rank,
        generation=scene.generation,
        step=scene.version,
        payload=dict(payload),
    )


def nodes_of(ranks: Sequence[int], places: dict[int, Place]) -> list[str]:
    """Where these are, each once."""
    return list(dict.fromkeys(places[rank].node for rank in ranks))
