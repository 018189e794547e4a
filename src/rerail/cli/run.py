"""Turns the arguments of `rerail run` into a JobSpec and Settings, and hands them to the launcher.

Called by `cli.main`. Everything a user can get wrong is found here, before any process is started.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import signal
import sys
import time
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from rerail.checks import check_drop_dir
from rerail.cli import machine
from rerail.cli.flags import add_arguments, parse
from rerail.cli.rundir import claim_run_dir
from rerail.config import JobSpec, Settings, load_settings, settings_file
from rerail.detect.levels import Levels
from rerail.errors import UsageError
from rerail.faults.catalog import load_catalog
from rerail.runtime import handling
from rerail.wording import closest

__all__ = ["add_arguments", "parse", "run", "settings_from", "spec_from"]

DEFAULT_PORT = 29400
"""torchrun's port for a rendezvous endpoint that names none."""
LOCAL = "127.0.0.1"
_STREAMS = re.compile(r"[0-3]|(\d+:[0-3],)*\d+:[0-3]")
_TRUE, _FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")


class Rendezvous(NamedTuple):
    """Where the controller is, and what this node is to it."""

    host: str
    port: int
    hosts_controller: bool
    node_rank: int
    local_addr: str


def run(args: argparse.Namespace) -> int:
    """Run the job to its end; the launcher's exit code is ours."""
    settings = settings_from(args)
    spec = spec_from(args)
    from rerail.runtime import launcher

    return launcher.run(spec, settings)


def settings_from(args: argparse.Namespace) -> Settings:
    """Settings by precedence: flags, environment, --config or ./rerail.toml, defaults."""
    path = Path(args.config) if args.config else settings_file()
    if path is not None and not path.is_file():
        raise UsageError(f"--config {args.config}: no such file")
    settings = load_settings(path, standbys=args.standbys)
    check_drop_dir()
    if settings.fault_files or settings.fault_levels:
        Levels.of(settings).catalog()  # says what is wrong with them before anything is started
    if settings.policy or settings.escalation or settings.rungs or settings.reset_command:
        handling.check(settings, load_catalog(Levels.of(settings).files).faults, str(path or "environment"))
    return settings


def spec_from(args: argparse.Namespace) -> JobSpec:
    """Check every flag and describe the job. Makes the run directory, which from then on belongs to this job."""
    _check_script(args)
    slots = machine.ranks_for(args.nproc_per_node)
    min_nodes, max_nodes = _nodes(args.nnodes)
    if args.standalone and max_nodes > 1:
        raise UsageError(f"--standalone is for one node, but --nnodes is {args.nnodes}")
    for name in ("spare_nodes", "spare_devices"):
        if getattr(args, name) < 0:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(args, name)}, but must not be negative")
    if args.standalone and args.spare_nodes:
        raise UsageError("--standalone is for one node, but --spare-nodes asks for more")
    place = _rendezvous(args, max_nodes + args.spare_nodes)
    if args.max_restarts is not None and args.max_restarts < 0:
        raise UsageError(f"--max-restarts is {args.max_restarts}, but must not be negative")
    if args.logs_specs not in (None, "default"):
        raise UsageError(f"--logs-specs {args.logs_specs}: only 'default' is known", hint="use --log-dir, -r and -t")
    redirects, tee = _streams("--redirects", args.redirects), _streams("--tee", args.tee)
    ranks_filter = _ranks_filter(args.local_ranks_filter)
    signals = _signals(args.signals_to_handle)
    grace = _grace(args.shutdown_timeout)
    job = _job_name(args, max_nodes + args.spare_nodes)
    run_dir = claim_run_dir(args.run_dir, job, place.hosts_controller, max_nodes + args.spare_nodes > 1)
    return JobSpec(
        job=job,
        script=args.script,
        script_args=tuple(args.script_args),
        module=args.module,
        no_python=args.no_python and not args.run_path,
        run_path=args.run_path,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        spare_nodes=args.spare_nodes,
        spare_devices=args.spare_devices,
        endpoint_host=place.host,
        endpoint_port=place.port,
        master_addr=args.master_addr or "",
        master_port=args.master_port or 0,
        role=args.role,
        max_restarts=-1 if args.max_restarts is None else args.max_restarts,
        shutdown_grace_s=grace,
        allow_inject=args.allow_inject,
        slots=slots,
        node_rank=place.node_rank,
        hosts_controller=place.hosts_controller,
        local_addr=place.local_addr,
        run_dir=str(run_dir),
        log_dir=_log_dir(args.log_dir, job),
        redirects=redirects,
        tee=tee,
        local_ranks_filter=ranks_filter,
        stdout_filters=tuple(args.duplicate_stdout_filters),
        stderr_filters=tuple(args.duplicate_stderr_filters),
        signals_to_handle=signals,
        virtual_local_rank=args.virtual_local_rank,
        numa_binding=args.numa_binding or "",
    )


def _check_script(args: argparse.Namespace) -> None:
    script = args.script
    if args.module:
        if args.no_python and not args.run_path:
            raise UsageError("--no-python and --module exclude one another", hint="leave one of them out")
        if PathFinder.find_spec(script.split(".")[0], [os.getcwd(), *sys.path]) is None:
            raise UsageError(f"no module named {script!r} here", hint=f"looked in {os.getcwd()} and sys.path")
        return
    if args.no_python and not args.run_path:
        if shutil.which(script) is None:
            raise UsageError(
                f"no program {script!r} on PATH", hint="give its path, or make the file executable (chmod +x)"
            )
        return
    path = Path(script)
    if path.is_file() or (path / "__main__.py").is_file():
        return
    folder = path.parent if path.parent.is_dir() else Path()
    close = closest(path.name, [entry.name for entry in folder.glob("*.py")])
    hint = f"did you mean {folder / close}?" if close else f"looked in {os.getcwd()}; for a module use -m"
    raise UsageError(f"script {script} does not exist", hint=hint)


def _nodes(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if not match:
        raise UsageError(f"--nnodes is {text!r}", hint="use a number, or MIN:MAX as in 2:4")
    low = int(match[1])
    high = int(match[2] or low)
    if not 0 < low <= high:
        raise UsageError(f"--nnodes is {text}, but 0 < MIN <= MAX is needed")
    return low, high


def _rendezvous(args: argparse.Namespace, max_nodes: int) -> Rendezvous:
    backend = args.rdzv_backend
    if backend.startswith("etcd"):
        raise UsageError(
            f"--rdzv-backend {backend} is not needed here", hint="rerail's controller does its work: use c10d"
        )
    if backend not in ("static", "c10d") and not args.standalone:
        raise UsageError(f"--rdzv-backend is {backend!r}", hint="use static or c10d")
    asked_to_host = _is_host(args.rdzv_conf)
    if args.standalone or (max_nodes == 1 and not args.rdzv_endpoint):
        return Rendezvous(LOCAL, 0, True, 0, args.local_addr or LOCAL)
    host, port = _endpoint(args, backend)
    if max_nodes == 1:
        if not machine.is_local(host):
            raise UsageError(f"--rdzv-endpoint {host} is not this machine", hint="a job of one node needs no endpoint")
        return Rendezvous(host, port, True, 0, args.local_addr or LOCAL)
    if not port:
        raise UsageError(
            "--rdzv-endpoint has port 0", hint=f"several nodes must agree on one, as in {host}:{DEFAULT_PORT}"
        )
    node_rank = -1 if backend == "c10d" else args.node_rank or 0
    if asked_to_host is not None:
        hosts = asked_to_host
    elif backend == "static":
        hosts = node_rank == 0
    else:
        # Two nodes of one job may share a machine; then the first to come is the host, as with torchrun.
        hosts = machine.is_local(host) and not machine.answers(host, port)
    return Rendezvous(host, port, hosts, node_rank, args.local_addr or machine.address_towards(host))


def _endpoint(args: argparse.Namespace, backend: str) -> tuple[str, int]:
    text = args.rdzv_endpoint.strip()
    if not text:
        if backend != "static" or not args.master_addr:
            raise UsageError(
                "several nodes need to know where to meet", hint="add --rdzv-endpoint HOST:PORT, the same on all nodes"
            )
        # --master-port is for the ranks' own store; the controller must not sit on it.
        return args.master_addr.strip("[]"), DEFAULT_PORT + (args.master_port == DEFAULT_PORT)
    match = re.fullmatch(r"(\[[\w:.%-]+\]|[\w.-]+)(?::(\d{1,5}))?", text)
    if not match or int(match[2] or 0) > 65535:
        raise UsageError(f"--rdzv-endpoint is {text!r}", hint="use HOST or HOST:PORT, with IPv6 as [ADDRESS]:PORT")
    return match[1].strip("[]"), int(match[2]) if match[2] else DEFAULT_PORT


def _is_host(conf: str) -> bool | None:
    """is_host of --rdzv-conf, if it is there; other keys tune backends that are not used here."""
    for item in filter(None, conf.strip().split(",")):
        key, _, value = (part.strip() for part in item.partition("="))
        if not key or not value:
            raise UsageError(f"--rdzv-conf is {conf!r}", hint="use KEY=VALUE,KEY=VALUE")
        if key == "is_host":
            if value.lower() not in _TRUE + _FALSE:
                raise UsageError(f"--rdzv-conf is_host={value}", hint="use is_host=true or is_host=false")
            return value.lower() in _TRUE
    return None


def _streams(flag: str, text: str) -> str:
    if not _STREAMS.fullmatch(text):
        raise UsageError(f"{flag} is {text!r}", hint="use 0, 1, 2 or 3, or LOCAL_RANK:N pairs as in 0:1,1:3")
    return text


def _ranks_filter(text: str) -> tuple[int, ...]:
    if text and not re.fullmatch(r"\d+(,\d+)*", text):
        raise UsageError(f"--local-ranks-filter is {text!r}", hint="use numbers, as in 0,1,2")
    return tuple(int(part) for part in text.split(",")) if text else ()


def _signals(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    known = [one.name for one in signal.Signals]
    for name in names:
        if name not in known:
            close = closest(name.upper(), known)
            raise UsageError(f"--signals-to-handle: no signal {name!r}", hint=f"did you mean {close}?" if close else "")
        if name in ("SIGKILL", "SIGSTOP"):
            raise UsageError(f"--signals-to-handle: {name} cannot be handled by any process", hint="leave it out")
    return names


def _grace(asked: float | None) -> float:
    raw = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5") if asked is None else str(asked)
    try:
        seconds = float(raw)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"the shutdown timeout is {raw!r}, but seconds are needed", hint="--shutdown-timeout 5")
    return seconds


def _job_name(args: argparse.Namespace, max_nodes: int) -> str:
    if args.rdzv_id != "none" and not args.standalone:
        if not re.fullmatch(r"[\w.:@+-]+", args.rdzv_id) or args.rdzv_id.startswith("."):
            raise UsageError(f"--rdzv-id is {args.rdzv_id!r}", hint="it names a folder: use letters, digits, - and _")
        return str(args.rdzv_id)
    if max_nodes > 1:
        return "none"  # as in torchrun: all nodes must come to the same name by themselves
    return f"run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _log_dir(asked: str | None, job: str) -> str:
    """Below --log-dir each job has its own folder, as with torchrun; empty means the run directory's."""
    if not asked:
        return ""
    folder = Path(asked).absolute() / job
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--log-dir {asked} cannot be used: {error.strerror}", hint="choose a folder you may write to"
        ) from None
    return str(folder)
