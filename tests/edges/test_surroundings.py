"""A machine that misbehaves: jumping clocks, a full /dev/shm, strangers at the controller's door."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from edge_helpers import TRAIN, running
from websockets.asyncio.client import connect

from rerail.runtime.frames import decode_to_agent, encode
from rerail.runtime.orders import AgentHello, Rejected, ToAgent

pytestmark = pytest.mark.timeout(150)
TWO = ("--nproc-per-node", "2", TRAIN)

JUMPING = """
import itertools, time
_real, _turn = time.time, itertools.count()
time.time = lambda: _real() + (86400.0 if next(_turn) % 2 else -86400.0)
"""


def test_clock_jumps_do_not_matter(tmp_path: Path) -> None:
    """Every process sees a wall clock that leaps by two days at each look; only the monotonic clock counts."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(JUMPING)
    hold = tmp_path / "go"
    arguments = (*TWO, "--until", "20", "--hold", str(hold))
    with running(tmp_path / "run", *arguments, env={"PYTHONPATH": str(tmp_path / "site")}) as run:
        run.controller()
        os.kill(run.rank_pid(1), signal.SIGKILL)
        (report,) = run.reports(1)
        assert report.ok and report.ranks == (1,) and report.attempts == 1, run.story()
        assert all(0.0 <= getattr(report.cost, part) < 100.0 for part in ("detect", "t0", "t1", "t2", "t3", "t4"))
        hold.touch()
        assert run.ended() == 0, run.story()
        assert len(run.all_reports()) == 1, run.story()
        run.leaves_nothing()


def may_unshare() -> bool:
    program = shutil.which("unshare")
    probe = [str(program), "-m", "sh", "-c", "mount -t tmpfs -o size=64k none /dev/shm"]
    return program is not None and subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may_unshare(), reason="a private /dev/shm needs the right to unshare and to mount")
def test_a_full_dev_shm_does_not_matter(tmp_path: Path) -> None:
    """Step clocks and snapshots are memory without a name: they need no room there."""
    full = 'mount -t tmpfs -o size=64k none /dev/shm && (cat /dev/zero > /dev/shm/full; true) 2>/dev/null; exec "$@"'
    hold = tmp_path / "go"
    prefix = ("unshare", "-m", "sh", "-c", full, "sh")
    with running(tmp_path / "run", *TWO, "--until", "20", "--hold", str(hold), prefix=prefix) as run:
        run.controller()
        os.kill(run.rank_pid(1), signal.SIGKILL)
        (report,) = run.reports(1)
        assert report.ok and report.ranks == (1,), run.story()
        hold.touch()
        assert run.ended() == 0, run.story()
        assert "snapshots" not in run.err, run.story()
        run.leaves_nothing()


async def knock(port: int, **hello: Any) -> ToAgent:
    """Greet the controller as an agent would; its answer."""
    async with connect(f"ws://127.0.0.1:{port}/agent", compression=None, proxy=None) as socket:
        await socket.send(encode(AgentHello(address="127.0.0.1", slots=2, **hello)))
        data = await asyncio.wait_for(socket.recv(), 30)
        return decode_to_agent(data if isinstance(data, bytes) else data.encode())


def test_strangers_and_zombies_are_turned_away_and_training_goes_on(tmp_path: Path) -> None:
    hold = tmp_path / "go"
    with running(tmp_path, *TWO, "--until", "60", "--hold", str(hold)) as run:
        run.rank_pid(1, step=9)
        door = run.controller()
        job = run.run_dirs()[0].name
        own = {"job": job, "token": door["token"], "node": os.uname().nodename, "incarnation": "of long ago"}
        for wrong, reason in (
            ({}, "takes part already"),
            ({"token": "guessed"}, "token is wrong"),
            ({"job": "another"}, f"runs job {job}"),
            ({"node": "elsewhere"}, "has all its 1 nodes"),
        ):
            answer = asyncio.run(knock(int(door["port"]), **{**own, **wrong}))
            assert isinstance(answer, Rejected) and reason in answer.reason, answer
        hold.touch()
        assert run.ended() == 0, run.story()
        assert not run.all_reports() and len(re.findall(r"rank 0 pid \d+ step 60", run.out)) == 1, run.story()
        run.leaves_nothing()
