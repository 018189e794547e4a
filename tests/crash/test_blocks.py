"""A disk whose blocks fail under a mounted file system: writes that are refused, reads that give an error.

Refused writes: the image lies on a memory file system that has less room than the image promises, so that the loop device
fails wherever the room ends. Failing reads: the image is cut short under a loop device that reads it directly. ext4.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash_helpers import COLUMNS, NEW, OLD, Crash, check
from test_power import mounted, sh
from two_ranks import start

from rerail.checkpoint import names
from rerail.checkpoint.files import FileTier
from rerail.checkpoint.names import StepId

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount an image"),
    pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="mkfs.ext4 is not installed"),
    pytest.mark.timeout(900),
]
IMAGE_MB, ROOM_MB = 96, 48
STEP_KB = 384
"""From one try to the next, so much more of the save reaches the disk."""


@pytest.fixture(autouse=True, scope="module")
def may_mount(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("may-mount")
    try:
        formatted(folder / "image")
        with mounted(folder / "at", "-t", "ext4", "-o", "loop", folder / "image"):
            pass
    except OSError as error:
        pytest.skip(f"no image can be mounted here: {error}")


def formatted(image: Path, *options: str) -> None:
    image.touch()
    os.truncate(image, IMAGE_MB << 20)
    sh("mkfs.ext4", "-q", "-b", "4096", *options, image)


def test_writes_that_the_disk_refuses_anywhere_in_a_save(crash: Crash, tmp_path: Path) -> None:
    seen: Counter[int] = Counter()
    with mounted(tmp_path / "memory", "-t", "tmpfs", "-o", f"size={ROOM_MB}m", "none") as memory:
        pristine = tmp_path / "pristine"
        formatted(pristine)
        with mounted(tmp_path / "disk", "-t", "ext4", "-o", "loop", pristine) as disk:
            assert crash.save(str(disk / "root"), OLD).saved == {OLD}
        for room_kb in range(0, 8 << 10, STEP_KB):
            image, filler = memory / "image", memory / "filler"
            sh("cp", "--sparse=always", pristine, image)
            with mounted(tmp_path / "disk", "-t", "ext4", "-o", "loop", image) as disk:
                free = os.statvfs(memory)
                with open(filler, "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_bsize - (room_kb << 10))
                ended = crash.save(str(disk / "root"), NEW)
            filler.unlink()  # the disk is well again, and the machine is started anew
            with mounted(tmp_path / "disk", "-t", "ext4", "-o", "loop", image) as disk:
                seen[check(ended, disk / "root", what=f"block errors after {room_kb} KB")] += 1
                assert crash.save(str(disk / "root"), NEW).saved == {NEW}, "the next save fails as well"
            image.unlink()
    assert seen[OLD] > 3 and seen[NEW] > 3, f"the errors did not hit the save: {seen}"
    print(
        f"\nblock errors in {sum(seen.values())} saves: {seen[OLD]} times the old state, {seen[NEW]} times the new one"
    )


@contextlib.contextmanager
def looped(image: Path) -> Iterator[str]:
    command = ["losetup", "--direct-io=on", "--find", "--show", str(image)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no loop device here: {done.stderr.strip()}")
    try:
        yield done.stdout.strip()
    finally:
        sh("losetup", "--detach", done.stdout.strip())


def test_reads_that_fail_make_the_older_step_count(crash: Crash, tmp_path: Path) -> None:
    image = tmp_path / "image"
    formatted(image, "-O", "^has_journal")  # nothing but files lies behind the first blocks
    with mounted(tmp_path / "disk", "-t", "ext4", "-o", "loop", image) as disk:
        root = disk / "root"
        # the step that is to be lost is written last, so that it lies behind the other one
        assert crash.save(f"{root}", OLD).saved == {OLD}
        shutil.copytree(root, tmp_path / "kept")
        assert crash.save(f"{root}", NEW).saved == {NEW}
        if not (root / StepId(1, OLD, 0).folder).exists():  # retention removed it
            shutil.copytree(tmp_path / "kept" / StepId(1, OLD, 0).folder, root / StepId(1, OLD, 0).folder)
        shard = (root / StepId(1, NEW, 0).folder / names.shard_name(0, 0)).read_bytes()
        old = (root / StepId(1, OLD, 0).folder / names.shard_name(0, 0)).read_bytes()
    data = image.read_bytes()
    lost, kept = data.find(shard[-8192:-4096]), data.find(old[-8192:-4096])
    assert lost > 0 and kept > 0, "the shards are not to be found in the image"
    if lost < kept:
        pytest.skip("the file system has put the newer step before the older one")
    with looped(image) as device:
        os.truncate(image, max(lost // 4096 * 4096, kept + 8192))
        with mounted(tmp_path / "disk", "-t", "ext4", "-o", "ro", device) as disk:
            path = disk / "root" / StepId(1, NEW, 0).folder / names.shard_name(0, 0)
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                path.read_bytes()
            loaded = start([FileTier(disk / "root")], COLUMNS)
    assert loaded.version == OLD
    assert "cannot be read" in loaded.reasons[0], loaded.reasons
