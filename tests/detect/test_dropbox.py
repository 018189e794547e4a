"""Faults dropped as files, in a real directory."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rerail.config import Settings
from rerail.detect.detector import Told
from rerail.detect.dropbox import FILES, Dropbox
from rerail.detect.monitor import Found, Monitor
from rerail.faults.catalog import load_catalog

SETTINGS = Settings(fault_senders="dcgm")
FAULT = {"sender": "dcgm", "code": "gpu.xid.79", "subject": "gpu3", "text": "fell off"}


def drop(folder: Path, name: str, body: object, mode: int = 0o644) -> Path:
    path = folder / name
    path.write_bytes(body if isinstance(body, bytes) else json.dumps(body).encode())
    path.chmod(mode)
    return path


def box(folder: Path, **changes: Any) -> Dropbox:
    return Dropbox(SETTINGS, str(folder), **{"settle_s": 0.0, **changes})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_files_are_told_once_and_removed(tmp_path: Path) -> None:
    dropbox = box(tmp_path)
    os.utime(drop(tmp_path, "a.json", FAULT), (1e9, 1e9))
    drop(tmp_path, "b.json", [{**FAULT, "over": True, "at": 5.0}, {"sender": "dcgm", "code": "GPU-XID-79"}])
    drop(tmp_path, "c.json.part", FAULT)
    drop(tmp_path, "readme", b"")
    told = list(dropbox.look())
    assert told[0] == Told("gpu.xid.79", "gpu3", "fell off", False, "dcgm", 1e9), "without a time, that of the file"
    assert [(one.code, one.over) for one in told[1:]] == [("gpu.xid.79", True), ("gpu.xid.79", False)]
    assert told[1].at == 5.0 and abs(told[2].at - time.time()) < 60
    assert names(tmp_path) == ["c.json.part", "readme"] and list(dropbox.look()) == []


def test_what_the_user_has_switched_off_is_removed_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drop(tmp_path, "a.json", [{**FAULT, "code": "gpu.xid.63"}, FAULT])
    settings = Settings(fault_senders="dcgm", fault_levels="gpu.xid.63=off")
    told = list(Dropbox(settings, str(tmp_path), settle_s=0.0).look())
    assert [one.code for one in told] == ["gpu.xid.79"] and names(tmp_path) == [] and capsys.readouterr().err == ""


def test_a_renamed_file_is_seen_while_watching_and_becomes_a_finding(tmp_path: Path) -> None:
    found: list[Found] = []
    seen = threading.Event()

    def tell(one: Found) -> None:
        found.append(one)
        seen.set()

    dropbox = box(tmp_path, every_s=0.02)
    Monitor(load_catalog(), tell).run([], [dropbox])
    drop(tmp_path, "a.tmp", {**FAULT, "at": 5.0}).rename(tmp_path / "a.json")
    assert seen.wait(20)
    assert found == [
        Found(code="gpu.xid.79", detector="reported by dcgm", subject="gpu3", text="fell off", at=5.0),
    ]


def test_a_file_that_was_just_written_is_given_a_moment(tmp_path: Path) -> None:
    path = drop(tmp_path, "a.json", b'{"sender": "dc')
    dropbox = box(tmp_path, settle_s=3600.0)
    assert list(dropbox.look()) == [] and names(tmp_path) == ["a.json"]
    drop(tmp_path, "a.json", FAULT)
    os.utime(path, (1e9, 1e9))
    assert len(list(dropbox.look())) == 1 and names(tmp_path) == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        ({**FAULT, "sender": "mallory"}, "fault_senders"),
        ({**FAULT, "code": "gpu.xid.79x"}, "did you mean gpu.xid.79?"),
        ({**FAULT, "node": "elsewhere"}, "not a node"),
        ({**FAULT, "text": 1}, "Expected `str`"),
        ([FAULT] * 101, "at most 100"),
        (b" " * 70_000, "64 KiB"),
    ],
)
def test_what_cannot_be_taken_is_told_of_once_and_moved_aside(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], body: object, words: str
) -> None:
    drop(tmp_path, "a.json", body)
    dropbox = box(tmp_path)
    assert [*dropbox.look(), *dropbox.look()] == []
    assert names(tmp_path) == ["a.json.bad"]
    said = capfd.readouterr().err
    assert words in said and said.count("\n") == 1
    drop(tmp_path, "a.json", FAULT)
    assert len(list(dropbox.look())) == 1, "a better file of the same name is taken"


def test_links_pipes_and_folders_are_not_followed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "drop"
    folder.mkdir()
    target = drop(tmp_path, "outside.json", FAULT)
    (folder / "link.json").symlink_to(target)
    (folder / "dangling.json").symlink_to(tmp_path / "nowhere")
    os.link(target, folder / "hard.json")
    os.mkfifo(folder / "pipe.json")
    (folder / "folder.json").mkdir()
    drop(folder, "open.json", FAULT, mode=0o666)
    dropbox = box(folder)
    assert [*dropbox.look(), *dropbox.look()] == []
    assert json.loads(target.read_text()) == FAULT and all(name.endswith(".json.bad") for name in names(folder))
    assert capfd.readouterr().err.count("is not taken") == 6


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_other_users_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    os.chown(drop(tmp_path, "a.json", FAULT), 12345, 12345)
    assert list(box(tmp_path).look()) == [] and names(tmp_path) == ["a.json.bad"]
    assert "user 12345" in capfd.readouterr().err


def test_what_cannot_be_moved_is_told_of_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    drop(tmp_path, "a.json", b"{")
    (tmp_path / "a.json.bad").mkdir()
    (tmp_path / "a.json.bad" / "full").touch()
    dropbox = box(tmp_path)
    assert [*dropbox.look(), *dropbox.look(), *dropbox.look()] == []
    assert capfd.readouterr().err.count("\n") == 1


def test_what_a_killed_monitor_had_begun_is_told_by_the_next(tmp_path: Path) -> None:
    drop(tmp_path, "a.json", FAULT)
    begun = box(tmp_path).look()
    next(begun)
    assert names(tmp_path) == ["a.json.taken"]
    drop(tmp_path, "a.json", {**FAULT, "subject": "gpu4"})
    assert [one.subject for one in box(tmp_path).look()] == ["gpu3", "gpu4"] and names(tmp_path) == []
    begun.close()


def test_two_monitors_do_not_take_the_same_file(tmp_path: Path) -> None:
    one, other = box(tmp_path), box(tmp_path)
    assert [*one.look(), *other.look()] == []
    for number in range(50):
        drop(tmp_path, f"{number}.json", {**FAULT, "subject": str(number)})
    told: list[str] = []
    threads = [
        threading.Thread(target=lambda b=b: told.extend(t.subject for t in b.look()))
        for b in (one, other)  # type: ignore[misc]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(told, key=int) == [str(number) for number in range(50)]


def test_one_look_is_bounded(tmp_path: Path) -> None:
    for number in range(FILES + 5):
        drop(tmp_path, f"{number}.json", FAULT)
    dropbox = box(tmp_path)
    assert (len(list(dropbox.look())), len(list(dropbox.look()))) == (FILES, 5)


def test_where_nothing_can_be_dropped_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RERAIL_DROP_DIR", raising=False)
    assert "RERAIL_DROP_DIR" in Dropbox(SETTINGS).supported()
    assert "fault_senders" in Dropbox(Settings(), str(tmp_path)).supported()
    assert "no directory" in box(tmp_path / "none").supported()
    monkeypatch.setenv("RERAIL_DROP_DIR", str(tmp_path))
    assert Dropbox(SETTINGS).supported() == "" and Dropbox(SETTINGS).blind_spots() == []


def test_a_directory_that_goes_and_comes_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "drop"
    dropbox = box(folder)
    assert [*dropbox.look(), *dropbox.look()] == []
    assert capfd.readouterr().err.count("cannot be opened") == 1
    folder.mkdir()
    drop(folder, "a.json", FAULT)
    assert len(list(dropbox.look())) == 1
