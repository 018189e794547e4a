"""The process on each node that keeps checkpoints and shadows for the other nodes: `python -m rerail.checkpoint.depot`.

It serves one tier, in its memory or in a directory of the node, and beside it one for shadows, always in memory, to whoever knows
the job's key. Started by `runtime.launcher`, with which it ends; spoken to through `checkpoint.remote`. Never imports torch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading

from rerail.checkpoint import calls
from rerail.checkpoint.calls import MOST, SHADOWS, Answer, Call, checked_path
from rerail.checkpoint.files import FileTier
from rerail.checkpoint.header import PageBuffer
from rerail.checkpoint.manifest import LEAST_CHUNK, MOST_CHUNK
from rerail.checkpoint.memory import MemoryTier
from rerail.checkpoint.room import memory_left
from rerail.checkpoint.tiers import Tier
from rerail.config import DEPOT_KEY, DEPOT_SOCKET, settings_of_rank
from rerail.errors import CheckpointError
from rerail.texts import node_memory

PATIENCE_S = 60.0
"""Seconds the other side may take in the middle of a call."""


def store_of(setting: str) -> Tier:
    """What the setting `node_store` names, as a tier; one without room where it names nothing."""
    memory = node_memory(setting) if setting else 0
    return FileTier(setting) if setting and not memory else MemoryTier(memory)


class Depot:
    """Serves a tier; one thread for each connection."""

    def __init__(self, listening: socket.socket, tier: Tier, key: str) -> None:
        self._listening, self._tier, self._key = listening, tier, key
        self._shadows = MemoryTier(sys.maxsize, spare=memory_left)
        self._pages = PageBuffer()

    def serve(self) -> None:
        """Until the listening socket is closed."""
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(sock,), name="rerail-depot", daemon=True).start()

    def _talk(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, CheckpointError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(PATIENCE_S)
            if not calls.challenge(sock, self._key):
                return
            while True:
                sock.settimeout(None)  # between two calls a caller may take its time
                call = calls.receive_call(sock)
                sock.settimeout(PATIENCE_S)
                self._answer(sock, call)

    def _answer(self, sock: socket.socket, call: Call) -> None:
        """Errors of the tier go to the caller; errors of the connection end it."""
        data = bytearray(self._announced(call))
        calls.receive_into(sock, memoryview(data))
        lost: list[BaseException] = []
        try:
            answer, found = self._carried_out(sock, call, bytes(data), lost)
        except (OSError, CheckpointError) as error:
            if lost:
                raise lost[0] from error
            kinds = (FileNotFoundError, FileExistsError, CheckpointError)
            kind = next((kind for kind in kinds if isinstance(error, kind)), OSError)
            answer, found = Answer(error=kind.__name__, text=str(error)[:2000]), b""
        calls.send(sock, answer, found)

    def _announced(self, call: Call) -> int:
        size = call.size if call.method == "put" else 0
        if not 0 <= size <= MOST:
            raise CheckpointError(f"{size} bytes were announced; at most {MOST} are accepted")
        return size

    def _carried_out(
        self, sock: socket.socket, call: Call, data: bytes, lost: list[BaseException]
    ) -> tuple[Answer, memoryview | bytes]:
        tier, path = self._tier, call.path
        if path.startswith(SHADOWS):
            tier, path = self._shadows, path.removeprefix(SHADOWS)
        match call.method:
            case "names":
                return Answer(names=tier.names(checked_path(path, folder=True))), b""
            case "size":
                return Answer(size=tier.size(checked_path(path))), b""
            case "get":
                found = tier.get(checked_path(path), min(call.size, MOST))
                return Answer(size=len(found)), found
            case "read":
                return self._read(tier, checked_path(path), call)
            case "make_folder":
                tier.make_folder(checked_path(path, folder=True))
            case "put":
                tier.put(checked_path(path), data, exclusive=call.exclusive)
            case "put_large":
                if not LEAST_CHUNK <= call.chunk <= MOST_CHUNK or call.chunk % LEAST_CHUNK or call.size < 0:
                    raise CheckpointError(f"{call.size} bytes in chunks of {call.chunk} are not accepted")
                source = _Pulled(sock, call.chunk, lost)
                return Answer(names=tier.put_large(checked_path(path), source, call.size, call.chunk)), b""
            case "remove":
                if not path:
                    raise CheckpointError("the whole store cannot be removed")
                tier.remove(checked_path(path, folder=True))
            case _:
                raise CheckpointError(f"{call.method[:50]!r} is not known here")
        return Answer(), b""

    def _read(self, tier: Tier, path: str, call: Call) -> tuple[Answer, memoryview]:
        if not 0 <= call.size <= MOST_CHUNK or call.offset < 0:
            raise CheckpointError(f"{call.size} bytes at {call.offset} cannot be read")
        buffer = self._pages.of(call.size)
        with tier.reading(path) as read:
            read(call.offset, buffer, call.size)
        return Answer(size=call.size), buffer[: call.size]


class _Pulled:
    """A source whose bytes the caller has: asks for them as the tier does, whichever thread that is."""

    def __init__(self, sock: socket.socket, chunk: int, lost: list[BaseException]) -> None:
        self._sock, self._chunk, self._lost = sock, chunk, lost
        self._lock = threading.Lock()
        self._pages = PageBuffer()

    def __call__(self, offset: int, size: int) -> memoryview:
        buffer = self._pages.of(self._chunk)
        with self._lock:
            if self._lost:  # one thread has found out; the others need not wait for the same
                raise ConnectionError("the connection is lost")
            try:
                calls.send(self._sock, Answer(want=offset, size=size))
                calls.receive_into(self._sock, buffer[:size])
            except OSError as error:
                self._lost.append(error)
                raise
        return buffer


def main() -> None:
    listening = socket.socket(fileno=int(os.environ[DEPOT_SOCKET]))
    Depot(listening, store_of(settings_of_rank().node_store), os.environ.pop(DEPOT_KEY)).serve()


if __name__ == "__main__":
    main()
