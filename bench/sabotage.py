"""Is a bad guess at a lost shard caught? Turns 50 spoilt repairs into how many were noticed, how soon, and where the training went on.

    python bench/sabotage.py [--count 50] [--seeds 5]

Each job loses one of two ranks under `fidelity = "fast"`, and the shard it gets back is spoilt in one of four ways: noise, one NaN in each
tensor, the values of the right shard in the wrong places, the values of the first step. Caught means: all ranks went back to the snapshot
from before, and the weights at the end are those of a run without faults, bit for bit. Told is how many were refused before anything was
changed, and after how many steps the others were.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from rerail.flow import Report, Rung
from rerail.runtime.journal import FILE_NAME, Journal

HERE = Path(__file__).resolve().parent
KINDS = ("noise", "nan", "wrong shard", "old")
FAST = {
    "RERAIL_FIDELITY": "fast",
    "RERAIL_REHAB_FROM": "10",
    "RERAIL_REHAB_SHARE": "0.5",
    "RERAIL_SNAPSHOT_EVERY": "40",
    "RERAIL_SHADOW_COST": "0",
    "OMP_NUM_THREADS": "1",
}


def job(folder: Path, seed: int, kind: str = "", spoil_seed: int = 0) -> tuple[str, list[Report], str]:
    """One job to its end: the weights it came to, its reports, and what it printed."""
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "rerail.cli.main",
        "run",
        "--nproc-per-node",
        "2",
        "--run-dir",
        str(folder / "run"),
    ]
    script = [str(HERE / "sabotage_train.py"), "--folder", str(folder), "--seed", str(seed)]
    script += ["--kind", kind, "--spoil-seed", str(spoil_seed)]
    told = subprocess.run([*command, *script], env={**os.environ, **FAST}, capture_output=True, text=True, timeout=180)
    if told.returncode:
        return "", [], told.stdout + told.stderr
    journal = Journal(folder / "run" / FILE_NAME, read_only=True)
    reports = [record for record in journal.records(kind="report") if isinstance(record, Report)]
    journal.close()
    return json.loads((folder / "end").read_text())["sha256"], reports, told.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    caught: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    lasted: list[int] = []
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        quiet = [job(root / f"quiet{seed}", seed)[0] for seed in range(args.seeds)]
        for n in range(args.count):
            kind, seed = KINDS[n % len(KINDS)], n % args.seeds
            weights, reports, output = job(root / f"spoilt{n}", seed, kind, n)
            tried[kind] += 1
            back = [report for report in reports if report.rung is Rung.ROLL_BACK]
            spoilt = (root / f"spoilt{n}" / "spoilt").exists()
            if spoilt and weights == quiet[seed]:
                caught[kind] += 1
                # what is seen before the first step is complete belongs to the same incident
                last = back[0].lost_steps + back[0].resumed_step - reports[0].resumed_step if len(reports) > 1 else 0
                lasted.append(last)
            else:
                told = [(report.code, report.rung.value, report.fidelity, report.resumed_step) for report in reports]
                print(
                    f"{n}: {kind}, seed {seed}: not caught; {told}\n{output[-2000:] if not reports else ''}", flush=True
                )
    for kind in KINDS:
        print(f"{kind:<12} {caught[kind]} of {tried[kind]} caught")
    if lasted:
        print(f"{lasted.count(0)} of them before anything was changed, the others after at most {max(lasted)} steps")
    print(f"{caught.total()} of {args.count} caught; the weights of each of those are those of a run without faults")
    return int(caught.total() < args.count)


if __name__ == "__main__":
    sys.exit(main())
