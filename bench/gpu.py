"""Shows on real GPUs what the CPU benchmark shows on gloo: replacement under living survivors, NCCL's wires included.

    python bench/gpu.py [--ranks 2] [--json FILE]

Several ranks may share one GPU: each then claims to be a host of its own (NCCL_HOSTID), so that NCCL accepts the sharing and
talks over loopback sockets. Prints one line per case; exits 1 if one fails. Run by hand on a machine with a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

WORKLOAD = Path(__file__).with_name("gpu_workload.py")
FLIP = "bit flip"
FAST = "SIGKILL, fast"
SHADOWED = {
    "RERAIL_FIDELITY": "fast",
    "RERAIL_REHAB_FROM": "10",
    "RERAIL_REHAB_SHARE": "0.5",
    "RERAIL_SNAPSHOT_EVERY": "60",
    "RERAIL_SHADOW_EVERY": "4",
}
REPLAYED = {"RERAIL_SNAPSHOT_EVERY": "60"}
CASES = (
    ("ddp", "nccl", ("SIGKILL", "SIGSTOP", FLIP)),
    ("fsdp", "nccl", ("SIGKILL", "SIGSTOP", FAST)),
    ("pp", "nccl", ("SIGKILL", FAST)),
    ("ddp", "gloo", ("SIGKILL", "SIGSTOP", FLIP)),
)
"""With what faults each is tried. `fast`: repairs need not be exact, and the lost shard comes from its shadow."""


class Watched:
    """One `rerail run` whose ranks print JSON lines."""

    def __init__(self, folder: Path, ranks: int, settings: dict[str, str], *args: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.lines: list[str] = []
        command = [sys.executable, "-m", "rerail.cli.main", "run", "--nproc-per-node", str(ranks), str(WORKLOAD), *args]
        env = {**os.environ, "RERAIL_HOME": str(folder), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        env |= {"RERAIL_ALLOW_INJECT": "1", "RERAIL_VOTE_EVERY": "20"}
        env |= settings
        env |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        self.started = time.monotonic()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        self._folder = folder
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None, "the pipe was asked for"
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith("{"):
                self.events.append({**json.loads(line), "at": time.monotonic()})

    def until(self, condition: Any, patience: float = 150.0) -> None:
        end = time.monotonic() + patience
        while not condition():
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError("the run stopped short:\n" + "\n".join(self.lines[-40:]))
            time.sleep(0.01)

    def steps(self, rank: int) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("rank") == rank and "step" in event]

    def reach(self, step: int, ranks: int) -> None:
        self.until(lambda: all(self.steps(r) and self.steps(r)[-1]["step"] >= step for r in range(ranks)))

    def finish(self) -> dict[str, Any]:
        self.process.wait(200)
        self._reader.join(5)
        if self.process.returncode:
            raise RuntimeError(f"exit code {self.process.returncode}:\n" + "\n".join(self.lines[-40:]))
        return {"digests": {str(event["rank"]): event["digest"] for event in self.events if "digest" in event}}

    def ask(self, *command: str) -> dict[str, Any]:
        told = subprocess.run(
            [sys.executable, "-m", "rerail.cli.main", *command, "--json"],
            env={**os.environ, "RERAIL_HOME": str(self._folder)},
            capture_output=True,
            text=True,
        )
        return dict(json.loads(told.stdout)) if told.stdout else {}

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(30)


def settings_for(style: str, fault: str) -> dict[str, str]:
    return SHADOWED if fault == FAST else REPLAYED if style == "pp" else {}


def case(style: str, backend: str, fault: str, ranks: int) -> dict[str, Any]:
    """One run, undisturbed or with the last rank broken at step 20 once a standby is warm."""
    with tempfile.TemporaryDirectory(prefix="rerail-gpu-") as folder:
        arguments = ("--style", style, "--backend", backend)
        run = Watched(Path(folder), ranks, settings_for(style, fault), *arguments)
        try:
            result: dict[str, Any] = {"case": f"{style}/{backend} {fault or 'undisturbed'}"}
            run.reach(1, ranks)
            result["cold_s"] = round(run.steps(0)[0]["at"] - run.started, 2)
            if fault == FLIP:
                run.reach(30, ranks)
                result["flipped"] = run.ask("inject", "bitflip", "--rank", str(ranks - 1), "--seed", "3")["message"]
            elif fault:
                run.reach(20, ranks)
                time.sleep(12.0)  # the standby warms up meanwhile
                victim = run.steps(ranks - 1)[-1]
                before = {rank: run.steps(rank)[-1]["pid"] for rank in range(ranks - 1)}
                broken = time.monotonic()
                os.kill(victim["pid"], signal.Signals[fault.split(",")[0]])
                run.until(lambda: run.steps(ranks - 1)[-1]["pid"] != victim["pid"])
                first = next(event for event in run.steps(ranks - 1) if event["pid"] != victim["pid"])
                result["recovered_s"] = round(first["at"] - broken, 2)
                run.reach(first["step"] + 5, ranks)
                after = {rank: run.steps(rank)[-1]["pid"] for rank in range(ranks - 1)}
                result["survivors_kept"] = before == after
            result |= run.finish()
            usual = sorted(event["step_s"] for event in run.events if "step_s" in event)
            result["step_ms"] = round(1000 * usual[len(usual) // 2], 2)
            told = run.ask("incidents")
            result["incidents"] = [
                (report["code"], report["rung"], report["attempts"], report["fidelity"], report["lost_steps"])
                for report in told["incidents"]
            ]
            result["told"] = [line for line in run.lines if "heal" in line or "again" in line]
            result["also_seen"] = [(one["code"], one["rank"]) for one in told["also_seen"]]
            return result
        finally:
            run.end()


def is_as_wanted(style: str, fault: str, row: dict[str, Any]) -> bool:
    """The same weights in the end; where it need not be exact: no step lost, and one model on all ranks."""
    if fault != FAST:
        return bool(row["identical"])
    ((_, rung, _, fidelity, lost),) = row["incidents"]
    same = style == "pp" or len(set(row["digests"].values())) == 1
    return (rung, fidelity, lost) == ("replace_rank", "approximate", 0) and same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="cases whose name contains this; undisturbed runs are always made")
    args = parser.parse_args()
    rows, failed = [], False
    for style, backend, tried in CASES:
        faults = [one for one in tried if args.only in f"{style}/{backend} {one}"]
        if not faults:
            continue
        quiet = case(style, backend, "", args.ranks)
        rows.append(quiet)
        print(json.dumps(quiet), flush=True)
        for fault in faults:
            try:
                row = case(style, backend, fault, args.ranks)
                row["identical"] = row["digests"] == quiet["digests"]
                row["ok"] = is_as_wanted(style, fault, row)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                row = {"case": f"{style}/{backend} {fault}", "error": str(error)[-3000:]}
            failed = failed or not row.get("ok", False)
            rows.append(row)
            print(json.dumps(row) if "error" not in row else row["error"], flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
