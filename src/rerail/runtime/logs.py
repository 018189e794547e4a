"""Turns what ranks print into log files, console lines and filtered copies, without ever waiting for the console.

Layout, as torchrun's: <log_dir>/attempt_<generation>/<local_rank>/{stdout.log,stderr.log,error.json} and, where filters
are given, <log_dir>/attempt_<generation>/filtered_{stdout,stderr}.log. Called by `runtime.children` and `runtime.agent`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import re
import select
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import IO

from rerail.config import JobSpec
from rerail.errors import UsageError
from rerail.runtime import processes

OUT, ERR = 1, 2
"""The streams by their file descriptor, which is also their bit in --redirects and --tee."""
NAMES = {OUT: "stdout", ERR: "stderr"}
KEPT_UNASSIGNED = 64 << 10
"""Bytes of a standby's output that wait for its promotion; older ones are dropped."""
CONSOLE_BACKLOG = 8 << 20
"""Bytes that may wait for a slow console before lines are left out there (never in the files)."""
TAIL_LINES = 20
PARTIAL_LINE_S = 0.5
"""Seconds after which an unfinished line is shown: progress dots and prompts end without a newline."""

Sink = Callable[[bytes], None]


class OutputPipe:
    """The reading end of one stream of a process. Keeps what comes until somebody says where it belongs."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._fd = fd = file.fileno()
        self._sink: Stream | None = None
        self._kept = bytearray()
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self.closed = False
        os.set_blocking(fd, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._readable)

    def attach(self, sink: Stream) -> None:
        """Send everything to `sink` from now on, beginning with what was kept; it is closed with the pipe."""
        self._sink = sink
        if self._kept:
            sink.feed(bytes(self._kept))
            self._kept.clear()
        if self.closed:
            sink.close()

    def tail(self) -> str:
        """The last lines, as evidence."""
        return b"".join(self._tail).decode(errors="replace").strip()

    def drain(self) -> None:
        """Take what is there now. Called when the process has ended; a grandchild may write on."""
        while not self.closed and self._readable():
            pass

    def close(self) -> None:
        """Stop reading, also when a grandchild still holds the other end."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._fd)
            self._file.close()
            if self._sink is not None:
                self._sink.close()

    def _readable(self) -> bool:
        try:
            data = os.read(self._fd, 64 << 10)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.close()
            return False
        self._tail.extend(data[-8192:].splitlines(keepends=True))
        if self._sink is not None:
            self._sink.feed(data)
        else:
            self._kept += data
            del self._kept[:-KEPT_UNASSIGNED]
        return True


class Console:
    """Writes to our own stdout and stderr from a thread of its own, so that a slow terminal holds up nobody."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._waiting = 0
        self._left_out = 0
        self._broken: set[int] = set()
        self._thread = threading.Thread(target=self._write_out, name="rerail-console", daemon=True)
        self._thread.start()

    def write(self, stream: int, data: bytes) -> None:
        if self._waiting + len(data) > CONSOLE_BACKLOG:
            self._left_out += len(data)
            return
        if self._left_out:
            note = f"rerail: console too slow, {self._left_out} bytes left out here; the log files have them\n"
            self._left_out = 0
            self._put(ERR, note.encode())
        self._put(stream, data)

    def close(self, timeout: float) -> None:
        """Write out what waits, for at most `timeout` seconds."""
        self._queue.put(None)
        self._thread.join(timeout)

    def _put(self, stream: int, data: bytes) -> None:
        self._waiting += len(data)
        self._queue.put((stream, data))

    def _write_out(self) -> None:
        while (item := self._queue.get()) is not None:
            stream, data = item
            if stream not in self._broken:
                try:
                    _write_all(stream, data)
                except OSError:  # `rerail run ... | head`: the reader has gone, the job has not
                    self._broken.add(stream)
            self._waiting -= len(data)


class Stream:
    """One stream of one rank: file, console and filtered copy."""

    def __init__(self, file: Path, echo: Sink | None, prefix: bytes, copy: Sink | None) -> None:
        self._path = file
        self._fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._echo = echo
        self._prefix = prefix
        self._copy = copy
        self._partial = b""
        self._timer: asyncio.TimerHandle | None = None

    def feed(self, data: bytes) -> None:
        self._to_file(data)
        if self._echo is None and self._copy is None:
            return
        *lines, self._partial = re.split(rb"(?<=[\r\n])", self._partial + data) if data else (self._partial,)
        if len(self._partial) > KEPT_UNASSIGNED:
            lines, self._partial = [*lines, self._partial], b""
        if self._copy is not None:
            for line in lines:
                self._copy(line)
        self._show(lines)
        if self._partial and not self._prefix and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PARTIAL_LINE_S, self._show_partial)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._partial and self._copy is not None:
            self._copy(self._partial)
        self._show_partial()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _show(self, lines: list[bytes]) -> None:
        if self._echo is not None and lines:
            self._echo(b"".join(self._prefix + line for line in lines))

    def _show_partial(self) -> None:
        self._timer = None
        if self._partial:
            self._show([self._partial + (b"\n" if self._prefix else b"")])
            self._partial = b""

    def _to_file(self, data: bytes) -> None:
        if self._fd < 0:
            return
        try:
            _write_all(self._fd, data)
        except OSError as error:
            processes.say(f"log {self._path} cannot be written any more ({error.strerror}); the console goes on")
            os.close(self._fd)
            self._fd = -1


class LogBook:
    """Opens the logs of every process that becomes a rank of this node."""

    def __init__(self, spec: JobSpec, console: Console) -> None:
        self._spec = spec
        self._console = console
        self._root = Path(spec.log_dir or Path(spec.run_dir) / "logs")
        self._redirects = parse_std(spec.redirects, spec.slots + spec.spare_devices, "--redirects")
        self._tee = parse_std(spec.tee, spec.slots + spec.spare_devices, "--tee")
        self._prefix = Template(os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${role_name}${local_rank}]:"))
        self._copies: dict[Path, int] = {}

    def folder(self, generation: int, local_rank: int) -> Path:
        """Where this process's logs and error file lie; made if missing."""
        folder = self._root / f"attempt_{generation}" / str(local_rank)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def open(self, generation: int, rank: int, local_rank: int, stream: int) -> Stream:
        """The log of one stream of the process that becomes `rank`."""
        folder = self.folder(generation, local_rank)
        prefix = b""
        shown = not self._spec.local_ranks_filter or local_rank in self._spec.local_ranks_filter
        if self._tee[local_rank] & stream:
            words = {"role_name": self._spec.role, "rank": str(rank), "local_rank": str(local_rank)}
            prefix = self._prefix.safe_substitute(words).encode()
        elif self._redirects[local_rank] & stream:
            shown = False
        console = self._console
        echo: Sink | None = (lambda data: console.write(stream, data)) if shown else None
        filters = self._spec.stdout_filters if stream == OUT else self._spec.stderr_filters
        copy = self._copier(folder.parent / f"filtered_{NAMES[stream]}.log", filters, rank) if filters else None
        return Stream(folder / f"{NAMES[stream]}.log", echo, prefix, copy)

    def _copier(self, path: Path, filters: tuple[str, ...], rank: int) -> Sink:
        if path not in self._copies:
            self._copies[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        fd, needles = self._copies[path], [text.encode() for text in filters]
        head = f"[{self._spec.role}{rank}]:".encode()

        def copy(line: bytes) -> None:
            if any(needle in line for needle in needles):
                with contextlib.suppress(OSError):
                    _write_all(fd, head + line.rstrip(b"\r\n") + b"\n")

        return copy


def parse_std(text: str, slots: int, flag: str) -> dict[int, int]:
    """torchrun's syntax: `3` for all ranks, or `0:1,1:2` for single local ranks. 0 none, 1 stdout, 2 stderr, 3 both."""
    if re.fullmatch(r"[0-3]", text):
        return dict.fromkeys(range(slots), int(text))
    found = dict.fromkeys(range(slots), 0)
    for part in text.split(","):
        match = re.fullmatch(r"(\d+):([0-3])", part.strip())
        if match is None:
            raise UsageError(
                f"{flag} {text!r}: {part!r} is not LOCAL_RANK:STREAMS",
                hint="use 0 (none), 1 (stdout), 2 (stderr), 3 (both), or a list such as 0:1,1:3",
            )
        found[int(match[1])] = int(match[2])
    return found


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # somebody made our terminal non-blocking
            select.select([], [fd], [])
