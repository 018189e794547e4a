"""Watches a directory into which other systems on this machine put faults as JSON files, and tells them one by one.

Run by `detect.monitor`. The directory is named by RERAIL_DROP_DIR, the format is that of `runtime.reported`. Whoever drops
a file writes it under another name and renames it to `NAME.json`; it is read once and removed. What cannot be taken is told
of once and moved aside as `NAME.json.bad`. Files are trusted by their owner (this user or root), never followed elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rerail.checks import DROP_DIR
from rerail.config import Settings
from rerail.detect.detector import Told
from rerail.detect.levels import Levels
from rerail.runtime.reported import MAX_BODY, Desk, Refused, Reported

SUFFIX, TAKEN, BAD = ".json", ".json.taken", ".bad"
FILES = 100
"""Taken in one look; the rest in the next."""
NAMES = 10_000
"""Names of the directory that are looked at."""
SETTLE_S = 0.5
"""A file changed less than this ago may still be written by someone who does not rename."""


class Dropbox:
    """One directory."""

    name = "dropbox"

    def __init__(
        self, settings: Settings, folder: str | None = None, every_s: float = 1.0, settle_s: float = SETTLE_S
    ) -> None:
        self._folder = Path(folder if folder is not None else os.environ.get(DROP_DIR, ""))
        self._named = str(self._folder) != "."
        self._settings, self._every_s, self._settle_s = settings, every_s, settle_s
        self._desk: Desk | None = None
        self._complained: set[str] = set()
        self._first = True

    def supported(self) -> str:
        if not self._named:
            return f"no directory is named by {DROP_DIR}"
        if not self._settings.fault_senders.strip():
            return "the setting fault_senders names nobody who may drop faults"
        if not (self._folder.is_dir() and os.access(self._folder, os.R_OK | os.W_OK | os.X_OK)):
            return f"{self._folder} is no directory that can be read and written"
        return ""

    def blind_spots(self) -> list[str]:
        return []

    def watch(self) -> Iterator[Told]:
        while True:
            yield from self.look()
            time.sleep(self._every_s)

    def look(self) -> Iterator[Told]:
        """What lies there now."""
        try:
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            self._complain(str(self._folder), f"cannot be opened: {error.strerror}")
            return  # it may come back: a file system that is mounted again
        try:
            for name in self._names(folder):
                yield from self._file(folder, name)
        finally:
            os.close(folder)

    def _names(self, folder: int) -> list[str]:
        """Files that are ready; at first also those that a monitor which was killed had begun to read."""
        ends = (SUFFIX, TAKEN) if self._first else (SUFFIX,)
        self._first = False
        found: list[str] = []
        with os.scandir(folder) as entries:
            for seen, entry in enumerate(entries):
                if len(found) == FILES or seen == NAMES:
                    break
                if entry.name.endswith(ends) and entry.name not in self._complained:
                    found.append(entry.name)
        return sorted(found, key=lambda name: (not name.endswith(TAKEN), name))

    def _file(self, folder: int, name: str) -> Iterator[Told]:
        taken, present = name.removesuffix(TAKEN).removesuffix(SUFFIX) + TAKEN, name
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if why := _untrusted(found):
                raise Refused(403, why)
            if name != taken and 0 <= time.time() - found.st_mtime < self._settle_s:
                return
            os.rename(name, taken, src_dir_fd=folder, dst_dir_fd=folder)  # from here on it is ours alone
            present = taken
            faults = self._read(folder, taken)
        except FileNotFoundError:
            return  # another monitor was faster
        except Refused as error:
            self._put_aside(folder, name, present, str(error))
            return
        except OSError as error:
            self._put_aside(folder, name, present, f"cannot be read: {error.strerror}")
            return
        for one in faults:
            yield Told(one.code, one.subject, one.text, one.over, one.sender, one.at)
        with contextlib.suppress(OSError):  # only now: rather told twice than not at all
            os.unlink(taken, dir_fd=folder)

    def _read(self, folder: int, name: str) -> list[Reported]:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if why := _untrusted(found):  # it may have been exchanged since
                raise Refused(403, why)
            body = file.read(MAX_BODY + 1)
        if self._desk is None:
            levels = Levels.of(self._settings)
            self._desk = Desk(self._settings.fault_senders, levels.catalog(), off=levels.switched_off())
        here = os.environ.get("RERAIL_NODE") or socket.gethostname()
        return self._desk.take(body, {here, socket.gethostname()}, here, time.time(), found.st_mtime).faults

    def _put_aside(self, folder: int, name: str, present: str, why: str) -> None:
        """Under a name that nobody reads; a file that cannot be moved is remembered instead."""
        self._complain(name, f"is not taken: {why}")
        aside = name.removesuffix(".taken") + BAD
        with contextlib.suppress(OSError):
            os.rename(present, aside, src_dir_fd=folder, dst_dir_fd=folder)
            self._complained.discard(name)

    def _complain(self, name: str, what: str) -> None:
        if name not in self._complained and len(self._complained) < NAMES:
            self._complained.add(name)
            print(f"rerail monitor: dropped file {name!r} {what}", file=sys.stderr, flush=True)


def _untrusted(found: os.stat_result) -> str:
    """Why a file is not read; empty if it is."""
    if not stat.S_ISREG(found.st_mode):
        return "it is no regular file"
    if found.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {found.st_uid}, neither to us nor to root"
    if found.st_mode & stat.S_IWOTH:
        return "anyone may write to it"
    if found.st_nlink > 1:
        return "it has a second name somewhere (a hard link)"
    if found.st_size > MAX_BODY:
        return f"it has more than {MAX_BODY >> 10} KiB"
    return ""
