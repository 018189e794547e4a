"""Memory for snapshots, taken a piece at a time and only while the machine can spare it.

The kernel grants more than there is and ends processes later. So what is left is read from /proc/meminfo and from the
limits of this process's control groups before each piece. Called by `checkpoint.arena`. Needs no torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

PIECE = 256 << 20
SPARED = 0.02
"""Share of all memory that is left alone."""
_ROOT = Path("/")


def take(fd: int, size: int, most: int | None = None) -> None:
    """Make a file in memory this long, all of it backed by memory. OSError with ENOMEM, and an empty file, if it cannot be."""
    try:
        if most is not None and size > most:
            allowed = f"{most / (1 << 20):.1f} MiB are allowed" if most else "none is allowed"
            raise OSError(errno.ENOMEM, f"{allowed} by snapshot_memory")
        for at in range(0, size, PIECE):
            here = min(PIECE, size - at)
            left = memory_left()
            if left < here:
                raise OSError(errno.ENOMEM, f"the machine can spare {(at + max(0, left)) >> 20} MiB")
            os.posix_fallocate(fd, at, here)
    except OSError:
        os.ftruncate(fd, 0)
        raise


def memory_left(root: Path = _ROOT) -> int:
    """Bytes that can still be taken before the machine, or a control group of this process, is nearly full."""
    limits = [*_machine(root), *_groups(root)]
    return min((int(left - SPARED * whole) for left, whole in limits), default=1 << 62)


def _machine(root: Path) -> Iterator[tuple[int, int]]:
    with contextlib.suppress(OSError, KeyError, ValueError, IndexError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
        yield found["MemAvailable"], found["MemTotal"]


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Of each control group above this process that has a limit: what is left of it, and the limit."""
    with contextlib.suppress(OSError, ValueError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        own = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
        folder = root / "sys/fs/cgroup" / own
        for group in (folder, *folder.parents):
            yield from _group(group)
            if group == root / "sys/fs/cgroup":
                break


def _group(group: Path) -> Iterator[tuple[int, int]]:
    with contextlib.suppress(OSError, ValueError, IndexError):  # no file, or `max`: no limit
        limit, used = int((group / "memory.max").read_text()), int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        yield limit - used + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0)), limit
