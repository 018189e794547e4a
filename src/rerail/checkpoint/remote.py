"""A tier on another node, spoken to through that node's depot. Called by `checkpoint.nodes`."""

from __future__ import annotations

import contextlib
import socket
import weakref
from collections.abc import Iterator

from rerail.checkpoint import calls
from rerail.checkpoint.calls import Answer, Call
from rerail.checkpoint.manifest import digest
from rerail.checkpoint.tiers import Read, Source
from rerail.errors import CheckpointError

PATIENCE_S = 60.0
"""Seconds that an answer may take."""
CONNECT_S = 5.0
_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (FileNotFoundError, FileExistsError, CheckpointError, OSError)
}


class RemoteTier:
    """What the depot at `host:port` keeps. As many connections as there are calls at the same time, each used again."""

    def __init__(self, host: str, port: int, key: str, *, lasting: bool) -> None:
        self.url = f"depot://{host}:{port}"
        self.lasting = lasting
        self._address, self._key = (host, port), key
        self._idle: list[socket.socket] = []
        weakref.finalize(self, _close, self._idle)

    def names(self, folder: str = "") -> list[str]:
        return self._ask(Call("names", folder)).names

    def size(self, path: str) -> int:
        return self._ask(Call("size", path)).size

    def get(self, path: str, limit: int) -> bytes:
        with self._call(Call("get", path, limit)) as (sock, answer):
            if not 0 <= answer.size <= limit:
                raise ConnectionError(f"{self.url} answered with {answer.size} bytes, at most {limit} were asked for")
            data = bytearray(answer.size)
            calls.receive_into(sock, memoryview(data))
        return bytes(data)

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[Read]:
        def read(offset: int, buffer: memoryview, size: int) -> None:
            with self._call(Call("read", path, size, offset)) as (sock, answer):
                if answer.size != size:
                    raise ConnectionError(f"{self.url} answered with {answer.size} bytes instead of {size}")
                calls.receive_into(sock, buffer[:size])

        yield read

    def make_folder(self, folder: str) -> None:
        self._ask(Call("make_folder", folder))

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        self._ask(Call("put", path, len(data), exclusive=exclusive), data)

    def put_large(self, path: str, source: Source, size: int, chunk: int) -> list[str]:
        hashes: dict[int, str] = {}
        with self._connection() as sock:
            calls.send(sock, Call("put_large", path, size, chunk=chunk))
            while (answer := self._answer(sock)).want >= 0:
                offset, here = answer.want, answer.size
                if offset % chunk or here != min(chunk, size - offset):
                    raise ConnectionError(f"{self.url} wants {here} bytes at {offset} of a file of {size}")
                part = source(offset, here)[:here]
                sock.sendall(part)
                hashes[offset] = digest(part)
        found = [hashes[offset] for offset in sorted(hashes)]
        if answer.names != found:  # what it has is not what it was sent
            raise OSError(f"{self.url}/{path} arrived with other checksums than it was sent with")
        return found

    def remove(self, folder: str) -> None:
        self._ask(Call("remove", folder))

    # --- one call ---

    def _ask(self, call: Call, data: bytes = b"") -> Answer:
        with self._call(call, data) as (_, answer):
            return answer

    @contextlib.contextmanager
    def _call(self, call: Call, data: bytes = b"") -> Iterator[tuple[socket.socket, Answer]]:
        with self._connection() as sock:
            calls.send(sock, call, data)
            yield sock, self._answer(sock)

    def _answer(self, sock: socket.socket) -> Answer:
        answer = calls.receive_answer(sock)
        if answer.error:
            raise _Told(_ERRORS.get(answer.error, OSError)(answer.text))
        return answer

    @contextlib.contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        """One that is good; after anything but an error that the depot itself has told, it is not used again."""
        try:
            sock = self._idle.pop()
        except IndexError:
            sock = self._connect()
        try:
            yield sock
        except _Told as told:
            self._idle.append(sock)
            raise told.error from None
        except BaseException:
            sock.close()
            raise
        self._idle.append(sock)

    def _connect(self) -> socket.socket:
        sock = socket.create_connection(self._address, CONNECT_S)
        try:
            sock.settimeout(PATIENCE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            calls.prove(sock, self._key)
        except BaseException:
            sock.close()
            raise
        return sock


def _close(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


class _Told(Exception):
    """The depot has answered with an error; the connection is good."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error
