"""Reads logs of any kind and size and turns them into sightings: files, gzip, UTF-16, directories, standard input.

Called by `cli.diagnose`. Reads in pieces and keeps only lines that show something, so a log may be larger than memory;
a line may be endless, bytes may be anything.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
import os
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import xxhash

from rerail.errors import UsageError
from rerail.faults.lines import take_apart
from rerail.faults.matcher import Matcher, plain
from rerail.faults.quotes import said_after
from rerail.faults.sightings import Sighting, sightings
from rerail.flow import Role

PIECE = 1 << 20
OVERLAP = 64 << 10
"""An unfinished line longer than this is looked at as it is."""
SHARED = 4096
"""Bytes of it that are looked at once more with what follows, so that what lies across the cut is seen."""
MAX_SIGHTINGS = 200
"""Of one fault in one file that are kept; nobody reads more."""
MAX_ALIKE = 1000
"""Lines of one file that differ only in times, addresses and long numbers and are looked at; a flood says nothing new."""
ENDLESS = 256 << 20
"""Bytes without the end of a line: no log, but something like /dev/zero."""
MAX_FILES = 10_000
SAMPLES, SAMPLE, NO_TEXT = 8, 512, 0.03
"""Places of a block that are tried, bytes there, and the share of them that no text has."""
_TEXT = bytes({*range(0x20, 0x7F), *b"\t\n\r\f\b\x1b", *range(0x80, 0x100)})
LOOK_BACK = 16 << 10
"""Bytes before a line without a time in which the time of an earlier line is looked for: a traceback has none of its own."""
STAMPED = 480
"""Characters of such a line that are enough to find its time."""
_SKIPPED = (".pt", ".pth", ".bin", ".safetensors", ".ckpt", ".npy", ".npz", ".db", ".sqlite", ".so", ".png", ".jpg", ".whl", ".tar", ".zip", ".pyc")  # fmt: skip
_OPENERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
_NOT_LOGS = {
    b"\x28\xb5\x2f\xfd": "it is compressed by zstd; unpack it, or: zstdcat FILE | rerail diagnose -",
    b"\x7fELF": "it is a program",
    b"PK\x03\x04": "it is a zip archive",
    b"\x93NUMPY": "it is an array",
    b"SQLite f": "it is a database",
    b"\x89PNG": "it is a picture",
}
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}
_PASSING = re.compile(rb"0x[0-9a-fA-F]+|\d+(?:[:.,]\d+)+|\d{4,}|[0-9a-fA-F]{8,}")
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_LISTED = re.compile(rb"\brank\s{0,8}:\s{0,8}(\d{1,6})\s{1,8}\(local_rank")
"""Whose failure the summary at the end of torchrun's output is about."""
_HEADINGS = {"root": b"Root Cause (first observed failure)", "listed": b"Failures:"}
_RULE = re.compile(rb"[=-]{20}")
_RANK_IN_NAME = (
    re.compile(r"rank[_.=-]?(\d{1,6})(?!\d)", re.I),
    re.compile(r"(?:^|[/\\])(\d{1,6})[/\\]std(?:out|err)\.log$", re.I),
    re.compile(r"(?:worker|proc|gpu)[_.=-]?(\d{1,6})(?!\d)", re.I),
)


def files_of(paths: list[str]) -> list[Path]:
    """What to read: the files named, and everything that looks like a log in the directories named."""
    found: list[Path] = []
    for given in paths:
        path = Path(given)
        if path.is_dir():
            inside = sorted(Path(folder) / name for folder, _, names in os.walk(path) for name in names)
            logs = [file for file in inside if file.suffix.lower() not in _SKIPPED and _is_file(file)]
            if not logs:
                raise UsageError(f"{given}: no log in this directory")
            found += logs
        elif path.exists():
            found.append(path)
        else:
            raise UsageError(f"{given}: no such file or directory")
        if len(found) > MAX_FILES:
            raise UsageError(f"more than {MAX_FILES} files in {given}", hint="name the directories of one run")
    return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False  # not for us to look at


class Reader:
    """Reads files in turn, and remembers what it could not read."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._order = 0
        self.lines = 0
        self.size = 0
        self.unreadable: dict[str, str] = {}

    def read(self, path: Path) -> Iterator[Sighting]:
        """Sightings of one file, in order. What cannot be read is noted, not raised: the other files may say it all."""
        try:
            kind = stat.S_IFMT(path.stat().st_mode)
            # what the shell itself has opened for us, `<(command)`, has an end
            if kind != stat.S_IFREG and not str(path).startswith(("/dev/fd/", "/dev/stdin", "/proc/self/fd/")):
                self.unreadable[str(path)] = f"it is {_KINDS.get(kind, 'no file')}; - reads standard input"
                return
            with open(path, "rb") as stream:
                yield from self.open(stream, str(path))
        except (OSError, ValueError) as error:
            self.unreadable[str(path)] = getattr(error, "strerror", None) or str(error)

    def open(self, stream: IO[bytes], name: str) -> Iterator[Sighting]:
        """Sightings of one stream that may be compressed. What is left of a damaged one is read."""
        head = stream.peek(8)[:8] if hasattr(stream, "peek") else b""
        why = next((why for magic, why in _NOT_LOGS.items() if head.startswith(magic)), "")
        if why:
            self.unreadable[name] = why
            return
        opener = next((o for magic, o in _OPENERS.items() if head.startswith(magic)), None)
        try:
            yield from self.scan(opener(stream, "rb") if opener is not None else stream, name)
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            self.unreadable[name] = getattr(error, "strerror", None) or str(error)

    def scan(self, stream: IO[bytes], name: str) -> Iterator[Sighting]:
        """Sightings of one stream."""
        file, read = _File(name), _Source(stream).read
        rest, number, unfinished = b"", 1, 0
        while True:
            try:
                piece, broken = read(), None
            except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
                piece, broken = b"", error  # first what was read before
            data = rest + piece
            cut = again = len(data) if not piece else data.rfind(b"\n") + 1
            if not cut and len(data) > OVERLAP:
                cut, again = len(data), len(data) - SHARED
            rest = data[again:]
            yield from self._lines(data[:cut], number, file)
            number += data.count(b"\n", 0, cut)
            self.size += len(piece)
            unfinished = 0 if b"\n" in piece else unfinished + len(piece)
            if unfinished > ENDLESS:
                self.unreadable[name] = f"no line ends within {ENDLESS >> 20} MiB: it is no log"
                return
            if not piece:
                self.lines += number - (not data)
                if broken is not None:
                    raise broken
                return

    def _lines(self, raw: bytes, number: int, file: _File) -> Iterator[Sighting]:
        """Sightings of a block of lines, the first of which is line `number`."""
        if is_binary(raw):
            return  # a core dump, a tensor: whatever words are in there, nobody said them
        block = plain(raw)
        counted = 0
        for start, end in self._matcher.spans(block):
            number += block.count(b"\n", counted, start)
            counted = max(counted, start)
            if file.too_many(block[start:end]):
                continue
            yield from self._look(block, start, end, number, file)
        file.leave(block)

    def _look(self, block: bytes, start: int, end: int, number: int, file: _File) -> Iterator[Sighting]:
        text = block[start:end].decode("utf-8", "replace").rstrip("\r\n")
        begins = block.rfind(b"\n", max(0, start - OVERLAP), start) + 1 or max(0, start - OVERLAP)
        if begins < start:  # the line is too long to be looked at as a whole
            text = said_after(block[begins:start].decode("utf-8", "replace"), text)
        for sighting in sightings(self._matcher, text, file=file.name, number=number, rank=file.rank):
            if not file.wants(sighting):
                continue
            time, clock = (sighting.time, sighting.clock) if sighting.clock else file.time_before(block, start)
            rank, summary = file.summary_before(block, start)
            self._order += 1
            yield msgspec.structs.replace(
                sighting,
                order=self._order,
                time=time,
                clock=clock,
                rank=rank if summary else sighting.rank,
                summary=summary,
            )


def is_binary(block: bytes) -> bool:
    """Whether none of several places looks like text. A log with holes (zeros after a power cut) is still a log."""
    # rounded up, or the last place would be a byte or two, which may look like anything
    step = -(-len(block) // SAMPLES)
    places = (block[at : at + SAMPLE] for at in range(0, len(block), max(1, step)))
    return bool(block) and all(len(place.translate(None, _TEXT)) > len(place) * NO_TEXT for place in places)


class _Source:
    """A stream in UTF-8: Windows tools write UTF-16 and say so in the first two bytes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._read = getattr(stream, "read1", stream.read)
        self._decoder: codecs.IncrementalDecoder | None = None
        self._begun = False

    def read(self) -> bytes:
        """The next piece; empty at the end."""
        piece: bytes = self._read(PIECE)
        while len(piece) == 1 and not self._begun and (more := self._read(PIECE)):
            piece += more
        if not self._begun and piece.startswith(_UTF_16) and not piece.startswith(codecs.BOM_UTF32_LE):
            self._decoder = codecs.getincrementaldecoder("utf-16")("replace")
        self._begun = True
        if self._decoder is None:
            return piece
        while not (text := self._decoder.decode(piece, final=not piece)) and piece:
            piece = self._read(PIECE)
        return text.encode("utf-8", "replace")


class _File:
    """What has been seen of one file."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rank = rank_of(name)
        self._seen: dict[str, int] = {}
        self._line: dict[str, int] = {}
        self._alike: dict[int, int] = {}
        self._tail = b""
        self._stamp = (0, -1.0, "")
        """Up to where times have been looked for in this block, and the last one."""

    def too_many(self, line: bytes) -> bool:
        """Whether lines like this one have been looked at often enough."""
        shape = xxhash.xxh3_64_intdigest(_PASSING.sub(b"", line))
        count = self._alike[shape] = self._alike.get(shape, 0) + 1
        if len(self._alike) > 100 * MAX_ALIKE:
            self._alike.clear()
        return count > MAX_ALIKE

    def wants(self, sighting: Sighting) -> bool:
        """Not the same fault twice in a line, and not more of it than anyone reads."""
        code = sighting.fault.code
        if self._line.get(code) == sighting.line:
            return False
        self._line[code] = sighting.line
        count = self._seen[code] = self._seen.get(code, 0) + 1
        if count <= MAX_SIGHTINGS and sighting.fault.role is Role.CLEAR:
            self._seen = {sighting.fault.code: count}  # what comes again after its end is news
            self._alike.clear()
        return count <= MAX_SIGHTINGS

    def time_before(self, block: bytes, start: int) -> tuple[float, str]:
        """Time of the nearest line before that has one."""
        known, time, clock = self._stamp
        since = max(known, start - LOOK_BACK)
        before = (self._tail if start < LOOK_BACK and not known else b"") + block[since:start]
        if since > known:
            time, clock = -1.0, ""  # too long ago
        for line in reversed(before.decode("utf-8", "replace").splitlines()):
            taken = take_apart(line[:STAMPED])
            if taken.clock:
                time, clock = taken.time, taken.clock
                break
        self._stamp = (start, time, clock)
        return time, clock

    def summary_before(self, block: bytes, start: int) -> tuple[int, str]:
        """The rank that torchrun's summary is about at this place, and whether it calls it the root; else -1 and nothing."""
        before = (self._tail if start < LOOK_BACK else b"") + block[max(0, start - LOOK_BACK) : start]
        named = list(_LISTED.finditer(before)) if b"(local_rank" in before else []
        if not named or _RULE.search(before, named[-1].end()):
            return -1, ""
        at, heading = max((before.rfind(words, 0, named[-1].start()), name) for name, words in _HEADINGS.items())
        return (int(named[-1][1]), heading) if at >= 0 else (-1, "")

    def leave(self, block: bytes) -> None:
        """This block is done."""
        self._tail, self._stamp = block[-LOOK_BACK:], (0, -1.0, "")


def rank_of(name: str) -> int:
    """The rank that the name of a file tells, or -1; the last one, as directories may have names like that, too."""
    for pattern in _RANK_IN_NAME:
        if found := pattern.findall(name):
            return int(found[-1])
    return -1
