"""Detection and diagnosis in figures: how often right, how fast, at what cost.

    python bench/detect.py [--corpus FILE] [--only NAME] [--json FILE]

`--corpus` is a file of labelled excerpts, one JSON object per line: `text`, `label_fault` (an id that entries of the catalogue
have among their aliases, or NONE), `right_action`, `role` (`cascade` where one fault drew others along). The line from the
kernel log is written to /dev/kmsg and needs root.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from rerail.config import Settings
from rerail.detect.kernel_log import INJECTED, KMSG
from rerail.detect.logs import Reader
from rerail.diagnose.cascade import judge
from rerail.diagnose.classify import Classifier
from rerail.diagnose.straggler import Phases, StragglerWatch
from rerail.faults.catalog import load_catalog
from rerail.faults.matcher import Matcher
from rerail.flow import Event, Signal
from rerail.runtime.lookout import Lookout

LOG_MB = 400
KERNEL_LINES = 300
IDLE_S = 60.0
STEPS = 2000


def corpus(path: Path) -> dict[str, Any]:
    """Root cause and handling of labelled excerpts."""
    matcher = Matcher(load_catalog().faults)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    tally = dict.fromkeys(
        ("faults", "root right", "cascades", "cascades right", "handling right", "benign", "false alarms"), 0
    )
    wrong = []
    for row in rows:
        verdict = judge(Reader(matcher).scan(io.BytesIO(row["text"].encode()), row["id"]))
        if row["label_fault"] == "NONE":
            tally["benign"] += 1
            tally["false alarms"] += verdict.root is not None
            continue
        right = verdict.root is not None and row["label_fault"] in verdict.root.fault.aliases
        tally["faults"] += 1
        tally["root right"] += right
        tally["handling right"] += str(verdict.action) == row["right_action"]
        if row["role"] == "cascade":
            tally["cascades"] += 1
            tally["cascades right"] += right
        if not right:
            wrong.append(f"{row['id']}: {verdict.root.fault.code if verdict.root else None}, not {row['label_fault']}")
    return {**tally, "wrong": wrong}


def healthy_log(megabytes: int) -> bytes:
    """What a job of eight ranks writes on a good day, with a little of everything that looks like trouble and is none."""
    dice = random.Random(7)
    noise = [
        "[rank{r}]: UserWarning: Grad strides do not match bucket view strides.",
        "node-1:4242:4343 [{r}] NCCL INFO Channel 07/0 : {r}[{r}] -> 0[0] via P2P/CUMEM",
        "2026-01-02 03:04:05,678 - trainer - INFO - saving checkpoint to /shared/run/step_{i} (0 errors)",
        "kernel: [ {i}.123456] EXT4-fs (nvme0n1p2): mounted filesystem with ordered data mode",
    ]
    usual = (
        "[rank{r}]: 2026-01-02 03:{m:02d}:{s:02d} iteration {i}/500000 | consumed samples: {n} | elapsed time per iteration (ms): {t:.1f} | "
        "learning rate: 3.0E-04 | global batch size: 1024 | lm loss: {l:.6f} | loss scale: 1.0 | grad norm: {g:.3f}"
    )
    lines, size, i = [], 0, 0
    while size < 8 << 20:
        i += 1
        words = {"r": i % 8, "i": i, "m": i // 60 % 60, "s": i % 60, "n": i * 1024}
        words |= {"t": 500 + 50 * dice.random(), "l": 2 + dice.random(), "g": dice.random()}
        lines.append((noise[i % len(noise)] if i % 50 == 0 else usual).format(**words))
        size += len(lines[-1]) + 1
    block = ("\n".join(lines) + "\n").encode()
    return block * max(1, megabytes * 1_000_000 // len(block))


def throughput() -> dict[str, Any]:
    """`rerail diagnose` on one large log with one fault at its end, start of the command included."""
    data = healthy_log(LOG_MB) + b"[rank3]: RuntimeError: CUDA error: an illegal memory access was encountered\n"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "train.log"
        log.write_bytes(data)
        took, found = [], ""
        for _ in range(3):
            began = time.perf_counter()
            ended = subprocess.run(
                [sys.executable, "-m", "rerail.cli.main", "diagnose", "--json", str(log)],
                capture_output=True,
                check=False,
            )
            took.append(time.perf_counter() - began)
            found = json.loads(ended.stdout)["root"]["code"]
    megabytes = len(data) / 1e6
    return {
        "MB": round(megabytes),
        "MB/s best": round(megabytes / min(took)),
        "MB/s median": round(megabytes / statistics.median(took)),
        "root": found,
    }


async def _kernel_latency() -> dict[str, Any]:
    classifier, arrived = Classifier(load_catalog()), asyncio.Queue[tuple[float, Event]]()

    def told(signal: Signal) -> None:
        arrived.put_nowait((time.perf_counter(), classifier.classify(signal)))

    os.environ["RERAIL_INJECT"] = "1"
    lookout = asyncio.create_task(Lookout(Settings(), "bench", "n0", told).run())
    await asyncio.sleep(8.0)
    waits = []
    for number in range(KERNEL_LINES):
        # different devices: the same fault again and again is told at a limited rate
        text = f"NVRM: Xid (PCI:0000:{number % 250:02x}:00): {(13, 31, 43, 48, 63, 74, 79, 94, 95, 119)[number % 10]}, pid=1, bench\n"
        sent = time.perf_counter()
        KMSG.write_text(f"<4>{INJECTED}{text}")
        with contextlib.suppress(TimeoutError):
            when, _ = await asyncio.wait_for(arrived.get(), 5.0)
            waits.append(when - sent)
        await asyncio.sleep(0.35)
    lookout.cancel()
    waits.sort()
    return {
        "lines": KERNEL_LINES,
        "seen": len(waits),
        "ms median": round(1e3 * statistics.median(waits), 1),
        "ms p99": round(1e3 * waits[int(len(waits) * 0.99) - 1], 1),
        "ms worst": round(1e3 * waits[-1], 1),
    }


def kernel_latency() -> dict[str, Any]:
    """From a line in the kernel log to the Event made of it."""
    if not os.access(KMSG, os.W_OK):
        return {"skipped": "/dev/kmsg cannot be written"}
    return asyncio.run(_kernel_latency())


def idle_cost() -> dict[str, Any]:
    """The monitor with all its detectors on a machine where nothing happens."""
    process = subprocess.Popen([sys.executable, "-m", "rerail.detect.monitor"], stdout=subprocess.DEVNULL)
    try:
        watched = psutil.Process(process.pid)
        time.sleep(15.0)
        before, began = _cpu(watched), time.monotonic()
        time.sleep(IDLE_S)
        share = (_cpu(watched) - before) / (time.monotonic() - began)
        memory = watched.memory_info().rss + sum(child.memory_info().rss for child in watched.children(recursive=True))
    finally:
        process.kill()
        process.wait()
    return {"% of one core": round(100 * share, 3), "MB resident": round(memory / 1e6, 1)}


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


def stragglers() -> dict[str, Any]:
    """Steps until a rank that is slowed by 1.3 is named, and false alarms in noise."""
    delays, wrong, missed, alarms = [], 0, 0, 0
    for seed in range(40):
        ranks, culprit, at = (4, 8, 64)[seed % 3], seed % 4, 200
        named = _watch(seed, ranks, 400, culprit=culprit, at=at)
        mine = [step for step, rank in named if rank == culprit and step >= at]
        wrong += any(rank != culprit or step < at for step, rank in named)
        missed += not mine
        delays += [mine[0] - at + 1] if mine else []
    for seed in range(10):
        alarms += len(_watch(1000 + seed, (2, 4, 8, 64)[seed % 4], STEPS))
    return {
        "runs": 40,
        "named": 40 - missed,
        "wrong rank": wrong,
        "steps median": statistics.median(delays),
        "steps worst": max(delays),
        f"false alarms in 10 x {STEPS} steps": alarms,
    }


def _watch(seed: int, ranks: int, steps: int, culprit: int = -1, at: int = 0) -> list[tuple[int, int]]:
    dice, watch, named = random.Random(seed), StragglerWatch(), []
    for step in range(1, steps + 1):
        common = dice.lognormvariate(0.0, 0.1) * (3.0 if dice.random() < 0.01 else 1.0)
        for rank in range(ranks):
            own = common * dice.lognormvariate(0.0, 0.1) * (5.0 if dice.random() < 0.002 else 1.0)
            slow = 1.3 if rank == culprit and step >= at else 1.0
            for found in watch.take(rank, step, Phases(0.01, 0.4 * own * slow, 0.1, 0.0)):
                if not found.over:
                    named.append((step, found.rank))
    return named


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "throughput": throughput,
    "kernel": kernel_latency,
    "idle": idle_cost,
    "straggler": stragglers,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--only", choices=[*PARTS, "corpus"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for name, part in PARTS.items():
        if args.only in (None, name):
            results[name] = part()
            print(f"{name:<11}", results[name], flush=True)
    if args.corpus is not None and args.only in (None, "corpus"):
        results["corpus"] = corpus(args.corpus)
        print(f"{'corpus':<11}", results["corpus"], flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
