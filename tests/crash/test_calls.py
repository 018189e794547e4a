"""A save that is killed, fails or is lied to at any of its system calls leaves the old state or the new one, never another."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from crash_helpers import COLUMNS, NEW, OLD, Crash, Ended, check
from two_ranks import start

from rerail.checkpoint import names
from rerail.checkpoint.files import FileTier
from rerail.checkpoint.names import StepId

pytestmark = [
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed"),
    pytest.mark.timeout(900),
]

CALLS = (
    "openat,pwrite64,fsync,fdatasync,rename,mkdir,ftruncate,fallocate,link,unlink,unlinkat,rmdir,close,getdents64,"
    "newfstatat,fstat,preadv,preadv2,read,fcntl,flock"
)
"""All that a save does to files."""
CHANGES = ("openat", "pwrite64", "fsync", "rename", "mkdir", "ftruncate", "fallocate", "link", "unlink", "unlinkat")
"""What changes the disk, or makes a change durable: these fail, too."""


@pytest.fixture(scope="module")
def made(crash: Crash) -> list[str]:
    """The calls of a save that goes well."""
    root = crash.with_old()
    ended = crash.traced(str(root), NEW, CALLS)
    assert check(ended, root, what="an undisturbed save") == NEW and NEW in ended.saved
    return ended.calls


def count(calls: list[str]) -> Counter[str]:
    return Counter(found[1] for line in calls if (found := re.match(r"\d+ +(\w+)\(", line)))


def test_the_list_of_calls_is_not_empty(made: list[str]) -> None:
    counted = count(made)
    wanted = {"openat", "pwrite64", "fsync", "mkdir", "fallocate", "link", "rename", "unlink"}
    assert wanted <= counted.keys(), f"a save made only these calls: {dict(counted)}"


def test_killed_at_any_call(crash: Crash, made: list[str]) -> None:
    loaded: Counter[int] = Counter()
    for call, times in sorted(count(made).items()):
        for which in range(1, times + 1):
            root = crash.with_old()
            ended = crash.traced(str(root), NEW, call, f"{call}:signal=KILL:when={which}")
            what = f"kill at {call} {which} of {times}"
            version = check(ended, root, what=what)
            loaded[version] += 1
            # what the crash left behind does not disturb the next try, which is the same order again
            again = crash.save(str(root), NEW)
            assert again.saved == {NEW}, f"after {what} the next persister could not save: {again.said}"
            assert check(again, root, what=f"{what}, and again") == NEW
    assert loaded[OLD] > 10 and loaded[NEW] > 10, f"the kills did not hit the save: {loaded}"
    print(f"\nkilled {sum(loaded.values())} times: {loaded[OLD]} times the old state, {loaded[NEW]} times the new one")


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_error_at_any_call(crash: Crash, made: list[str], error: str) -> None:
    tried = fallen_back = 0
    for call in CHANGES:
        for which in range(1, count(made)[call] + 1):
            root, second = crash.with_old(), crash.folder / "second"
            shutil.rmtree(second, ignore_errors=True)
            ended = crash.traced(f"{root}:{second}", NEW, call, f"{call}:error={error}:when={which}")
            what = f"{error} from {call} {which}"
            assert check(ended, root, second, what=what) == NEW, f"a second tier was there, yet lost after {what}"
            assert NEW in ended.saved, f"after {what} the second tier did not take it: {ended.said}"
            fallen_back += f"saved {NEW} {second}" in ended.said
            tried += 1
    assert fallen_back > 3, "no error made a save go to the second tier"
    print(f"\n{error} {tried} times: the second tier took over {fallen_back} times")


def test_errors_without_a_second_tier(crash: Crash, made: list[str]) -> None:
    refused = 0
    for call in CHANGES:
        for which in range(1, count(made)[call] + 1):
            root = crash.with_old()
            ended = crash.traced(str(root), NEW, call, f"{call}:error=EIO:when={which}")
            check(ended, root, what=f"EIO from {call} {which}")
            refused += NEW not in ended.saved
    assert refused > 3, "no error kept the save from being acknowledged"


def test_a_disk_that_always_fails_is_never_acknowledged(crash: Crash, made: list[str]) -> None:
    for call in ("fsync", "pwrite64", "mkdir", "link"):
        root = crash.with_old()
        ended = crash.traced(str(root), NEW, call, f"{call}:error=EIO:when=1+")
        assert not ended.saved, f"{call} never worked, yet: {ended.said}"
        assert check(ended, root, what=f"{call} that always fails") == OLD


def test_a_file_whose_sync_failed_is_not_used(crash: Crash, made: list[str]) -> None:
    """What the kernel dropped it does not report twice: a second sync of the same file would succeed."""
    shards = 0
    for which in range(1, count(made)["fsync"] + 1):
        root = crash.with_old()
        ended = crash.traced(str(root), NEW, "fsync", f"fsync:error=EIO:when={which}")
        check(ended, root, what=f"fsync {which} failing once")
        folder = root / StepId(1, NEW, 0).folder
        if "tried again" in ended.said or (folder / names.shard_name(0, 1)).exists():
            shards += 1
            assert not (folder / names.shard_name(0, 0)).exists(), "the file that was not synced is still there"
    assert shards == 2, "the shard's sync and that of its directory were to be among those that failed"


def test_lying_and_short_writes(crash: Crash, made: list[str]) -> None:
    """A write that says it wrote, and did not: nothing wrong is loaded, and the old state is, wherever it happened."""
    sizes = [int(found[1]) for line in made if (found := re.search(r"pwrite64\(.*= (\d+)$", line))]
    assert len(sizes) >= 4, "two chunks, manifest and COMMIT are written by pwrite64"
    detected = 0
    for which, size in enumerate(sizes, start=1):
        for told in sorted({size, size // 2, 4096 if size > 4096 else 1} - {0}):
            root = crash.with_old()
            ended = crash.traced(str(root), NEW, "pwrite64", f"pwrite64:retval={told}:when={which}")
            silent = ended._replace(saved=set())  # acknowledged in good faith; only the reader can know
            version = check(silent, root, what=f"write {which} of {size} bytes that wrote none of {told}")
            detected += version == OLD
    assert detected >= 3, "lying writes were not detected"


def test_the_old_state_outlives_a_lying_disk(crash: Crash, made: list[str]) -> None:
    """The shard is not on the disk and the step acknowledged: retention must not have removed the step before."""
    size = max(int(found[1]) for line in made if (found := re.search(r"pwrite64\(.*= (\d+)$", line)))
    root = crash.with_old()
    ended = crash.traced(str(root), NEW, "pwrite64", f"pwrite64:retval={size}:when=1")
    assert "read back wrong" in ended.said, ended.said
    assert (root / StepId(1, OLD, 0).folder / names.COMMIT).exists(), "the good step was removed for a bad one"
    assert check(ended._replace(saved=set()), root, what="a shard that was never written") == OLD


def test_killed_while_the_root_is_made(crash: Crash) -> None:
    """The first save of a job makes its folders; whatever is left of them, the next one works."""
    for which in range(1, 4):
        root = crash.folder / "fresh" / "deep"
        shutil.rmtree(root.parent, ignore_errors=True)
        crash.traced(str(root), NEW, "mkdir", f"mkdir:signal=KILL:when={which}")
        again = crash.save(str(root), NEW)
        assert again.saved == {NEW}, again.said
        check(again, Path(root), what=f"kill at mkdir {which} of a new root")


def beyond(crash: Crash, made: list[str]) -> dict[str, range]:
    """Of each call, which ones belong to the copy of a step rather than to its save."""
    root, second = crash.with_old(), crash.folder / "second"
    shutil.rmtree(second, ignore_errors=True)
    ended = crash.traced(f"{root}>{second}", NEW, CALLS)
    assert f"copied {NEW}" in ended.said, ended.said
    saved, both = count(made), count(ended.calls)
    return {call: range(saved[call] + 1, times + 1) for call, times in sorted(both.items()) if times > saved[call]}


def copied_or_nothing(second: Path, ended: Ended, what: str) -> bool:
    """The place that was copied to has the new state, exact, or none."""
    loaded = start([FileTier(second)], COLUMNS)
    assert loaded.version in (0, NEW), f"{what}: {loaded}"
    assert loaded.version == NEW or f"copied {NEW}" not in ended.said, (
        f"{what}: acknowledged and lost: {loaded.reasons}"
    )
    return loaded.version == NEW


def test_a_copy_killed_at_any_call(crash: Crash, made: list[str]) -> None:
    there: Counter[bool] = Counter()
    for call, numbers in beyond(crash, made).items():
        for which in numbers:
            root, second = crash.with_old(), crash.folder / "second"
            shutil.rmtree(second, ignore_errors=True)
            what = f"kill of a copy at {call} {which}"
            ended = crash.traced(f"{root}>{second}", NEW, call, f"{call}:signal=KILL:when={which}")
            assert check(ended, root, what=what) == NEW
            there[copied_or_nothing(second, ended, what)] += 1
            again = crash.save(f"{root}>{second}", NEW)
            assert f"copied {NEW}" in again.said, f"after {what} it could not be copied: {again.said}"
            assert copied_or_nothing(second, again, what)
    assert there[True] > 3 and there[False] > 10, f"the kills did not hit the copy: {there}"


def test_a_copy_with_an_error_at_any_call(crash: Crash, made: list[str]) -> None:
    refused = 0
    for call, numbers in beyond(crash, made).items():
        for which in numbers if call in CHANGES else ():
            root, second = crash.with_old(), crash.folder / "second"
            shutil.rmtree(second, ignore_errors=True)
            what = f"EIO from {call} {which} of a copy"
            ended = crash.traced(f"{root}>{second}", NEW, call, f"{call}:error=EIO:when={which}")
            assert check(ended, root, what=what) == NEW
            refused += not copied_or_nothing(second, ended, what)
    assert refused > 5, "no error kept the copy from being made"
