"""What a lost shard costs if only that shard is put back: measured against computing everything again.

    python bench/rehab.py --shape mini --first-seed 4 --seeds 5 --at-once 5 --to-end      faults at 25, 50 and 75 % of the run
    python bench/rehab.py --shape mini --lost "a quarter of every tensor" --beta2 0.999
    python bench/rehab.py --shape mini --repeated 5                 five faults in one run
    python bench/rehab.py --shape gpt350                            303 M parameters
    python bench/rehab.py --shape gpt3b --seed 4                    3.2 B parameters: one fault, the ways that a job may use
    python bench/rehab.py --shape vgg16 --seeds 2
    python bench/rehab.py --read results.jsonl --plots rehab.html   the tables once more, and drawings
    python bench/rehab_all.py --minutes 8 --out results.jsonl       a list of such runs, side by side, until the time is up

A run is trained undisturbed. Then, for every fault, all is put back to the step of the fault, the lost part (a quarter: the second of four
stages) is replaced by each way of restoring it, and training goes on with the same data. Three metrics, since they rank methods
differently, all in steps; computing again costs exactly the steps since the checkpoint:

    lag      how far behind the undisturbed run the validation loss is, two checkpoint intervals later, by that run's slope
    regain   steps until the training loss is what it was before the fault
    end      the same as lag at the end of the run

"chosen" is what the back-test takes of all predictors; where it takes the stale one, it is neither better nor worse than that.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from rehab_all import side_by_side
from rehab_plots import drawings
from rehab_runs import FEW, METHODS, Reference, choice, horizon, recovery, repeated
from rehab_tables import tables
from rehab_train import SHAPES, Span, Trainer

LOST: dict[str, Callable[[Trainer], list[Span]]] = {
    "second of 4 stages": lambda trainer: trainer.stage(1, 4),
    "first of 4 stages": lambda trainer: trainer.stage(0, 4),
    "last of 4 stages": lambda trainer: trainer.stage(3, 4),
    "a quarter of every tensor": lambda trainer: trainer.slices(1, 4),
}
TO_END = ("replica", "stale", "linear", "shadow", "shadow, on")
"""And whatever was chosen."""


def reference(args: argparse.Namespace, seed: int) -> Reference:
    """The undisturbed run, trained, with its faults at a quarter, half and three quarters; of a lean shape at half alone."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = SHAPES[args.shape]
    shape = shape._replace(steps=args.steps or shape.steps, batch=args.batch or shape.batch, beta2=args.beta2)
    every = args.every or max(20, shape.steps // 20)
    shares = (0.5,) if shape.lean else (0.25, 0.5, 0.75)
    faults = [round(shape.steps * share) // every * every + every - 5 for share in shares]
    trainer = Trainer(shape, seed, device, recorded=not args.eager)
    run = Reference(trainer, every, faults, LOST[args.lost](trainer))
    run.run()
    return run


def one_seed(args: argparse.Namespace, seed: int) -> None:
    began = time.monotonic()
    run = reference(args, seed)
    told = {"shape": args.shape, "seed": seed, "every": run.every, "lost": args.lost, "beta2": args.beta2}
    _say(told | _undisturbed(run) | {"until_s": time.monotonic() - began})
    told["share"] = sum(span.end - span.start for span in run.lost) / sum(one.numel() for one in run.trainer.parameters)
    few = bool(args.repeated) or run.trainer.shape.lean
    names = args.method or [name for name in METHODS if not few or name in FEW]
    if args.repeated:
        for name in names:
            _say(told | repeated(run, name, args.repeated))
        return
    for fault in run.faults:
        _one_fault(args, run, fault, names, told)


def _undisturbed(run: Reference) -> dict[str, object]:
    curve = {str(step): round(loss, 5) for step, loss in run.valid.items()}
    return {
        "step_s": run.seconds,
        "steps": run.trainer.shape.steps,
        "parameters": sum(one.numel() for one in run.trainer.parameters),
        "end_loss": run.valid[run.trainer.shape.steps],
        "slopes": {str(fault): run.slope(fault) for fault in run.faults},
        "undisturbed": curve,
    }


def _one_fault(args: argparse.Namespace, run: Reference, fault: int, names: list[str], told: dict[str, object]) -> None:
    """Every way of putting the shard back; the chosen one is one of them, or is measured as well."""
    steps = run.trainer.shape.steps
    to_end = {*TO_END} if args.to_end and fault == run.faults[len(run.faults) // 2] else set[str]()
    found = None
    if "chosen" in names:
        began = time.monotonic()
        found = choice(run, fault)
        more = {"method": "chosen", "chose": found.predictor.name, "expected": found.costs}
        more["choose_s"] = time.monotonic() - began
        if to_end:
            to_end.add(found.predictor.name)
        names = list(dict.fromkeys([*(name for name in names if name != "chosen"), found.predictor.name]))
    for name in names:
        result = recovery(run, fault, name, steps if name in to_end else min(fault + horizon(run), steps))
        _say(told | result)
        if found is not None and name == found.predictor.name:
            _say(told | result | more)


def _say(what: dict[str, object]) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--every", type=int, default=0, help="steps between checkpoints")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=1, help="seeds at the same time, each in a process of its own")
    parser.add_argument("--method", action="append", choices=METHODS, help="no others; may be repeated")
    parser.add_argument("--lost", choices=LOST, default="second of 4 stages")
    parser.add_argument("--beta2", type=float, default=0.95)
    parser.add_argument("--repeated", type=int, default=0, metavar="N", help="N faults in one run, nothing else")
    parser.add_argument("--to-end", action="store_true", help="the fault in the middle: train to the end of the run")
    parser.add_argument("--eager", action="store_true", help="do not record the kernels of a step")
    parser.add_argument("--seed", type=int, default=-1, help="only this one, in this process")
    parser.add_argument("--out", type=Path, help="a JSON line for every recovery")
    parser.add_argument("--read", type=Path, action="append", help="only make tables of what was written before")
    parser.add_argument("--plots", type=Path, metavar="FILE", help="a page with drawings, too")
    args = parser.parse_args()
    if args.seed >= 0 and not args.read:
        torch.backends.cuda.matmul.allow_tf32 = True
        one_seed(args, args.seed)
        return
    if args.read:
        lines = [line for path in args.read for line in path.read_text().splitlines()]
    else:
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        jobs = [[*sys.argv[1:], "--seed", str(seed)] for seed in seeds]
        lines = side_by_side(jobs, at_once=args.at_once, out=args.out)
    tables(lines)
    if args.plots:
        args.plots.write_text(drawings(lines))


if __name__ == "__main__":
    main()
