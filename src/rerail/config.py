"""Everything that can be set: what to run (`JobSpec`) and how to behave (`Settings`).

Order of precedence: explicit argument > environment (`RERAIL_<NAME>`) > file (`rerail.toml`) > default.
Called by `cli.run`, `runtime.launcher`, the controller and the agents.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rerail.checks import FAST, out_of_range
from rerail.errors import ConfigError
from rerail.wording import counted, guess, mistyped

DEPOTS = "RERAIL_DEPOTS"
"""In a rank's environment: host:port of every node's depot, in the order of the nodes."""
DEPOT_PORT = "RERAIL_DEPOT_PORT"
"""In an agent's environment: the port of its own node's depot."""
DEPOT_SOCKET = "RERAIL_DEPOT_SOCKET"
"""In a depot's environment: the descriptor it listens on."""
DEPOT_KEY = "RERAIL_DEPOT_KEY"
"""In a rank's environment: what it needs to know to be let in there."""
INJECT = "RERAIL_INJECT"
"""In the environment of all processes of a job: 1 where faults may be injected (`rerail inject`)."""
FILE = "rerail.toml"

EXIT_DONE = 0
EXIT_FAILED = 1
"""Failed; a scheduler may requeue the job."""
EXIT_DO_NOT_REQUEUE = 93
"""No progress, or the verdict is that another try cannot help."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to run and where: torchrun's flags after parsing. The same on every node but for the last group."""

    job: str
    """Name of this run: --rdzv-id if given, else made up. Also TORCHELASTIC_RUN_ID."""
    script: str
    script_args: tuple[str, ...] = ()
    module: bool = False
    """-m: `script` is a module name."""
    no_python: bool = False
    """`script` is a program of its own: run as is, without warm standbys."""
    run_path: bool = False
    """--run-path: run the script by runpy.run_path in the rank's interpreter."""
    min_nodes: int = 1
    max_nodes: int = 1
    spare_nodes: int = 0
    """Nodes beyond those that are let in and wait until one of the others is lost."""
    spare_devices: int = 0
    """Places for ranks on each node beyond --nproc-per-node, left empty until a device is lost."""
    endpoint_host: str = "127.0.0.1"
    endpoint_port: int = 0
    """The controller's address. Port 0 picks a free one, possible on a single node only."""
    master_addr: str = ""
    master_port: int = 0
    """As asked for by --master-port; 0 picks a free one for each attempt."""
    role: str = "default"
    max_restarts: int = -1
    """Restarts of all ranks that are allowed; -1 leaves it to the settings. In-place repairs do not count."""
    shutdown_grace_s: float = 5.0
    """Seconds between SIGTERM and SIGKILL when the job ends (--shutdown-timeout)."""
    allow_inject: bool = False
    """--allow-inject: `rerail inject` may break things in this job on purpose."""
    # this node
    slots: int = 1
    """Ranks on this node (--nproc-per-node)."""
    node_rank: int = -1
    hosts_controller: bool = True
    """Whether the controller runs on this node."""
    local_addr: str = "127.0.0.1"
    run_dir: str = ""
    """Journal, logs and the controller's address are kept here."""
    log_dir: str = ""
    redirects: str = "0"
    tee: str = "0"
    local_ranks_filter: tuple[int, ...] = ()
    stdout_filters: tuple[str, ...] = ()
    """--duplicate-stdout-filters: lines with these substrings also go to one file for all ranks."""
    stderr_filters: tuple[str, ...] = ()
    signals_to_handle: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    virtual_local_rank: bool = False
    numa_binding: str = ""

    @property
    def several_nodes(self) -> bool:
        return self.max_nodes + self.spare_nodes > 1


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rerail behaves. Every field can stand in rerail.toml and as RERAIL_<NAME> in the environment."""

    standbys: int = 1
    """Warm processes kept per node. 1: faults mostly come one at a time, and each costs the memory of an imported torch."""
    max_restarts: int = 3
    """Restarts of all ranks before the job is given up with exit code 1. 3: what torchrun's users commonly set."""
    no_progress_limit: int = 3
    """Times the same fault may hit the same ranks without one new completed step before the job is stopped with exit code 93. Different faults may be five times as many."""
    hang_floor_s: float = 2.0
    """Seconds without progress below which no rank is called hung, however short its steps are."""
    hang_factor: float = 3.0
    """A rank is called hung after this many times its median step, if that is more than the floor."""
    busy_floor_s: float = 60.0
    """The same floor for a rank that burns CPU: it may be compiling or loading."""
    busy_factor: float = 20.0
    """The same factor for a rank that burns CPU."""
    beat_s: float = 0.1
    """Seconds between two beats of a rank's watcher thread and between two looks of the agent."""
    agent_lost_s: float = 10.0
    """Seconds without a word from an agent before it counts as lost. In a job of several nodes an agent that hears nothing from the controller ends its ranks after three quarters of this, so that no rank ever runs twice."""
    agent_back_s: float = 2.0
    """Seconds an agent whose connection broke has to come back (a new controller, a hiccup) before it is lost. With several nodes it has `agent_lost_s` since its last word, if that is more."""
    node_wait_s: float = 30.0
    """Seconds a restart waits for a lost node, or another in its place, before it makes do with the others (`--nnodes MIN:MAX`)."""
    controller_away_s: float = 300.0
    """Seconds for which the agents of other nodes wait for a lost controller to come back, before they give the job up."""
    park_timeout_s: float = 30.0
    """Seconds a survivor may take to run out an interrupted step, at least; ten median steps if that is more."""
    build_timeout_s: float = 600.0
    """Seconds a newcomer may take to import, build and rehearse before it is given up."""
    echo_window_s: float = 0.5
    """Seconds to wait for a root cause when only echoes (failed collectives) have been seen."""
    snapshot_every: int = 0
    """Steps between memory snapshots; 0 lets rerail plan them by how often faults come, at a cost of at most `snapshot_cost`."""
    snapshot_cost: float = 0.001
    """Share of the step time that snapshots may take when `snapshot_every` is 0. Losing a rank every few hours, more would cost more than it saves."""
    vote_every: int = 100
    """Steps between two checksums of the state of ranks that must hold the same (DDP and other replicas), to find silent data corruption; they are also compared whenever a snapshot or checkpoint is taken, and at the end. 0: never at all. One pass over parameters and optimizer state each."""
    replay_log: str = "512MiB"
    """Memory of each rank for what it has told others since the last snapshot, so that a lost pipeline stage does its steps again by itself while the others stay where they are; 0: none. Jobs that exchange anything but messages and small collectives keep nothing."""
    fidelity: str = "exact"
    """`exact`: every repair gives the very numbers of a run without faults. `fast`: a lost shard that no replica holds comes from its last snapshot while the survivors keep what they have, where that is cheaper; the loss is watched, and all go back if it does not heal."""
    rehab_share: float = 0.25
    """With `fidelity = "fast"`: the largest share of the ranks that may be restored like that at once. 0.25: half a model lost was bad in trials."""
    rehab_from: int = 100
    """With `fidelity = "fast"`: the first step at which that is allowed. A run in its warm-up changes too fast."""
    shadow_every: int = 0
    """With `fidelity = "fast"`: steps between two copies of the parameters alone, in half precision, on ranks whose parameters no other rank holds; 0 lets each plan them, at a cost of at most `shadow_cost`."""
    shadow_cost: float = 0.001
    """Share of the step time that these copies may take when `shadow_every` is 0; 0: there are none. A copy is a sixth of a snapshot or less, so it may be taken that much more often."""
    predictor_cost: float = 0.005
    """With `fidelity = "fast"`: share of one CPU that a rank may take to learn how its parameters move from checkpoint to checkpoint, in moments in which it waits for others; 0: nothing is guessed from checkpoints. A net takes some two seconds, shared among the ranks, for each checkpoint."""
    roll_back: str = "nan"
    """Faults of the training after which all ranks go back to before them and compute the same again, then leave the data out: `nan` (loss or gradient norm not finite), `spike` (of the loss), `divergence`. Empty: they are only told."""
    roll_back_limit: int = 3
    """Times that all may go back in a row, with less than 100 steps of progress between two of them, before the job is stopped with exit code 93."""
    snapshot_memory: str = ""
    """Most memory that the snapshots of one rank may take, such as `8GiB`; by default what its node can spare. Where they do not fit, checkpoints are written straight from the tensors, and the training waits for each."""
    storage_hang_s: float = 30.0
    """Seconds without any progress after which a place for checkpoints counts as hung and is left alone until it answers again; five times the usual if that is more."""
    detectors: int = 1
    """1: every node watches its own hardware, kernel log, network and storage, in a process of about 40 MB; 0: it does not."""
    detectors_off: str = ""
    """Detectors that are not to run, by name, with wildcards: `host.smart, nvidia`. `rerail check` lists them."""
    fault_levels: str = ""
    """How much faults count, if not what the catalogue says: `gpu.xid.63=off, nic.*=warning, gpu.ecc.*=error/drain_node`."""
    fault_files: str = ""
    """Files with faults of your own, in the catalogue's format (`rerail faults check FILE`)."""
    fault_senders: str = ""
    """Other systems that may report faults to this job, by name: `dcgm, gpud`; none by default."""
    notice_files: str = ""
    """Where notices of preemption and maintenance come from: absolute files that appear or change, and the metadata services `aws`, `gcp` and `azure`."""
    node_store: str = ""
    """What every node keeps for the place `nodes://`: `memory:8GiB`, or a directory of its own. Nothing by default: it takes memory, and each node then listens for the others."""
    handling: str = "rescheduling"
    """What is tried first when a device is faulty: `rescheduling` moves its work to healthy devices, `graceful` tries to recover the device in place before."""
    rungs: str = ""
    """Rungs of the ladder that may be taken, such as `replace_rank, restart_all, stop`; all when empty. The job may always be stopped when nothing else is left."""
    restart_limits: str = "rank=20, node=60, job=200"
    """How often the processes of one rank, of one node and of the whole job may be started anew within `restart_window_s`; beyond that the next rung is taken. A rank that needs one every three minutes has a fault that a new process does not repair, though each costs little; a node has several ranks, a job several nodes. What is not named has no limit."""
    restart_window_s: float = 3600.0
    """Seconds that `restart_limits` look back."""
    reset_command: str = ""
    """What resets a device, with `{device}` for its number; by default the vendor's own tool, where there is one: `nvidia-smi --gpu-reset -i {device}`. It is run when a fault asks for a reset and no rank uses the device."""
    reset_limit: int = 3
    """Times one device may be reset within six hours; a device that needs more is not repaired by resets. 0: devices are never reset."""
    policy: tuple[dict[str, Any], ...] = ()
    """What to do about which fault, if not what the shipped mapping says: `[[policy]]` tables of `rerail.toml`, see [policy](policy.md)."""
    escalation: tuple[dict[str, Any], ...] = ()
    """When faults that come often or last count for more, if not by the shipped rules: `[[escalation]]` tables of `rerail.toml`, see [policy](policy.md)."""

    @property
    def fast(self) -> bool:
        """Whether repairs need not be exact."""
        return self.fidelity == FAST

    @property
    def shadows(self) -> bool:
        """Whether ranks keep copies of their parameters alone."""
        return self.fast and (self.shadow_cost > 0 or self.shadow_every > 0)


settings_decoder = msgspec.json.Decoder(Settings)
spec_decoder = msgspec.json.Decoder(JobSpec)
"""As they are handed from process to process."""
TABLES = ("policy", "escalation")
"""Settings that are tables: they stand in the file only."""


def load_settings(path: Path | None = None, env: Mapping[str, str] = os.environ, **explicit: Any) -> Settings:
    """Settings from file, environment and explicit arguments, in rising precedence."""
    settings, wrong = read_settings(path, env, **explicit)
    if wrong:
        more = f"\n  ({counted(len(wrong) - 1, 'more problem')}: rerail policy check)" if len(wrong) > 1 else ""
        raise ConfigError(f"{wrong[0]}{more}")
    return settings


def read_settings(
    path: Path | None = None, env: Mapping[str, str] = os.environ, **explicit: Any
) -> tuple[Settings, list[str]]:
    """The same, with everything that is wrong, one sentence each; what cannot be read is left at its default.

    ConfigError: the file itself cannot be read.
    """
    values, wrong = _from_file(path) if path is not None else ({}, [])
    kinds = {field.name: field.type for field in msgspec.structs.fields(Settings)}
    for name, kind in kinds.items():
        raw, origin = env.get(f"RERAIL_{name.upper()}"), f"environment variable RERAIL_{name.upper()}"
        if raw is not None and name in TABLES:
            wrong.append(f"{origin}: [[{name}]] tables stand in {FILE} only")
        elif raw is not None and kind is not str and _number(raw) is None:
            wrong.append(f"{origin} is {raw!r}, but a number is needed")
        elif raw is not None:
            values[name] = raw if kind is str else _number(raw)
    values.update({name: value for name, value in explicit.items() if value is not None})
    fitting = dict(values)
    for name, value in values.items():
        try:
            msgspec.convert({name: value}, Settings)
        except msgspec.ValidationError as error:
            wrong.append(f"setting not accepted: {mistyped(error)}")
            del fitting[name]
    settings = msgspec.convert(fitting, Settings)
    return settings, [*wrong, *out_of_range(settings)]


def settings_file() -> Path | None:
    """`rerail.toml` in the current folder, if there is one."""
    path = Path(FILE)
    return path if path.is_file() else None


def settings_of_rank(env: Mapping[str, str] = os.environ) -> Settings:
    """The settings of the job this process is a rank of; the agent hands them down. Defaults outside `rerail run`."""
    handed = env.get("RERAIL_SETTINGS", "")
    return settings_decoder.decode(handed) if handed else load_settings(env=env)


def _from_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    """What stands there, and what is wrong with it."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not valid TOML: byte {error.start + 1} is no UTF-8; save it as UTF-8 text"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    known = [field.name for field in msgspec.structs.fields(Settings)]
    wrong = [f"{path}: unknown setting {name!r}{guess(name, known)}" for name in values if name not in known]
    values = {name: value for name, value in values.items() if name in known}
    for name in TABLES:
        rows = values.get(name, [])
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            wrong.append(f"{path}: {name} is no list of tables; write each as [[{name}]]")
            del values[name]
    return values, wrong


def _number(raw: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(raw)
        except ValueError:
            pass
    return None
