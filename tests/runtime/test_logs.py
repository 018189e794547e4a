from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from node_helpers import SOURCE, job

from rerail.errors import UsageError
from rerail.runtime.logs import ERR, KEPT_UNASSIGNED, OUT, Console, LogBook, OutputPipe, parse_std


class Recorder(Console):
    """A console that remembers."""

    def __init__(self) -> None:
        self.shown: list[tuple[int, bytes]] = []

    def write(self, stream: int, data: bytes) -> None:
        self.shown.append((stream, data))


def write(tmp_path: Path, data: bytes, stream: int = OUT, local_rank: int = 1, **changes: Any) -> bytes:
    """Feed one stream of rank 5 and return what the console got."""

    async def main() -> bytes:
        console = Recorder()
        log = LogBook(job(tmp_path, **changes), console).open(2, 5, local_rank, stream)
        log.feed(data)
        log.close()
        return b"".join(shown for _, shown in console.shown)

    return asyncio.run(main())


def test_by_default_lines_go_to_file_and_raw_to_the_console(tmp_path: Path) -> None:
    assert write(tmp_path, b"one\ntwo") == b"one\ntwo"
    assert (tmp_path / "logs/attempt_2/1/stdout.log").read_bytes() == b"one\ntwo"


def test_redirects_mean_file_only(tmp_path: Path) -> None:
    assert write(tmp_path, b"one\n", redirects="1:1") == b""
    assert write(tmp_path, b"one\n", ERR, redirects="1:1") == b"one\n"
    assert (tmp_path / "logs/attempt_2/1/stdout.log").read_bytes() == b"one\n"


def test_tee_prefixes_every_line_as_torchrun_does(tmp_path: Path) -> None:
    assert write(tmp_path, b"one\ntwo", tee="3") == b"[default1]:one\n[default1]:two\n"


def test_the_prefix_template_of_torchrun_is_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "<${rank}/${local_rank}> ")
    assert write(tmp_path, b"one\n", tee="3") == b"<5/1> one\n"


def test_the_rank_filter_silences_the_console_and_keeps_the_file(tmp_path: Path) -> None:
    assert write(tmp_path, b"one\n", local_ranks_filter=(0,), tee="3") == b""
    assert (tmp_path / "logs/attempt_2/1/stdout.log").read_bytes() == b"one\n"


def test_filtered_lines_of_all_ranks_go_to_one_file(tmp_path: Path) -> None:
    write(tmp_path, b"loss 1\nnoise\nloss", stdout_filters=("loss",))
    write(tmp_path, b"loss 3\n", local_rank=0, stdout_filters=("loss",))
    copied = (tmp_path / "logs/attempt_2/filtered_stdout.log").read_text()
    assert copied == "[default5]:loss 1\n[default5]:loss\n[default5]:loss 3\n"


def test_progress_bars_are_not_held_back_until_a_newline(tmp_path: Path) -> None:
    async def main() -> None:
        console = Recorder()
        log = LogBook(job(tmp_path), console).open(0, 0, 0, ERR)
        log.feed(b"10%\r20%\r3")
        assert console.shown == [(ERR, b"10%\r20%\r")]
        log.close()

    asyncio.run(main())


def test_a_full_disk_is_said_once_and_the_console_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        console = Recorder()
        book = LogBook(job(tmp_path), console)
        (book.folder(0, 0) / "stdout.log").symlink_to("/dev/full")
        log = book.open(0, 0, 0, OUT)
        log.feed(b"one\n")
        log.feed(b"two\n")
        log.close()
        assert b"".join(data for _, data in console.shown) == b"one\ntwo\n"

    asyncio.run(main())
    assert capsys.readouterr().err.count("cannot be written") == 1


def test_stream_lists_are_read_as_torchrun_reads_them() -> None:
    assert parse_std("1", 2, "--tee") == {0: 1, 1: 1}
    assert parse_std("1:3", 2, "--tee") == {0: 0, 1: 3}


@pytest.mark.parametrize("text", ["4", "x", "0:9", "0:1,", ":1"])
def test_bad_stream_lists_are_refused_with_advice(text: str) -> None:
    with pytest.raises(UsageError, match="use 0"):
        parse_std(text, 2, "--tee")


def piped(body: Callable[[OutputPipe, int], None]) -> None:
    async def main() -> None:
        read, write = os.pipe()
        pipe = OutputPipe(os.fdopen(read, "rb", buffering=0))
        body(pipe, write)
        pipe.close()
        os.close(write)

    asyncio.run(main())


def test_a_standbys_output_waits_for_its_promotion_within_bounds(tmp_path: Path) -> None:
    def body(pipe: OutputPipe, fd: int) -> None:
        for _ in range(2 * KEPT_UNASSIGNED // 1024):
            os.write(fd, b"x" * 1023 + b"\n")
            pipe.drain()
        os.write(fd, b"last\n")
        pipe.drain()
        console = Recorder()
        pipe.attach(LogBook(job(tmp_path), console).open(0, 0, 0, OUT))
        shown = b"".join(data for _, data in console.shown)
        assert len(shown) == KEPT_UNASSIGNED and shown.endswith(b"last\n")
        assert pipe.tail().endswith("last")

    piped(body)


SLOW_CONSOLE = """
from rerail.runtime.logs import CONSOLE_BACKLOG, Console
import os, sys
console = Console()
for _ in range(2 * CONSOLE_BACKLOG // 65536):
    console.write(1, b"x" * 65536)
os.write(2, b"not held up")
os._exit(0)
"""


def test_a_console_that_nobody_reads_holds_up_nobody() -> None:
    read, write = os.pipe()
    env = {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", SLOW_CONSOLE], env=env, stdout=write, stderr=subprocess.PIPE, timeout=60
    )
    assert done.stderr == b"not held up"
    os.close(read)
    os.close(write)


BROKEN_CONSOLE = """
from rerail.runtime.logs import Console
import os
console = Console()
console.write(1, b"x" * 100)
console.write(2, b"stderr lives")
console.close(10)
"""


def test_a_closed_console_ends_nothing() -> None:
    read, write = os.pipe()
    os.close(read)
    env = {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-c", BROKEN_CONSOLE], env=env, stdout=write, stderr=subprocess.PIPE, timeout=60
    )
    os.close(write)
    assert done.returncode == 0 and done.stderr == b"stderr lives"
