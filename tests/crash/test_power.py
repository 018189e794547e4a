"""The power goes at any instant of a save, or the disk is full: the old state or the new one is there, and the new one if it
was acknowledged.

A file system on a loop device holds in its image what has reached the disk, and nothing of what is only in memory. So the
image is copied at the instant in question, and what a start of the job would load from the copy is what it would load after
a power cut. ext4 and xfs.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crash_helpers import COLUMNS, NEW, OLD, Crash, Ended, check
from two_ranks import start

from rerail.checkpoint.files import FileTier

pytestmark = pytest.mark.timeout(900)

INSTANTS = "fsync,pwrite64,link,rename,mkdir,fallocate,ftruncate,unlink,unlinkat"
"""Between any two of these calls the power goes once."""
IMAGE_MB = {"ext4": 64, "xfs": 320}
OPTIONS = {"ext4": "loop,commit=300", "xfs": "loop,nouuid"}
"""Nothing is to be written on the way by the clock: an image is copied in a moment, but not in an instant."""


def sh(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{command[0]} failed: {done.stderr.strip()}")


@contextlib.contextmanager
def mounted(at: Path, *arguments: object) -> Iterator[Path]:
    at.mkdir(exist_ok=True)
    sh("mount", *arguments, at)
    try:
        yield at
    finally:
        try:
            sh("umount", at)
        except OSError:
            sh("umount", "--lazy", at)  # a process that failed to end must not keep the machine from being cleaned up


class Machine:
    """A disk that can lose its power: an image that holds the old state."""

    def __init__(self, kind: str, crash: Crash) -> None:
        self.kind, self.crash, self.folder = kind, crash, crash.folder / kind
        self.folder.mkdir()
        self.image, self.copy = self.folder / "disk", self.folder / "after"
        self._pristine = self.folder / "pristine"
        self._pristine.touch()
        os.truncate(self._pristine, IMAGE_MB[kind] << 20)
        sh(f"mkfs.{kind}", "-q", self._pristine)
        with self._on(self._pristine) as root:
            ended = crash.save(str(root), OLD)
            assert ended.saved == {OLD}, ended.said

    @contextlib.contextmanager
    def _on(self, image: Path) -> Iterator[Path]:
        with mounted(self.folder / "mounted", "-t", self.kind, "-o", OPTIONS[self.kind], image) as at:
            yield at / "root"

    def cut(self, run: Callable[[str], Ended]) -> tuple[Ended, Path]:
        """Run on a fresh disk, and cut the power where it ends."""
        _copy(self._pristine, self.image)
        with self._on(self.image) as root:
            ended = run(str(root))
            if not self.copy.exists():
                _copy(self.image, self.copy)
        return ended, self.copy

    def loaded(self, ended: Ended, what: str) -> int:
        """What is loaded after the power is back."""
        try:
            with self._on(self.copy) as root:
                return check(ended, root, what=f"a power cut at {what} on {self.kind}")
        finally:
            self.copy.unlink()

    def loses(self, ended: Ended) -> bool:
        """Whether something acknowledged is gone after the power is back."""
        try:
            with self._on(self.copy) as root:
                return start([FileTier(root)], COLUMNS).version not in ended.saved
        finally:
            self.copy.unlink()


def _copy(source: Path, target: Path) -> None:
    sh("cp", "--sparse=always", source, target)


@pytest.fixture(scope="module", params=["ext4", "xfs"])
def machine(request: pytest.FixtureRequest, crash: Crash) -> Iterator[Machine]:
    kind: str = request.param
    if os.geteuid() != 0:
        pytest.skip("only root may mount an image")
    if shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"mkfs.{kind} is not installed")
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    try:
        made = Machine(kind, crash)
    except OSError as error:
        pytest.skip(f"no {kind} image can be mounted here: {error}")
    yield made
    shutil.rmtree(made.folder)


def test_power_cut_at_any_instant_of_a_save(machine: Machine) -> None:
    crash = machine.crash
    whole, _ = machine.cut(lambda root: crash.traced(root, NEW, INSTANTS))
    assert machine.loaded(whole, "the end") == NEW
    counted = Counter(found[1] for line in whole.calls if (found := re.match(r"\d+ +(\w+)\(", line)))
    assert {"fsync", "pwrite64", "link", "mkdir"} <= counted.keys(), f"a save made only these calls: {dict(counted)}"
    seen: Counter[int] = Counter()
    for call, times in sorted(counted.items()):
        for which in range(1, times + 1):
            rule = f"{call}:signal=KILL:when={which}"
            ended, _ = machine.cut(lambda root, call=call, rule=rule: crash.traced(root, NEW, call, rule))  # type: ignore[misc]
            seen[machine.loaded(ended, f"{call} {which} of {times}")] += 1
    assert seen[OLD] > 5 and seen[NEW] > 3, f"the cuts did not hit the save: {seen}"
    print(f"\n{machine.kind}: power cut {sum(seen.values())} times: {seen[OLD]} times old, {seen[NEW]} times new")


def test_power_cut_at_the_instant_of_the_acknowledgement(machine: Machine) -> None:
    for turn in range(5):
        ended, _ = machine.cut(lambda root: _until_told(machine, root))
        assert ended.saved == {NEW}, ended.said
        assert machine.loaded(ended, f"the acknowledgement, turn {turn}") == NEW


def _until_told(machine: Machine, root: str) -> Ended:
    with machine.crash.writer(root, NEW) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        said = process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        _copy(machine.image, machine.copy)
    return Ended({NEW} if said.startswith(f"saved {NEW} ") else set(), said, [])


def test_a_disk_that_does_not_sync_is_caught_by_this_very_test(machine: Machine) -> None:
    """The control: if syncs do nothing, what was acknowledged is lost, and the tests above would say so."""
    crash = machine.crash
    ended, _ = machine.cut(lambda root: crash.traced(root, NEW, "fsync", "fsync:retval=0:when=1+"))
    assert ended.saved == {NEW}, ended.said
    assert machine.loses(ended), "without syncs nothing was lost: the tests of power cuts prove nothing"


@pytest.mark.parametrize("spare", [-5000, -4096, -2048, -64, -12, -8, -4, 0, 4, 64])
def test_a_disk_that_is_full(crash: Crash, spare: int) -> None:
    """`spare`: KiB left when both states are on the disk; below nothing, the new one does not fit."""
    old, second = crash.with_old("full"), crash.folder / "elsewhere"
    shutil.rmtree(second, ignore_errors=True)
    used = sum(-(-path.stat().st_size // 4096) * 4 for path in old.rglob("*") if path.is_file())
    with contextlib.ExitStack() as stack:
        try:
            at = stack.enter_context(
                mounted(crash.folder / "small", "-t", "tmpfs", "-o", f"size={max(used, 2 * used + spare)}k", "none")
            )
        except OSError as error:
            pytest.skip(f"no tmpfs can be mounted here: {error}")
        root = at / "root"
        shutil.copytree(old, root)
        alone = crash.save(str(root), NEW)
        check(alone, root, what=f"a disk with {spare} KiB to spare")
        assert alone.saved == ({NEW} if spare >= 0 else set()), alone.said
        if NEW not in alone.saved:
            assert "No space left" in alone.said, alone.said
            both = crash.save(f"{root}:{second}", NEW)
            assert both.saved == {NEW}, both.said
            assert check(both, root, second, what=f"a full disk with {spare} KiB to spare and a second tier") == NEW
