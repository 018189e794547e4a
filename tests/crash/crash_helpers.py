"""Runs the writer under strace or on a mounted image, and says what a start of the job would load afterwards."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "checkpoint"))

from two_ranks import start  # noqa: E402

from rerail.checkpoint.files import FileTier  # noqa: E402

OLD, NEW = 10, 20
LIMIT_S = 60.0
COLUMNS = 140_000
"""Makes a shard of two chunks."""


class Ended(NamedTuple):
    """How a run of the writer went."""

    saved: set[int]
    """Versions that it said are saved."""
    said: str
    calls: list[str]
    """System calls that were traced, as strace writes them."""


class Crash:
    """An arena with two versions in it, and a writer to save them with."""

    def __init__(self, folder: Path, arena: Path) -> None:
        self.folder, self.arena = folder, arena

    @contextlib.contextmanager
    def writer(self, tiers: str, *versions: int) -> Iterator[subprocess.Popen[str]]:
        """A writer that waits for a line on its standard input. It is gone afterwards."""
        command = [sys.executable, str(HERE / "writer.py"), str(self.arena), tiers, *map(str, versions)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first == "ready\n", f"the writer did not start: {first}{process.stdout.read()}"
            yield process
        finally:
            process.kill()
            process.communicate()

    def save(self, tiers: str, *versions: int) -> Ended:
        with self.writer(tiers, *versions) as process:
            said, _ = process.communicate("go\n", LIMIT_S)
        return Ended(_saved(said), said, [])

    def traced(self, tiers: str, version: int, trace: str, inject: str = "") -> Ended:
        """Save under strace: `trace` are the calls to record, `inject` what to do to one of them."""
        log = self.folder / "strace.log"
        log.unlink(missing_ok=True)
        rule = ["-e", f"inject={inject}"] if inject else []
        with self.writer(tiers, version) as process:
            command = ["strace", "-f", "-s", "0", "-o", str(log), "-p", str(process.pid), "-e", f"trace={trace}", *rule]
            tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            try:
                assert tracer.stderr is not None
                attached = tracer.stderr.readline()
                assert "attached" in attached, f"strace could not attach: {attached}"
                said, _ = process.communicate("go\n", LIMIT_S)
            finally:
                tracer.terminate()
                tracer.communicate()
        return Ended(_saved(said), said, log.read_text().splitlines())

    def with_old(self, name: str = "root") -> Path:
        """A new tier that has the old version."""
        pristine, root = self.folder / "pristine", self.folder / name
        if not pristine.exists():
            ended = self.save(str(pristine), OLD)
            assert ended.saved == {OLD}, ended.said
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(pristine, root)
        return root


def check(ended: Ended, *roots: Path, what: str) -> int:
    """The state that a start of the job loads is exact, and it is the new one if that was acknowledged."""
    loaded = start([FileTier(root) for root in roots], COLUMNS)
    told = f"{what}\n  said: {ended.said!r}\n  passed over: {loaded.reasons}"
    assert loaded.version in (OLD, NEW), f"neither the old nor the new state can be loaded after {told}"
    assert NEW not in ended.saved or loaded.version == NEW, f"acknowledged and lost after {told}"
    return loaded.version


def _saved(said: str) -> set[int]:
    return {int(line.split()[1]) for line in said.splitlines() if line.startswith("saved ")}
