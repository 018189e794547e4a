"""How a tier is spoken to over a connection: one call, its answer, and what lies between them.

    depot -> nonce                     caller -> proof that it knows the job's key
    caller -> Call [+ bytes]           depot -> Answer [+ bytes]
    put_large: depot -> want(offset, size), caller -> bytes, as often as it takes; then the Answer

Used by `checkpoint.depot` and `checkpoint.remote`. Whatever comes in is checked before it is believed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import socket
import struct
from collections.abc import Callable
from typing import TypeVar

import msgspec

from rerail.checkpoint.manifest import LARGEST
from rerail.errors import CheckpointError

SHADOWS = "shadows:"
"""Ahead of a path: not of the tier, but of what the depot keeps of other nodes' parameters (`session.buddies`)."""
LONGEST = 1 << 24
"""Bytes of a call or an answer without what follows it: a folder may have a hundred thousand names."""
MOST = LARGEST
"""Bytes that may follow one."""
_LENGTH = struct.Struct("!I")
_NONCE = 16
_M = TypeVar("_M")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}", re.ASCII)


class Call(msgspec.Struct, frozen=True, array_like=True):
    """What a tier is to do: the name of its method, and the arguments that method has."""

    method: str
    path: str = ""
    size: int = 0
    """Bytes to read, to write or that follow; for `get` the limit."""
    offset: int = 0
    chunk: int = 0
    exclusive: bool = False


_call = msgspec.msgpack.Decoder(Call)


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What came of it."""

    error: str = ""
    """Empty, or the kind of error."""
    text: str = ""
    size: int = 0
    names: list[str] = []
    """Names in a folder, or checksums."""
    want: int = -1
    """Not the end: `size` bytes from this offset are wanted first."""


_answer = msgspec.msgpack.Decoder(Answer)


def challenge(sock: socket.socket, key: str) -> bool:
    """Whether the caller knows the key."""
    nonce = secrets.token_bytes(_NONCE)
    sock.sendall(nonce)
    proof = bytearray(hashlib.sha256().digest_size)
    receive_into(sock, memoryview(proof))
    return hmac.compare_digest(proof, _proof(key, nonce))


def prove(sock: socket.socket, key: str) -> None:
    """Show that this caller knows the key."""
    nonce = bytearray(_NONCE)
    receive_into(sock, memoryview(nonce))
    sock.sendall(_proof(key, bytes(nonce)))


def _proof(key: str, nonce: bytes) -> bytes:
    return hmac.new(key.encode(), nonce, hashlib.sha256).digest()


def send(sock: socket.socket, message: Call | Answer, data: memoryview | bytes = b"") -> None:
    """A message, and what follows it."""
    body = msgspec.msgpack.encode(message)
    sock.sendall(_LENGTH.pack(len(body)) + body)
    if data:
        sock.sendall(data)


def receive_call(sock: socket.socket) -> Call:
    return _receive(sock, _call.decode)


def receive_answer(sock: socket.socket) -> Answer:
    return _receive(sock, _answer.decode)


def _receive(sock: socket.socket, decode: Callable[[bytearray], _M]) -> _M:
    head = bytearray(_LENGTH.size)
    receive_into(sock, memoryview(head))
    (length,) = _LENGTH.unpack(head)
    if length > LONGEST:
        raise CheckpointError(f"a message of {length} bytes was announced; at most {LONGEST} are accepted")
    body = bytearray(length)
    receive_into(sock, memoryview(body))
    try:
        return decode(body)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"a message cannot be read: {error}") from error


def receive_into(sock: socket.socket, buffer: memoryview) -> None:
    """Fill all of the buffer. ConnectionError if the other side ends before."""
    done = 0
    while done < len(buffer):
        got = sock.recv_into(buffer[done:])
        if not got:
            raise ConnectionError("the connection was closed")
        done += got


def checked_path(path: str, *, folder: bool = False) -> str:
    """A path as tiers have them, `folder/name` or `name`, and nothing that leads elsewhere."""
    parts = path.split("/") if path else []
    fine = all(_NAME.fullmatch(part) and part.strip(".") for part in parts) and len(parts) <= (1 if folder else 2)
    if not fine or not (parts or folder):
        raise CheckpointError(f"{path[:200]!r} is no path of a checkpoint")
    return path
