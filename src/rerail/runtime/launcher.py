"""Turns a job description into an agent and, on the node that hosts it, a controller; and ends with nothing left behind.

It is kept tiny, so that it has no reason to die: it starts the two (and a depot, where one is asked for), starts them again
when they are killed, passes signals on, adopts and ends orphans, and returns the job's exit code. Called by `rerail run`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from types import FrameType

import msgspec

from rerail.config import DEPOT_KEY, DEPOT_PORT, DEPOT_SOCKET, EXIT_FAILED, INJECT, JobSpec, Settings
from rerail.detect.process import signal_name
from rerail.errors import UsageError
from rerail.runtime import lastwill, memory, processes
from rerail.runtime.processes import say
from rerail.texts import node_memory

AGENT, CONTROLLER, DEPOT = "agent", "controller", "depot"
MODULES = {AGENT: "rerail.runtime.agent", CONTROLLER: "rerail.runtime.controller", DEPOT: "rerail.checkpoint.depot"}
EXIT_CRASHED = 70
"""What agent and controller exit with when they fail by a defect of their own."""
EXIT_CANNOT_START = 2
"""What the controller exits with when it cannot begin (a busy port): trying again would not help."""
RESTARTS, WINDOW_S = 5, 60.0
"""Restarts of one process within this many seconds; beyond that something is wrong for good."""
CONTROLLER_GRACE_S = 2.0
HARD_END_S = 10.0
"""Seconds beyond the job's own grace after which an agent that was asked to end is killed."""


class _Helper:
    """The agent or the controller: a module that is started, and started again."""

    def __init__(self, name: str, env: dict[str, str], fds: tuple[int, ...] = ()) -> None:
        self.name = name
        self._env, self._fds = env, fds
        self._started: deque[float] = deque(maxlen=RESTARTS + 1)
        self.process: subprocess.Popen[bytes] | None = None
        self.pidfd = -1

    def start(self) -> None:
        self._started.append(time.monotonic())
        self.process = subprocess.Popen(
            [sys.executable, "-m", MODULES[self.name]],
            env=self._env,
            stdin=subprocess.DEVNULL,
            pass_fds=self._fds,
            start_new_session=True,  # the terminal's Ctrl-C reaches the launcher alone
            preexec_fn=processes.tie_to_parent(signal.SIGTERM),
        )
        self.pidfd = os.pidfd_open(self.process.pid)

    def collect(self) -> int | None:
        """Its exit status if it has ended, once."""
        if self.process is None or (status := self.process.poll()) is None:
            return None
        self.process = None
        os.close(self.pidfd)
        self.pidfd = -1
        return status

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else -1

    def signal(self, signum: int) -> None:
        if self.process is not None:
            self.process.send_signal(signum)

    def wait(self, timeout: float) -> bool:
        """Whether it has ended within `timeout` seconds."""
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout)
        return self.process is None or self.process.returncode is not None

    @property
    def worn_out(self) -> bool:
        """Whether it has been started too often of late."""
        return len(self._started) > RESTARTS and time.monotonic() - self._started[0] < WINDOW_S


class Launcher:
    """One run of one job on this node."""

    def __init__(self, spec: JobSpec, settings: Settings) -> None:
        self.spec = spec
        env = environment(spec, settings)
        # Kept open here: what the ranks have in memory outlives their agent.
        self._memory = memory.make(spec.slots)
        told = {**env, memory.VARIABLE: memory.describe(self._memory)}
        # The door stays open here, so that the depot's port stays the same.
        self._door = listen(spec.local_addr) if has_depot(spec, settings) else None
        of_depot, fds = env, tuple[int, ...]()
        if self._door is not None:
            told[DEPOT_PORT] = str(self._door.getsockname()[1])
            of_depot, fds = {**env, DEPOT_SOCKET: str(self._door.fileno())}, (self._door.fileno(),)
        self.agent = _Helper(AGENT, told, tuple(fd for one in self._memory for fd in one))
        self.controller = _Helper(CONTROLLER, env)
        self.depot = _Helper(DEPOT, of_depot, fds)
        self._helpers = (self.agent, self.controller, self.depot)
        self._signals: list[int] = []
        self._asked_at: float | None = None
        self._at_once = False
        self._wake, self._waker = socket.socketpair()

    def run(self) -> int:
        """Start all, stay until the agent is done, leave nothing behind."""
        processes.adopt_orphans()
        before = self._listen_to_signals()
        code: int | None = None
        try:
            with contextlib.suppress(OSError):
                self._address_file.unlink()
            if self._door is not None:
                self.depot.start()
            self.agent.start()
            if self.spec.hosts_controller:
                self.controller.start()
            while code is None:
                self._sleep()
                self._pass_signals_on()
                code = self._look()
            return code
        finally:
            self._clean_up()
            arenas = [one.arena for one in self._memory] if code != 0 else []
            lastwill.carry_out(arenas, lambda: len(self._signals) > 1)
            self.depot.signal(signal.SIGKILL)
            self.depot.wait(CONTROLLER_GRACE_S)
            self._restore_signals(before)

    @property
    def _address_file(self) -> Path:
        return Path(self.spec.run_dir) / "controller.json"

    # --- the loop ---

    def _sleep(self) -> None:
        """Until a signal comes (SIGCHLD for orphans included), one of our own ends, or time is up."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            for helper in self._helpers:
                if helper.pidfd >= 0:
                    selector.register(helper.pidfd, selectors.EVENT_READ)
            selector.select(1.0 if self._asked_at is not None else None)
        with contextlib.suppress(BlockingIOError):
            while self._wake.recv(4096):
                pass

    def _look(self) -> int | None:
        """The job's exit code once there is one."""
        # First of all the dead are counted, so that no zombie of ours is taken for an orphan.
        agent, controller, depot = self.agent.collect(), self.controller.collect(), self.depot.collect()
        if agent is not None:
            self._end_orphans()
            if 0 <= agent != EXIT_CRASHED:
                return agent
            if self._asked_at is not None:
                return 128 + self._signals[0]
            if not self._start_again(self.agent, agent):
                return EXIT_FAILED
        if controller is not None and controller != 0 and self._asked_at is None:
            never_listened = not self._address_file.exists()
            if controller == EXIT_CANNOT_START or (controller > 0 and never_listened):
                if controller != EXIT_CANNOT_START:
                    say(f"the controller could not start (exit code {controller}); its message is above")
                return EXIT_FAILED
            if not self._start_again(self.controller, controller):
                return EXIT_FAILED
        if depot is not None and self._asked_at is None:
            self._start_again(self.depot, depot)  # the job can go on without
        self._reap_adopted()
        if self._asked_at is not None and time.monotonic() - self._asked_at > self.spec.shutdown_grace_s + HARD_END_S:
            say("the agent did not end in time and is killed with all its ranks")
            return 128 + self._signals[0]
        return None

    def _start_again(self, helper: _Helper, status: int) -> bool:
        how = f"was killed ({signal_name(-status)})" if status < 0 else f"failed (exit code {status})"
        if helper.worn_out:
            say(
                f"the {helper.name} {how}, for the {RESTARTS + 1}th time within {WINDOW_S:.0f} s: giving up\n"
                "  look for who kills it (dmesg shows the out-of-memory killer) and start the job again"
            )
            return False
        say(f"the {helper.name} {how}; starting a new one")
        helper.start()
        return True

    # --- signals ---

    def _listen_to_signals(self) -> dict[int, signal.Handlers]:
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        before: dict[int, signal.Handlers] = {}
        for name in {*self.spec.signals_to_handle, "SIGINT", "SIGTERM"}:
            number = signal.Signals[name]
            before[number] = signal.signal(number, self._note_signal)  # type: ignore[assignment]
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)  # type: ignore[assignment]
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        return before

    def _restore_signals(self, before: dict[int, signal.Handlers]) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
        self._wake.close()
        self._waker.close()

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _pass_signals_on(self) -> None:
        """The first asks the agent to end the job in good order; a second one means now."""
        if self._signals and self._asked_at is None:
            self._asked_at = time.monotonic()
            say(f"{signal_name(self._signals[0])}: ending the job; once more ends it at once")
            self.agent.signal(self._signals[0])
        if len(self._signals) > 1 and self.agent.process is not None and not self._at_once:
            self._at_once = True
            say("ending at once")
            self.agent.signal(signal.SIGKILL)

    # --- cleaning up ---

    def _end_orphans(self) -> None:
        """What the agent has left behind: its ranks die with it, what they had started may not."""
        keep = [helper.pid for helper in self._helpers]
        for _ in range(200):
            if not processes.end_orphans(keep):
                break
            time.sleep(0.01)

    def _reap_adopted(self) -> None:
        for pid in processes.children_of_self():
            if pid not in [helper.pid for helper in self._helpers]:
                processes.reap(pid)

    def _clean_up(self) -> None:
        """End the agent if it is still there, then the controller, then whoever is left."""
        if not self.agent.wait(0):
            self.agent.signal(signal.SIGKILL if len(self._signals) > 1 else signal.SIGTERM)
            if not self.agent.wait(self.spec.shutdown_grace_s + CONTROLLER_GRACE_S):
                self.agent.signal(signal.SIGKILL)
                self.agent.wait(CONTROLLER_GRACE_S)
        if self.spec.several_nodes:
            # The other nodes' agents have yet to hear that the job is over.
            self.controller.wait(CONTROLLER_GRACE_S)
        self.controller.signal(signal.SIGTERM)
        if not self.controller.wait(CONTROLLER_GRACE_S):
            self.controller.signal(signal.SIGKILL)
            self.controller.wait(CONTROLLER_GRACE_S)
        self._end_orphans()


def environment(spec: JobSpec, settings: Settings) -> dict[str, str]:
    """What agent and controller are told. The token never stands on a command line, where anyone could read it."""
    env = dict(os.environ)
    if not env.get("RERAIL_TOKEN") and not spec.several_nodes:
        env["RERAIL_TOKEN"] = secrets.token_hex(16)
    if settings.node_store and not node_memory(settings.node_store):
        settings = msgspec.structs.replace(settings, node_store=str(Path(settings.node_store, store_name(spec))))
    env["RERAIL_SPEC"] = msgspec.json.encode(spec).decode()
    env["RERAIL_SETTINGS"] = msgspec.json.encode(settings).decode()
    env["RERAIL_LAUNCHER"] = str(os.getpid())
    env.setdefault("RERAIL_NODE", node_name(spec))
    env[INJECT] = "1" if spec.allow_inject else "0"
    if has_depot(spec, settings):
        import hashlib  # here, because most jobs start without it
        import hmac

        key = f"depot of {spec.job}".encode()  # ranks must not know the token itself
        env[DEPOT_KEY] = hmac.new(env.get("RERAIL_TOKEN", "").encode(), key, hashlib.sha256).hexdigest()
    return env


def has_depot(spec: JobSpec, settings: Settings) -> bool:
    """Whether this node keeps something for the others: checkpoints, or the parameters that they would lose."""
    return bool(settings.node_store) or (settings.shadows and spec.several_nodes)


def store_name(spec: JobSpec) -> str:
    """What a node's own part of the store's directory is called: the same in the next run, and another one for each node,
    should they share the directory."""
    name = os.environ.get("RERAIL_NODE") or f"{socket.gethostname()}-{max(spec.node_rank, 0)}"
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name).lstrip(".") or "node"


def listen(address: str) -> socket.socket:
    """A socket that listens where the other nodes reach this one, and nowhere else."""
    try:
        family, *_, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(where, family=family, backlog=1024)
    except OSError as error:
        raise UsageError(f"this node's depot cannot listen on {address}: {error}", hint="set --local-addr") from error


def node_name(spec: JobSpec) -> str:
    """The same for every agent of this run, and different from other nodes of the job on the same host."""
    host = socket.gethostname()
    if not spec.several_nodes:
        return host
    return f"{host}-{spec.node_rank if spec.node_rank >= 0 else os.getpid()}"


def check(spec: JobSpec) -> None:
    """Refuse what could only fail later, in the agent."""
    from rerail.runtime.logs import parse_std

    parse_std(spec.redirects, spec.slots, "--redirects")
    parse_std(spec.tee, spec.slots, "--tee")
    for name in spec.signals_to_handle:
        if name not in signal.Signals.__members__:
            raise UsageError(f"--signals-to-handle: {name!r} is not a signal", hint="use names such as SIGTERM,SIGINT")
        if name in ("SIGKILL", "SIGSTOP", "SIGCHLD"):
            raise UsageError(f"--signals-to-handle: {name} cannot be handled", hint="leave it out")
    for folder in filter(None, (spec.run_dir, spec.log_dir)):
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{folder} cannot be made: {error.strerror}", hint="choose another --run-dir") from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"{folder} is not writable", hint="choose another --run-dir or --log-dir")


def run(spec: JobSpec, settings: Settings) -> int:
    """Run the job on this node until it is over; the exit code is the job's."""
    check(spec)
    return Launcher(spec, settings).run()
