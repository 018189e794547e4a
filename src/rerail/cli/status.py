"""`rerail status [JOB]`: how a job stands, asked of its live controller, or how it ended. Called by `cli.main`."""

from __future__ import annotations

import argparse
import json
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from rerail.cli.rundir import to_controller
from rerail.detect.process import signal_name
from rerail.report.summary import find_run, reading, reports
from rerail.wording import counted

ASK_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", default="", help="the job; the newest when not given")
    parser.add_argument("--run-dir", default="", help="the job's run directory, if it was started with one")
    parser.add_argument("--json", action="store_true", help="what the controller answers, as JSON")


def run(args: argparse.Namespace) -> int:
    """Print how the job stands."""
    folder = find_run(args.job, args.run_dir)
    live = ask(folder)
    status = live if live is not None else _from_journal(folder)
    print(json.dumps(status) if args.json else _text(status, folder))
    return 0


def ask(folder: Path) -> dict[str, Any] | None:
    """The live controller's answer, or None when there is none."""
    try:
        with urllib.request.urlopen(to_controller(folder, "/status"), timeout=ASK_S) as answer:
            found: dict[str, Any] = json.load(answer)
        return {**found, "live": True}
    except (OSError, ValueError, KeyError, urllib.error.URLError):
        return None


def _from_journal(folder: Path) -> dict[str, Any]:
    with reading(folder) as journal:
        state = journal.state()
        count = len(reports(journal))
    code = state.get("exit_code")
    return {"job": folder.name, "live": False, "exit_code": code, "incidents": count}


def _step(version: int) -> str:
    return f"step {version:,}" if version >= 0 else "no step yet"


def _how(code: int) -> str:
    name = f" (stopped by {signal_name(code - 128)})" if code - 128 in set(signal.Signals) else ""
    return f"ended with exit code {code}{name}"


def _doing(status: dict[str, Any]) -> str:
    """A repair that is not under way is none: then the ranks train."""
    return "training" if status["stage"] == "idle" else str(status["stage"])


def _text(status: dict[str, Any], folder: Path) -> str:
    if not status["live"]:
        code = status["exit_code"]
        how = "ended without a word (killed?)" if code is None else _how(code)
        return f"job {status['job']}: {how}, {counted(status['incidents'], 'incident')}\n  {folder}\nmore: rerail incidents"
    lines = [
        f"job {status['job']}: {_step(status['version'])}, generation {status['generation']} ({_doing(status)}), "
        f"{counted(status['incidents'], 'incident')}, {counted(status['restarts_used'], 'restart')}"
    ]
    for node in status["nodes"]:
        there = "connected" if node["connected"] else "away"
        lines.append(
            f"  node {node['node']}: {there}, {counted(node['standbys'], 'standby')} warm, {node['warming']} warming"
        )
    for rank in status["ranks"]:
        pid = f"pid {rank['pid']}" if rank.get("pid") else ""
        lines.append(
            f"  rank {rank['rank']:<4} {rank['node']}  {rank['state']:<12} {_step(rank['version']):<13} {pid}".rstrip()
        )
    for fault in status.get("faults", ()):
        lines.append(f"  fault {fault['code']}: {fault['message']}")
    return "\n".join([*lines, "more: rerail incidents · rerail report"])
