"""What being ready to go on from now costs when nothing fails: the same step without it, with shadows, and with everything.

    python bench/rehab_cost.py [--style pp|fsdp] [--runs 3] [--rounds 30]

Two ranks of one job (a pipeline of two stages, or FSDP2; on a GPU where there is one, which both share), again and again. Blocks of steps of
each kind follow one another in random order in the same processes, so that a busy machine slows all alike; one kind is there twice,
to show what the measurement is good for. Everything: shadows as they are planned, a log of messages (pipelines), and a predictor
that never stops learning in the moments in which a rank waits, though it would be done within seconds of each checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import rerail
from rerail.rehab.choosing import choose
from rerail.rehab.predictors import Times, Window
from rerail.rehab.vitp import STEPS, Vitp
from rerail.session.drifting import ELEMENTS, KEPT, TENSORS
from rerail.session.fabric import messages
from rerail.session.foretelling import PART
from rerail.session.past import ROOM

KINDS = ("nothing", "nothing again", "shadows", "everything")
BLOCK, WARM_UP, MICRO = 5, 20, 8
"""Steps in a row of one kind, steps before anything is measured, and micro-batches of a pipeline."""
SETTINGS = {
    "RERAIL_FIDELITY": "fast",
    "RERAIL_REHAB_FROM": "0",
    "RERAIL_SNAPSHOT_EVERY": "100000",
    "RERAIL_DETECTORS": "0",
    "OMP_NUM_THREADS": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
}


def layers_of(width: int, count: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for _ in range(count):
        parts += [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width)]
    return nn.Sequential(*parts)


def pipeline(job: rerail.Job, model: nn.Module) -> Callable[[torch.Tensor], None]:
    stage = PipelineStage(model, job.rank, job.world_size, job.device)
    schedule = Schedule1F1B(stage, MICRO, loss_fn=nn.functional.mse_loss)

    def run(batch: torch.Tensor) -> None:
        if job.rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch)

    return run


def sharded(model: nn.Sequential) -> Callable[[torch.Tensor], None]:
    for part in model:
        if isinstance(part, nn.Linear):
            fully_shard(part)
    fully_shard(model)
    return lambda batch: (model(batch) - batch).square().mean().backward()  # type: ignore[no-any-return]


class Readiness:
    """Switches all of it on and off."""

    def __init__(self, job: rerail.Job, pipelined: bool) -> None:
        self._shadow, self.foretelling = job._snapshots.shadow, job._snapshots.foretelling
        self._caster, self._log = self._shadow._caster, pipelined and messages.recording
        self.net = Vitp()

    def learn(self, version: int) -> None:
        """A sample of the parameters, as a checkpoint would have taken; from the sixth on the net learns without end."""
        self.foretelling._drifting.note(version)
        windows = self.foretelling._drifting.windows()
        if windows and windows[0].rows.shape[0] == 6:

            def endless() -> Iterator[None]:
                while True:
                    yield from self.net.learning(windows, part=PART)

            self.foretelling.coordinator.give(endless())

    @contextlib.contextmanager
    def of(self, kind: str) -> Iterator[None]:
        self._shadow._caster = self._caster if kind in KINDS[2:] else None
        messages.recording = bool(self._log) and kind == KINDS[3]
        with contextlib.nullcontext() if kind == KINDS[3] else self.foretelling.coordinator.paused():
            yield

    def end(self) -> None:
        self._shadow._caster = self._caster


def train(args: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    job = rerail.join(backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else None)
    if job.device.type == "cuda" and job.world_size > torch.cuda.device_count():
        os.environ["NCCL_HOSTID"] = f"host-of-rank-{job.rank}"  # two ranks on one GPU
    torch.manual_seed(1)
    model = layers_of(args.width, args.layers).to(job.device)
    step = pipeline(job, model) if args.style == "pp" else sharded(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    job.track(model=model, optimizer=optimizer)
    data = torch.randn(args.batch, args.width, device=job.device)
    turns = job.steps(until=WARM_UP + len(KINDS) * args.rounds * BLOCK)

    def took(steps: int, each: Callable[[int], None] = lambda version: None) -> float:
        began = time.monotonic()
        for _ in range(steps):
            each(next(turns))
            with job.step():
                step(data)
                optimizer.step()
                optimizer.zero_grad()
        if job.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.monotonic() - began) / steps

    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    took(WARM_UP // 2)
    while job._snapshots._stager is not None and job._snapshots._stager.making_room:
        time.sleep(0.1)
    ready, chance = Readiness(job, args.style == "pp"), random.Random(args.seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    took(WARM_UP // 2, ready.learn)
    for _ in range(args.rounds):
        for kind in chance.sample(KINDS, len(KINDS)):
            with ready.of(kind):
                found[kind].append(took(BLOCK))
    ready.end()
    coordinator, shadow = ready.foretelling.coordinator, job._snapshots.shadow
    if job.rank == 0:
        facts = {
            "every": shadow.every,
            "bits": coordinator.bits,
            "used_s": coordinator.used_s,
            "grown": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
            "log": messages._bytes / 1e6,
            "problem": repr(coordinator.problem),
        }
        args.out.write_text(json.dumps({"seconds": found, **facts}))
    for _ in turns:
        raise RuntimeError("there are steps left")


def memory() -> float:
    """MB that this process grows by while a net learns on as large a sample as a rank keeps, and guesses as much of a tensor as it is given at once."""

    def warm() -> None:
        one = nn.Linear(64, 64)
        one(torch.randn(PART, 64)).sum().backward()
        torch.optim.AdamW(one.parameters()).step()

    torch.set_num_threads(1)
    warm()
    torch.fft.rfft(torch.randn(KEPT, 64), dim=0)
    times = Times(tuple(map(float, range(KEPT))), float(KEPT))
    windows = [Window(torch.randn(KEPT, ELEMENTS // TENSORS), times) for _ in range(TENSORS)]
    size = ROOM // (8 * KEPT)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    net = Vitp()
    for _ in net.learning(windows, steps=STEPS, part=PART):
        pass
    onward = net.towards("drift")
    onward.tune(windows)
    choose(windows, [net, onward])
    rows = [torch.randn(size) for _ in range(KEPT)]
    onward.predict(torch.stack(rows), times)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--style", choices=("pp", "fsdp"), default="pp")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bar", type=float, default=3.0, help="percent that everything may cost")
    parser.add_argument("--out", type=Path, help="of a rank")
    parser.add_argument("--memory", action="store_true", help="only what the predictor takes")
    args = parser.parse_args()
    if args.out is not None:
        train(args)
        return 0
    if args.memory:
        grown = memory()
        print(f"the predictor, its samples, and what is guessed at once: {grown:.0f} MB (bar 200)")
        return int(grown >= 200)
    rises: dict[str, list[float]] = {kind: [] for kind in KINDS[1:]}
    for run in range(args.runs):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "found.json")
            command = [sys.executable, "-m", "rerail.cli.main", "run", "--nproc-per-node", "2", __file__]
            for name in ("style", "rounds", "width", "layers", "batch"):
                command += [f"--{name}", str(getattr(args, name))]
            command += ["--out", str(out), "--seed", str(run)]
            subprocess.run(command, check=True, env={**os.environ, **SETTINGS, "RERAIL_HOME": folder})
            told = json.loads(out.read_text())
        plain = told["seconds"][KINDS[0]]
        for kind, values in rises.items():
            values += [one / other - 1 for one, other in zip(told["seconds"][kind], plain, strict=True)]
        print(
            f"run {run}: a step takes {1000 * statistics.median(plain):.1f} ms; a shadow every {told['every']} steps; the predictor did "
            f"{told['bits']} bits in {told['used_s']:.2f} s of a CPU ({told['problem']}); log {told['log']:.0f} MB; the process grew by "
            f"{told['grown']:.0f} MB in all",
            flush=True,
        )
    middle = {kind: 100 * statistics.median(values) for kind, values in rises.items()}
    for kind, values in rises.items():
        mean, error = 100 * statistics.mean(values), 196 * statistics.stdev(values) / len(values) ** 0.5
        print(f"{kind:<14} median {middle[kind]:+.2f} %, mean {mean:+.2f} ± {error:.2f} % (95 %), {len(values)} blocks")
    return int(middle[KINDS[3]] > args.bar)


if __name__ == "__main__":
    sys.exit(main())
