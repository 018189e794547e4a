"""The chaos soak: hurts one long-running job again and again, and sees whether it always comes back, exact and without help.

    python bench/chaos.py --faults 1000 --seed 1           figures (hours); as root, with iproute2, for the faults of wires
    python bench/chaos.py --only kill-agent --faults 10    one kind

Three nodes and a spare one in network namespaces, two ranks each. The schedule is the seed's: which kind (`chaos_faults.py`), whom,
and whether the next fault comes when this one is repaired, at the same moment, or 0.05 to 0.5 s behind it, into its repair. In
the end every step of every rank must hold the weights of an undisturbed run, and nothing may be left behind.

What counts faults to find broken hardware is switched off (`SETTINGS` in `chaos_job.py`): the hardware is not broken, and would all
be in quarantine soon. Nodes that were killed are started again some seconds later, as a cluster's manager would.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from chaos_faults import KINDS, Effect, Fault, Kind, Nothing, own_process, possible
from chaos_job import HERE, SOURCE, ChaosJob, Size
from namespaces import Namespaces, why_not
from rerail.flow import Report
from witness import read

START_S = 180.0
PATIENCE_S = 180.0
"""Seconds that a job has to come back."""
PAIRED = 0.25
"""Share of faults that come together with the one before, or into its repair."""
OWN_LIMIT, OWN_WINDOW_S = 4, 65.0
"""How often one process of rerail itself is killed within this time: its launcher gives up beyond five in a minute."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one fault."""

    fault: Fault
    did: str
    """The kind in fact done: `kill` where there was nothing for the wanted one."""
    at: float
    """Wall clock."""
    step: int
    seconds: float
    """Until all ranks had completed a step again; -1: they did not."""
    why: str = ""
    rungs: tuple[str, ...] = ()
    """Of the reports between this fault, or the first of those that came together, and the next."""


def schedule(seed: int, count: int, kinds: dict[str, Kind], size: Size, paired: float = PAIRED) -> list[Fault]:
    """The same for the same seed. Every kind comes at least once if there is room."""
    chance = random.Random(f"chaos {seed}")
    names = list(kinds)
    chosen = names[:count] + chance.choices(names, [kinds[name].weight for name in names], k=max(0, count - len(names)))
    chance.shuffle(chosen)
    faults = []
    for index, kind in enumerate(chosen):
        behind = -1.0
        if index and faults[-1].behind_s < 0 and chance.random() < paired:
            behind = chance.choice([0.0, round(chance.uniform(0.05, 0.5), 3)])
        rank = chance.randrange(size.ranks)
        if behind >= 0 and rank == faults[-1].rank:  # what a rank is told to do in its step is lost with it
            rank = (rank + 1) % size.ranks
        place = {"rank": rank, "node": chance.randrange(size.all_nodes)}
        faults.append(Fault(index=index, kind=kind, seed=chance.randrange(1 << 31), behind_s=behind, **place))
    return faults


def together(faults: Iterable[Fault]) -> list[list[Fault]]:
    """Those that come at once, or into one another's repair."""
    groups: list[list[Fault]] = []
    for fault in faults:
        if fault.behind_s < 0 or not groups:
            groups.append([])
        groups[-1].append(fault)
    return groups


class Plan(NamedTuple):
    """What is to be done to the job."""

    faults: int
    seed: int
    only: tuple[str, ...] = ()
    """Kinds; all that can be done here when empty."""
    minutes: float = 0.0
    """No fault begins after that; 0: all are done."""
    log: Path | None = None
    paired: float = PAIRED
    patience_s: float = PATIENCE_S


class Soak:
    """The driver."""

    def __init__(self, job: ChaosJob, kinds: dict[str, Kind], plan: Plan) -> None:
        self.job, self.kinds, self._log, self._patience_s = job, kinds, plan.log, plan.patience_s
        self.results: list[Result] = []
        self._killed: dict[tuple[str, int], deque[float]] = {}
        self.began = self.ended = 0.0
        self.first_step = self.last_step = 0

    def begin(self) -> None:
        for node in range(self.job.size.all_nodes):
            self.job.start(node)
        if not self.job.wait(lambda: self.job.whole_since(0) and self.job.high > 5, START_S):
            raise SystemExit(f"the job did not start\n{self.job.story()}")
        self.began, self.first_step = time.monotonic(), self.job.high

    def run(self, groups: Sequence[list[Fault]], until: float = float("inf")) -> bool:
        """All faults, or as many as there is time for; False if the job did not come back from one."""
        for group in groups:
            if time.monotonic() > until:
                break
            if not self._hurt(group):
                return False
            if self.job.found:
                return False
        return True

    def _hurt(self, group: list[Fault]) -> bool:
        done: list[tuple[Fault, str, str, Effect, float, float]] = []
        for fault in group:
            if fault.behind_s > 0:
                self.job.wait(lambda: False, fault.behind_s)
            did, why, effect = self._do(fault)
            done.append((fault, did, why, effect, time.time(), time.monotonic()))
        took = [-1.0] * len(done)

        def over() -> bool:
            for index, (*_, effect, _, moment) in enumerate(done):
                if took[index] < 0 and effect.over(self.job):
                    newest = max(step.at for step in self.job.last.values()) / 1e9
                    took[index] = max(newest - moment, 0.0)
            return all(one >= 0 for one in took) and not self.job.busy

        recovered = self.job.wait(over, self._patience_s)
        recovered = recovered and self.job.wait(lambda: self.job.whole_since(self._calm_ns), self._patience_s)
        pause = random.Random(group[-1].seed).uniform(0.1, 0.5)
        self.job.wait(lambda: False, pause)
        rungs = self._rungs(done[0][4])
        for (fault, did, why, _, at, _), seconds in zip(done, took, strict=True):
            self._note(
                Result(
                    fault=fault,
                    did=did,
                    at=at,
                    step=self.job.high,
                    seconds=seconds if recovered else -1.0,
                    why=why,
                    rungs=rungs,
                )
            )
        self.ended, self.last_step = time.monotonic(), self.job.high
        return recovered

    @property
    def _calm_ns(self) -> int:
        return int(self.ended * 1e9)

    def _do(self, fault: Fault) -> tuple[str, str, Effect]:
        """What was done, why not what was wanted, and how to tell that it is over."""
        why = ""
        self.job.look()
        own = own_process(fault.kind, fault.node)
        if own is not None and self._too_often(own):
            why = f"the {own[0]} was killed {OWN_LIMIT} times within {OWN_WINDOW_S:.0f} s"
        else:
            try:
                return fault.kind, "", self.kinds[fault.kind].do(self.job, fault)
            except Nothing as nothing:
                why = str(nothing)
        return "kill", why, self.kinds["kill"].do(self.job, fault)

    def _too_often(self, own: tuple[str, int]) -> bool:
        times = self._killed.setdefault(own, deque(maxlen=OWN_LIMIT))
        if len(times) == OWN_LIMIT and time.monotonic() - times[0] < OWN_WINDOW_S:
            return True
        times.append(time.monotonic())
        return False

    def _rungs(self, since: float) -> tuple[str, ...]:
        return tuple(str(report.rung.value) for report in self.job.reports() if report.at >= since)

    def _note(self, result: Result) -> None:
        self.results.append(result)
        if self._log is not None:
            with open(self._log, "ab") as file:
                file.write(msgspec.json.encode(result) + b"\n")
        print(_line(result), flush=True)

    def story(self) -> str:
        """All that happened, a line each."""
        return "\n".join(map(_line, self.results))


def _line(result: Result) -> str:
    fault = result.fault
    how = f"{result.seconds:6.2f} s" if result.seconds >= 0 else "NOT RECOVERED"
    with_it = "" if fault.behind_s < 0 else f"  {fault.behind_s:g} s behind"
    return (
        f"{fault.index:4} {result.did:<18} rank {fault.rank} node {fault.node}  {how}  step {result.step}"
        f"  {','.join(result.rungs) or '-'}{with_it}{f'  (not {fault.kind}: {result.why})' if result.why else ''}"
    )


# --- exactness ---


def undisturbed(folder: Path, size: Size, steps: int) -> dict[tuple[int, int], str]:
    """What every rank holds after every step if nothing happens to them."""
    folder.mkdir()
    (folder / "end").write_text(str(steps))
    command = [sys.executable, "-m", "rerail.cli.main", "run", "--standalone", "--nproc-per-node", str(size.ranks)]
    command += ["--run-dir", str(folder / "run"), str(HERE / "chaos_train.py"), "--witness", str(folder / "witness")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RERAIL_DETECTORS": "0", "RERAIL_STANDBYS": "0"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SOURCE), str(HERE), env.get("PYTHONPATH", ""))))
    with open(folder / "log", "wb") as log:
        subprocess.run([*command, "--end", str(folder / "end")], env=env, stdout=log, stderr=log, check=True)
    return {(step.rank, step.step): step.digest for step in read(folder / "witness")}


def differences(found: dict[tuple[int, int], str], wanted: dict[tuple[int, int], str]) -> list[str]:
    """Where each rank first holds what it should not, and steps nobody has completed."""
    wrong = sorted((place for place, digest in found.items() if wanted.get(place) != digest), key=lambda one: one[1])
    missing = [place for place in wanted if place not in found]
    first = dict(reversed(wrong))
    lines = [f"rank {rank} holds other weights at step {step}" for rank, step in sorted(first.items())]
    # a rank that advances beside the others completes a step without running it
    lines += [f"rank {rank} never told of step {step}" for rank, step in missing if step == max(wanted)[1]]
    return lines


# --- figures ---


def summary(soak: Soak) -> str:
    """The figures as tables."""
    results = soak.results
    lines = [_row("fault", "times", "recovered", "median", "p95")]
    for kind in sorted({result.did for result in results}):
        lines.append(_figures(kind, [result for result in results if result.did == kind]))
    lines.append(_figures("all", results))
    alone = _alone(results)
    lines += ["", _row("rung (of faults that came alone)", "times", "recovered", "median", "p95")]
    for rung in sorted({result.rungs for result in alone}, key=str):
        name = " + ".join(rung) or "none needed"
        lines.append(_figures(name, [result for result in alone if result.rungs == rung]))
    wall = soak.ended - soak.began
    steps = soak.last_step - soak.first_step
    useful = steps * soak.job.usual_s
    lines.append(
        f"\n{len(results)} faults of {len({result.did for result in results})} kinds in {wall:.0f} s, {steps} steps of "
        f"{soak.job.usual_s * 1e3:.0f} ms: goodput {useful / max(wall, 1e-9):.0%}; generations {soak.job.generation}; "
        f"restarts of all {_restarts(soak.job.reports())}"
    )
    return "\n".join(lines)


def _alone(results: list[Result]) -> list[Result]:
    paired = {result.fault.index for result in results if result.fault.behind_s >= 0}
    return [one for one in results if not {one.fault.index, one.fault.index + 1} & paired]


def _restarts(reports: list[Report]) -> int:
    return Counter(str(report.rung.value) for report in reports)["restart_all"]


def _figures(name: str, results: list[Result]) -> str:
    seconds = sorted(result.seconds for result in results if result.seconds >= 0)
    if not seconds:
        return _row(name, str(len(results)), "0", "-", "-")
    late = seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))]
    return _row(name, str(len(results)), str(len(seconds)), f"{statistics.median(seconds):.2f} s", f"{late:.2f} s")


def _row(name: str, times: str, recovered: str, median: str, late: str) -> str:
    return f"{name:<34}{times:>6}{recovered:>11}{median:>10}{late:>10}"


def soak(folder: Path, size: Size, wires: Namespaces | None, plan: Plan) -> tuple[str, list[str]]:
    """The whole of it: the figures, and what is not as it should be."""
    job = ChaosJob(folder, size, wires)
    try:
        kinds = possible(job)
        wanted = {name: kinds[name] for name in plan.only} or kinds
        run = Soak(job, kinds, plan)
        run.begin()
        until = time.monotonic() + plan.minutes * 60 if plan.minutes else float("inf")
        fine = run.run(together(schedule(plan.seed, plan.faults, wanted, size, plan.paired)), until)
        wrong = list(job.found) if fine else [*job.found, "the job did not come back"]
        if fine and (said := job.finish()):
            wrong.append(said)
        if wrong:
            return summary(run), [*wrong, job.story()]
        wrong += job.leaks()
        if other := differences(job.digests, undisturbed(folder / "undisturbed", size, job.high)):
            wrong += [*other, run.story()]
        return summary(run), wrong
    finally:
        job.clean_up()


@contextlib.contextmanager
def network(size: Size) -> Iterator[Namespaces | None]:
    """Namespaces where they can be had."""
    if why := why_not():
        print(f"no faults of wires: {why}", flush=True)
        yield None
        return
    with Namespaces(size.all_nodes) as wires:
        yield wires


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=6, help="a multiple of --nodes")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--spares", type=int, default=1, help="spare nodes")
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no fault after that; 0: all of them")
    parser.add_argument("--only", action="append", default=[], metavar="KIND", help="no other kinds; may be repeated")
    parser.add_argument("--paired", type=float, default=PAIRED, help="share of faults that do not come alone")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds to come back from a fault")
    parser.add_argument("--log", type=Path, help="a JSON line for every fault")
    parser.add_argument("--keep", type=Path, help="keep what the nodes said in this new folder")
    args = parser.parse_args()
    if args.ranks % args.nodes:
        parser.error(f"{args.ranks} ranks cannot be dealt to {args.nodes} nodes evenly")
    if unknown := [kind for kind in args.only if kind not in KINDS]:
        parser.error(f"there is no kind {unknown[0]!r}; kinds: {', '.join(KINDS)}")
    size = Size(args.nodes, args.spares, args.ranks // args.nodes)
    plan = Plan(args.faults, args.seed, tuple(args.only), args.minutes, args.log, args.paired, args.patience)
    with tempfile.TemporaryDirectory(prefix="rerail-chaos-") as name, network(size) as wires:
        folder = args.keep or Path(name)
        folder.mkdir(exist_ok=True)
        figures, wrong = soak(folder, size, wires, plan)
    print(f"\n{figures}\n")
    print("\n".join(wrong[:20]) or "every step of every rank as in an undisturbed run; nothing left behind")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
