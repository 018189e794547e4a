"""Saves without a snapshot: the persister asks for the bytes of the file, and the rank answers from its tensors.

    persister: offset, size  ->  rank: those bytes          over a socket, until it closes

For hosts that cannot hold a shard beside the model. The persister holds one chunk for each of its threads; the rank must
not change its tensors until the outcome is there. `Stream` is the rank's side, used by `checkpoint.writer`; `Streamed` the
persister's. Needs no torch.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable

import msgspec

from rerail.checkpoint.arena import Meta
from rerail.checkpoint.calls import receive_into
from rerail.checkpoint.header import PageBuffer, to_page
from rerail.checkpoint.tiers import Source
from rerail.errors import CheckpointError

_meta_of = msgspec.msgpack.Decoder(Meta)

_ASK = struct.Struct("<QQ")
_LENGTH = struct.Struct("<Q")
_BUFFER = 4 << 20
"""Bytes that the kernel may keep on their way."""


class Stream:
    """One version of a rank's state, for as long as it stays as it is."""

    def __init__(self, meta: Meta, fill: Callable[[int, memoryview], None]) -> None:
        self._meta, self._fill = msgspec.msgpack.encode(meta), fill
        self._lock = threading.Lock()
        self._answering: list[tuple[socket.socket, threading.Thread]] = []
        self._closed = False
        self.heard_at = time.monotonic()
        """When the persister last asked for anything."""

    def connect(self) -> socket.socket:
        """The other end of a new link, for a persister. Nobody answers there once the stream is closed."""
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        with self._lock:
            if self._closed:
                ours.close()
                return theirs
            thread = threading.Thread(target=self._answer, args=(ours,), name="rerail-stream", daemon=True)
            self._answering.append((ours, thread))
            thread.start()
        return theirs

    def close(self) -> None:
        """Nothing is read from the tensors any more when this returns."""
        with self._lock:
            self._closed = True
        for link, thread in self._answering:
            with contextlib.suppress(OSError):  # the persister has closed it
                link.shutdown(socket.SHUT_RDWR)
            thread.join()

    def _answer(self, link: socket.socket) -> None:
        buffers = PageBuffer()
        with link, contextlib.suppress(OSError):
            link.sendall(_LENGTH.pack(len(self._meta)) + self._meta)
            ask = memoryview(bytearray(_ASK.size))
            while not self._closed:
                receive_into(link, ask)
                self.heard_at = time.monotonic()
                offset, size = _ASK.unpack(ask)
                part = buffers.of(size)[:size]
                self._fill(offset, part)
                link.sendall(part)


class Streamed:
    """The same from the persister's side; to a save it is what an arena is."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._lock = link, threading.Lock()
        self._buffers = PageBuffer()
        self._meta: Meta | None = None

    def lock_for_reading(self, version: int) -> bool:
        try:
            length = memoryview(bytearray(_LENGTH.size))
            receive_into(self._link, length)
            data = memoryview(bytearray(_LENGTH.unpack(length)[0]))
            receive_into(self._link, data)
            self._meta = _meta_of.decode(data)
        except OSError:
            return False
        return True

    def unlock(self, version: int) -> None:
        self._link.close()

    def meta(self, version: int) -> Meta:
        if self._meta is None:
            raise CheckpointError("the rank has not said what it saves")
        return self._meta

    def source(self, version: int, size: int) -> Source:
        def read(offset: int, size: int) -> memoryview:
            part = self._buffers.of(size)
            try:
                with self._lock:
                    self._link.sendall(_ASK.pack(offset, size))
                    receive_into(self._link, part[:size])
            except OSError as error:
                raise CheckpointError("the rank went on before all of its state was saved") from error
            return part[: to_page(size)]

        return read

    def holds(self, version: int) -> bool:
        return True  # what was answered was whole: it waits until it hears the outcome, or answers nothing any more
