"""A controller without judgement: records what agents say; as a program it starts all ranks and ends with the first news."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosedError

from rerail.config import JobSpec
from rerail.runtime import frames, orders, wire
from rerail.runtime.plans import Plan, Source

_M = TypeVar("_M", bound=wire.Message)


class FakeController:
    """Listens on loopback; `wait` hands out what was said, in order."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.heard: list[wire.Message] = []
        self._news = asyncio.Condition()
        self._socket: ServerConnection | None = None
        self._server: Server | None = None
        self.on_message: Callable[[wire.Message], None] = lambda message: None

    async def listen(self, port: int = 0) -> int:
        self._server = await serve(self._agent, "127.0.0.1", port, compression=None)
        port = next(iter(self._server.sockets)).getsockname()[1]
        file = self.run_dir / "controller.json"
        file.with_suffix(".tmp").write_text(json.dumps({"host": "127.0.0.1", "port": port, "pid": os.getpid()}))
        file.with_suffix(".tmp").rename(file)
        return port

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def send(self, message: wire.Message) -> None:
        assert self._socket is not None, "an agent is connected"
        await self._socket.send(frames.encode(message))

    def said(self, kind: type[_M], where: Callable[[_M], bool] = lambda message: True) -> list[_M]:
        return [message for message in self.heard if isinstance(message, kind) and where(message)]

    async def wait(
        self, kind: type[_M], where: Callable[[_M], bool] = lambda message: True, count: int = 1
    ) -> list[_M]:
        """Until `count` such messages have come."""
        async with asyncio.timeout(30), self._news:
            await self._news.wait_for(lambda: len(self.said(kind, where)) >= count)
        return self.said(kind, where)

    async def relayed(self, kind: type[_M], count: int = 1, generation: int | None = None) -> list[_M]:
        """Until `count` ranks have said this (in this generation)."""

        def fits(message: orders.Relayed) -> bool:
            return isinstance(message.message, kind) and generation in (
                None,
                getattr(message.message, "generation", None),
            )

        found = await self.wait(orders.Relayed, fits, count)
        return [each.message for each in found]  # type: ignore[misc]

    async def _agent(self, socket: ServerConnection) -> None:
        self._socket = socket
        with contextlib.suppress(ConnectionClosedError):  # the agent was killed
            async for data in socket:
                assert isinstance(data, bytes), "agents speak in binary frames"
                message = frames.decode_to_controller(data)
                async with self._news:
                    self.heard.append(message)
                    self._news.notify_all()
                self.on_message(message)


def assignments(count: int, generation: int) -> tuple[wire.Assign, ...]:
    return tuple(assignment(rank, count, generation) for rank in range(count))


def assignment(rank: int, world: int, generation: int, *, newcomer: bool = False) -> wire.Assign:
    env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    return wire.Assign(generation=generation, rank=rank, world_size=world, newcomer=newcomer, env=env)


def plan(world: int, generation: int) -> Plan:
    sources = {rank: Source(kind="initial") for rank in range(world)}
    return Plan(
        generation=generation,
        world_size=world,
        store_host="127.0.0.1",
        store_port=1,
        store_rank=0,
        version=0,
        sources=sources,
    )


async def main() -> None:
    """Start all ranks once; 0 when all have exited cleanly, 1 at the first fault. A reconnecting agent is left alone."""
    spec = msgspec.json.decode(os.environ["RERAIL_SPEC"], type=JobSpec)
    controller = FakeController(Path(spec.run_dir))
    inbox: asyncio.Queue[wire.Message] = asyncio.Queue()
    controller.on_message = inbox.put_nowait
    old = Path(spec.run_dir) / "controller.json"
    await controller.listen(json.loads(old.read_text())["port"] if old.exists() else 0)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: os._exit(0))
    done: set[int] = set()
    while True:
        match await inbox.get():
            case orders.AgentHello() as hello:
                assert hello.token == os.environ["RERAIL_TOKEN"], "the agent knows the token"
                await controller.send(orders.Welcome(node_rank=0))
                if not hello.ranks:
                    await controller.send(orders.Start(generation=0, assignments=assignments(spec.slots, 0)))
            case orders.RankExited(rank=rank):
                done.add(rank)
                if len(done) == spec.slots:
                    await controller.send(orders.Shutdown(exit_code=0, reason="done"))
            case orders.Observed(signal=seen):
                await controller.send(orders.Shutdown(exit_code=1, reason=f"rank {seen.rank}: {seen.payload}"))
            case orders.LeaveJob(reason=reason):
                await controller.send(orders.Shutdown(exit_code=1, reason=reason, grace_s=spec.shutdown_grace_s))


if __name__ == "__main__":
    asyncio.run(main())
