"""A node is lost with shards that nobody else holds, and a spare one goes on from now with what other nodes and disks have of them."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from edge_helpers import HERE, Run, free_port, running

from rerail.flow import Recovery

pytestmark = pytest.mark.timeout(300)
TRAIN = str(HERE.parent / "multiprocess" / "train.py")
STEP = r'"rank": 0, "pid": (\d+), "step": 5,'
FAST = {
    "RERAIL_TOKEN": "the same on all",
    "RERAIL_FIDELITY": "fast",
    "RERAIL_REHAB_FROM": "10",
    "RERAIL_REHAB_SHARE": "0.5",
    "RERAIL_SNAPSHOT_EVERY": "20",
    "OMP_NUM_THREADS": "1",
}


@contextlib.contextmanager
def three(folder: Path, until: int, saves: str, **settings: str) -> Iterator[tuple[Run, Run, Run]]:
    """Two nodes with one FSDP2 rank each, and a spare one."""
    port = free_port()

    def node(number: int) -> contextlib.AbstractContextManager[Run]:
        place = ("--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", f"127.0.0.{number + 1}", "--rdzv-id", "lost")
        size = ("--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1", "--spare-nodes", "1")
        script = (TRAIN, "fsdp", str(until), "--tell", "--sleep", "0.06", "--saves", saves)
        env = {**FAST, **settings, "RERAIL_NODE": f"node{number}", "TEST_DIR": str(folder)}
        return running(folder / str(number), *size, *place, *script, env=env)

    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(node(number)) for number in range(2))
        first.line(STEP)
        yield first, second, stack.enter_context(node(2))


def lost(first: Run, second: Run, spare: Run) -> Recovery:
    """The second node is lost, and all is well in the end."""
    survivor = int(first.line(STEP)[1])
    second.signal(signal.SIGKILL)  # of its launcher: everything of that node goes, its memory, too
    (report,) = first.reports(1)
    assert report.ok and report.rung == "swap_node" and report.fidelity == "approximate", first.story() + spare.story()
    assert report.lost_steps == 0 and survivor in first.alive()
    (recovery,) = (one for one in first.records("recovery") if isinstance(one, Recovery))
    assert recovery.sources[0] in ("own", "behind"), recovery
    assert first.ended() == 0 and spare.ended() == 0, first.story() + spare.story()
    digests = re.findall(r'"digest": "(\w+)"', first.out + spare.out)
    assert len(digests) == 2 and len(set(digests)) == 1, "all hold one model"
    assert "the training has healed" in first.err, first.story()
    for run in (first, second, spare):
        run.leaves_nothing()
    return recovery


def test_its_parameters_come_from_the_next_node_and_its_moments_from_a_checkpoint(tmp_path: Path) -> None:
    with three(tmp_path, 300, f"{tmp_path / 'root'}@25", RERAIL_SHADOW_EVERY="2") as (first, second, spare):
        first.line("node2 waits as a spare")
        first.line(r'"step": 60,')
        recovery = lost(first, second, spare)
    assert re.fullmatch(
        r"its shadow of step \d+, all else from the checkpoint of step \d+ \(not exact\)", recovery.sources[1]
    ), recovery


def test_without_shadows_all_of_it_comes_from_a_checkpoint(tmp_path: Path) -> None:
    with three(tmp_path, 300, f"{tmp_path / 'root'}@25", RERAIL_SHADOW_COST="0") as (first, second, spare):
        first.line("node2 waits as a spare")
        first.line(r'"step": 60,')
        recovery = lost(first, second, spare)
    assert re.match(r"the checkpoint of step \d+", recovery.sources[1]), recovery
