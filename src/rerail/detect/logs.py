"""Reads logs of any kind and size and turns them into sightings: files, gzip, directories, standard input.

Called by `cli.diagnose`. Reads in pieces and keeps only lines that show something, so a log may be larger than memory;
a line may be endless, bytes may be anything.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from rerail.errors import UsageError
from rerail.faults.matcher import Matcher
from rerail.faults.sightings import Sighting, sightings

PIECE = 1 << 20
OVERLAP = 64 << 10
"""An unfinished line longer than this is looked at as it is."""
MAX_SIGHTINGS = 200
"""Of one fault in one file that are kept; nobody reads more."""
MAX_ALIKE = 1000
"""Lines of one file that differ only in times, addresses and long numbers and are looked at; a flood says nothing new."""
SHAPE = 240
"""Characters of a line by which it is compared with others."""
MAX_FILES = 10_000
_SKIPPED = (".pt", ".pth", ".bin", ".safetensors", ".ckpt", ".npy", ".npz", ".db", ".sqlite", ".so", ".png", ".jpg", ".whl", ".tar", ".zip", ".pyc")  # fmt: skip
_OPENERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
_PASSING = re.compile(rb"0x[0-9a-fA-F]+|\d+(?:[:.,]\d+)+|\d{4,}|[0-9a-fA-F]{8,}")
_RANK_IN_NAME = re.compile(
    r"(?:rank|worker|node|proc|gpu)[_.=-]?(\d{1,6})(?=\D|$)|(?:^|[/\\])(\d{1,6})[/\\](?:std(?:out|err)\.log)$", re.I
)


def files_of(paths: list[str]) -> list[Path]:
    """What to read: the files named, and everything that looks like a log in the directories named."""
    found: list[Path] = []
    for given in paths:
        path = Path(given)
        if path.is_dir():
            inside = sorted(Path(folder) / name for folder, _, names in os.walk(path) for name in names)
            found += [file for file in inside if file.is_file() and file.suffix.lower() not in _SKIPPED]
        elif path.exists():
            found.append(path)
        else:
            raise UsageError(f"{given}: no such file or directory")
        if len(found) > MAX_FILES:
            raise UsageError(f"more than {MAX_FILES} files in {given}", hint="name the directories of one run")
    return found


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
            with open(path, "rb") as probe:
                head = probe.read(8)
            opener = next((o for magic, o in _OPENERS.items() if head.startswith(magic)), open)
            with opener(path, "rb") as stream:
                yield from self.scan(stream, str(path))
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            self.unreadable[str(path)] = getattr(error, "strerror", None) or str(error)

    def scan(self, stream: IO[bytes], name: str) -> Iterator[Sighting]:
        """Sightings of one stream."""
        named = _RANK_IN_NAME.search(name)
        file_rank = int(next(group for group in named.groups() if group)) if named else -1
        seen: dict[str, int] = {}
        alike: dict[bytes, int] = {}
        rest, number = b"", 1
        while True:
            piece = stream.read(PIECE)
            data = rest + piece
            cut = len(data) if not piece else data.rfind(b"\n") + 1
            if not cut and len(data) > OVERLAP:
                cut = len(data)
            block, rest = data[:cut], data[cut:]
            counted = 0
            for start, end in self._matcher.spans(block):
                number += block.count(b"\n", counted, start)
                counted = start
                if _too_many(block[start : min(end, start + SHAPE)], alike):
                    continue
                yield from self._look(block[start:end], name, number, file_rank, seen)
            number += block.count(b"\n", counted)
            self.size += len(piece)
            if not piece:
                self.lines += number
                return

    def _look(self, raw: bytes, name: str, number: int, rank: int, seen: dict[str, int]) -> Iterator[Sighting]:
        text = raw.decode("utf-8", "replace").rstrip("\r\n")
        for sighting in sightings(self._matcher, text, file=name, number=number, rank=rank):
            code = sighting.fault.code
            seen[code] = seen.get(code, 0) + 1
            if seen[code] <= MAX_SIGHTINGS:
                self._order += 1
                yield msgspec.structs.replace(sighting, order=self._order)


def _too_many(line: bytes, alike: dict[bytes, int]) -> bool:
    shape = _PASSING.sub(b"", line)
    count = alike[shape] = alike.get(shape, 0) + 1
    if len(alike) > 100 * MAX_ALIKE:
        alike.clear()
    return count > MAX_ALIKE
