"""The first code of every rank process: warms up, waits for its rank, then becomes the user's script.

Started by `runtime.children` as `python -c "from rerail.runtime.bootstrap import main; main()"` with

    RERAIL_LINK_FD   the socketpair to the agent
    RERAIL_BOOT      JSON: script, args, module, no_python, run_path
    RERAIL_STANDBY   `script`: run the user's script up to rerail.join() and wait there; else wait before it begins
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Iterable
from string import Template
from types import CodeType
from typing import NoReturn

import msgspec

from rerail.errors import JobStopped
from rerail.runtime.wire import Warm
from rerail.session.link import AgentLink, connect

_PR_SET_PDEATHSIG = 1
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, as the agent was told."""

    script: str
    args: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    run_path: bool = False


_boot = msgspec.json.Decoder(Boot)


def main() -> NoReturn:
    """Never returns: the process ends with the script."""
    die_with_parent()
    boot = _boot.decode(os.environ.pop("RERAIL_BOOT"))
    link = connect()
    if link is None:
        sys.exit("rerail: this is the inside of `rerail run`, not a command of its own")
    if not boot.no_python:
        _warm_up()
    if os.environ.pop("RERAIL_STANDBY", "") != "script":
        link.send(Warm(at_join=False))
        assignment = link.wait_for_assignment()
        os.environ.update(assignment.env)
        if boot.no_python:
            os.execvp(boot.script, [boot.script, *_filled_in(boot.args)])
    _run_script(boot, link)


def die_with_parent() -> None:
    """Be killed when the agent dies, however it dies: no rank outlives its agent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


def _warm_up() -> None:
    """Import what every PyTorch script imports, and take one tiny step: the first one sets up as much as it computes.

    The first optimizer alone pulls in as much again as torch itself. Nothing here draws a random number.
    """
    with contextlib.suppress(ImportError):
        import torch
        import torch.distributed

        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.AdamW([weight])
        (weight * 2).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        import torch.nn.parallel

        import rerail.session.job  # noqa: F401


def _run_script(boot: Boot, link: AgentLink) -> NoReturn:
    """Run the user's program as `python script.py` would, in the real __main__."""
    sys.argv = [boot.script, *_filled_in(boot.args)]
    code = 0
    try:
        if boot.module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(boot.script, run_name="__main__", alter_sys=True)
        elif boot.run_path:
            runpy.run_path(boot.script, run_name="__main__")
        else:
            _exec_main(boot.script)
    except SystemExit as exit_:
        code = _exit_code(exit_)
    except JobStopped as stopped:
        print(f"rerail: {stopped}", file=sys.stderr) if _is_culprit(link) else None
        code = 1
    except BaseException as error:
        _write_error_file(error)
        if link.stop is None or link.stop.culprit:
            _print_user_traceback(error)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    _leave(code)


def _filled_in(arguments: Iterable[str]) -> list[str]:
    """The arguments with ${local_rank} replaced, as torchrun does (`$$` stands for a dollar sign)."""
    values = {"local_rank": rank} if (rank := os.environ.get("RERAIL_LOCAL_RANK")) else {}
    return [Template(argument).safe_substitute(values) for argument in arguments]


def _exec_main(script: str) -> None:
    main_module = sys.modules["__main__"]
    names = main_module.__dict__
    for name in [name for name in names if not name.startswith("__")]:
        del names[name]
    path = os.path.abspath(script)
    names.update({"__file__": path, "__spec__": None, "__cached__": None, "__name__": "__main__"})
    sys.path.insert(0, os.path.dirname(path))
    with open(path, "rb") as file:
        code: CodeType = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, names)


def _is_culprit(link: AgentLink) -> bool:
    return link.stop is not None and link.stop.culprit


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return 1


def _print_user_traceback(error: BaseException) -> None:
    """The user's own traceback, without the frames of rerail that started the script; once for all ranks of the node."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    if _is_first(error):
        traceback.print_exception(type(error), error, trace or error.__traceback__)
    else:
        rank = os.environ.get("RANK", "?")
        last = traceback.format_exception_only(error)[-1].strip()
        print(f"rank {rank}: {last} (traceback as above, and in {os.environ[ERROR_FILE]})", file=sys.stderr)


def _is_first(error: BaseException) -> bool:
    """Whether nobody on this node has shown an error of this type from this place yet, in this attempt or before."""
    path = os.environ.get(ERROR_FILE, "")
    if not path:
        return True
    places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    key = zlib.crc32("|".join((type(error).__name__, os.environ.get("RERAIL_NODE", ""), *places)).encode())
    logs = os.path.dirname(os.path.dirname(os.path.dirname(path)))
    try:
        os.close(os.open(os.path.join(logs, f".shown-{key:08x}"), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    except OSError:
        pass  # better twice than not at all
    return True


def _write_error_file(error: BaseException) -> None:
    """torchelastic's error file, unless the script's @record has written it already."""
    path = os.environ.get(ERROR_FILE, "")
    if not path or os.path.exists(path):
        return
    stack = "".join(traceback.format_exception(error))
    name = type(error).__name__
    body = {
        "message": {
            "message": f"{name}: {error}",
            "extraInfo": {"py_callstack": stack, "timestamp": str(int(time.time()))},
        },
        "exception": name if type(error).__module__ == "builtins" else f"{type(error).__module__}.{name}",
    }
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(body, file)
    except OSError as reason:
        print(f"rerail: error file {path} could not be written: {reason.strerror}", file=sys.stderr)


def _leave(code: int) -> NoReturn:
    """End as the interpreter would, exit handlers included, but leave torch's threads and sockets to the kernel.

    Taking groups and stores apart in whatever order the interpreter drops them can end in abort(), after all was done.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # joins the script's own threads, as at any exit
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
