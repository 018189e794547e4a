"""What Linux offers to start, tie, watch and end processes, as small functions without state.

Called by `runtime.children`, `runtime.agent` and `runtime.launcher`; imports nothing of rerail.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CAP_SYS_NICE = 23

SPARED = "RERAIL_SPARED"
"""Environment variable of a process that outlives its rank to finish what it was given, and then ends by itself."""
MARK = "RERAIL_CHILD"
"""Environment variable that every rank process and all it starts carry: names the owner of an orphan."""


def to_stderr(data: bytes) -> None:
    """Where `say` writes unless told otherwise."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(data.decode())
        sys.stderr.flush()


_voice: Callable[[bytes], None] = to_stderr


def say(text: str) -> None:
    """The one way in which agent and launcher speak to the user."""
    _voice("".join(f"rerail: {line}\n" for line in text.splitlines()).encode())


def speak_through(voice: Callable[[bytes], None]) -> None:
    """From now on `say` hands its lines to `voice`: the agent must not wait for a slow terminal."""
    global _voice
    _voice = voice


def adopt_orphans() -> None:
    """Descendants whose parent dies become children of this process, not of init, so that they can be ended."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def tie_to_parent(signum: int, nice: int = 0) -> Callable[[], None]:
    """A `preexec_fn`: the new process gets `signum` when this one dies, however it dies."""
    parent = os.getpid()

    def before_exec() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
        if os.getppid() != parent:  # it died between fork and prctl
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if nice:
            os.nice(nice)

    return before_exec


def may_undo_nice() -> bool:
    """Whether a lowered priority can be raised again: otherwise it is better not to lower it at all."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text()
        capabilities = int(status.split("CapEff:")[1].split()[0], 16)
        if capabilities >> _CAP_SYS_NICE & 1:
            return True
    soft, _ = resource.getrlimit(resource.RLIMIT_NICE)
    return soft == resource.RLIM_INFINITY or soft >= 20


def set_nice(pid: int, nice: int) -> None:
    """Set the priority of every thread, and of the session where the kernel groups processes by session."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(thread), nice)


def signal_process(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def kill_group(pid: int) -> None:
    """SIGKILL the process group that `pid` leads. Works on stopped processes too, and after its leader has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Everything below `pid`, nearest first; empty when it is gone."""
    import psutil  # here, because the first ranks are started before this is needed

    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def kill_tree(pid: int) -> None:
    """SIGKILL `pid`, its process group and everything below it, wherever that has put itself; a spared one stays."""
    below = [each for each in descendants(pid) if not is_spared(each)]
    kill_group(pid)
    for each in (pid, *below):
        signal_process(each, signal.SIGKILL)


def children_of_self() -> list[int]:
    """Direct children of this process, adopted ones included."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):
                found += [int(pid) for pid in Path(f"/proc/self/task/{thread}/children").read_text().split()]
    return found


def is_spared(pid: int) -> bool:
    """Whether `pid` is to be left to its own end."""
    return _variable_of(pid, SPARED) is not None


def mark_of(pid: int) -> str | None:
    """The mark `pid` carries, or None when it carries none or cannot be read."""
    return _variable_of(pid, MARK)


def _variable_of(pid: int, name: str) -> str | None:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    prefix = f"{name}=".encode()
    for entry in environment.split(b"\0"):
        if entry.startswith(prefix):
            return entry[len(prefix) :].decode(errors="replace")
    return None


attended: set[int] = set()
"""Children that somebody here waits for, and ends."""


def reap(pid: int) -> bool:
    """Collect the adopted child `pid` if it has ended; True when it is gone."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def end_orphans(keep: Iterable[int], owned_by_the_living: Callable[[int], bool] = lambda pid: False) -> int:
    """SIGKILL and reap adopted children. Those in `keep`, owned by a living rank or spared stay. How many are left."""
    kept, left = {*keep, *attended}, 0
    for pid in children_of_self():
        if pid in kept or reap(pid):
            continue
        if owned_by_the_living(pid) or is_spared(pid):
            continue
        left += 1
        if process_state(pid) in (
            "D",
            "Z",
        ):  # in a place that hangs, or ended but for a thread there: it needs no looking into
            signal_process(pid, signal.SIGKILL)
        else:
            kill_tree(pid)
    return left


def process_state(pid: int) -> str:
    """The state letter of /proc/<pid>/stat (R, S, D, T, t, Z), or `` when the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    return chr(stat[stat.rindex(b")") + 2])


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time burnt so far by these processes, together with that of their children that have ended."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            stat = Path(f"/proc/{pid}/stat").read_bytes()
            ticks += sum(int(field) for field in stat[stat.rindex(b")") + 2 :].split()[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """A port that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
