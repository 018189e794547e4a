"""Watches the kernel log and gives its lines as they come: `/dev/kmsg`, else the journal; after a panic also what pstore kept.

Run by `detect.monitor`. Records have sequence numbers, so a gap (the kernel overwrote what was not read in time) is known.
Only lines of the kernel itself count: anyone with the right to write to /dev/kmsg could make up a broken GPU.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from rerail.detect.detector import Line

KMSG = Path("/dev/kmsg")
RECORD = 8192
PSTORE = ("sys/fs/pstore", "var/lib/systemd/pstore")
PSTORE_LIMIT = 1 << 20
INJECTED = "rerail-inject: "
"""In front of a line that `rerail inject` wrote; taken for the kernel's own only where the job allows it."""
NAMESPACE = Path("/proc/self/ns/pid")
FIRST_NAMESPACE = "pid:[4026531836]"
"""The machine's own; elsewhere (in most containers) processes have other numbers than those in the kernel log."""
_VICTIM = re.compile(r"\bKill(?:ed)? process (\d+)|\boom-kill:.*,pid=(\d+)\b")


class KernelLog:
    """The kernel's messages from now on."""

    name = "kernel_log"

    def __init__(self, path: Path = KMSG, *, injected: bool = False, from_start: bool = False) -> None:
        self._path, self._injected, self._from_start = path, injected, from_start
        self.lost = 0
        """Records that the kernel overwrote before they were read."""

    def supported(self) -> str:
        if os.access(self._path, os.R_OK):
            return ""
        if self._journal():
            return ""
        return f"{self._path} cannot be read (run as root, or allow it by sysctl kernel.dmesg_restrict=0), and there is no journalctl"

    def blind_spots(self) -> list[str]:
        if os.access(self._path, os.R_OK):
            return []
        return ["kernel log comes through the journal: a little later, and not when journald is stuck"]

    def watch(self) -> Iterator[Line]:
        if os.access(self._path, os.R_OK):
            yield from self._kmsg()
        else:
            yield from self._follow_journal()

    def _kmsg(self) -> Iterator[Line]:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            if not self._from_start:
                os.lseek(descriptor, 0, os.SEEK_END)
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            last = -1
            while True:
                record = next_record(descriptor)
                if record is None:
                    poll.poll()
                    continue
                if not record:
                    return
                line = parse_record(record, injected=self._injected)
                if line is None:
                    continue
                if last >= 0 and line.seq > last + 1:
                    self.lost += line.seq - last - 1
                last = line.seq
                if line.text:
                    yield line
        finally:
            os.close(descriptor)

    @staticmethod
    def _journal() -> str:
        return shutil.which("journalctl") or ""

    def _follow_journal(self) -> Iterator[Line]:
        command = [self._journal(), "--dmesg", "--follow", "--lines=0", "--output=cat", "--quiet"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as journal:
            try:
                assert journal.stdout is not None
                for raw in journal.stdout:
                    yield Line("kernel", raw.decode("utf-8", "replace").rstrip("\n"))
            finally:
                journal.kill()


def next_record(descriptor: int) -> bytes | None:
    """One record of an open /dev/kmsg; None if there is none at the moment, nothing at its end."""
    while True:
        try:
            return os.read(descriptor, RECORD)
        except BlockingIOError:
            return None
        except BrokenPipeError:
            continue  # overwritten; the next read gives the oldest that is left, and its number shows the gap


def parse_record(record: bytes, *, injected: bool = False) -> Line | None:
    """`prio,seq,usec,flags;text` and continuation lines; None if it is no record. Text is empty if not the kernel's own."""
    head, separator, body = record.partition(b";")
    fields = head.split(b",")
    if not separator or len(fields) < 3 or not (fields[0].isdigit() and fields[1].isdigit()):
        return None
    text = body.split(b"\n", 1)[0].decode("utf-8", "replace")
    facility, number = int(fields[0]) >> 3, int(fields[1])
    if facility != 0:
        text = text.removeprefix(INJECTED) if injected and text.startswith(INJECTED) else ""
    return Line("kernel", text, number)


def victim_of(line: str) -> int:
    """The process that the out-of-memory killer has ended, as this process would call it; 0 if that cannot be told."""
    found = _VICTIM.search(line)
    try:
        ours = os.readlink(NAMESPACE) == FIRST_NAMESPACE
    except OSError:
        ours = False
    return int(found[1] or found[2]) if found is not None and ours else 0


def last_words(root: Path = Path("/")) -> list[Line]:
    """What the kernel said last before it went down, if the firmware kept it: pstore, newest file first."""
    files = [file for folder in PSTORE for file in (root / folder).glob("**/dmesg*") if file.is_file()]
    lines: list[Line] = []
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)[:8]:
        try:
            text = file.read_bytes()[-PSTORE_LIMIT:].decode("utf-8", "replace")
        except OSError:
            continue
        lines += [Line("kernel", line) for line in text.splitlines() if line.strip()]
    return lines
