"""A node made of messages only: answers the controller as an agent with well-behaved ranks would, over a real WebSocket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from websockets.asyncio.client import ClientConnection, connect

from rerail.flow import Signal, new_id
from rerail.runtime.frames import decode_to_agent, encode
from rerail.runtime.orders import (
    AgentHello,
    FormAll,
    InterruptAll,
    Observed,
    PickPort,
    PortPicked,
    Promote,
    RankExited,
    RankStatus,
    Relayed,
    Shutdown,
    Standbys,
    Start,
    ToAgent,
)
from rerail.runtime.wire import Assign, Formed, FromRank, Joined, Message, Parked, Raised, Resumed

M = TypeVar("M", bound=Message)
LIMIT_S = 20.0


class FakeAgent:
    """Ranks that train by DDP: every rank is a replica of every other."""

    def __init__(self, port: int, *, node: str = "n0", slots: int = 2, token: str = "secret", job: str = "j") -> None:
        self.port, self.node, self.slots, self.token, self.job = port, node, slots, token, job
        self.incarnation = new_id("agent")
        self.aware = True
        self.holding: set[int] = set()
        """Ranks that do not park."""
        self.resuming = True
        self.losing: set[type[Message]] = set()
        """Kinds of orders whose first is lost with the connection."""
        self.cut_off = asyncio.Event()
        self.version = 0
        self.untrained: set[int] = set()
        """Newcomers that have not got their state yet."""
        self.ranks: dict[int, Assign] = {}
        self.world = 0
        self.parked: dict[int, Parked] = {}
        self.got: list[ToAgent] = []
        self._news = asyncio.Condition()
        self._socket: ClientConnection | None = None
        self._task: asyncio.Task[None] | None = None

    async def dial(self, **changes: Any) -> None:
        self._socket = await connect(f"ws://127.0.0.1:{self.port}/agent", compression=None, proxy=None)
        hello = {
            "job": self.job,
            "token": self.token,
            "node": self.node,
            "address": "127.0.0.1",
            "slots": self.slots,
            "incarnation": self.incarnation,
            **changes,
        }
        await self.send(AgentHello(**hello))
        self._task = asyncio.create_task(self._listen(self._socket))

    async def hang_up(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._socket is not None:
            await self._socket.close()

    async def send(self, *messages: Message) -> None:
        assert self._socket is not None, "dial first"
        for message in messages:
            await self._socket.send(encode(message))

    async def say(self, rank: int, message: FromRank) -> None:
        await self.send(Relayed(rank=rank, message=message))

    async def wait_for(self, kind: type[M], test: Callable[[M], bool] = lambda message: True, count: int = 1) -> M:
        """The count-th message of this kind that passes the test, past ones included."""

        def found() -> list[M]:
            return [m for m in self.got if isinstance(m, kind) and test(m)]

        async with self._news, asyncio.timeout(LIMIT_S):
            await self._news.wait_for(lambda: len(found()) >= count)
            return found()[count - 1]

    def statuses(self, **states: Any) -> tuple[RankStatus, ...]:
        return tuple(
            RankStatus(
                rank=rank,
                local_rank=rank,
                pid=1,
                generation=a.generation,
                state="parked" if rank in self.parked else "running",
                joined=True,
                replaceable=True,
                version=self.version,
                parked=self.parked.get(rank),
            )
            for rank, a in self.ranks.items()
        )

    # --- faults ---

    async def kill(self, rank: int, signal: str = "SIGKILL", **payload: Any) -> None:
        await self.observe("process.exit", rank, **(payload or {"signal": signal}))

    async def observe(self, source: str, rank: int, **payload: Any) -> None:
        generation = self.ranks[rank].generation if rank in self.ranks else 0
        signal = Signal(
            id=new_id("signal"), job=self.job, at=1.0, source=source, node=self.node, rank=rank,
            generation=generation, step=self.version, payload=payload,
        )  # fmt: skip
        await self.send(Observed(signal=signal, age_s=0.01))

    async def raise_in(self, rank: int, exception: str, generation: int, text: str = "boom") -> None:
        await self.say(
            rank,
            Raised(
                rank=rank, generation=generation, version=self.version, exception=exception, text=text, traceback="tb"
            ),
        )

    async def exit_all(self) -> None:
        await self.send(*(RankExited(rank=rank, generation=a.generation) for rank, a in self.ranks.items()))

    # --- the well-behaved part ---

    async def _listen(self, socket: ClientConnection) -> None:
        async for data in socket:
            message = decode_to_agent(data if isinstance(data, bytes) else data.encode())
            if type(message) in self.losing:
                self.losing.discard(type(message))
                await socket.close()
                self.cut_off.set()
                return
            await self._answer(message)
            async with self._news:
                self.got.append(message)
                self._news.notify_all()

    async def _answer(self, message: ToAgent) -> None:
        match message:
            case PickPort(generation=generation):
                await self.send(PortPicked(generation=generation, port=12345))
            case Start(assignments=orders):
                self.ranks, self.parked = {order.rank: order for order in orders}, {}
                self.world = orders[0].world_size
                for order in orders:
                    if self.aware:
                        await self._join(order)
                await self.send(Standbys(ready=1, warming=0))
            case Promote(assignment=order):
                self.ranks[order.rank] = order
                self.untrained.add(order.rank)
                self.parked.pop(order.rank, None)
                await self._join(order)
            case InterruptAll(interrupt=order, ranks=ranks):
                for rank in ranks:
                    self.ranks[rank] = msgspec.structs.replace(self.ranks[rank], generation=order.generation)
                    await self.park(rank, order.generation, order.store_rank)
            case FormAll(plan=plan):
                self.untrained.clear()
                for rank in self.ranks:
                    self.parked.pop(rank, None)
                    phases = {"communication": 0.01, "load": 0.02}
                    await self.say(
                        rank, Formed(rank=rank, generation=plan.generation, version=plan.version, phases=phases)
                    )
                if self.resuming:
                    self.version = plan.version + 1
                    for rank in self.ranks:
                        await self.resume(rank, plan.generation)
            case Shutdown():
                pass

    async def resume(self, rank: int, generation: int) -> None:
        message = Resumed(rank=rank, generation=generation, version=self.version, step_s=0.03, usual_step_s=0.02)
        await self.say(rank, message)

    async def _join(self, order: Assign) -> None:
        await self.say(order.rank, Joined(rank=order.rank, generation=order.generation, replaceable=True))
        await self.park(order.rank, order.generation, order.store_rank, fresh=not order.newcomer)

    async def park(self, rank: int, generation: int, store_rank: int, *, fresh: bool = False) -> None:
        if rank in self.holding:
            return
        newcomer = rank in self.untrained
        self.parked[rank] = Parked(
            rank=rank,
            generation=generation,
            version=0 if newcomer or fresh else self.version,
            intact=not newcomer,
            in_training=not newcomer and not fresh,
            small_versions=(self.version - 1, self.version),
            replicas=tuple(range(self.world)),
            store_port=4000 + generation if rank == store_rank else 0,
        )
        await self.say(rank, self.parked[rank])
