"""The harness itself: its cuts cut, its splits split, and it leaves nothing behind, not even when it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import namespaces
from namespaces import Namespaces

SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("up", flush=True)
    while True:
        server.accept()[0].close()
"""
CLIENT = "import socket, sys; socket.create_connection((sys.argv[1], 5000), timeout=1.0)"
OWNER = """
import subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from namespaces import Namespaces
with Namespaces(2) as wires:
    wires.start(1, ["sleep", "600"], stdout=subprocess.DEVNULL)
    print("up", flush=True)
    time.sleep(600)
"""


def reaches(wires: Namespaces, node: int, other: int) -> bool:
    command = [*wires.prefix(node), sys.executable, "-S", "-c", CLIENT, wires.address(other)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def comes_to_reach(wires: Namespaces, node: int, other: int) -> bool:
    """Whether it does before long: a neighbour that was not found is not asked for again at once."""
    return any(reaches(wires, node, other) for _ in range(30))


def left_of(owner: int) -> list[str]:
    return [
        name for name in (*os.listdir("/run/netns"), *os.listdir("/sys/class/net")) if name.startswith(f"rr{owner}-")
    ]


def test_links_are_cut_and_restored_and_nothing_is_left() -> None:
    with Namespaces(3) as wires:
        servers = [
            wires.start(node, [sys.executable, "-c", SERVER, wires.address(node)], stdout=subprocess.PIPE)
            for node in (0, 1)
        ]
        for server in servers:
            assert server.stdout.readline() == b"up\n"
        assert comes_to_reach(wires, 1, 0) and comes_to_reach(wires, 2, 1)
        for carrier in (False, True):
            wires.cut(1, carrier=carrier)
            assert not reaches(wires, 1, 0) and not reaches(wires, 2, 1) and comes_to_reach(wires, 2, 0)
            wires.restore(1)
            assert comes_to_reach(wires, 1, 0)
        wires.split([0], [1, 2])
        assert not reaches(wires, 1, 0) and not reaches(wires, 2, 0) and comes_to_reach(wires, 2, 1)
        wires.heal()
        wires.slow(2, "1mbit")
        assert comes_to_reach(wires, 2, 0)
        wires.kill(0)
        assert servers[0].wait(30) == -signal.SIGKILL and not wires.pids(0) and wires.pids(1)
    assert servers[1].wait(30) == -signal.SIGKILL
    for server in servers:
        server.stdout.close()
    assert not left_of(os.getpid())


def test_what_a_killed_owner_left_is_swept_away() -> None:
    bench = str(Path(namespaces.__file__).parent)
    owner = subprocess.Popen([sys.executable, "-c", OWNER, bench], stdout=subprocess.PIPE)
    assert owner.stdout is not None and owner.stdout.readline() == b"up\n"
    owner.kill()
    owner.communicate()
    assert left_of(owner.pid), "the test is of no use"
    deadline = time.monotonic() + 60
    while left_of(owner.pid):
        namespaces.sweep()
        assert time.monotonic() < deadline, left_of(owner.pid)


@pytest.mark.parametrize("missing", ["root", "ip"])
def test_what_is_missing_is_said_unneeded(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    if missing == "root":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None if tool == "ip" else f"/bin/{tool}")
    assert missing in namespaces.why_not()
