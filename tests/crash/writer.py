"""Saves staged versions one after the other, and says which are saved: `writer.py ARENA FIRST_TIER[:SECOND_TIER] VERSION...`.

`FIRST_TIER>SECOND_TIER` copies from the first to the second what was saved, as a persister does, and says `copied`.

It says `ready` when everything is imported and waits for a line, so that a tracer can be attached and count the system
calls of the saves alone. strace counts the calls of each thread by itself, so chunks are written one after the other
here. Run by the tests in this folder; needs no torch, so that it starts quickly.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from rerail.checkpoint import files, reading
from rerail.checkpoint.arena import Arena
from rerail.checkpoint.copying import copied
from rerail.checkpoint.retention import Keep
from rerail.checkpoint.saving import Order, carry_out


class OneByOne(Executor):
    """Does what it is given at once, in the thread that gives it."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, do: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(do(*args, **named))
        except BaseException as error:
            future.set_exception(error)
        return future


def main() -> None:
    files.ThreadPoolExecutor = reading.ThreadPoolExecutor = OneByOne  # type: ignore[assignment, misc]
    arena = Arena(os.open(sys.argv[1], os.O_RDWR))
    print("ready", flush=True)
    sys.stdin.readline()
    for version in map(int, sys.argv[3:]):
        order = Order(
            version=version,
            epoch=1,
            generation=0,
            rank=0,
            group=(0,),
            world_size=1,
            tiers=tuple(re.split("[:>]", sys.argv[2])),
            keep=Keep(last=1),
            deadline_s=5.0,
        )
        for outcome in carry_out(order, arena, lambda order=order: {order.id}):
            if outcome.ok:
                print(f"saved {version} {outcome.url}", flush=True)
                url = outcome.url
            else:
                print(f"failed {version} {outcome.notes}", flush=True)
        if ">" in sys.argv[2]:
            copy = copied(order, url, order.tiers[-1])
            print(f"copied {version}" if copy.ok else f"not copied: {copy.notes}", flush=True)


if __name__ == "__main__":
    main()
