"""NUMA binding against a made-up machine: two sockets, two nodes, eight cores with two threads each, four devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rerail.runtime.numa import Topology, bind, plan

ADDRESSES = ["0000:0a:00.0", "0000:0b:00.0", "0000:8a:00.0", "0000:8b:00.0"]


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")

    for index, address in enumerate(ADDRESSES):
        write(f"proc/driver/nvidia/gpus/{address.upper()}/information", "Model: H")
        write(f"sys/bus/pci/devices/{address}/numa_node", str(index // 2))
    for node in (0, 1):
        write(
            f"sys/devices/system/node/node{node}/cpulist", f"{4 * node}-{4 * node + 3},{8 + 4 * node}-{11 + 4 * node}"
        )
    for cpu in range(16):
        core, base = cpu % 8, f"sys/devices/system/cpu/cpu{cpu}"
        write(f"{base}/topology/physical_package_id", str(core // 4))
        write(f"{base}/topology/thread_siblings_list", f"{core},{core + 8}")
        first = core // 2 * 2
        for index, kind, level, shared in (
            (0, "Data", 1, f"{core},{core + 8}"),
            (1, "Instruction", 9, "0-15"),
            (3, "Unified", 3, f"{first}-{first + 1},{first + 8}-{first + 9}"),
        ):
            write(f"{base}/cache/index{index}/type", kind)
            write(f"{base}/cache/index{index}/level", str(level))
            write(f"{base}/cache/index{index}/shared_cpu_list", shared)
    return tmp_path


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("node", [{0, 1, 2, 3, 8, 9, 10, 11}] * 2 + [{4, 5, 6, 7, 12, 13, 14, 15}] * 2),
        ("socket", [{0, 1, 2, 3, 8, 9, 10, 11}] * 2 + [{4, 5, 6, 7, 12, 13, 14, 15}] * 2),
        ("exclusive", [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}]),
        ("core-complex", [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}]),
    ],
)
def test_every_mode(machine: Path, mode: str, expected: list[set[int]]) -> None:
    bound, notice = plan(mode, 4, Topology(machine, env={}))
    assert bound == dict(enumerate(expected)) and notice == ""


def test_only_visible_devices_count(machine: Path) -> None:
    bound, _ = plan("node", 1, Topology(machine, env={"CUDA_VISIBLE_DEVICES": "3,2"}))
    assert min(bound[0]) == 4


def test_more_ranks_than_devices_and_none_at_all(machine: Path, tmp_path: Path) -> None:
    bound, notice = plan("node", 5, Topology(machine, env={}))
    assert len(bound) == 4 and "local ranks 4" in notice
    nothing, notice = plan("node", 2, Topology(tmp_path / "empty", env={}))
    assert nothing == {} and "no accelerator" in notice
    assert plan("", 2) == ({}, "")


def test_all_threads_of_a_process_are_bound() -> None:
    code = "import threading, sys; threading.Thread(target=sys.stdin.read).start(); print('up', flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None, "made with pipes"
        process.stdout.readline()
        one = {min(os.sched_getaffinity(0))}
        bind(process.pid, one)
        assert all(os.sched_getaffinity(int(t)) == one for t in os.listdir(f"/proc/{process.pid}/task"))
        process.stdin.close()
