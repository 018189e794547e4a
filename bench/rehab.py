"""What a lost shard costs if only that shard is put back: measured against computing everything again.

    python bench/rehab.py --shape gpt350 --seeds 1                  one run, faults at 25, 50 and 75 % of it (minutes on a GPU)
    python bench/rehab.py --shape small --seeds 5 --at-once 3 --to-end
    python bench/rehab.py --shape small --lost "a quarter of every tensor" --beta2 0.999
    python bench/rehab.py --shape small --repeated 5                five faults in one run
    python bench/rehab.py --shape vgg16 --seeds 2
    python bench/rehab.py --read results.jsonl --plots rehab.html   the tables once more, and drawings

A run is trained undisturbed. Then, for every fault, all is put back to the step of the fault, the lost part (a quarter: the second of four
stages) is replaced by each way of restoring it, and training goes on with the same data. Three metrics, since they rank methods
differently, all in steps; computing again costs exactly the steps since the checkpoint:

    lag      how far behind the undisturbed run the validation loss is, some 100 steps later, by that run's slope
    regain   steps until the training loss is what it was before the fault
    end      the same as lag at the end of the run
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

from rehab_plots import drawings
from rehab_train import SHAPES, Shape, Span, State, Trainer, part
from rerail.rehab.choosing import Choice, choose
from rerail.rehab.predictors import LeastSquares, Linear, Predictor, Stale, Times, Window
from rerail.rehab.vitp import Vitp

KEPT = 6
"""Checkpoints of a shard that predictors may look at."""
MIRROR = 4
"""Steps between two mirrors of the shadow; the fault comes as late behind one as it can."""
LOOK = 3
"""Steps between two validations."""
SMOOTH = 30
"""Steps at the end of a horizon over which the gap is averaged."""


class Reference:
    """The undisturbed run: its losses, and what is needed to go back into it."""

    def __init__(self, trainer: Trainer, every: int, faults: Sequence[int]) -> None:
        self.trainer, self.every, self.faults = trainer, every, list(faults)
        self.hit: Callable[[int], object] | None = None
        """Called at each fault: the run is disturbed, after all."""
        self.valid: dict[int, float] = {}
        self.rates = [0.0]
        self.states: dict[int, State] = {}
        self.checkpoints: dict[int, list[torch.Tensor]] = {}
        self.mirrors: dict[int, list[torch.Tensor]] = {}
        self.learnt: dict[tuple[int, str], Vitp] = {}
        """Predictors that were trained for a fault, by its step and their name."""
        self.seconds = 0.0

    def run(self) -> None:
        trainer, shape = self.trainer, self.trainer.shape
        whole = {*self.faults, *(self.checkpoint(fault) for fault in self.faults)}
        mirrored = {fault - back for fault in self.faults for back in (MIRROR - 1, 2 * MIRROR - 1)}
        trained: list[torch.Tensor] = []
        valid: dict[int, torch.Tensor] = {}
        began = time.monotonic()
        for step in range(shape.steps + 1):
            if step in whole:
                self.states[step] = trainer.take()
            if step % self.every == 0:
                self.checkpoints[step] = [one.clone() for one in trainer.tensors()[0]]
            if step in mirrored:
                self.mirrors[step] = [one.bfloat16() for one in trainer.tensors()[0]]
            if step % LOOK == 0 or step == shape.steps or step in whole:
                valid[step] = trainer.validate()
            if self.hit is not None and step in self.faults:
                self.hit(step)
            if step < shape.steps:
                trained.append(trainer.train())
                self.rates.append(self.rates[-1] + shape.rate_at(step))
        self.seconds = (time.monotonic() - began) / shape.steps
        self.valid = {step: float(loss) for step, loss in valid.items()}
        self.trained = [float(loss) for loss in trained]

    def checkpoint(self, fault: int) -> int:
        """The newest one before it; never at the very step."""
        return (fault - 1) // self.every * self.every

    def slope(self, step: int) -> float:
        """By how much the validation loss falls in a step, around this one."""
        near = [(s, loss) for s, loss in self.valid.items() if abs(s - step) <= 60]
        return -statistics.linear_regression(*zip(*near, strict=True)).slope

    def windows(self, fault: int, lost: Sequence[Span], clock: Sequence[float]) -> list[Window]:
        newest = self.checkpoint(fault)
        steps = [step for step in sorted(self.checkpoints) if step <= newest][-KEPT:]
        times = Times(tuple(clock[step] for step in steps), clock[fault])
        return [Window(torch.stack([part(self.checkpoints[s], span) for s in steps]), times) for span in lost]


Method = Callable[[Reference, int, Sequence[Span]], dict[str, object]]
"""Puts the lost part back, at the step of the fault; says what there is to say about it."""


def put_back(run: Reference, fault: int, lost: Sequence[Span], guess: Callable[[int], torch.Tensor]) -> None:
    """`guess(i)` is the i-th lost part; its moments are those of the checkpoint."""
    old, now = run.states[run.checkpoint(fault)].tensors, run.trainer.tensors()
    for at, span in enumerate(lost):
        part(now[0], span).copy_(guess(at))
        for kind in (1, 2):
            part(now[kind], span).copy_(part(old[kind], span))


def predicted(
    made: Callable[[], Predictor], by_rates: bool, run: Reference, fault: int, lost: Sequence[Span]
) -> dict[str, object]:
    clock = run.rates if by_rates else list(map(float, range(len(run.rates))))
    windows, predictor = run.windows(fault, lost, clock), made()
    began = time.monotonic()
    told: dict[str, object] = {}
    if isinstance(predictor, Vitp):
        predictor = run.learnt[fault, predictor.name] = trained(predictor, windows)
        told["predictor_loss"] = predictor.loss
    put_back(run, fault, lost, lambda at: predictor.predict(*windows[at]))
    if run.trainer.device.type == "cuda":
        torch.cuda.synchronize()
    return told | {"seconds": time.monotonic() - began}


def trained(net: Vitp, windows: Sequence[Window]) -> Vitp:
    net.train(windows)
    net.tune(windows)
    return net


def choice(run: Reference, fault: int, lost: Sequence[Span]) -> Choice:
    """Which of the predictors rerail would take, by what was known at the checkpoint."""
    windows = run.windows(fault, lost, run.rates)
    candidates: list[Predictor] = [Linear(), Linear("linear over 2", 2), LeastSquares()]
    candidates += [net for (at, _), net in run.learnt.items() if at == fault]
    return choose(windows, candidates)


def shadow(on: bool, run: Reference, fault: int, lost: Sequence[Span]) -> dict[str, object]:
    """Parameters of some steps before, in half precision; the steps since on a straight line, or not at all."""
    sooner, later = (run.mirrors[fault - back] for back in (2 * MIRROR - 1, MIRROR - 1))
    times = Times((run.rates[fault - 2 * MIRROR + 1], run.rates[fault - MIRROR + 1]), run.rates[fault])
    way = Linear() if on else Stale()

    def guess(at: int) -> torch.Tensor:
        return way.predict(torch.stack([part(sooner, lost[at]).float(), part(later, lost[at]).float()]), times)

    put_back(run, fault, lost, guess)
    return {}


def untouched(run: Reference, fault: int, lost: Sequence[Span]) -> dict[str, object]:
    return {}


METHODS: dict[str, Method] = {
    "replica": untouched,
    "stale": partial(predicted, Stale, True),
    "linear": partial(predicted, Linear, True),
    "linear, by steps": partial(predicted, Linear, False),
    "linear over 2": partial(predicted, partial(Linear, "linear over 2", 2), True),
    "least squares": partial(predicted, LeastSquares, True),
    "vitp": partial(predicted, Vitp, True),
    "vitp, drift": partial(predicted, partial(Vitp, target="drift"), True),
    "shadow": partial(shadow, False),
    "shadow, on": partial(shadow, True),
}


def recovery(run: Reference, fault: int, name: str, lost: Sequence[Span], until: int) -> dict[str, object]:
    """Train on behind a fault, and price it."""
    trainer = run.trainer
    trainer.put(run.states[fault])
    told = METHODS[name](run, fault, lost)
    jump = float(trainer.validate())
    trained: list[torch.Tensor] = []
    valid: dict[int, torch.Tensor] = {}
    while trainer.step < until:
        if trainer.step % LOOK == 0:
            valid[trainer.step] = trainer.validate()
        trained.append(trainer.train())
    valid[trainer.step] = trainer.validate()
    early = min(until, fault + horizon(run))
    result = {
        "method": name,
        "fault": fault,
        "behind": fault - run.checkpoint(fault),
        "jump": jump - run.valid[fault],
        "fell": run.valid[run.checkpoint(fault)] - run.valid[fault],
        "lag": _gap(run, {s: float(x) for s, x in valid.items()}, early) / run.slope(early - SMOOTH // 2),
        "regain": regained(run.trained[:fault], [float(loss) for loss in trained]),
        **told,
    }
    if until == trainer.shape.steps:
        result["valid"] = {str(s): round(float(x), 5) for s, x in valid.items()}
        result["end"] = _gap(run, {s: float(x) for s, x in valid.items()}, until) / run.slope(until - SMOOTH // 2)
    return result


def horizon(run: Reference) -> int:
    return 2 * run.every


def _gap(run: Reference, valid: dict[int, float], until: int) -> float:
    steps = [step for step in valid if until - SMOOTH <= step <= until and step in run.valid]
    return statistics.fmean(valid[step] - run.valid[step] for step in steps)


def regained(before: Sequence[float], after: Sequence[float], window: int = 10) -> int:
    """Steps until the mean of ten losses is no more than that of the ten before the fault; one more than were seen: never."""
    level = statistics.fmean(before[-window:])
    for at in range(window, len(after) + 1):
        if statistics.fmean(after[at - window : at]) <= level:
            return at - window
    return len(after) + 1


def reference(shape: Shape, seed: int, every: int, shares: Iterable[float]) -> Reference:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    faults = [round(shape.steps * share) // every * every + every - 5 for share in shares]
    run = Reference(Trainer(shape, seed, device), every, faults)
    run.run()
    return run


def one_seed(args: argparse.Namespace, seed: int) -> None:
    shape = SHAPES[args.shape]
    shape = shape._replace(steps=args.steps or shape.steps, beta2=args.beta2)
    every = args.every or max(20, shape.steps // 20)
    run = reference(shape, seed, every, (0.25, 0.5, 0.75))
    told = {"shape": args.shape, "seed": seed, "every": every, "lost": args.lost, "beta2": args.beta2}
    curve = {str(step): round(loss, 5) for step, loss in run.valid.items()}
    _say(told | {"step_s": run.seconds, "end_loss": run.valid[shape.steps], "undisturbed": curve})
    lost = LOST[args.lost](run.trainer)
    told["share"] = sum(span.end - span.start for span in lost) / sum(one.numel() for one in run.trainer.parameters)
    for fault in run.faults if not args.repeated else ():
        results: dict[str, dict[str, object]] = {}
        for name in args.method or METHODS:
            last = shape.steps if args.to_end and fault == run.faults[1] and name in TO_END else fault + horizon(run)
            results[name] = recovery(run, fault, name, lost, min(last, shape.steps))
            _say(told | results[name])
        found = choice(run, fault, lost)
        _say(told | {"fault": fault, "chose": found.predictor.name, "expected": found.costs})
        if found.predictor.name in results:
            more = {"method": "chosen"}
            _say(told | results[found.predictor.name] | more)
    for name in args.method or METHODS if args.repeated else ():
        _say(told | repeated(run, seed, name, args.repeated, LOST[args.lost]))


def repeated(
    run: Reference, seed: int, name: str, count: int, which: Callable[[Trainer], list[Span]]
) -> dict[str, object]:
    """The same run, hit several times; each time with what was kept in this very run."""
    shape, trainer = run.trainer.shape, Trainer(run.trainer.shape, seed, run.trainer.device)
    faults = [shape.steps * (at + 1) // (count + 1) // run.every * run.every + run.every - 5 for at in range(count)]
    hit, lost = Reference(trainer, run.every, faults), which(trainer)
    hit.hit = lambda fault: METHODS[name](hit, fault, lost)
    hit.run()
    behind = sum(fault - hit.checkpoint(fault) for fault in faults)
    end = _gap(run, hit.valid, shape.steps) / run.slope(shape.steps - SMOOTH // 2)
    return {"method": name, "faults": count, "behind": behind, "end": end, "end_loss": hit.valid[shape.steps]}


LOST: dict[str, Callable[[Trainer], list[Span]]] = {
    "second of 4 stages": lambda trainer: trainer.stage(1, 4),
    "first of 4 stages": lambda trainer: trainer.stage(0, 4),
    "last of 4 stages": lambda trainer: trainer.stage(3, 4),
    "a quarter of every tensor": lambda trainer: trainer.slices(1, 4),
}
TO_END = ("replica", "stale", "linear", "shadow", "shadow, on")


def _say(what: dict[str, object]) -> None:
    print(json.dumps(what), flush=True)


# --- tables ---


def tables(lines: Iterable[str]) -> None:
    found = [json.loads(line) for line in lines if line.startswith("{")]
    by: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for one in found:
        if "lag" in one:
            by[f"{one['shape']}, {one['lost']} lost, beta2 {one['beta2']}", one["method"]].append(one)
    for shape in sorted({key[0] for key in by}):
        stale = {(one["seed"], one["fault"]): one["lag"] for one in by[shape, "stale"]}
        print(f"\n{shape}: in shares of the steps since the checkpoint; computing again is 1")
        print(
            "| restored from | n | lag | worst | saved | regain | better than stale | end of run |\n|---|---|---|---|---|---|---|---|"
        )
        for (of, name), runs in by.items():
            if of != shape:
                continue
            lags = [one["lag"] / one["behind"] for one in runs]
            better = sum(one["lag"] < stale[one["seed"], one["fault"]] for one in runs) if stale else 0
            ends = [one["end"] / one["behind"] for one in runs if "end" in one]
            end = f"{statistics.fmean(ends):.2f} ± {_confidence(ends):.2f} (n {len(ends)})" if len(ends) > 1 else "-"
            regain = statistics.fmean(one["regain"] / one["behind"] for one in runs)
            print(
                f"| {name} | {len(runs)} | {statistics.fmean(lags):.3f} | {max(lags):.3f} | {1 - statistics.fmean(lags):.0%} "
                f"| {regain:.2f} | {better} of {len(runs)} | {end} |"
            )

    hit = [one for one in found if "faults" in one]
    if hit:
        print("\n| several faults in one run | faults | end of run, in steps | computing again |\n|---|---|---|---|")
    for name in dict.fromkeys(one["method"] for one in hit):
        runs = [one for one in hit if one["method"] == name]
        ends = [one["end"] for one in runs]
        spread = f" ± {_confidence(ends):.0f}" if len(ends) > 1 else ""
        print(
            f"| {name} | {runs[0]['faults']} | {statistics.fmean(ends):.0f}{spread} (n {len(runs)}) | {runs[0]['behind']} |"
        )


def _confidence(values: Sequence[float]) -> float:
    """Half of the interval that holds the mean in 95 of 100 cases."""
    students = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
    return students.get(len(values), 2.2) * statistics.stdev(values) / len(values) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--every", type=int, default=0, help="steps between checkpoints")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=1, help="seeds at the same time, each in a process of its own")
    parser.add_argument("--method", action="append", choices=METHODS, help="no others; may be repeated")
    parser.add_argument("--lost", choices=LOST, default="second of 4 stages")
    parser.add_argument("--beta2", type=float, default=0.95)
    parser.add_argument("--repeated", type=int, default=0, metavar="N", help="N faults in one run, nothing else")
    parser.add_argument("--to-end", action="store_true", help="the fault in the middle: train to the end of the run")
    parser.add_argument("--seed", type=int, default=-1, help="only this one, in this process")
    parser.add_argument("--out", type=Path, help="a JSON line for every recovery")
    parser.add_argument("--read", type=Path, help="only make tables of what was written before")
    parser.add_argument("--plots", type=Path, metavar="FILE", help="a page with drawings, too")
    args = parser.parse_args()
    if args.read:
        lines = args.read.read_text().splitlines()
        tables(lines)
        if args.plots:
            args.plots.write_text(drawings(lines))
    elif args.seed >= 0:
        torch.backends.cuda.matmul.allow_tf32 = True
        one_seed(args, args.seed)
    else:
        lines = _all_seeds(args)
        if args.out:
            args.out.write_text("".join(lines))
        tables(lines)
        if args.plots:
            args.plots.write_text(drawings(lines))


def _all_seeds(args: argparse.Namespace) -> list[str]:
    passed = [text for text in sys.argv[1:] if text]
    waiting, running, lines = list(range(args.seeds)), list[subprocess.Popen[str]](), list[str]()
    while waiting or running:
        while waiting and len(running) < args.at_once:
            command = [sys.executable, __file__, *passed, "--seed", str(waiting.pop(0))]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        first = running.pop(0)
        assert first.stdout is not None, "it was asked for"
        for line in first.stdout:
            sys.stderr.write(line)
            lines.append(line)
        if first.wait():
            raise SystemExit(f"a run ended with {first.returncode}")
    return lines


if __name__ == "__main__":
    main()
