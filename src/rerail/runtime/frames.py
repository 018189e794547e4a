"""How messages travel: turns them into bytes and back, and checks every one that comes in.

A WebSocket frame carries one message between agent and controller; a rank's socketpair carries them behind a length.
Called by `runtime.server`, `runtime.uplink`, `runtime.children` and `session.link`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

import msgspec

from rerail.errors import WireError
from rerail.runtime.orders import ToAgent, ToController
from rerail.runtime.wire import FromRank, Message, ToRank

MAX_MESSAGE = 8 << 20
"""Bytes. A longer message is a defect or an attack, never state: tensors do not travel here."""

_LENGTH = struct.Struct("!I")
_TCP_THIN_LINEAR_TIMEOUTS, _TCP_RTO_MAX_MS = 16, 44
_encoder = msgspec.msgpack.Encoder()
_from_rank = msgspec.msgpack.Decoder(FromRank)
_to_rank = msgspec.msgpack.Decoder(ToRank)
_to_controller = msgspec.msgpack.Decoder(ToController)
_to_agent = msgspec.msgpack.Decoder(ToAgent)


def encode(message: Message) -> bytes:
    """One message as msgpack, checked for size."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE:
        raise WireError(f"{type(message).__name__} has {len(data)} bytes; at most {MAX_MESSAGE} travel in one message")
    return data


def decode_to_controller(data: bytes) -> ToController:
    """Parse and validate what an agent sent."""
    return _decode(_to_controller, data, "an agent")  # type: ignore[return-value]


def decode_to_agent(data: bytes) -> ToAgent:
    """Parse and validate what the controller sent."""
    return _decode(_to_agent, data, "the controller")  # type: ignore[return-value]


def decode_from_rank(data: bytes) -> FromRank:
    """Parse and validate what a rank sent."""
    return _decode(_from_rank, data, "a rank")  # type: ignore[return-value]


def decode_to_rank(data: bytes) -> ToRank:
    """Parse and validate what the agent sent to its rank."""
    return _decode(_to_rank, data, "the agent")  # type: ignore[return-value]


def _decode(decoder: msgspec.msgpack.Decoder, data: bytes, sender: str) -> object:  # type: ignore[type-arg]
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise WireError(f"malformed message from {sender} ({len(data)} bytes): {error}") from error


def frame(message: Message) -> bytes:
    """A message as it goes through a rank's socketpair."""
    data = encode(message)
    return _LENGTH.pack(len(data)) + data


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The agent's side: the next frame of a rank, or None when the rank has closed its end."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_MESSAGE:
            raise WireError(f"a rank announced a message of {length} bytes; at most {MAX_MESSAGE} are accepted")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError):
        return None


def recv_frame(sock: socket.socket) -> tuple[bytes, list[int]] | None:
    """The rank's side, blocking: the next frame and the file descriptors that came with it, or None at the end."""
    fds: list[int] = []
    head = _recv_exactly(sock, _LENGTH.size, fds)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MAX_MESSAGE:
        raise WireError(f"the agent announced a message of {length} bytes; at most {MAX_MESSAGE} are accepted")
    body = _recv_exactly(sock, length, fds)
    return None if body is None else (body, fds)


def _recv_exactly(sock: socket.socket, count: int, fds: list[int]) -> bytes | None:
    data = b""
    while len(data) < count:
        try:
            chunk, new_fds, _, _ = socket.recv_fds(sock, count - len(data), 4)
        except ConnectionResetError:
            return None
        fds.extend(new_fds)
        if not chunk:
            return None
        data += chunk
    return data


def be_persistent(sock: socket.socket | None) -> None:
    """Let lost packets be sent again without ever longer pauses, so that a short cut is noticed to be over while it is short.
    Best effort: what the system does not know is left out."""
    for option, value in ((_TCP_THIN_LINEAR_TIMEOUTS, 1), (_TCP_RTO_MAX_MS, 1000)):
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)  # type: ignore[union-attr]
