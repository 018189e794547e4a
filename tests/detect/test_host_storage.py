from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from test_host_memory import lay, values

from rerail.detect import host_services, host_storage
from rerail.detect.host_smart import Smart, smart_values
from rerail.detect.host_storage import OK, Drives, Mounts, Probe, Space, mounts

MOUNTINFO = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 {root_options}
23 22 0:45 / /mnt/data\\040sets rw,relatime shared:2 - nfs4 filer:/data rw,vers=4.2
24 22 0:46 / /scratch rw - fuse.juicefs JuiceFS rw,user_id=0
25 22 0:47 / /sys/fs/fuse/connections rw - fusectl fusectl rw
26 22 7:0 / /snap ro - squashfs /dev/loop0 ro
this line is rubbish
"""


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Lets go of whatever hangs when the test is over."""
    event = threading.Event()
    yield event
    event.set()


def machine(root: Path, root_options: str = "rw,errors=remount-ro") -> None:
    lay(root, {"proc/self/mountinfo": MOUNTINFO.format(root_options=root_options)})
    for folder in ("mnt/data sets", "scratch"):
        (root / folder).mkdir(parents=True, exist_ok=True)


def hanging(gate: threading.Event, path: Path, real: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
    """A `stat` that does not come back from one path until the gate opens."""

    def stat(given: str, *arguments: object, **more: object) -> os.stat_result:
        if str(given) == str(path):
            gate.wait(30)
        return real(given, *arguments, **more)

    return stat


def eventually(look: Callable[[], bool]) -> bool:
    until = time.monotonic() + 10
    while not look():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def test_mountinfo_is_read_with_its_escapes_and_rubbish_is_left_out() -> None:
    found = mounts(MOUNTINFO.format(root_options="rw"))
    assert [mount.point for mount in found] == ["/", "/mnt/data sets", "/scratch", "/sys/fs/fuse/connections", "/snap"]
    assert [mount.point for mount in found if mount.remote] == ["/mnt/data sets", "/scratch"]


def test_mounts_that_are_there_and_answer(tmp_path: Path) -> None:
    machine(tmp_path)
    found = Mounts(tmp_path, expected=["/scratch", "/lustre"], wait_s=10).check()
    assert values(found, "mount.missing") == {"/scratch": 0, "/lustre": 1}
    assert values(found, "mount.unreachable_s") == {"/mnt/data sets": 0.0, "/scratch": 0.0}
    assert values(found, "mount.error") == {"/mnt/data sets": OK, "/scratch": OK}
    assert values(found, "mount.readonly") == {"/": 0, "/mnt/data sets": 0, "/scratch": 0}


def test_only_a_file_system_that_was_writable_has_become_read_only(tmp_path: Path) -> None:
    machine(tmp_path)
    detector = Mounts(tmp_path)
    detector.check()
    machine(tmp_path, "ro,errors=remount-ro")
    assert values(detector.check(), "mount.readonly")["/"] == 1
    assert "/snap" not in values(detector.check(), "mount.readonly")
    assert "/" not in values(Mounts(tmp_path).check(), "mount.readonly")


def test_a_mount_that_hangs_holds_up_neither_the_detector_nor_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    machine(tmp_path)
    monkeypatch.setattr(host_storage.os, "stat", hanging(gate, tmp_path / "scratch", os.stat))
    detector = Mounts(tmp_path, wait_s=0.05)
    before = threading.active_count()
    began = time.monotonic()
    looks = [detector.check() for _ in range(5)]
    assert time.monotonic() - began < 5
    hung = [values(look, "mount.unreachable_s")["/scratch"] for look in looks]
    assert hung == sorted(hung) and 0 < float(hung[0]) < float(hung[-1])
    assert all("/scratch" not in values(look, "mount.error") for look in looks)
    assert eventually(lambda: values(detector.check(), "mount.unreachable_s")["/mnt/data sets"] == 0.0)
    assert threading.active_count() <= before + 2  # one that hangs, one that may just be answering
    gate.set()
    assert eventually(lambda: values(detector.check(), "mount.unreachable_s")["/scratch"] == 0.0)


def test_a_mount_that_answers_with_an_error_is_told_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tmp_path)
    real = os.statvfs

    def stale(path: str) -> os.statvfs_result:
        if str(path).endswith("scratch"):
            raise OSError(107, "Transport endpoint is not connected")
        if str(path).endswith("sets"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(host_storage.os, "statvfs", stale)
    found = Mounts(tmp_path, wait_s=10).check()
    assert values(found, "mount.error") == {"/scratch": "ENOTCONN", "/mnt/data sets": OK}


def test_a_fuse_queue_is_told_by_its_mount(tmp_path: Path) -> None:
    machine(tmp_path)
    lay(tmp_path, {"sys/fs/fuse/connections/46/waiting": "12", "sys/fs/fuse/connections/46/max_background": "12"})
    lay(tmp_path, {"sys/fs/fuse/connections/99/waiting": "x", "sys/fs/fuse/connections/99/max_background": "12"})
    assert values(Mounts(tmp_path).check(), "storage.fuse.waiting_share") == {"/scratch": 1.0}


def test_without_mountinfo_there_is_a_reason(tmp_path: Path) -> None:
    assert Mounts(tmp_path).supported() and Mounts(tmp_path).check() == []


def test_a_pipe_that_nobody_writes_to_hangs_only_its_probe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reads: list[int] = []

    def read() -> str:
        reads.append(1)
        return (tmp_path / "pipe").read_text()

    probe = Probe(read)
    probe.start()
    assert eventually(lambda: reads == [1])
    assert probe.hung_s(time.monotonic() + 0.05) > 0
    probe.start()  # still the same one
    with (tmp_path / "pipe").open("w") as pipe:
        pipe.write("at last")
    assert eventually(lambda: probe.hung_s(0.0) == 0.0)
    assert probe.result == "at last" and reads == [1]


def test_space_of_folders_that_are_there_or_will_be(tmp_path: Path) -> None:
    for folder in ("dev/shm", "tmp", "run"):
        (tmp_path / folder).mkdir(parents=True)
    found = Space(tmp_path, directories=["/run/not/yet"], wait_s=10).check()
    assert values(found, "mount.error") == {"/run/not/yet": OK}
    shares = values(found, "storage.space.free_share") | values(found, "storage.shm.free_share")
    assert "/run/not/yet" in shares and all(0 <= float(value) <= 1 for value in shares.values())


def test_space_counts_what_users_may_still_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.statvfs_result((4096, 4096, 1000, 50, 10, 2000, 100, 0, 0, 255))
    monkeypatch.setattr(host_storage.os, "statvfs", lambda _: full)
    found = Space(tmp_path, wait_s=10).check()
    assert values(found, "storage.shm.free_share") == {"/dev/shm": 0.01}
    assert values(found, "storage.space.free_share") == {"/tmp": 0.01}
    assert values(found, "storage.inodes.free_share") == {"/dev/shm": 0.0, "/tmp": 0.0}


def test_a_folder_on_a_dead_server_is_told_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    (tmp_path / "tmp").mkdir()
    real = os.statvfs

    def statvfs(path: Path) -> os.statvfs_result:
        if str(path).endswith("ckpt"):
            gate.wait(30)
        return real(path)

    monkeypatch.setattr(host_storage.os, "statvfs", statvfs)
    space = Space(tmp_path, directories=["/ckpt"])
    assert eventually(lambda: "/tmp" in values(space.check(), "storage.space.free_share"))
    found = space.check()
    assert float(values(found, "mount.unreachable_s")["/ckpt"]) > 0
    assert "/ckpt" not in values(found, "storage.space.free_share")


def test_drives_before_and_after(tmp_path: Path) -> None:
    lay(tmp_path, {
        "sys/class/nvme/nvme0/state": "live", "sys/class/nvme/nvme1/state": "live", "sys/class/nvme/nvme0/serial": "S1",
        "sys/block/md0/md/degraded": "0", "sys/block/sda/device/state": "running", "sys/block/loop0/stat": "1 " * 11,
        "sys/fs/ext4/sda1/errors_count": "0", "sys/fs/ext4/features/x": "",
    })  # fmt: skip
    drives = Drives(tmp_path, expected_nvme=2)
    found = drives.check()
    assert values(found, "storage.nvme.state") == {"nvme0": "live", "nvme1": "live"}
    assert values(found, "storage.nvme.missing") == {"nvme": 0}
    lay(tmp_path, {
        "sys/class/nvme/nvme0/state": "dead", "sys/block/md0/md/degraded": "1", "sys/block/sda/device/state": "offline",
        "sys/fs/ext4/sda1/errors_count": "2",
    })  # fmt: skip
    shutil.rmtree(tmp_path / "sys/class/nvme/nvme1")
    found = drives.check()
    assert values(found, "storage.nvme.state") == {"nvme0": "dead"}
    assert values(found, "storage.nvme.gone") == {"nvme0": 0, "nvme1": 1}
    assert values(found, "storage.nvme.missing") == {"nvme": 1}
    assert values(found, "storage.raid.degraded") == {"md0": 1}
    assert values(found, "storage.scsi.state") == {"sda": "offline"}
    assert values(found, "storage.ext4.error_count") == {"sda1": 2}


def test_a_drive_is_stuck_when_requests_are_under_way_and_none_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(host_storage.time, "monotonic", lambda: now[0])
    drives = Drives(tmp_path)

    def look(stat: str) -> tuple[object, object]:
        lay(tmp_path, {"sys/block/nvme0n1/stat": stat})
        found = drives.check()
        now[0] += 15
        return values(found, "storage.disk.stuck_s")["nvme0n1"], values(found, "storage.disk.latency_ms").get("nvme0n1")

    assert look("100 0 0 50 100 0 0 50 3 0 0") == (0.0, None)
    assert look("150 0 0 150 150 0 0 150 3 0 0") == (0.0, 2.0)
    assert look("150 0 0 150 150 0 0 150 3 0 0") == (15.0, None)
    assert look("150 0 0 150 150 0 0 150 3 0 0") == (30.0, None)
    assert look("151 0 0 150 150 0 0 150 0 0 0") == (0.0, None)
    assert look("151 0 0 150 150 0 0 150 1 0 0") == (0.0, None)  # idle until now: this one has just begun
    lay(tmp_path, {"sys/block/nvme0n1/stat": "1 2 rubbish"})
    assert values(drives.check(), "storage.disk.stuck_s") == {}


NVME = {
    "critical_warning": 4,
    "avail_spare": 5,
    "spare_thresh": 10,
    "percent_used": 101,
    "media_errors": "12",
    "temperature": 300,
}
SMARTCTL = {
    "smart_status": {"passed": False},
    "ata_smart_attributes": {
        "table": [{"id": 197, "raw": {"value": 8}}, {"id": 5, "raw": {"value": 3}}, {"id": 9}, "x"]
    },
}


def test_both_tools_are_understood_and_garbage_is_not() -> None:
    assert smart_values(json.dumps(NVME)) == {
        "critical_warning": 4, "spare_margin": -5, "percentage_used": 101, "media_errors": 12,
    }  # fmt: skip
    assert smart_values(json.dumps({"critical_warning": {"value": 1, "ro": 0}})) == {"critical_warning": 1}
    log = {
        "critical_warning": 0,
        "available_spare": 100,
        "available_spare_threshold": 10,
        "percentage_used": 3,
        "media_errors": 0,
    }
    assert smart_values(json.dumps({"nvme_smart_health_information_log": log}))["spare_margin"] == 90
    assert smart_values(json.dumps(SMARTCTL)) == {"failing": 1, "pending_sectors": 8, "reallocated_sectors": 3}
    for text in ("", "not json", "[]", "3", '{"smart_status": 1, "ata_smart_attributes": {"table": 2}}'):
        assert smart_values(text) == {}


def test_one_drive_is_asked_at_a_look_and_each_seldom(tmp_path: Path) -> None:
    lay(tmp_path, {"sys/class/nvme/nvme0/state": "live", "sys/block/sda/stat": "", "sys/block/vda/stat": ""})
    asked: list[Sequence[str]] = []

    def run(command: Sequence[str], limit_s: float) -> str | None:
        asked.append(command)
        return json.dumps(NVME) if command[0] == "nvme" else None

    smart = Smart(tmp_path, run=run, which=lambda name: name)
    first, second, third = smart.check(), smart.check(), smart.check()
    assert [command[-1] for command in asked] == ["/dev/nvme0", "/dev/sda"]
    assert values(first, "storage.smart.media_errors") == {"nvme0": 12} and values(
        first, "storage.smart.unresponsive"
    ) == {"nvme0": 0}
    assert values(second, "storage.smart.unresponsive") == {"sda": 1}
    assert third == []
    assert "installed" in Smart(tmp_path, which=lambda _: None).supported()


def test_a_tool_that_takes_too_long_is_ended_and_one_that_is_missing_says_nothing() -> None:
    began = time.monotonic()
    assert host_services.run_tool([sys.executable, "-c", "import time; time.sleep(60)"], 0.2) is None
    assert time.monotonic() - began < 10
    assert host_services.run_tool(["/no/such/tool"], 1) == ""
    assert host_services.run_tool([sys.executable, "-c", "print('hello')"], 30) == "hello\n"
    assert eventually(lambda: not any(thread.name == "rerail-reap" for thread in threading.enumerate()))
