"""The key-value store that torch's groups meet through, replaceable under them once per generation.

Every generation has a store of its own, served by one of its ranks: nothing stale can be read, and the store's host may
die like any other rank. torch keeps the object it was given at the start, so that object passes each call on to the
store of the current generation. Called by `session.fabric`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta

from rerail.session.c10d import HashStore, Store, TCPStore

CONNECT_TIMEOUT = timedelta(seconds=60)
TRY = timedelta(seconds=0.5)
"""The first of several tries to connect; each takes twice as long as the one before."""


class ReplaceableStore(Store):
    """What torch holds; `target` is the store of the current generation."""

    def __init__(self) -> None:
        super().__init__()
        self.target: Store = HashStore()

    def set(self, key: str, value: str) -> None:
        self.target.set(key, value)

    def get(self, key: str) -> bytes:
        return self.target.get(key)

    def add(self, key: str, value: int) -> int:
        return self.target.add(key, value)

    def delete_key(self, key: str) -> bool:
        return self.target.delete_key(key)

    def check(self, keys: list[str]) -> bool:
        return self.target.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self.target.wait(keys)
        else:
            self.target.wait(keys, timeout)

    def num_keys(self) -> int:
        return self.target.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self.target.set_timeout(timeout)


def serve(address: str) -> tuple[TCPStore, int]:
    """Open a store on a free port of `address` and nowhere else; the store and its port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.bind((address, 0))
    sock.listen(1024)
    port = int(sock.getsockname()[1])
    fd = sock.detach()
    store = TCPStore(
        address, port, None, True, CONNECT_TIMEOUT, wait_for_workers=False, multi_tenant=False, master_listen_fd=fd
    )
    return store, port


def dial(address: str, port: int, given_up: Callable[[], bool]) -> TCPStore:
    """Connect to the store of a generation. RuntimeError as soon as its host is gone or the generation is given up."""
    until, patience = time.monotonic() + CONNECT_TIMEOUT.total_seconds(), TRY
    while True:
        try:
            # torch goes on knocking at a closed door; the store was open before its port was told, so closed means gone
            socket.create_connection((address, port), patience.total_seconds()).close()
            store = TCPStore(address, port, None, False, patience, wait_for_workers=False)
            store.set_timeout(CONNECT_TIMEOUT)
            return store
        except ConnectionRefusedError:
            raise RuntimeError(f"the store at {address}:{port} is gone") from None
        except (OSError, RuntimeError) as error:
            if given_up() or time.monotonic() > until:
                raise RuntimeError(f"the store at {address}:{port} cannot be reached: {error}") from error
            patience *= 2
