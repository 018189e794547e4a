"""Runs one node: turns the controller's orders into processes, and what becomes of them into messages.

    spawn at once -> greet the controller -> Start -> watch, relay, Promote ... -> Shutdown

Started by `runtime.launcher` as `python -m rerail.runtime.agent`; owns every rank and standby of the node. No torch here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
import traceback
import uuid

import msgspec

from rerail.config import DEPOT_PORT, EXIT_FAILED, JobSpec, Settings, settings_decoder, spec_decoder
from rerail.detect import hang
from rerail.detect.process import SOURCE as EXIT_SOURCE
from rerail.detect.process import exit_payload, signal_name
from rerail.errors import RerailError
from rerail.flow import Signal, new_id
from rerail.runtime import flight, leaving, memory, numa, orders, processes, wire
from rerail.runtime.children import Child, child_spec, end_all, end_orphans, needs_local_rank, virtual_device
from rerail.runtime.chores import Chores, reset_command
from rerail.runtime.clock import Reading
from rerail.runtime.gauges import Gauges
from rerail.runtime.injecting import Injector, Payload
from rerail.runtime.lease import FENCED, Lease, fence, get_ready
from rerail.runtime.logs import ERR, OUT, Console, LogBook
from rerail.runtime.lookout import Lookout
from rerail.runtime.mirror import Mirror
from rerail.runtime.processes import say
from rerail.runtime.slots import Slot, form, interrupt, slot_for, vacate
from rerail.runtime.standbys import StandbyPool
from rerail.runtime.uplink import Uplink
from rerail.runtime.watch import Watch

EXIT_CRASHED = 70
"""The agent itself failed (EX_SOFTWARE); the launcher starts a new one."""
UNAWARE_CALM_S = 3.0
"""Seconds after its start in which a script that has not called join() is left alone with the machine."""


class Agent:
    """All there is of rerail on one node."""

    def __init__(self, spec: JobSpec, settings: Settings, token: str, node: str) -> None:
        self.spec = spec
        self.settings = settings
        self.token = token
        self.node = node
        self.incarnation = uuid.uuid4().hex
        self.console = Console()
        self.logs = LogBook(spec, self.console)
        self.slots = [Slot(local_rank, given) for local_rank, given in enumerate(memory.found(spec.slots))]
        self.pool = StandbyPool(
            child_spec(spec), wanted=0 if spec.no_python else settings.standbys, changed=self._standbys_changed
        )
        self.lease = Lease.of(spec, settings, lambda: (slot.clock for slot in self.slots), self._fence)
        self.uplink = Uplink(spec, settings, self._greeting, self._order, lambda why: self._end(EXIT_FAILED, why))
        self.uplink.on_refusal = self.lease.renew
        self.watch = Watch(settings, self.slots, self._hung, self._stalled)
        self.gauges = Gauges()
        self.mirror = Mirror()
        self.chores = Chores(reset_command(settings.reset_command), lambda done: self.uplink.send(done))
        self.lookout = Lookout(settings, spec.job, node, lambda seen: self.uplink.send(orders.Observed(signal=seen)))
        self.injector = Injector(self.slots, self._observe, allowed=spec.allow_inject)
        self._cpus, self._cpu_notice = numa.plan(spec.numa_binding, spec.slots + spec.spare_devices)
        self._accelerators = numa.accelerators()
        self._orders: asyncio.Queue[orders.ToAgent] = asyncio.Queue()
        self._started_at: float | None = None
        self._left_by = 0
        """The signal by which the user asked us to leave."""
        self._ending: asyncio.Task[None] | None = None
        self._done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """The whole life of the agent; returns the job's exit code."""
        self.pool.prepare(self.spec.slots)
        if self._cpu_notice:
            say(self._cpu_notice)
        loop = asyncio.get_running_loop()
        for name in {*self.spec.signals_to_handle, "SIGTERM", "SIGINT"}:
            loop.add_signal_handler(signal.Signals[name], self._asked_to_leave, signal.Signals[name])
        chores = [self.uplink.run(), self._obey(), self.watch.run(), self._keep_house(), self.lookout.run()]
        if self.spec.several_nodes or self.spec.spare_devices:
            chores.append(self.mirror.run(self.slots, self.uplink))
        tasks = [asyncio.create_task(chore) for chore in (*chores, self.lease.run())]
        for task in tasks:
            task.add_done_callback(self._chore_ended)
        try:
            return await self._done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.console.close(timeout=2.0)

    def _chore_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._done.done():
            self._done.set_exception(error)

    # --- orders of the controller ---

    def _order(self, message: orders.ToAgent) -> None:
        """An end is obeyed at once; everything else in turn, since a Start may take its grace."""
        match message:
            case orders.Rejected():
                self._end(EXIT_FAILED, f"the controller turned this node away: {message.reason}", shown=True)
            case orders.Shutdown():
                code = 128 + self._left_by if self._left_by else message.exit_code
                self._end(code, message.reason, message.culprit, message.grace_s, shown=not self.spec.hosts_controller)
            case orders.Heard():
                self.lease.heard(message.number)
            case orders.Welcome():
                self.lease.renew(self.uplink.dialed_ns)
                get_ready(self.slots, self.pool)
            case wire.Inject():
                self.injector.order(message)
            case orders.Chore():
                self.chores.begin(message)
            case _:
                self._orders.put_nowait(message)

    async def _obey(self) -> None:
        while True:
            message = await self._orders.get()
            if self._ending is not None:
                return
            match message:
                case orders.PickPort():
                    self.uplink.send(orders.PortPicked(generation=message.generation, port=processes.free_port()))
                case orders.Start():
                    await self._start(message)
                case orders.Promote():
                    self._promote(message)
                case orders.Vacate():
                    vacate(self.slots, message)
                case orders.InterruptAll():
                    interrupt(self.slots, message)
                case orders.FormAll():
                    form(self.slots, message)
                case orders.DismissAll():
                    for slot in self.slots:
                        if slot.running and slot.child is not None:
                            slot.child.send(wire.Dismiss())

    async def _start(self, order: orders.Start) -> None:
        """End what there is, then make ranks of the processes that wait for it."""
        if any(slot.generation > order.generation for slot in self.slots):
            return
        old = [slot.child for slot in self.slots if slot.child is not None]
        for child in old:
            child.disown(hang_up=False)
        await end_all([child for child in old if child.alive], order.grace_s)
        end_orphans(self._children())
        self._started_at = time.monotonic()
        for slot in self.slots:
            slot.empty()
        # those whose rank has a slot here come first, so that nobody else takes its memory
        known = [slot.owner for slot in self.slots]
        for assignment in sorted(order.assignments, key=lambda one: one.rank not in known):
            self._place(assignment, slot_for(self.slots, assignment.rank))
        asyncio.get_running_loop().call_later(UNAWARE_CALM_S + 0.05, self._refill)

    def _promote(self, order: orders.Promote) -> None:
        """A standby takes the place of a rank; whatever is left of that rank goes."""
        assignment = order.assignment
        slot = slot_for(self.slots, assignment.rank, beside=order.beside)
        if slot.generation > assignment.generation:
            return
        slot.end_child()
        self._started_at = self._started_at or time.monotonic()  # a spare node has had no other start
        self._place(assignment, slot, tuple(order.kept), new=order.beside)
        slot.beside = order.beside

    def _place(self, assignment: wire.Assign, slot: Slot, kept: tuple[orders.Kept, ...] = (), new: bool = True) -> None:
        slot.local_rank = local_rank = int(assignment.env["LOCAL_RANK"])
        child = self.pool.take(awaited=not new)
        folder = self.logs.folder(assignment.generation, local_rank)
        error_file = folder / "error.json"
        error_file.unlink(missing_ok=True)
        slot.fill(child, assignment, error_file, kept)
        env = {**assignment.env, "TORCHELASTIC_ERROR_FILE": str(error_file), "RERAIL_LOCAL_RANK": str(local_rank)}
        if self.spec.virtual_local_rank:
            env |= virtual_device(local_rank)
        if local_rank in self._cpus:
            numa.bind(child.pid, self._cpus[local_rank])
        child.on_message, child.on_exit = self._heard, self._exited
        child.assign(msgspec.structs.replace(assignment, env=env), slot.memory)
        child.stdout.attach(self.logs.open(assignment.generation, slot.rank, local_rank, OUT))
        child.stderr.attach(self.logs.open(assignment.generation, slot.rank, local_rank, ERR))

    # --- news of the ranks ---

    def _filled(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.child is not None and not slot.beside]

    def _generation(self) -> int:
        return max((slot.generation for slot in self._filled()), default=0)

    def _slot_of(self, child: Child) -> Slot | None:
        return next((slot for slot in self.slots if slot.child is child), None)

    def _heard(self, child: Child, message: wire.FromRank) -> None:
        slot = self._slot_of(child)
        if slot is None or isinstance(message, wire.Warm):
            return
        if isinstance(message, wire.Injected):
            return self.injector.answered(slot, message)
        slot.heard(message)
        if isinstance(message, wire.Formed):
            slot.said.clear()  # the parking that led here is history; told again it would pass for a new one
        if isinstance(message, wire.Parked):
            for kept in self.mirror.news([slot]):  # before it counts as parked: a successor may need it
                self.uplink.send(kept)
        slot.said.append(orders.Relayed(rank=slot.rank, message=message, beside=slot.beside))
        self.uplink.send(slot.said[-1])
        self._refill()

    def _exited(self, child: Child) -> None:
        slot = self._slot_of(child)
        if slot is None or self._ending is not None or child.exit_status is None:
            return
        if child.exit_status == 0 or slot.beside:
            slot.unsettled = orders.RankExited(rank=slot.rank, generation=slot.generation, beside=slot.beside)
        else:
            payload = exit_payload(child.exit_status, slot.error_file, child.stderr.tail())
            slot.unsettled = orders.Observed(signal=self._signal(EXIT_SOURCE, slot, payload))
        self.uplink.send(slot.unsettled)

    async def _hung(self, slot: Slot, verdict: hang.Verdict) -> None:
        child = slot.child
        stack = await flight.where(slot, self.slots)
        if slot.child is child:
            slot.unsettled = self._observe(hang.SOURCE, slot, hang.payload_of(verdict, stack), verdict.stalled_s)

    async def _stalled(self, waited: float, ranks: dict[int, Reading]) -> None:
        generation, told = self._generation(), await flight.ask(self.slots)
        if self._generation() == generation:
            self._observe(hang.STALLED_SOURCE, None, hang.stalled_payload(self.node, waited, ranks, told), waited)

    def _observe(self, source: str, slot: Slot | None, payload: Payload, age_s: float = 0.0) -> orders.Observed:
        message = orders.Observed(signal=self._signal(source, slot, payload), age_s=round(age_s, 3))
        self.uplink.send(message)
        return message

    def _signal(self, source: str, slot: Slot | None, payload: Payload) -> Signal:
        return Signal(
            id=new_id("sig"),
            job=self.spec.job,
            at=time.time(),
            source=source,
            node=self.node,
            rank=slot.rank if slot else -1,
            generation=slot.generation if slot else self._generation(),
            step=slot.version if slot else -1,
            payload=payload,
        )

    # --- what the controller is told unasked ---

    def _greeting(self) -> list[wire.Message]:
        placed = self._filled()
        self.mirror.forget()
        hello = orders.AgentHello(
            job=self.spec.job,
            token=self.token,
            node=self.node,
            address=self.spec.local_addr,
            slots=self.spec.slots,
            devices=self.spec.slots + self.spec.spare_devices,
            resets=self.chores.can_reset,
            accelerators=self._accelerators,
            node_rank=self.spec.node_rank,
            incarnation=self.incarnation,
            ranks=tuple(slot.status() for slot in placed),
            standbys_ready=self._standby_counts()[0],
            depot_port=int(os.environ.get(DEPOT_PORT, 0)),
        )
        # The last words before a connection broke may not have arrived; all of them can be heard twice.
        again = [message for slot in placed for message in (*slot.said, slot.unsettled) if message is not None]
        for message in again:
            self.uplink.forget(message)
        return [hello, *again]

    def _standby_counts(self) -> tuple[int, int]:
        """Before the start, the processes in the pool are the ranks to be, not standbys."""
        return self.pool.counts() if self._started_at is not None else (0, 0)

    def _standbys_changed(self) -> None:
        ready, warming = self._standby_counts()
        if self._started_at is not None:
            self.uplink.send(orders.Standbys(ready=ready, warming=warming))
            asyncio.get_running_loop().call_soon(self._refill)

    def _refill(self) -> None:
        """Warm standbys when the job is calm: warming must not compete with a start or a recovery."""
        if self._started_at is None or self._ending is not None or not all(slot.running for slot in self._filled()):
            return
        joined = [slot.joined for slot in self._filled()]
        if all(joined):
            calm = all(slot.settled for slot in self._filled())
        else:
            calm = not any(joined) and time.monotonic() - self._started_at >= UNAWARE_CALM_S
        if calm:
            self.pool.refill(script_mode=all(joined) and not needs_local_rank(self.spec.script_args))

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(self.lease.beat_s)
            self.uplink.send(self.gauges.beat(self._filled(), self.lease.next_beat()))
            end_orphans(self._children())
            self._refill()

    def _fence(self, silent_s: float) -> None:
        """Others may get the places of this node's ranks now: end them, and come back without."""
        self.uplink.hang_up(self.lease.length_s)
        while not self._orders.empty():
            self._orders.get_nowait()
        why = f"no word from the controller for {silent_s:.1f} s"
        for slot in (ended := fence(self.slots, self.pool)):
            slot.unsettled = self._observe(FENCED, slot, {"message": why}, silent_s)
        if ended and self._ending is None:
            say(f"{why}: this node ends its ranks, since others may get their places, and tries to come back")

    def _children(self) -> list[Child]:
        return [*(slot.child for slot in self.slots if slot.child is not None), *self.pool.members]

    # --- the end ---

    def _asked_to_leave(self, signum: signal.Signals) -> None:
        """Ctrl-C, or the launcher is gone. A second time means at once."""
        if self._left_by or self._ending is not None:
            for child in self._children():
                child.kill()
            return
        self._left_by = int(signum)
        reason = f"stopped by {signal_name(signum)}"
        if not self.uplink.connected or os.getppid() != int(os.environ.get("RERAIL_LAUNCHER", os.getppid())):
            self._end(128 + signum, reason)
            return
        self.uplink.send(orders.LeaveJob(reason=reason, exit_code=128 + signum))
        leaving.unless_answered(lambda: self.uplink.connected, lambda: self._end(128 + signum, reason))

    def _end(
        self, code: int, reason: str, culprit: int = -1, grace_s: float | None = None, *, shown: bool = True
    ) -> None:
        if self._ending is None:
            if code and shown and not self._left_by:
                say(reason)
            grace = self.spec.shutdown_grace_s if grace_s is None else grace_s
            self._ending = asyncio.create_task(self._shut_down(code, reason, culprit, grace))
            self._ending.add_done_callback(self._chore_ended)

    async def _shut_down(self, code: int, reason: str, culprit: int, grace_s: float) -> None:
        """Stop, SIGTERM, grace, SIGKILL with all below; then nothing of the job is left on this node."""
        await leaving.end_node(
            self.slots, self.pool, reason, culprit, grace_s, lambda: end_orphans(self._children(), everything=True)
        )
        await self.uplink.close(0.5)
        if not self._done.done():
            self._done.set_result(code)


async def _main(spec: JobSpec, settings: Settings) -> int:
    node = os.environ.get("RERAIL_NODE") or socket.gethostname()
    agent = Agent(spec, settings, os.environ.get("RERAIL_TOKEN", ""), node)
    processes.speak_through(lambda data: agent.console.write(ERR, data))
    return await agent.run()


def main() -> int:
    """Run the agent described by the environment; the exit code is the job's."""
    spec = spec_decoder.decode(os.environ["RERAIL_SPEC"])
    settings = settings_decoder.decode(os.environ["RERAIL_SETTINGS"])
    processes.adopt_orphans()
    try:
        return asyncio.run(_main(spec, settings))
    except (RerailError, OSError) as error:
        processes.speak_through(processes.to_stderr)
        say(f"the agent of this node cannot go on: {error}")
        return EXIT_FAILED
    except BaseException:
        with contextlib.suppress(OSError):
            traceback.print_exc()
        return EXIT_CRASHED


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a console thread that waits for a stuck terminal must not hold up the end
