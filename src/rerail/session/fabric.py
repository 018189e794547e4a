"""All process groups of this rank, and the one switch between living peers and none.

    LIVE        collectives go to the peers of this generation
    SOLO        the rank is alone: a newcomer building its model, or an interrupted step running out
    CUT         the peers are gone and nobody has asked for solo results: a collective raises

`interrupt()` may come from another thread at any time and frees whoever waits in a collective. `form()` builds the
wires of a new generation under the same group objects. Called by `session.groups` (each collective) and
`session.job`.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from rerail.errors import FencedError, StepInterrupted
from rerail.session import sockets, waiting
from rerail.session.c10d import PrefixStore, Store, cuda_in_use
from rerail.session.heard import Hearing
from rerail.session.messages import Messages
from rerail.session.store import ReplaceableStore, dial, serve

if TYPE_CHECKING:
    from rerail.session.groups import ReplaceableGroup, Wires


CUT_EVERY_S = 0.02
"""Seconds between two looks for new wires while a forming generation is broken off."""


class Mode(Enum):
    """See the module's docstring."""

    LIVE = "live"
    SOLO = "solo"
    CUT = "cut"


class Fabric:
    """One per process."""

    def __init__(self) -> None:
        self.mode = Mode.SOLO
        self.generation = -1
        self.address = "127.0.0.1"
        """Where this rank's groups listen."""
        self.inner_backend = "gloo"
        """What carries the collectives: `gloo`, `nccl`, or `cpu:gloo,cuda:nccl`."""
        self.store = ReplaceableStore()
        self._served: Store | None = None
        """The store this rank serves, kept alive here."""
        self.groups: list[ReplaceableGroup] = []
        self.nodes: tuple[int, ...] = ()
        """The number of each rank's node, by rank; empty: there is one."""
        self.seats: tuple[int, ...] = ()
        """Ranks that take part in this generation, lowest first; empty: all of them."""
        self.interrupted = False
        """A fault is known and the current attempt is void."""
        self.rehearsing = True
        """No generation has been joined yet: being alone is fine, everywhere."""
        self.shielded = False
        """Inside `job.step()` or `job.guard()`: what comes out of a dead collective is thrown away."""
        self.solo_used = 0
        """Collectives carried out alone since the start."""
        self.on_failure: Callable[[str], None] = lambda text: None
        self.collectives = 0
        """Begun since the generation was formed."""
        self.formed_ns = 0
        """When the generation was formed (wall clock): torch's record of collectives goes further back."""
        self.aborted = False
        """Whether wires of NCCL have been aborted in this process."""
        self.wanted = -1
        """The newest generation an interrupt asked for. Nothing older is formed any more."""
        self.cuts = 0
        """Interrupts since the generation was formed."""
        self.cut_at = 0.0
        self.exposed_s = 0.0
        """Of the step under way: seconds in which a GPU had nothing to do but its last collective."""
        self._mark: Any = None
        self._before_forming: set[tuple[int, int]] | None = None
        self._laid = threading.Event()
        """Set when the wires of the generation being formed are laid, or not wanted any more."""
        self._retired: list[tuple[int, object]] = []
        self.promises = waiting.Promises()
        self._store_connections: set[tuple[int, int]] = set()
        self._newest: Any = None
        self._name = self._group = ""
        self._seen_newest: Any = None
        self._newest_since = 0
        self._lock = threading.Lock()

    # --- every collective passes here ---

    def begin(self, work: Any, name: str, group: str) -> None:
        """Count this collective and remember it as the newest, for the beat thread."""
        self.collectives += 1
        self._newest, self._name, self._group = work, name, group
        if self._mark is not None:
            self._mark.record()

    def ended(self, work: Any) -> None:
        """It was waited for, and is complete, whatever it says itself."""
        if work is self._newest:
            self._newest = None

    def synchronize(self) -> None:
        """Wait for the GPU, and note how long it had been waiting for others."""
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end.record()
        with waiting.idling():
            torch.cuda.current_stream().synchronize()
        if self._mark is None:
            self._mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        elif self._mark.query():
            self.exposed_s = max(0.0, self._mark.elapsed_time(end) / 1e3)

    @property
    def newest_name(self) -> str:
        """The newest collective in words."""
        return f"{self._name} of {self._group}"

    def pending_since(self) -> int:
        """When the newest collective was first seen under way, if it is still; else 0. Asked at every beat."""
        work = self._newest
        if work is None:
            return 0
        try:
            if not work.is_completed():
                if work is not self._seen_newest:
                    self._seen_newest, self._newest_since = work, time.monotonic_ns()
                return self._newest_since
        except RuntimeError:
            pass
        self._newest = self._seen_newest = None
        return 0

    def failed(self, error: BaseException) -> None:
        """A collective broke by itself: the attempt is void; tell the agent, who may not know yet."""
        with self._lock:
            first = not self.interrupted
            self.interrupted = True
            self._leave_peers()
        if first:
            self.on_failure(f"{type(error).__name__}: {error}")

    def alone_or_raise(self) -> None:
        """Called when a collective finds no peers: fine inside a shield or a rehearsal, an error elsewhere."""
        if self.mode is Mode.CUT:
            raise StepInterrupted(
                "a collective outside job.step() met a fault. Put it under job.guard(function), "
                "which repeats it when the job is whole again"
            )
        self.solo_used += 1

    # --- generations ---

    def interrupt(self, wanted: int) -> None:
        """Void the attempt and free everyone who waits: generation `wanted` is to be formed. Any thread."""
        with self._lock:
            if wanted <= self.generation:
                return
            self.wanted = max(self.wanted, wanted)
            self.interrupted = True
            if not self.cuts:
                self.cut_at = time.monotonic()
            self.cuts += 1
            self._leave_peers()
            groups, before, store = list(self.groups), self._before_forming, self._store_connections
            self._laid.set()
        for group in groups:
            group.cut()
        sockets.cut(store)
        threading.Thread(
            target=self.promises.free, args=(lambda: not self.cuts,), name="rerail-free", daemon=True
        ).start()
        if before is not None:
            # A peer died while wires were being laid. Those laid so far belong to no group yet, and more may follow.
            threading.Thread(target=self._keep_cutting, args=(before,), name="rerail-cut", daemon=True).start()

    def retire(self, wires: object) -> None:
        """Keep the wires of an older generation until their threads are idle.

        Taking a gloo group apart joins its threads while Python is locked, and one of them may be waiting for that very
        lock to deliver an error.
        """
        self._retired.append((self.generation, wires))

    def leave(self, wires: object) -> None:
        """One of their threads is stuck: they are kept for as long as this process lives, or taking them apart would
        wait for it, or wake a thread that finds no interpreter any more, and abort."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(wires))

    def cut_since(self) -> float:
        """When the wires of this generation were cut (monotonic); 0.0: they were not."""
        return self.cut_at if self.cuts else 0.0

    def _keep_cutting(self, before: set[tuple[int, int]]) -> None:
        while self._before_forming is before:
            sockets.cut(sockets.established(sockets.open_sockets() - before))
            time.sleep(CUT_EVERY_S)

    def shield(self, on: bool) -> None:
        """Enter or leave a block whose results are thrown away if a fault comes."""
        with self._lock:
            self.shielded = on
            if self.mode is not Mode.LIVE:
                self._leave_peers()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Void attempts on purpose, while the peers stay connected; they must do the same."""
        self.mode, self.interrupted, self.rehearsing = Mode.SOLO, True, True
        try:
            yield
        finally:
            with self._lock:
                self.rehearsing = False
                if self.cuts == 0:
                    self.mode, self.interrupted = Mode.LIVE, False
                else:
                    self._leave_peers()

    def serve(self) -> tuple[Store, int]:
        """Open the store of the generation about to be formed, for all ranks; the store and its port."""
        before = sockets.open_sockets()
        self._served, port = serve(self.address)
        self._store_connections = sockets.established(sockets.open_sockets() - before)
        return self._served, port

    def dial(self, host: str, port: int) -> Store:
        """Connect to the store of the generation being formed. An interrupt cuts that connection."""
        before, generation = sockets.open_sockets(), self.generation
        connection = dial(host, port, given_up=lambda: self.wanted > generation)
        self._store_connections = sockets.established(sockets.open_sockets() - before)
        return connection

    def form(self, generation: int, meet: Callable[[], Store], seats: tuple[int, ...] = ()) -> None:
        """Build the wires of all groups for `generation`, which meets in the store that `meet` gives.

        `seats`: who takes part; empty: all. RuntimeError if it cannot be completed.
        """
        with self._lock:
            if generation <= self.generation:
                raise FencedError(f"generation {generation} is not newer than {self.generation}")
            self._give_way_to_newer(generation)
            self.generation, self.seats = generation, seats
            self._before_forming = sockets.open_sockets()
            self._laid = threading.Event()
        for group in self.groups:
            group.disconnect()
        try:
            wires = self._lay(generation, meet)
        finally:
            self._before_forming = None
        self._retired = [(born, old) for born, old in self._retired if born >= generation - 1]
        with self._lock:
            self._give_way_to_newer(generation)
            for group, laid in wires:
                group.adopt(laid)
            self.interrupted = self.rehearsing = False
            self.cuts = 0
            self._newest = None
            self.formed_ns = time.time_ns()
            self.mode = Mode.LIVE

    def _lay(self, generation: int, meet: Callable[[], Store]) -> list[tuple[ReplaceableGroup, Wires]]:
        """Lay the wires in a thread of their own, and leave it behind when the generation is given up.

        A rank that waits for a dead peer to call has no connection that could be cut.
        """
        laid, device = self._laid, torch.cuda.current_device() if cuda_in_use() else -1
        outcome: list[list[tuple[ReplaceableGroup, Wires]] | BaseException] = []

        def work() -> None:
            try:
                if device >= 0:
                    torch.cuda.set_device(device)
                outcome.append(self._wires(generation, meet))
            except BaseException as error:
                outcome.append(error)
            laid.set()

        threading.Thread(target=work, name=f"rerail-form-{generation}", daemon=True).start()
        laid.wait()
        self._give_way_to_newer(generation)
        found = outcome[0]
        if isinstance(found, BaseException):
            raise found
        return found

    def _wires(self, generation: int, meet: Callable[[], Store]) -> list[tuple[ReplaceableGroup, Wires]]:
        store = meet()
        self.store.target = PrefixStore(f"default/{generation}", store)
        return [
            (group, group.connect(PrefixStore(f"groups/{generation}/{group.key}", store)))
            for group in self._groups_known_to_all(generation, store)
        ]

    def _give_way_to_newer(self, generation: int) -> None:
        """An interrupt may come at any moment of forming; it must not be forgotten because the wires were laid."""
        if self.wanted > generation:
            raise RuntimeError(f"generation {generation} gives way to {self.wanted}")

    def _groups_known_to_all(self, generation: int, store: Store) -> list[ReplaceableGroup]:
        """A newcomer has only the groups that construction makes; later ones cannot be rebuilt."""
        if not self.groups:
            return []
        world = self.groups[0]
        mine = msgspec.json.encode([group.key for group in self.groups]).decode()
        store.set(f"known/{generation}/{world.own_rank}", mine)
        here = self.seats or range(world.own_size)
        lists = store.multi_get([f"known/{generation}/{rank}" for rank in here])
        known = {rank: msgspec.json.decode(keys, type=set[str]) for rank, keys in zip(here, lists, strict=True)}
        return [
            group for group in self.groups if all(group.key in known[rank] for rank in group.members if rank in known)
        ]

    def _leave_peers(self) -> None:
        self.mode = Mode.SOLO if self.shielded or self.rehearsing else Mode.CUT


fabric = Fabric()
hearing = Hearing()
"""What this rank hears while it is built."""
messages = Messages(hearing)
"""What it has told the others since the last snapshot."""
