"""Turns a boot order into one rank process with a link, two log pipes and an exit watch, and ends it with all it started.

A child is born as a standby; `assign` makes it a rank. Called by `runtime.standbys` (spawns) and `runtime.agent`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from string import Template

import msgspec

from rerail.config import JobSpec
from rerail.errors import WireError
from rerail.runtime import processes
from rerail.runtime.frames import decode_from_rank, frame, read_frame
from rerail.runtime.logs import OutputPipe
from rerail.runtime.wire import Assign, FromRank, Message

BOOTSTRAP = "from rerail.runtime.bootstrap import main; main()"
STANDBY_NICE = 10


class Mode(StrEnum):
    """How far a standby goes by itself."""

    PRELOAD = "preload"
    """Imports torch and waits for its rank before the script begins."""
    SCRIPT = "script"
    """Runs the script and waits inside `rerail.join()`."""


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for all processes of one agent."""

    command: tuple[str, ...]
    env: dict[str, str]


def child_spec(spec: JobSpec, environ: Mapping[str, str] = os.environ) -> ChildSpec:
    """The command and environment of every rank process of this node."""
    env = {name: value for name, value in environ.items() if name not in ("RERAIL_TOKEN", "RERAIL_SPEC")}
    boot = {
        "script": spec.script,
        "args": spec.script_args,
        "module": spec.module,
        "no_python": spec.no_python,
        "run_path": spec.run_path,
    }
    env["RERAIL_BOOT"] = msgspec.json.encode(boot).decode()
    env.setdefault("PYTHONUNBUFFERED", "1")
    if spec.slots > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does: many ranks would fight for the same cores
    return ChildSpec(command=(sys.executable, "-c", BOOTSTRAP), env=env)


def needs_local_rank(arguments: Iterable[str]) -> bool:
    """Whether ${local_rank} stands in the script's arguments: then no process can begin the script before it has one."""
    return any("local_rank" in Template(argument).get_identifiers() for argument in arguments)


def virtual_device(local_rank: int) -> dict[str, str]:
    """--virtual-local-rank: each rank sees its own device alone, as number 0."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible is not None else []
    device = devices[local_rank].strip() if local_rank < len(devices) else str(local_rank)
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": device}


class Child:
    """One process. Its callbacks fall silent once it is `disowned`: what an old generation says no longer counts."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket, mode: Mode, mark: str) -> None:
        self.process = process
        self.pid = process.pid
        self.mode = mode
        self.mark = mark
        self.warm = False
        self.at_join = False
        self.disowned = False
        self.niced = False
        self.exit_status: int | None = None
        """Exit code, or minus the signal, once it has ended."""
        self.ended = asyncio.Event()
        self.on_message: Callable[[Child, FromRank], None] = lambda child, message: None
        self.on_exit: Callable[[Child], None] = lambda child: None
        assert process.stdout is not None and process.stderr is not None, "rank processes are started with pipes"
        self.stdout = OutputPipe(process.stdout)
        self.stderr = OutputPipe(process.stderr)
        self._sock = sock
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._pidfd = os.pidfd_open(self.pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._exited)
        self._listening = self._loop.create_task(self._listen(), name=f"link of {self.pid}")

    @classmethod
    def spawn(cls, spec: ChildSpec, mode: Mode, nice: int = 0) -> Child:
        """Start a process in a session of its own; it dies with this one."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        mark = uuid.uuid4().hex[:12]
        env = {**spec.env, "RERAIL_LINK_FD": str(theirs.fileno()), processes.MARK: mark}
        if mode is Mode.SCRIPT:
            env["RERAIL_STANDBY"] = "script"
        with theirs:
            process = subprocess.Popen(
                spec.command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                preexec_fn=processes.tie_to_parent(signal.SIGKILL, nice),
            )
        child = cls(process, ours, mode, mark)
        child.niced = bool(nice)
        return child

    # --- talking ---

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send without ever waiting: what the process does not read yet is kept here."""
        if self.disowned or self.exit_status is not None:
            return
        self._unsent.append((frame(message), list(fds)))
        self._flush()

    def assign(self, assignment: Assign, fds: tuple[int, int]) -> None:
        """Make this standby a rank, at full priority."""
        if self.niced:
            processes.set_nice(self.pid, 0)
            self.niced = False
        self.send(assignment, fds)

    def _flush(self) -> None:
        while self._unsent:
            data, fds = self._unsent[0]
            try:
                sent = socket.send_fds(self._sock, [data], fds) if fds else self._sock.send(data)
            except BlockingIOError:
                self._loop.add_writer(self._sock.fileno(), self._flush)
                return
            except OSError:  # it has closed its end; the exit watch tells the rest
                self._unsent.clear()
                break
            if sent < len(data):
                self._unsent[0] = (data[sent:], [])
            else:
                self._unsent.popleft()
        if self._sock.fileno() >= 0:
            self._loop.remove_writer(self._sock.fileno())

    async def _listen(self) -> None:
        reader, writer = await asyncio.open_connection(sock=self._sock.dup())
        try:
            while (data := await read_frame(reader)) is not None and not self.disowned:
                self.on_message(self, decode_from_rank(data))
        except WireError as error:
            processes.say(f"process {self.pid} broke the protocol and is ended: {error}")
            processes.kill_tree(self.pid)
        except Exception as error:  # a process that nobody listens to would look like one that does not answer
            processes.say(f"process {self.pid} is ended, its message failed here: {type(error).__name__}: {error}")
            processes.kill_tree(self.pid)
        finally:
            writer.close()

    # --- ending ---

    @property
    def alive(self) -> bool:
        return self.exit_status is None

    def disown(self, *, hang_up: bool = True) -> None:
        """Nothing this process says or does counts any more. Hanging up its link also makes it leave at once."""
        self.disowned = True
        if not hang_up:
            return
        self._listening.cancel()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._close_link()

    def kill(self) -> None:
        """SIGKILL the process and everything it has started."""
        if self.alive:
            processes.kill_tree(self.pid)

    def terminate(self) -> None:
        """Ask it to end. A stopped process is continued, or it could not hear."""
        if self.alive:
            processes.signal_process(self.pid, signal.SIGTERM)
            processes.signal_process(self.pid, signal.SIGCONT)

    def close_output(self) -> None:
        """Write down what it said last."""
        for pipe in (self.stdout, self.stderr):
            pipe.drain()
            pipe.close()

    async def wait(self, timeout: float) -> bool:
        """Whether it has ended within `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), timeout)
        return self.ended.is_set()

    def _exited(self) -> None:
        # A process that was replaced may have been collected with the orphans; then nobody asks how it ended.
        with contextlib.suppress(ChildProcessError):
            info = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if info is None:
                return
            if info.si_status != 0:
                # While the zombie holds the number, the group cannot be a stranger's. After a clean end its
                # background work may go on until the job ends.
                processes.kill_group(self.pid)
        status = self.process.wait()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.exit_status = status
        self.stdout.drain()
        self.stderr.drain()
        # Its last messages may still lie in the socket, and they come before the news of its end.
        self._loop.create_task(self._settle(), name=f"end of {self.pid}")

    async def _settle(self) -> None:
        if not self.disowned:
            with contextlib.suppress(asyncio.CancelledError, TimeoutError):
                # Bounded, because a grandchild may hold the socket open.
                await asyncio.wait_for(self._listening, 0.05)
        self._close_link()
        self.ended.set()
        if not self.disowned:
            self.on_exit(self)

    def _close_link(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()


def end_orphans(children: list[Child], *, everything: bool = False) -> int:
    """End what processes that are gone have left behind. A living rank's own daemons are its own business."""
    alive = {child.mark for child in children if child.alive or child.exit_status == 0}
    ours = [child.pid for child in children if child.alive]

    def owned_by_the_living(pid: int) -> bool:
        return not everything and ((mark := processes.mark_of(pid)) is None or mark in alive)

    return processes.end_orphans(ours, owned_by_the_living)


async def end_all(children: list[Child], grace_s: float) -> None:
    """SIGTERM, `grace_s` seconds, then SIGKILL with everything below. Returns when all have ended or are past killing."""
    if grace_s > 0:
        for child in children:
            child.terminate()
        await _wait_all(children, grace_s)
    for child in children:
        child.kill()
    # A process in uninterruptible sleep dies only when the kernel lets it; waiting longer would not help.
    await _wait_all(children, 5.0)


async def _wait_all(children: list[Child], timeout: float) -> None:
    waits = [asyncio.ensure_future(child.ended.wait()) for child in children]
    if waits:
        _, pending = await asyncio.wait(waits, timeout=timeout)
        for each in pending:
            each.cancel()
