"""The controller's port: turns WebSocket frames into the controller's inbox and shows its state as JSON.

    /agent    WebSocket, one msgpack message per frame (see `runtime.wire`)
    /status   GET, JSON; asked by `rerail status` and the benchmark
    /faults   POST, JSON; faults that other systems have found (see `runtime.reported`)
    /inject   POST, JSON; a fault on purpose, where the job allows it (see `runtime.injections`)
    /quarantine  GET, POST, JSON; what is out of use (see `runtime.quarantining`)

Called by the launcher through `python -m rerail.runtime.controller`, whose `main` is here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from rerail.config import JobSpec, Settings, settings_decoder, spec_decoder
from rerail.detect.levels import Levels
from rerail.detect.monitor import SOURCE
from rerail.errors import JournalError, UsageError, WireError
from rerail.runtime.controller import Controller
from rerail.runtime.frames import MAX_MESSAGE, be_persistent, decode_to_controller, encode
from rerail.runtime.intake import Inbound, Sighting
from rerail.runtime.isolation import members_of
from rerail.runtime.journal import FILE_NAME, Journal
from rerail.runtime.orders import AgentHello, Rejected, Shutdown, ToAgent
from rerail.runtime.processes import say
from rerail.runtime.quarantining import listing, take
from rerail.runtime.reported import MAX_BODY, PER_MINUTE, Desk, Refused
from rerail.runtime.samples import Mark, MarkKind

ADDRESS_FILE = "controller.json"
EXIT_USAGE = 2
HELLO_S = 10.0
"""Seconds a connection may take to say who it is, or to send a request."""
FAREWELL_S = 10.0
"""Seconds beyond the grace period that agents may take to leave once the job is over."""


class AgentLink:
    """One agent's connection: what the controller sends is queued, so that its turns never wait."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self._outbox: asyncio.Queue[ToAgent | None] = asyncio.Queue()

    def send(self, message: ToAgent) -> None:
        self._outbox.put_nowait(message)

    def close(self) -> None:
        self._outbox.put_nowait(None)

    async def deliver(self) -> None:
        """Send what is queued until the connection ends."""
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
            while (message := await self._outbox.get()) is not None:
                await self._websocket.send_bytes(encode(message))
                if isinstance(message, Rejected):
                    break
            await self._websocket.close()


class Door:
    """The HTTP side of one controller."""

    def __init__(self, controller: Controller, token: str) -> None:
        self._controller, self._token = controller, token
        settings = controller.settings
        off = Levels.of(settings).switched_off()
        self._desk = Desk(settings.fault_senders, controller.classifier.catalog, PER_MINUTE, off)
        self.open_links = 0
        self.empty = asyncio.Event()
        self.empty.set()

    def app(self) -> Starlette:
        faults = Route("/faults", self.faults, methods=["POST"])
        inject = Route("/inject", self.inject, methods=["POST"])
        quarantine = Route("/quarantine", self.quarantine, methods=["GET", "POST"])
        agent, status = WebSocketRoute("/agent", self.agent), Route("/status", self.status)
        return Starlette(routes=[agent, status, faults, inject, quarantine])

    async def agent(self, websocket: WebSocket) -> None:
        """One agent's connection from greeting to end."""
        await websocket.accept()
        link, inbox = AgentLink(websocket), self._controller.inbox
        self.open_links += 1
        self.empty.clear()
        delivery = asyncio.create_task(link.deliver(), name="deliver")
        try:
            first = decode_to_controller(await asyncio.wait_for(websocket.receive_bytes(), HELLO_S))
            if not isinstance(first, AgentHello):
                raise WireError(f"a connection began with {type(first).__name__} instead of AgentHello")
            inbox.put_nowait(Inbound(link, first))
            while True:
                inbox.put_nowait(Inbound(link, decode_to_controller(await websocket.receive_bytes())))
        except (WebSocketDisconnect, TimeoutError, OSError, KeyError, RuntimeError):
            pass
        except WireError as error:
            # the message is dropped with its connection; the agent dials again and tells where its ranks stand
            say(str(error))
            link.send(Rejected(reason=str(error)))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(delivery), 1.0)
        finally:
            inbox.put_nowait(Inbound(link, None))
            delivery.cancel()
            self.open_links -= 1
            if not self.open_links:
                self.empty.set()

    async def status(self, request: Request) -> Response:
        """The fleet as JSON, for whoever knows the token."""
        return self._stranger(request) or JSONResponse(status_of(self._controller))

    async def faults(self, request: Request) -> Response:
        """Faults that other systems have found: heard like the words of a node's own monitor."""
        if (refusal := self._stranger(request)) is not None:
            return refusal
        controller = self._controller
        nodes, here = controller.fleet.agents, os.environ.get("RERAIL_NODE") or socket.gethostname()
        if here not in nodes and len(nodes) == 1:
            (here,) = nodes
        try:
            found = self._desk.take(await _body(request), nodes, here, time.time())
        except Refused as error:
            return JSONResponse({"error": str(error)}, error.status)
        for one in found.faults:
            told = controller.intake.signal(SOURCE, one.node, -1, one.at)
            controller.inbox.put_nowait(Sighting(msgspec.structs.replace(told, payload=one.payload())))
        return JSONResponse(found.answer(), 202 if found.faults else 200)

    async def inject(self, request: Request) -> Response:
        """Break something on purpose; the answer comes when it is done."""
        if (refusal := self._stranger(request)) is not None:
            return refusal
        try:
            status, answer = await self._controller.injections.ask(await _body(request))
        except Refused as error:
            return JSONResponse({"refused": str(error)}, error.status)
        return JSONResponse(answer, status)

    async def quarantine(self, request: Request) -> Response:
        """What is out of use; or a person's order about it, which is written down like any news."""
        if (refusal := self._stranger(request)) is not None:
            return refusal
        controller = self._controller
        if request.method != "POST":
            return JSONResponse(listing(controller.handling))
        try:
            status, answer = take(controller.handling, await _body(request), members_of(controller.fleet))
        except Refused as error:
            return JSONResponse({"refused": str(error)}, error.status)
        if "done" in answer:
            told = controller.intake.signal("quarantine", "", -1, time.time(), message=answer["done"])
            controller.inbox.put_nowait(Sighting(told))
        return JSONResponse(answer, status)

    def _stranger(self, request: Request) -> Response | None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._token and not hmac.compare_digest(given.encode(), self._token.encode()):
            return JSONResponse({"error": "the token is wrong or missing (Authorization: Bearer TOKEN)"}, 401)
        return None


async def _body(request: Request) -> bytes:
    """What a request brings, no more than is read of it, and not waited for longer than a hello."""
    body = bytearray()
    try:
        async with asyncio.timeout(HELLO_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY:
                    break
    except (TimeoutError, ClientDisconnect):
        raise Refused(408, "the request has no end") from None
    return bytes(body)


def status_of(controller: Controller) -> dict[str, Any]:
    """What `/status` shows."""
    fleet = controller.fleet
    return {
        "job": controller.spec.job,
        "generation": fleet.generation,
        "stage": controller.execution.stage.value,
        "aware": fleet.aware,
        "world_size": len(fleet.ranks),
        "version": max((rank.version for rank in fleet.ranks.values()), default=-1),
        "incidents": controller.incidents,
        "open_incident": controller.incident.number if controller.incident is not None else 0,
        "restarts_used": controller.budget.restarts_used,
        "standbys": sum(agent.ready for agent in fleet.connected()),
        "faults": [
            {"code": one.code, "node": one.node, "rank": one.rank, "since": one.first_seen, "message": one.message}
            for one in controller.machines.standing(time.time())
        ],
        "nodes": [
            {"node": a.node, "connected": a.connected, "standbys": a.ready, "warming": a.warming}
            for a in fleet.agents.values()
        ],
        "ranks": [
            {
                "rank": r.rank,
                "node": r.node,
                "pid": fleet.agents[r.node].pids.get(r.rank, 0) if r.node in fleet.agents else 0,
                "state": r.state.value,
                "version": r.version,
                "joined": r.joined,
            }
            for r in fleet.ranks.values()
        ],
    }


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn would raise SIGTERM again after a clean end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(spec: JobSpec, settings: Settings, journal: Journal, token: str, listener: socket.socket) -> None:
    """Run the controller on this socket until its job is over or SIGTERM comes."""
    controller = Controller(spec, settings, journal, token)
    door = Door(controller, token)
    config = uvicorn.Config(
        door.app(),
        log_level="error",
        lifespan="off",
        ws="websockets-sansio",
        ws_max_size=MAX_MESSAGE,
        ws_per_message_deflate=False,
        access_log=False,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="server")
    running = asyncio.create_task(controller.run(), name="controller")
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    publish(spec, listener, token)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await running
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(_farewell(controller, door), spec.shutdown_grace_s + FAREWELL_S)
        journal.append([], marks=[Mark(time.time(), MarkKind.LEFT)])
    finally:  # of an error there is to be one traceback, and not the server's, too
        server.should_exit = server.force_exit = True
        await serving


async def _farewell(controller: Controller, door: Door) -> None:
    """Wait until all agents have gone; one that comes back late is told that the job is over."""
    leaving = asyncio.create_task(door.empty.wait())
    while not leaving.done():
        news = asyncio.create_task(controller.inbox.get())
        await asyncio.wait({leaving, news}, return_when=asyncio.FIRST_COMPLETED)
        said = news.result() if news.done() else None
        if isinstance(said, Inbound) and isinstance(said.message, AgentHello):
            said.link.send(Shutdown(exit_code=controller.exit_code or 0, reason="the job is over"))
        news.cancel()


def listen(spec: JobSpec) -> socket.socket:
    """The controller's socket: where it was before if this is a new controller of a running job."""
    port = spec.endpoint_port or _former_port(spec)
    family = socket.AF_INET6 if ":" in spec.endpoint_host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((spec.endpoint_host, port))
        be_persistent(listener)  # the connections it accepts are, too
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"port {port} on {spec.endpoint_host} cannot be opened: {error.strerror}"
            if error.errno != 98
            else f"port {port} on {spec.endpoint_host} is in use",
            hint="choose another: rerail run --rdzv-endpoint HOST:PORT",
        ) from error
    return listener


def publish(spec: JobSpec, listener: socket.socket, token: str) -> None:
    """Write where the controller listens, readable by its user only; the file is whole or not there."""
    path = Path(spec.run_dir) / ADDRESS_FILE
    body = json.dumps(
        {"host": spec.endpoint_host, "port": listener.getsockname()[1], "pid": os.getpid(), "token": token}
    )
    draft = path.with_suffix(".tmp")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(body)
    os.replace(draft, path)


def _former_port(spec: JobSpec) -> int:
    try:
        return int(json.loads((Path(spec.run_dir) / ADDRESS_FILE).read_text())["port"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def main() -> int:
    """Entry of the controller process; what it needs stands in its environment."""
    spec = spec_decoder.decode(os.environ["RERAIL_SPEC"])
    settings = settings_decoder.decode(os.environ.get("RERAIL_SETTINGS", "{}"))
    token = os.environ.get("RERAIL_TOKEN", "")
    try:
        journal = Journal(Path(spec.run_dir) / FILE_NAME)
        listener = listen(spec)
    except (JournalError, UsageError) as error:
        print(f"rerail run: {error}", file=sys.stderr, flush=True)
        return EXIT_USAGE
    try:
        asyncio.run(serve(spec, settings, journal, token, listener))
    finally:
        journal.close()
    return 0
