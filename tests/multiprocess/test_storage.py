"""A place for checkpoints that breaks under a running job: full, read-only, hung, gone. The training never waits for it.

Real faults of a real file system: an ext4 image on a loop device that is filled, mounted read-only, frozen and taken away.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import Run, Start
from test_checkpoints import committed, kill_everything, later_losses

SCRIPT = Path(__file__).with_name("saved.py")
STEPS = 300
IMAGE_MB = 24
ENV = {"RERAIL_STORAGE_HANG_S": "2"}

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount an image"),
    pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="mkfs.ext4 is not installed"),
    pytest.mark.skipif(shutil.which("fsfreeze") is None, reason="fsfreeze is not installed"),
    pytest.mark.timeout(400),
]


def sh(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise OSError(f"{command[0]} failed: {done.stderr.strip()}")


class Disk:
    """A mounted image that can be broken in several ways."""

    def __init__(self, folder: Path) -> None:
        self.at, self._image = folder / "disk", folder / "image"
        self.at.mkdir()
        self._image.touch()
        os.truncate(self._image, IMAGE_MB << 20)
        sh("mkfs.ext4", "-q", "-m", "0", self._image)
        sh("mount", "-o", "loop", self._image, self.at)

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        filler = self.at / "filler"
        with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        try:
            yield
        finally:
            filler.unlink()

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        for _ in range(300):  # as long as a save has a file open there, it is refused
            with contextlib.suppress(OSError):
                sh("mount", "-o", "remount,ro", self.at)
                break
            time.sleep(0.1)
        try:
            yield
        finally:
            sh("mount", "-o", "remount,rw", self.at)

    @contextlib.contextmanager
    def hung(self) -> Iterator[None]:
        sh("fsfreeze", "-f", self.at)
        try:
            yield
        finally:
            self.thaw()

    @contextlib.contextmanager
    def gone(self) -> Iterator[None]:
        sh("umount", "--lazy", self.at)
        try:
            yield
        finally:
            sh("mount", "-o", "loop", self._image, self.at)

    def thaw(self) -> None:
        with contextlib.suppress(OSError):  # it is not frozen
            sh("fsfreeze", "-u", self.at)

    def close(self) -> None:
        self.thaw()
        with contextlib.suppress(OSError):
            sh("umount", "--lazy", self.at)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    try:
        made = Disk(tmp_path)
    except OSError as error:
        pytest.skip(f"no image can be mounted here: {error}")
    yield made
    made.close()


def places_told(run: Run) -> list[str]:
    """What the journal says about places, in order."""
    return [one.source for one in run.records("signal") if one.source.startswith("checkpoint.tier_")]


def saved_to(run: Run, root: Path) -> int:
    return sum(f"saved to {root} in" in line for line in run.output)


def survive(run: Run, fault: contextlib.AbstractContextManager[None], first: Path, second: Path) -> None:
    """While the fault lasts, saves go to the second place and steps are taken; afterwards the first is used again."""
    outs, backs = places_told(run).count("checkpoint.tier_out"), places_told(run).count("checkpoint.tier_back")
    with fault:
        there = saved_to(run, second)
        run.until(lambda: saved_to(run, second) > there + 1, "saves to the second place")
        run.reach(max(run.steps.values()) + 10)
        assert places_told(run).count("checkpoint.tier_out") == outs + 1, run.told("one word about the first place")
    run.until(lambda: places_told(run).count("checkpoint.tier_back") > backs, "the first place to be used again")
    there = saved_to(run, first)
    run.until(lambda: saved_to(run, first) > there, "a save to the first place")


def test_a_first_place_that_fills_up_turns_read_only_hangs_and_vanishes_costs_no_step(
    start: Start, tmp_path: Path, disk: Disk
) -> None:
    quiet = start("fsdp", str(STEPS), str(tmp_path / "quiet"), "--every", "100", ranks=2, script=SCRIPT)
    quiet.finish()
    first, second = disk.at / "run", tmp_path / "second"
    args = ("fsdp", str(STEPS), f"{first},{second}")
    run = start(*args, "--every", "4", "--sleep", "0.4", ranks=2, script=SCRIPT, env=ENV)
    run.until(lambda: saved_to(run, first), "a first save")
    faults: list[Callable[[], contextlib.AbstractContextManager[None]]] = [
        disk.full,
        disk.read_only,
        disk.hung,
        disk.gone,
    ]
    for fault in faults:
        survive(run, fault(), first, second)
    words = "\n".join(line for line in run.output if "for checkpoints is out" in line)
    for wanted in ("free space there", "mount it for writing", "its server or disk", "mount it, or put"):
        assert wanted in words, f"{wanted!r} is not in: {words}"
    assert not any("incident" in line for line in run.output), run.told("no incident")
    kill_everything(run)
    newest = max(committed(first)[-1:] + committed(second)[-1:])

    again = start(*args, "--every", "100", ranks=2, script=SCRIPT, env=ENV)
    again.finish()
    assert min(step for _, step in again.losses) == newest[1] + 1, again.told("to go on behind the newest save")
    assert again.digests == quiet.digests
    assert again.losses == later_losses(quiet, newest[1])
    assert {**run.losses, **again.losses} == quiet.losses, "a step was lost, or is another"


def test_a_job_starts_trains_and_ends_beside_a_place_that_hangs_all_the_while(
    start: Start, tmp_path: Path, disk: Disk
) -> None:
    first, second = disk.at / "run", tmp_path / "second"
    first.mkdir()
    with disk.hung():
        run = start("ddp", "40", f"{first},{second}", "--sleep", "0.1", ranks=2, script=SCRIPT, env=ENV)
        run.finish()
        assert committed(second)[-1] == (1, 40), run.told("the last step in the second place")
        assert any(f"{first} has not answered" in line for line in run.output), run.told("a word at the start")
    assert committed(first) == []
    again = start("ddp", "44", f"{first},{second}", ranks=2, script=SCRIPT, env=ENV)
    again.finish()
    assert min(step for _, step in again.losses) == 41 and committed(first)[-1] == (2, 44)


@pytest.mark.slow
def test_where_the_training_waits_for_each_save_it_waits_for_a_hung_place_only_once(
    start: Start, tmp_path: Path, disk: Disk
) -> None:
    first, second = disk.at / "run", tmp_path / "second"
    env = {**ENV, "RERAIL_SNAPSHOT_MEMORY": "0"}
    run = start("ddp", "60", f"{first},{second}", "--sleep", "0.1", ranks=2, script=SCRIPT, env=env)
    run.until(lambda: saved_to(run, first), "a first save")
    with disk.hung():
        run.finish()
    assert committed(second)[-1] == (1, 60), run.told("the last step in the second place")
    assert not any("incident" in line for line in run.output), run.told("no incident")
