"""The accounts of a large journal in figures: 1,000 incidents and 1,000,000 records become a report, as a process of its own.

    python bench/report.py [--incidents N] [--records N] [--repeats N] [--keep FOLDER]

Prints the best and the median of each format, and exits with 1 if the HTML file takes longer than the bar. `--keep` leaves the
journal there for a look; an existing one is used again.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rerail.flow import AnyRecord, Cost, Event, Phase, Recovery, Report, Rung, Signal
from rerail.runtime.journal import FILE_NAME, KEPT_SAMPLES, Journal
from rerail.runtime.samples import MOST, Mark, MarkKind, Sample

BAR_S = 5.0
BEGIN = 1_700_000_000.0
CODES = ("process.killed", "gpu.xid.79", "process.stopped", "collective.timeout", "node.lost")
BATCH = 50_000


def incident(number: int, at: float, rng: random.Random) -> list[tuple[int, AnyRecord]]:
    """The records of an incident that accounts are made of, with the signal and the event it began with."""
    t1, t2, t3, step = rng.expovariate(0.1), rng.random(), rng.expovariate(0.3), 1.0 + rng.random()
    cost = Cost(detect=rng.random() * 3, t0=step * 3, t1=t1, t2=t2, t3=t3, t4=rng.random())
    ends = [t1, t1 + t2 + t3, t1 + t2 + t3 + step + cost.t4]
    phases = tuple(
        Phase(name=name, start=start, end=end)
        for name, start, end in zip(("reschedule", "form", "replay"), [0.0, *ends], ends, strict=False)
    )
    code, over, mark = rng.choice(CODES), at + ends[-1], f"{number}"
    shared = {"job": "bench", "node": "n03"}
    records: list[AnyRecord] = [
        Signal(id=f"s{mark}", at=at, source="process.exit", rank=2, **shared),
        Event(id=f"e{mark}", at=at, cause_id=f"s{mark}", code=code, rank=2, **shared),
        Recovery(id=f"r{mark}", job="bench", at=over, rung=Rung.REPLACE_RANK, generation=number, ok=True, phases=phases),
        Report(
            id=f"p{mark}", at=over, cause_id=f"r{mark}", incident=number, code=code, summary=f"rank 2: {code}",
            rung=Rung.REPLACE_RANK, ok=True, cost=cost, lost_steps=2, ranks=(2,), **shared,
        ),
    ]  # fmt: skip
    return [(number, record) for record in records]


def make(path: Path, incidents: int, records: int) -> None:
    """A job of 30 days: its incidents, what was told between them, and as many samples as are ever kept."""
    rng, span = random.Random(1), 30 * 86_400.0
    journal = Journal(path)
    every = span / (incidents + 1)
    rest = max(0, records - 4 * incidents)
    told = 0
    for number in range(1, incidents + 1):
        at = BEGIN + every * number
        rows = incident(number, at, rng)
        share = rest * number // incidents - told
        told += share
        for place in range(0, share, BATCH):
            journal.append([(0, _word(at, told - share + n, rng)) for n in range(place, min(share, place + BATCH))])
        journal.append(rows)
    width = span / MOST
    samples = [
        Sample(
            at=BEGIN + width * (n + 1), span_s=width, step=100 * (n + 1), steps=100, moved=BEGIN + width * (n + 1) - 1,
            loss=2 + 8 * math.exp(-n / 1500) + rng.random() * 0.2, data=0.02, compute=2.0, communication=0.4,
            checkpoint=0.03, told=100, standbys=8.0, spares=2.0, joined=8, saves=1,
        )
        for n in range(MOST)
    ]  # fmt: skip
    marks = [Mark(BEGIN, MarkKind.BEGIN), Mark(BEGIN + 90, MarkKind.TRAINED, "0")]
    ends = [Mark(BEGIN + span, MarkKind.END, "0"), Mark(BEGIN + span + 8, MarkKind.LEFT)]
    for at in range(0, MOST, KEPT_SAMPLES):
        journal.append([], {}, samples[at : at + KEPT_SAMPLES])
    journal.append([], {"exit_code": 0}, [], [*marks, *ends])
    journal.close()


def _word(at: float, number: int, rng: random.Random) -> AnyRecord:
    """What most records of a long job are: words of checkpoints and machines, and the events made of them."""
    if number % 2:
        return Event(id=f"we{number}", job="bench", at=at, code="nic.down", node="n01", cause_id=f"ws{number - 1}")
    source = "checkpoint.saved" if number % 50 == 0 else "machine"
    payload = {
        "code": "nic.down",
        "subject": f"mlx5_{rng.randrange(8)}",
        "message": "link down",
        "over": bool(number % 4),
    }
    return Signal(id=f"ws{number}", job="bench", at=at, source=source, node="n01", step=number, payload=payload)


def timed(folder: Path, form: str, repeats: int) -> list[float]:
    """Seconds of `rerail report job` as a user starts it."""
    out = folder / f"report.{form}"
    command = [sys.executable, "-m", "rerail.cli.main", "report", "job", "--run-dir", str(folder), "--format", form]
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        subprocess.run([*command, "--out", str(out)], check=True, stderr=subprocess.DEVNULL)
        found.append(time.perf_counter() - began)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--incidents", type=int, default=1000)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--keep", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as passing:
        folder = Path(args.keep or passing)
        if not (folder / FILE_NAME).exists():
            make(folder / FILE_NAME, args.incidents, args.records)
        size = (folder / FILE_NAME).stat().st_size / 1e6
        print(f"{args.incidents:,} incidents, {args.records:,} records, {size:,.0f} MB")
        best = math.inf
        for form in ("html", "json", "text"):
            times = timed(folder, form, args.repeats)
            best = min(times) if form == "html" else best
            made = (folder / f"report.{form}").stat().st_size / 1e6
            print(f"{form:<6} best {min(times):.2f} s, median {statistics.median(times):.2f} s, {made:.2f} MB")
    print(f"bar: html <= {BAR_S:g} s: {'reached' if best <= BAR_S else 'missed'}")
    return 0 if best <= BAR_S else 1


if __name__ == "__main__":
    sys.exit(main())
