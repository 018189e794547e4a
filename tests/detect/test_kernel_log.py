"""Records of the kernel log: what counts as the kernel's own word, what is lost, and the real thing where it can be written."""

from __future__ import annotations

import os
import queue
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rerail.detect import kernel_log
from rerail.detect.detector import Line
from rerail.detect.kernel_log import INJECTED, KMSG, PSTORE_LIMIT, KernelLog, last_words, parse_record, victim_of

XID = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (f"4,1219,16597737869,-;{XID}\n".encode(), Line("kernel", XID, 1219)),
        (f"3,7,1,-,caller=T31;{XID}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n".encode(), Line("kernel", XID, 7)),
        (b"6,8,1,c;a; b, c;\n", Line("kernel", "a; b, c;", 8)),
        (b"6,9,1,-;", Line("kernel", "", 9)),
        (b"6,9,1,-;caf\xe9 \xff\x00\n", Line("kernel", "caf� �\x00", 9)),
        (f"12,10,1,-;{XID}\n".encode(), Line("kernel", "", 10)),
        (f"30,11,1,-;{XID}\n".encode(), Line("kernel", "", 11)),
        (f"12,12,1,-;{INJECTED}{XID}\n".encode(), Line("kernel", "", 12)),
        (b"", None),
        (b"no record", None),
        (b"x,1,2,-;text", None),
        (b"4,x,2,-;text", None),
        (b"4;text", None),
        ("٤,١,2,-;text".encode(), None),
    ],
)
def test_records(record: bytes, line: Line | None) -> None:
    assert parse_record(record) == line


def test_injected_lines_count_only_where_the_job_allows_it_and_are_marked() -> None:
    def read(text: str, *, facility: int = 12, injected: bool = True) -> str:
        line = parse_record(f"{facility},1,2,-;{text}\n".encode(), injected=injected)
        assert line is not None
        return line.text

    assert read(INJECTED + XID) == XID
    assert read(INJECTED + XID, injected=False) == ""
    assert read(XID) == "", "whoever may write to /dev/kmsg must not make up a broken GPU"
    assert read("x " + INJECTED + XID) == ""
    assert read(INJECTED + XID, facility=4) == INJECTED + XID, "the kernel's own line is not rewritten"


def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *script: bytes | OSError) -> tuple[list[Line], int]:
    """What a log gives whose reads end like this; then it is at its end."""
    file = tmp_path / "kmsg"
    file.write_bytes(b"")
    steps: Iterator[bytes | OSError] = iter([*script, b""])

    def read(_descriptor: int, _size: int) -> bytes:
        step = next(steps)
        if isinstance(step, OSError):
            raise step
        return step

    with monkeypatch.context() as patch:
        patch.setattr(kernel_log.os, "read", read)
        log = KernelLog(file)
        return list(log.watch()), log.lost


def test_overwritten_records_are_counted_and_reading_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines, lost = played(
        monkeypatch, tmp_path, b"4,10,1,-;one\n", BrokenPipeError(), b"4,15,1,-;two\n", b"4,16,1,-;three\n"
    )
    assert [line.text for line in lines] == ["one", "two", "three"] and lost == 4


def test_lines_of_others_and_nonsense_are_no_gap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    records = (b"4,1,1,-;one\n", b"12,2,1,-;user\n", b"4,3,1,-;\n", b"nonsense", b"4,4,1,-;two\n")
    lines, lost = played(monkeypatch, tmp_path, *records)
    assert [line.text for line in lines] == ["one", "two"] and lost == 0


def test_the_first_record_is_no_gap_whatever_its_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert played(monkeypatch, tmp_path, b"4,5000,1,-;one\n") == ([Line("kernel", "one", 5000)], 0)


def test_nothing_is_left_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    played(monkeypatch, tmp_path, b"4,1,1,-;one\n")
    with pytest.raises(OSError, match="broken"):
        played(monkeypatch, tmp_path, OSError("broken"))
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_a_log_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = KernelLog(tmp_path / "none").supported()
    assert str(tmp_path / "none") in reason and "dmesg_restrict" in reason


def test_the_journal_stands_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    journal = tmp_path / "journalctl"
    journal.write_text(f"#!/bin/sh\necho '{XID}'\necho \"$@\"\n")
    journal.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    log = KernelLog(tmp_path / "none")
    assert log.supported() == "" and "journal" in log.blind_spots()[0]
    first, second = log.watch()
    assert first == Line("kernel", XID) and "--follow" in second.text and "--lines=0" in second.text


# --- the real one ---


def writable() -> str:
    """Why the real log cannot be used, or nothing."""
    if not os.access(KMSG, os.R_OK | os.W_OK):
        return "/dev/kmsg cannot be read and written here"
    try:
        with open(KMSG, "wb", buffering=0) as stream:
            stream.write(b"<4>rerail test\n")
    except OSError as error:
        return f"/dev/kmsg cannot be written: {error}"
    return ""


WHY_NOT = writable()
REAL = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def say(text: str) -> None:
    with open(KMSG, "wb", buffering=0) as stream:
        stream.write(f"<4>{text}\n".encode())


@REAL
def test_a_line_that_was_written_comes_back_once_and_only_if_it_is_allowed() -> None:
    mark = uuid.uuid4().hex
    say(f"rerail test {mark} not marked")
    say(f"{INJECTED}{mark} first")
    say(f"{INJECTED}{mark} last")
    seen = []
    for line in KernelLog(injected=True, from_start=True).watch():
        seen += [line.text] if mark in line.text else []
        if line.text == f"{mark} last":
            break
    assert seen == [f"{mark} first", f"{mark} last"]


@REAL
def test_only_what_comes_from_now_on_is_given_and_at_once() -> None:
    mark, found = uuid.uuid4().hex, queue.SimpleQueue[str]()
    say(f"{INJECTED}{mark} before")

    def watch() -> None:
        for line in KernelLog(injected=True).watch():
            if mark in line.text:
                found.put(line.text)
            if line.text.endswith("end"):
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    for number in range(50):  # it may not have begun to watch
        say(f"{INJECTED}{mark} {number}")
        try:
            first = found.get(timeout=0.2)
            break
        except queue.Empty:
            continue
    else:
        pytest.fail("no line came within ten seconds")
    assert "before" not in first
    began = time.monotonic()
    say(f"{INJECTED}{mark} end")
    while not found.get(timeout=10).endswith("end"):
        pass
    took = time.monotonic() - began
    thread.join(timeout=10)
    assert not thread.is_alive() and took < 3.0, f"a line took {took:.2f} s"


# --- after a panic ---


def test_last_words_are_read_newest_file_first(tmp_path: Path) -> None:
    folder = tmp_path / "sys/fs/pstore"
    folder.mkdir(parents=True)
    for age, name in ((100, "dmesg-efi-1"), (50, "dmesg-efi-2")):
        (folder / name).write_text(f"Panic#1 of {name}\n<4>[  12.5] {XID}\n\n")
        os.utime(folder / name, (time.time() - age,) * 2)
    (folder / "console-ramoops").write_text("not this one\n")
    texts = [line.text for line in last_words(tmp_path)]
    assert texts == ["Panic#1 of dmesg-efi-2", f"<4>[  12.5] {XID}", "Panic#1 of dmesg-efi-1", f"<4>[  12.5] {XID}"]


def test_last_words_that_systemd_has_put_away_are_found_and_large_ones_are_cut(tmp_path: Path) -> None:
    folder = tmp_path / "var/lib/systemd/pstore/1767322/000"
    folder.mkdir(parents=True)
    (folder / "dmesg.txt").write_bytes(b"x" * (2 * PSTORE_LIMIT) + b"\n\xff" + XID.encode() + b"\n")
    texts = [line.text for line in last_words(tmp_path)]
    assert texts[-1].endswith(XID) and sum(map(len, texts)) <= PSTORE_LIMIT


def test_no_last_words_are_no_error(tmp_path: Path) -> None:
    assert last_words(tmp_path) == []
    folder = tmp_path / "sys/fs/pstore"
    folder.mkdir(parents=True)
    (folder / "dmesg-gone").symlink_to("nowhere")
    assert last_words(tmp_path) == []


@pytest.mark.parametrize(
    ("line", "pid"),
    [
        ("Out of memory: Killed process 40012 (python3) total-vm:98811200kB", 40012),
        ("Out of memory: Kill process 40012 (python3) score 911 or sacrifice child", 40012),
        ("Memory cgroup out of memory: Killed process 77120 (python) total-vm:1kB, UID:1000 pgtables:8kB", 77120),
        ("oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/job_8812,task=python,pid=77120,uid=1000", 77120),
        ("python3 invoked oom-killer: gfp_mask=0x100cca(GFP_HIGHUSER_MOVABLE), order=0", 0),
        (XID, 0),
    ],
)  # fmt: skip
def test_whom_the_out_of_memory_killer_has_ended(
    line: str, pid: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = tmp_path / "pid"
    monkeypatch.setattr(kernel_log, "NAMESPACE", namespace)
    assert victim_of(line) == 0, "not known"
    namespace.symlink_to(kernel_log.FIRST_NAMESPACE)
    assert victim_of(line) == pid
    namespace.unlink()
    namespace.symlink_to("pid:[4026532201]")
    assert victim_of(line) == 0, "in a container the kernel's numbers are not ours"
