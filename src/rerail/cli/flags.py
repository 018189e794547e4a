"""Turns torchrun's command line, in both spellings and with its PET_* variables, into parsed arguments.

Called by `cli.run`. The flags and their meaning are those of torch.distributed.run 2.13, read from its source; torch itself
is not imported, because that takes longer than everything else the launcher does.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Sequence
from typing import Any

from rerail.errors import UsageError

NUMA_MODES = ("node", "socket", "exclusive", "core-complex")
_NO_EFFECT = "accepted for compatibility, without effect: "


class FromEnv(argparse.Action):
    """A value whose default comes from PET_<NAME>, as in torchrun."""

    def __init__(self, option_strings: Sequence[str], dest: str, default: Any = None, **rest: Any) -> None:
        if default != argparse.SUPPRESS:
            default = os.environ.get(f"PET_{dest.upper()}", default)
        super().__init__(option_strings, dest, default=default, **rest)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values)


class SwitchFromEnv(argparse.Action):
    """A switch that PET_<NAME>=1 turns on, as in torchrun."""

    def __init__(self, option_strings: Sequence[str], dest: str, default: Any = None, **rest: Any) -> None:
        if default != argparse.SUPPRESS:
            raw = os.environ.get(f"PET_{dest.upper()}", "0")
            if raw not in ("0", "1"):
                raise UsageError(f"environment variable PET_{dest.upper()} is {raw!r}, but 0 or 1 is needed")
            default = raw == "1"
        super().__init__(option_strings, dest, nargs=0, const=True, default=default, **rest)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, True)


class AllowInject(argparse.Action):
    """A switch that RERAIL_ALLOW_INJECT=1 turns on."""

    def __init__(self, option_strings: Sequence[str], dest: str, default: Any = None, **rest: Any) -> None:
        if default != argparse.SUPPRESS:
            raw = os.environ.get("RERAIL_ALLOW_INJECT", "") or "0"
            if raw not in ("0", "1"):
                raise UsageError(f"environment variable RERAIL_ALLOW_INJECT is {raw!r}, but 0 or 1 is needed")
            default = raw == "1"
        super().__init__(option_strings, dest, nargs=0, const=True, default=default, **rest)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """torchrun's flags, then rerail's own, then the script and whatever follows it."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False  # or `script.py --log x` would be taken for half of --log-dir
    parser.usage = "%(prog)s [OPTIONS] SCRIPT [SCRIPT ARGUMENTS]"
    parser.epilog = (
        "Every option can be spelled with dashes or underscores; PET_<OPTION> in the environment gives its default.\n"
        "Several nodes: run the same command on each, with the same --rdzv-id and --rdzv-endpoint, and the same secret\n"
        "word in the environment as RERAIL_TOKEN; without it any process that reaches the endpoint may join the job."
    )
    _size_flags(parser)
    _spare_flags(parser)
    _rendezvous_flags(parser)
    _script_flags(parser)
    _log_flags(parser)
    _own_flags(parser)
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="training script (or module with -m)")
    parser.add_argument(
        "script_args", metavar="ARGUMENTS", nargs=argparse.REMAINDER, help="passed to the script as they are"
    )


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse; an option we do not know is an error with a suggestion, unless it stands behind the script."""
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        flag = unknown[0].split("=", 1)[0]
        known = [option for action in parser._actions for option in action.option_strings]
        close = difflib.get_close_matches(flag, [option for option in known if "_" not in option], n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else f"{parser.prog} --help lists the options"
        raise UsageError(f"unknown option {flag}", hint=f"{hint} Options of the script go behind the script.")
    if not args.script:
        raise UsageError("no script was given", hint=f"for example: {parser.prog} --nproc-per-node 4 train.py")
    return args


def _flag(group: Any, *names: str, action: type[argparse.Action] = FromEnv, **rest: Any) -> None:
    """One option under both spellings; the help shows the one with dashes."""
    shown = group.add_argument(*names, action=action, **rest)
    hidden = ["--" + name[2:].replace("-", "_") for name in names if "-" in name[2:]]
    if hidden:
        quiet = rest | {"dest": shown.dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        group.add_argument(*hidden, action=action, **quiet)


def _size_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how many")
    _flag(group, "--nnodes", default="1:1", metavar="N|MIN:MAX", help="nodes, or the range of nodes (default 1)")
    _flag(
        group,
        "--nproc-per-node",
        default="1",
        metavar="N|gpu|cpu|auto",
        help="ranks on each node: a number, or "
        "gpu, xpu, npu, cpu, auto to count devices (by their files in /dev and the *_VISIBLE_DEVICES variables)",
    )
    _flag(
        group,
        "--max-restarts",
        type=int,
        metavar="N",
        help="restarts of ALL ranks that are allowed; repairs that "
        "replace one rank in place do not count (default: setting max_restarts, 3)",
    )


def _spare_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("spares")
    store = argparse._StoreAction
    _flag(
        group,
        "--spare-nodes",
        action=store,
        type=int,
        default=0,
        metavar="N",
        help="nodes beyond --nnodes that may join and wait until one of the others is lost (default 0)",
    )
    _flag(
        group,
        "--spare-devices",
        action=store,
        type=int,
        default=0,
        metavar="N",
        help="devices of each node beyond --nproc-per-node that stay empty until one of the others is lost (default 0)",
    )


def _rendezvous_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several nodes")
    _flag(
        group, "--standalone", action=SwitchFromEnv, help="one node, free ports; other rendezvous options are ignored"
    )
    _flag(
        group,
        "--rdzv-backend",
        default="static",
        metavar="NAME",
        help="static (by --node-rank) or c10d; both are served by rerail's controller (default static)",
    )
    _flag(group, "--rdzv-endpoint", default="", metavar="HOST[:PORT]", help="the controller's address (port 29400)")
    _flag(group, "--rdzv-id", default="none", metavar="ID", help="name of the job, the same on all nodes")
    _flag(
        group, "--rdzv-conf", default="", metavar="K=V,...", help="is_host=true|false: whether the controller runs here"
    )
    _flag(group, "--node-rank", type=int, metavar="N", help="rank of this node; static only (default 0)")
    _flag(group, "--master-addr", metavar="HOST", help="address of node 0; static only (default 127.0.0.1)")
    _flag(group, "--master-port", type=int, metavar="PORT", help="MASTER_PORT of the ranks (default: a free one)")
    _flag(group, "--local-addr", metavar="ADDR", help="address under which other nodes reach this one")


def _script_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the script")
    _flag(group, "-m", "--module", action=SwitchFromEnv, help="SCRIPT is a module, as in python -m")
    _flag(group, "--no-python", action=SwitchFromEnv, help="SCRIPT is a program of its own; no warm standbys then")
    _flag(group, "--run-path", action=SwitchFromEnv, help="run SCRIPT with runpy.run_path; wins over --no-python")
    _flag(group, "--role", default="default", metavar="NAME", help="role name of the ranks (default: default)")
    _flag(
        group,
        "--virtual-local-rank",
        action=SwitchFromEnv,
        help="LOCAL_RANK is 0 everywhere; each rank sees its own device only",
    )
    # numa-binding and logs-specs have no PET_ variable in torchrun either.
    _flag(
        group,
        "--numa-binding",
        action=argparse._StoreAction,
        choices=NUMA_MODES,
        help="bind each rank to the CPUs near its device",
    )
    _flag(
        group,
        "--signals-to-handle",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        metavar="SIG,...",
        help="signals that end the job and are passed on (default SIGTERM,SIGINT,SIGHUP,SIGQUIT)",
    )
    _flag(
        group,
        "--shutdown-timeout",
        type=float,
        metavar="SECONDS",
        help="between SIGTERM and SIGKILL at the end (default: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 5)",
    )
    _flag(
        group,
        "--start-method",
        default="spawn",
        choices=("spawn", "fork", "forkserver"),
        help=_NO_EFFECT + "ranks are started by exec",
    )
    _flag(
        group,
        "--monitor-interval",
        type=float,
        default=0.1,
        metavar="SECONDS",
        help=_NO_EFFECT + "exits are seen at once",
    )
    _flag(group, "--event-log-handler", default="null", metavar="NAME", help=_NO_EFFECT + "events go to the journal")


def _log_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    _flag(group, "--log-dir", metavar="DIR", help="where the ranks' output goes (default: logs in the run directory)")
    _flag(
        group,
        "-r",
        "--redirects",
        default="0",
        metavar="SPEC",
        help="to file only: 0 none, 1 stdout, 2 stderr, 3 both; for some ranks 0:1,1:2 (default 0)",
    )
    _flag(group, "-t", "--tee", default="0", metavar="SPEC", help="to file and to the console with a prefix; as above")
    _flag(
        group, "--local-ranks-filter", default="", metavar="N,...", help="only these local ranks write to the console"
    )
    _flag(
        group,
        "--duplicate-stdout-filters",
        type=_comma_separated,
        default="",
        metavar="TEXT,...",
        help="copy stdout lines with one of these texts to one file for all ranks; ,, stands for a comma",
    )
    _flag(
        group,
        "--duplicate-stderr-filters",
        type=_comma_separated,
        default="",
        metavar="TEXT,...",
        help="the same for stderr",
    )
    _flag(group, "--logs-specs", action=argparse._StoreAction, metavar="NAME", help="only 'default' is known")


def _own_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("rerail")
    store = argparse._StoreAction
    _flag(
        group,
        "--run-dir",
        action=store,
        metavar="DIR",
        help="journal and logs of this job (default: a new folder under $RERAIL_HOME, $XDG_STATE_HOME/rerail or "
        "~/.local/state/rerail)",
    )
    _flag(
        group,
        "--standbys",
        action=store,
        type=int,
        metavar="N",
        help="warm standby processes on this node (default 1)",
    )
    _flag(
        group,
        "--config",
        action=store,
        metavar="FILE",
        help="settings (default: rerail.toml in the current folder, if there is one)",
    )
    _flag(
        group,
        "--allow-inject",
        action=AllowInject,
        help="let `rerail inject` break things in this job on purpose (RERAIL_ALLOW_INJECT=1 does the same)",
    )


def _comma_separated(text: str) -> tuple[str, ...]:
    """Split at commas; a doubled comma stands for itself, as in torchrun."""
    items = text.replace(",,", "\0").split(",")
    return tuple(item.replace("\0", ",") for item in items if item)
