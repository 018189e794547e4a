"""Runs a list of `bench/rehab.py` side by side on one device until the time is up, and writes every line as soon as it is said.

    python bench/rehab_all.py --minutes 8 --out results.jsonl                 five seeds to the end, then the other settings
    python bench/rehab_all.py --minutes 8 --out results.jsonl --only ends --only repeated --at-once 5
    python bench/rehab_all.py --list

What was written counts, however this ends: a run that is cut off has said all that it had measured so far. What the runs say beside
their results goes to FILE.log.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

BENCH = Path(__file__).resolve().parent
SEEDS = range(4, 9)
"""Not those that the back-test was made with."""
LEAST_S = 40.0
"""With less time left, nothing is begun."""
MINI = ["--shape", "mini"]
USABLE = [
    word for name in ("replica", "stale", "linear", "shadow", "shadow, on", "chosen") for word in ("--method", name)
]
"""The ways that a job may use."""
SETS: dict[str, list[list[str]]] = {
    "ends": [[*MINI, "--to-end", "--seed", str(seed)] for seed in SEEDS],
    "repeated": [[*MINI, "--repeated", "5", "--seed", str(seed)] for seed in SEEDS],
    "settings": [
        [*MINI, *more, *USABLE, "--seed", str(seed)]
        for seed in list(SEEDS)[:3]
        for more in (
            ["--lost", "a quarter of every tensor"],
            ["--beta2", "0.999"],
            ["--lost", "first of 4 stages"],
            ["--lost", "last of 4 stages"],
        )
    ],
    "images": [["--shape", "vgg16", "--seed", str(seed)] for seed in list(SEEDS)[:2]],
    "gpt350": [["--shape", "gpt350", "--seed", str(seed)] for seed in list(SEEDS)[:1]],
    "try": [["--shape", "tiny-lean", "--seed", "4"], ["--shape", "tiny", "--to-end", "--seed", "4"]],
}
USUAL = ("ends", "repeated", "settings")


class Sink:
    """Takes lines from several processes; a file has them as soon as they are there."""

    def __init__(self, out: Path | None) -> None:
        self.lines: list[str] = []
        self._out = out.open("a") if out else None
        self.log: IO[str] = out.with_name(out.name + ".log").open("a") if out else sys.stderr
        self._lock = threading.Lock()

    def add(self, line: str) -> None:
        with self._lock:
            self.lines.append(line)
            if self._out:
                self._out.write(line)
                self._out.flush()

    def close(self) -> None:
        if self._out:
            self._out.close()
            self.log.close()


class Running:
    """One process, and the thread that listens to it."""

    def __init__(self, arguments: Sequence[str], sink: Sink, threads: int) -> None:
        self.arguments, self.began = list(arguments), time.monotonic()
        command = [sys.executable, "-u", str(BENCH / "rehab.py"), *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sink.log, text=True, env=environment)
        self._listener = threading.Thread(target=self._listen, args=(sink,), daemon=True)
        self._listener.start()

    def _listen(self, sink: Sink) -> None:
        assert self.process.stdout is not None, "it was asked for"
        for line in self.process.stdout:
            if line.startswith("{") and line.endswith("\n"):
                sink.add(line)

    def done(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> None:
        if not self.done():
            self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._listener.join(5)
        if self.process.stdout is not None:
            self.process.stdout.close()


def side_by_side(
    jobs: Sequence[Sequence[str]], *, at_once: int, out: Path | None = None, seconds: float = float("inf")
) -> list[str]:
    """All lines that the jobs said within that time. One that fails is told of, and the others go on."""
    sink, waiting, running = Sink(out), list(jobs), list[Running]()
    until, threads = time.monotonic() + seconds, max(1, (os.cpu_count() or 1) // at_once)
    try:
        while running or waiting:
            left = until - time.monotonic()
            if left <= 0 or (not running and left < LEAST_S):
                break
            while waiting and len(running) < at_once and left >= LEAST_S:
                running.append(Running(waiting.pop(0), sink, threads))
            for one in [one for one in running if one.done()]:
                running.remove(one)
                one.end()
                took = time.monotonic() - one.began
                _tell(f"{took:.0f} s, exit code {one.process.returncode}: {' '.join(one.arguments)}")
            time.sleep(0.1)
    finally:
        for one in running:
            _tell(f"cut off after {time.monotonic() - one.began:.0f} s: {' '.join(one.arguments)}")
            one.end()
        sink.close()
    for job in waiting:
        _tell(f"not begun: {' '.join(job)}")
    return sink.lines


def _tell(said: str) -> None:
    print(said, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", action="append", choices=SETS, help="in this order; may be repeated")
    parser.add_argument("--at-once", type=int, default=6, help="processes at the same time")
    parser.add_argument("--list", action="store_true", help="what would be run")
    args = parser.parse_args()
    jobs = [job for name in args.only or USUAL for job in SETS[name]]
    if args.list:
        print("\n".join(" ".join(job) for job in jobs))
        return
    if args.out is None:
        raise SystemExit("--out FILE: where the lines go")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    side_by_side(jobs, at_once=args.at_once, out=args.out, seconds=60 * args.minutes)


if __name__ == "__main__":
    main()
