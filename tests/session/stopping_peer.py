"""The peer of test_waiting: takes part in one operation and is stopped in the middle of it, by its own hand."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from rerail.session.c10d import gloo_options

ELEMENTS = 40_000_000
HALF = ELEMENTS // 2


def gloo(path: str, rank: int) -> dist.ProcessGroupGloo:
    """One of two ranks, without rerail's own wrapping."""
    options = gloo_options()
    options._timeout = timedelta(seconds=120)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    options._threads = 2
    return dist.ProcessGroupGloo(dist.FileStore(path, 2), rank, 2, options)


def main() -> None:
    """Begin it, and freeze while most of the bytes are still to come."""
    path, operation = sys.argv[1:]
    group, tensor = gloo(path, 1), torch.ones(ELEMENTS)
    work = {
        "send": lambda: group.recv([tensor], 0, 0),
        "recv": lambda: group.send([tensor], 0, 0),
        "broadcast": lambda: group.broadcast(tensor, 0),
        "allreduce": lambda: group.allreduce(tensor),
        "reduce_scatter": lambda: group.reduce_scatter([tensor[:HALF].clone()], [list(tensor.split(HALF))]),
    }[operation]()
    os.kill(os.getpid(), signal.SIGSTOP)
    work.wait()


if __name__ == "__main__":
    main()
