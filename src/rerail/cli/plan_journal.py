"""Turns a job's journal into what a plan can be made from: its rate of faults, what its repairs took, its step, and how it has planned.

Called by `cli.plan`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from rerail.errors import JournalError, UsageError
from rerail.flow import Recovery, Report, Rung, Signal
from rerail.planner.paper import Job
from rerail.planner.rates import Rate, learnt, usual
from rerail.planner.units import duration
from rerail.report.accounts import NO_FAULTS, Accounts, accounts
from rerail.report.partition import Cause
from rerail.report.summary import find_run, reading, reports
from rerail.runtime.journal import FILE_NAME, Journal
from rerail.wording import counted

PLANNED, DECISIONS = "checkpoint.planned", 5
FEW = 3
"""Faults that the usual share of lost nodes weighs."""
_RUNGS = {
    "process_down": (Rung.REPLACE_RANK, Rung.RETRY_STEP, Rung.RESET_DEVICE, Rung.SWAP_DEVICE, Rung.ROLL_BACK),
    "node_down": (Rung.SWAP_NODE,),
    "job_down": (Rung.RESTART_ALL,),
}


class Learnt(msgspec.Struct, frozen=True, kw_only=True):
    """What a journal says: fields of a plan, where each comes from, and the job's own decisions."""

    name: str
    values: dict[str, float] = {}
    why: dict[str, str] = {}
    world: int = 0
    """Ranks of the job; 0: not known."""
    rate: Rate
    decisions: list[str] = []

    def scaled(self, gpus: float) -> Learnt:
        """The same job on another number of devices, which have as many faults each."""
        if not self.world or gpus == self.world:
            return self
        by = self.world / gpus
        values = {**self.values, "mtbf": self.values["mtbf"] * by}
        values |= {"per_node": gpus} if values.get("per_node", 0) > gpus else {}
        if values.get("replicas", 1) > gpus:
            del values["replicas"]
        words = f"{self.why['mtbf']}; that was on {counted(self.world, 'rank')}, and is scaled to {gpus:,.0f}"
        rate = msgspec.structs.replace(self.rate, low=self.rate.low / by, high=self.rate.high / by)
        return msgspec.structs.replace(self, values=values, why={**self.why, "mtbf": words}, rate=rate)


def from_journal(job: str) -> Learnt:
    """What a job has measured itself."""
    folder = _folder(job)
    with _read(folder) as journal:
        told = [report for report in reports(journal) if report.attempts and report.code not in NO_FAULTS]
        whole = accounts(journal, folder.name)
        planned = [s for s in journal.records(kind="signal") if isinstance(s, Signal) and s.source == PLANNED]
        repairs = [one for one in journal.records(kind="recovery") if isinstance(one, Recovery)]
        nodes = Counter(str(place[0]) for place in journal.state().get("placement") or ())
    if whole is None or not whole.wall_s:
        raise UsageError(f"the journal in {folder} tells of nothing: the job has not begun to train")
    ran, rate = _rate(whole, told, nodes.total())
    found, why = _shares(told, rate, ran, folder.name)
    if any(source.startswith("replica") for one in repairs for source in one.sources.values()):
        found["replicas"] = 2.0
        why["replicas"] = f"ranks of {folder.name} were restored from replicas; at least two"
    if nodes:
        found |= {"gpus": nodes.total(), "per_node": max(nodes.values())}
        why |= dict.fromkeys(("gpus", "per_node"), f"ranks in the journal of {folder.name}")
    for name, rungs in _RUNGS.items():
        mine = [report.cost for report in told if report.rung in rungs and report.ok]
        if mine:
            found[name] = sum(cost.detect + cost.t1 + cost.t2 + cost.t4 for cost in mine) / len(mine)
            why[name] = f"mean of {len(mine)} in the journal of {folder.name}"
    step_s = float(planned[-1].payload.get("step_s", 0.0)) if planned else 0.0
    if step_s > 0 or whole.step_s:
        found["step"] = step_s if step_s > 0 else whole.step_s or 0.0
        why["step"] = f"measured by {folder.name}"
    words = [f"  step {one.step}: {one.payload.get('message', '')}" for one in planned[-DECISIONS:]]
    return Learnt(name=folder.name, values=found, why=why, world=nodes.total(), rate=rate, decisions=words)


@contextlib.contextmanager
def _read(folder: Path) -> Iterator[Journal]:
    """The journal; what is damaged or foreign is said by the name of the option."""
    try:
        with reading(folder) as journal:
            yield journal
    except JournalError as error:
        raise UsageError(
            f"--journal: {str(error).splitlines()[0]}", hint="is it the journal of another program?"
        ) from error


def _rate(whole: Accounts, told: Sequence[Report], world: int) -> tuple[float, Rate]:
    """Seconds in which the job could have failed, and how often it did; pieces in which it did not run are left out."""
    off = [piece for piece in whole.pieces if piece.cause is Cause.OFF]
    at = [report.at - whole.begin - sum(one.seconds for one in off if one.end <= report.at) for report in told]
    marks = [0.0, *sorted(max(0.0, one) for one in at)]
    ran = max(whole.wall_s - whole.parts[Cause.OFF], marks[-1], 1e-3)
    return ran, learnt([b - a for a, b in pairwise(marks)], ran - marks[-1], usual(max(1, world)))


def _shares(told: Sequence[Report], rate: Rate, ran: float, name: str) -> tuple[dict[str, float], dict[str, str]]:
    """The time between faults, and the share of them that took a node."""
    taken = sum(report.rung is Rung.SWAP_NODE or report.code == "node.lost" for report in told)
    found = {
        "mtbf": rate.between_s,
        "node_share": (taken + Job(gpus=1, params=1).node_share * FEW) / (len(told) + FEW),
    }
    since = f", of which {rate.faults} {rate.why}" if rate.why else ""
    why = {
        "mtbf": f"{counted(len(told), 'fault')} in {duration(ran)} in the journal of {name}{since}; what is usual weighs one fault",
        "node_share": f"{taken} of {counted(len(told), 'fault')} there; what is usual weighs {FEW}",
    }
    return found, why


def _folder(job: str) -> Path:
    """By its name, its run directory, or the journal itself."""
    path = Path(job)
    path = path.parent if path.name == FILE_NAME else path
    if path.is_dir() or "/" in job:
        if not (path / FILE_NAME).is_file():
            raise UsageError(
                f"--journal {job} holds no journal", hint="it names a job, its run directory, or a journal"
            )
        return find_run("", str(path))
    return find_run(job)
