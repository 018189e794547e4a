"""The agent's line to the controller: keeps it up, and keeps what is to be said while nobody listens.

Called by `runtime.agent`, which gives it a way to find the controller, a greeting, and an ear.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rerail.config import JobSpec, Settings
from rerail.errors import WireError
from rerail.runtime.clock import now_ns
from rerail.runtime.frames import MAX_MESSAGE, be_persistent, decode_to_agent, encode
from rerail.runtime.orders import Beat, Kept, Standbys, ToAgent
from rerail.runtime.processes import say
from rerail.runtime.wire import Message

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

RETRY_S = 0.2
START_POLL_S = 0.02
FIRST_CONTACT_S = 600.0
"""How long to wait for the controller at the start: nodes of a job may be started minutes apart."""
PATIENCE_S = 5.0
"""After this long without a first contact the user is told what is waited for."""
MAX_BACKLOG = 10_000


class Uplink:
    """One WebSocket at a time, and a backlog that outlives it."""

    def __init__(
        self,
        spec: JobSpec,
        settings: Settings,
        greet: Callable[[], list[Message]],
        hear: Callable[[ToAgent], None],
        give_up: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._away_s = settings.controller_away_s
        self._greet = greet
        self._hear = hear
        self._give_up = give_up
        self._backlog: deque[Message] = deque(maxlen=MAX_BACKLOG)
        self._news = asyncio.Event()
        self._socket: ClientConnection | None = None
        self.connected = False
        self.dialed_ns = 0
        """When the newest connection was asked for, by the clock of leases."""
        self.on_refusal: Callable[[int], None] = lambda dialed_ns: None
        """Called when nobody listens where the controller was, with the time at which that was asked."""

    @property
    def idle(self) -> bool:
        """Connected, and everything is said."""
        return self.connected and not self._backlog

    def send(self, message: Message) -> None:
        """Say it now, or as soon as there is a controller. What is only of the moment is not kept."""
        if not self.connected and isinstance(message, Beat | Kept | Standbys):
            return
        self._backlog.append(message)
        self._news.set()

    def forget(self, message: Message) -> None:
        """Take back what has not been said yet: the greeting says it."""
        with contextlib.suppress(ValueError):
            self._backlog.remove(message)

    async def run(self) -> None:
        """Connect, talk, and connect again; never returns by itself."""
        known = told = False
        since = time.monotonic()
        while True:
            address = self._address()
            if address is not None and await self._talk(*address):
                known, since = True, time.monotonic()
            allowed = self._away_s if known else FIRST_CONTACT_S
            if address is not None and not known and not told and time.monotonic() - since > PATIENCE_S:
                told = True
                say(f"waiting for the controller at {address[0]}:{address[1]}; is the node that hosts it up?")
            if time.monotonic() - since > allowed:
                where = f"{address[0]}:{address[1]}" if address else self._spec.run_dir
                self._give_up(f"no controller at {where} for {allowed:.0f} s; is the node that hosts it up?")
                return
            await asyncio.sleep(RETRY_S if address is not None or known else START_POLL_S)

    async def close(self, timeout: float) -> None:
        """Say what is left to say, if it can be, and take leave in good order."""
        deadline = time.monotonic() + timeout
        while self.connected and self._backlog and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        if self._socket is not None:
            await self._socket.close()

    def hang_up(self, older_s: float) -> None:
        """Break a connection off that is older than this, and dial anew: nothing has come through it for too long."""
        if self._socket is not None and now_ns() - self.dialed_ns > older_s * 1e9:
            self._socket.transport.abort()

    def _address(self) -> tuple[str, int] | None:
        if not self._spec.hosts_controller:
            return self._spec.endpoint_host, self._spec.endpoint_port
        try:
            found = json.loads((Path(self._spec.run_dir) / "controller.json").read_text())
            return str(found["host"]), int(found["port"])
        except (OSError, ValueError, KeyError):
            return None

    async def _talk(self, host: str, port: int) -> bool:
        """One connection, from greeting to end; False when there was none."""
        from websockets.asyncio.client import connect  # late: the first ranks are started before this is imported
        from websockets.exceptions import WebSocketException

        name = f"[{host}]" if ":" in host else host
        talked = False
        self.dialed_ns = now_ns()
        try:
            async with connect(
                f"ws://{name}:{port}/agent",
                max_size=MAX_MESSAGE,
                compression=None,
                proxy=None,
                open_timeout=5,
                close_timeout=1,
                ping_interval=5,
                ping_timeout=10,
            ) as socket:
                be_persistent(socket.transport.get_extra_info("socket"))
                for message in self._greet():
                    await socket.send(encode(message))
                self.connected = talked = True
                self._socket = socket
                speaking = asyncio.create_task(self._speak(socket.send), name="uplink")
                try:
                    async for data in socket:
                        self._hear(decode_to_agent(data if isinstance(data, bytes) else data.encode()))
                finally:
                    self.connected, self._socket = False, None
                    speaking.cancel()
        except ConnectionRefusedError:
            self.on_refusal(self.dialed_ns)
        except (OSError, TimeoutError, WebSocketException):
            pass  # it is away; the caller tries again
        except WireError as error:
            say(f"{error}; are all nodes on the same version of rerail?")
        return talked

    async def _speak(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        from websockets.exceptions import WebSocketException

        while True:
            while self._backlog:
                message = self._backlog.popleft()
                try:
                    await send(encode(message))
                except WebSocketException:
                    self._backlog.appendleft(message)
                    return
            self._news.clear()
            await self._news.wait()
