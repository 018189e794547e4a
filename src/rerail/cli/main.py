"""Turns a command line into the one command it names and an exit code; the entry point of `rerail`.

Imports nothing heavy: a command's module is imported when that command is asked for.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NoReturn

from rerail.errors import RerailError, UsageError
from rerail.wording import closest

EXIT_USAGE = 2

COMMANDS = {
    "run": "start a training job; takes torchrun's flags",
    "demo": "train a small GPT on four ranks while things break",
    "report": "what happened in an incident, why, and where the time went",
    "incidents": "the incidents of a job, one line each",
    "status": "how a job stands right now",
    "diagnose": "find the root cause in any log of any job",
    "check": "is this machine healthy? --deep tries memory, devices, network and disk",
    "inject": "break something in a running job on purpose, where it allows that",
    "faults": "list, show and match the faults that are known",
    "policy": "check, explain and replay what is done about faults",
    "quarantine": "list, add and release what is out of use",
    "plan": "how often to save, how many spares to hold, and what faults will cost",
    "simulate": "run a cluster that is not there: goodput under faults, policy against policy",
    "ckpt": "list, show, verify, compare, export, import and prune checkpoints",
}
"""Each is a module of this package with `add_arguments(parser)` and `run(args) -> exit code`."""

_USAGE = "usage: rerail COMMAND [ARGUMENTS]      (rerail COMMAND --help says more)"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError where argparse prints and exits, so that every mistake looks the same."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"{self.prog} --help lists what there is")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the exit code of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = next(iter(arguments), "")
    try:
        if name in ("", "-h", "--help", "help"):
            print(_overview())
            return 0 if name else EXIT_USAGE
        if name in ("-V", "--version", "version"):
            print(f"rerail {version()}")
            return 0
        if name not in COMMANDS:
            raise _unknown(name)
        return _dispatch(name, arguments[1:])
    except RerailError as error:
        prog = f"rerail {name}" if name in COMMANDS else "rerail"
        print(f"{prog}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:
        # The reader of our output has gone (`rerail incidents | head`); python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def version() -> str:
    """The installed version, or that there is none."""
    try:
        return metadata.version("rerail")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _dispatch(name: str, arguments: list[str]) -> int:
    module = importlib.import_module(f"rerail.cli.{name}")
    parser = Parser(prog=f"rerail {name}", description=COMMANDS[name])
    module.add_arguments(parser)
    parse = getattr(module, "parse", None)
    args = parser.parse_args(arguments) if parse is None else parse(parser, arguments)
    return int(module.run(args))


def _unknown(name: str) -> UsageError:
    kind = "option" if name.startswith("-") else "command"
    close = closest(name, COMMANDS)
    hint = f"did you mean: rerail {close}" if close else f"commands: {', '.join(COMMANDS)}"
    if name.endswith(".py"):
        hint = f"did you mean: rerail run {name}"
    return UsageError(f"unknown {kind} {name!r}", hint=hint)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "rerail: one rank dies, the others live, and training goes on.",
            "",
            _USAGE,
            "",
            *(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()),
            "",
            "  --version, --help",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
