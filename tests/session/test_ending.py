"""SIGTERM without `rerail run`: what a process that is told to end does, alone. Among several: tests/multiprocess."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

BEGIN = """
    import os, signal, threading, time
    from rerail.session import ending
    ending.LATE_S = 0.5
    told = ending.Ending(0, 1, [])
"""


def run(body: str, *signals: signal.Signals) -> tuple[int, str]:
    """The exit code of a process, each signal being sent when it says `now`."""
    script = textwrap.dedent(BEGIN) + textwrap.dedent(body)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said, left = "", list(signals)
        for line in process.stdout:
            said += line
            if line.strip() == "now":
                process.send_signal(left.pop(0))
        return process.wait(30), said


@pytest.mark.timeout(60)
def test_the_version_at_hand_is_the_one_to_save() -> None:
    code, said = run(
        """
        told.watch(1)
        assert not told.due(7)
        print("now", flush=True)
        while not told.due(8): time.sleep(0.01)
        print("saved", flush=True)
        told.end()
        """,
        signal.SIGTERM,
    )
    assert code == -signal.SIGTERM and "saved" in said


@pytest.mark.timeout(60)
def test_whoever_never_comes_to_the_end_of_its_step_is_ended_all_the_same() -> None:
    code, _ = run("told.watch(1); print('now', flush=True); threading.Event().wait()", signal.SIGTERM)
    assert code == 128 + signal.SIGTERM


@pytest.mark.timeout(60)
def test_a_second_time_ends_it_at_once() -> None:
    body = """
    ending.LATE_S = 60
    told.watch(1)
    print("now", flush=True)
    while not told._told: time.sleep(0.01)
    print("now", flush=True)
    time.sleep(60)
    """
    code, _ = run(body, signal.SIGTERM, signal.SIGTERM)
    assert code == -signal.SIGTERM


@pytest.mark.timeout(60)
def test_a_script_with_plans_of_its_own_keeps_them() -> None:
    body = """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    told.watch(1)
    print("now", flush=True)
    time.sleep(60)
    """
    assert run(body, signal.SIGTERM)[0] == 7


@pytest.mark.timeout(60)
def test_behind_the_loop_everything_is_as_before() -> None:
    body = """
    told.watch(1)
    threads = threading.active_count()
    told.unwatch()
    told.unwatch()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and threading.active_count() == threads - 1
    assert signal.set_wakeup_fd(-1) == -1
    """
    assert run(body)[0] == 0
