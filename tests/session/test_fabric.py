"""Generations: what is newer always wins, whenever it is announced."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rerail.errors import FencedError
from rerail.session.c10d import HashStore
from rerail.session.fabric import Fabric, Mode
from rerail.session.store import dial


class LateInterrupt:
    """A group whose wires are just laid when the next fault is announced."""

    key, own_rank, own_size, members = "world", 0, 1, (0,)

    def __init__(self, fabric: Fabric, wanted: int) -> None:
        self._fabric, self._wanted = fabric, wanted

    def connect(self, store: object) -> None:
        self._fabric.interrupt(self._wanted)

    def adopt(self, wires: None) -> None:
        """It has no wires."""

    def disconnect(self) -> None:
        """It has no wires."""

    def cut(self) -> None:
        """It has no wires."""


def test_an_interrupt_while_wires_are_laid_is_not_forgotten() -> None:
    fabric = Fabric()
    fabric.groups.append(cast("Any", LateInterrupt(fabric, wanted=2)))
    with pytest.raises(RuntimeError, match="generation 1 gives way to 2"):
        fabric.form(1, HashStore)
    assert fabric.interrupted
    assert fabric.mode is not Mode.LIVE
    fabric.form(2, HashStore)
    assert fabric.mode is Mode.LIVE
    assert not fabric.interrupted


class NeverCalled(LateInterrupt):
    """A group that waits for a peer which is dead: there is no connection that could be cut."""

    def connect(self, store: object) -> None:
        threading.Event().wait(20)


def test_an_interrupt_frees_a_rank_that_waits_to_be_called_by_a_dead_peer() -> None:
    fabric = Fabric()
    fabric.groups.append(cast("Any", NeverCalled(fabric, wanted=0)))
    later = threading.Timer(0.1, fabric.interrupt, args=(2,))
    later.start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="generation 1 gives way to 2"):
        fabric.form(1, HashStore)
    assert time.monotonic() - began < 10


def test_an_interrupt_before_the_plan_is_carried_out_is_not_forgotten() -> None:
    fabric = Fabric()
    fabric.interrupt(3)
    with pytest.raises(RuntimeError, match="generation 2 gives way to 3"):
        fabric.form(2, HashStore)


def test_an_old_interrupt_does_not_void_a_newer_generation() -> None:
    fabric = Fabric()
    fabric.form(4, HashStore)
    fabric.interrupt(4)
    assert fabric.mode is Mode.LIVE
    with pytest.raises(FencedError, match="not newer"):
        fabric.form(4, HashStore)


def test_a_store_whose_host_is_gone_is_noticed_at_once() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(RuntimeError, match="is gone"):
            dial("127.0.0.1", port, given_up=lambda: False)


def test_an_interrupt_frees_a_rank_that_waits_for_a_frozen_store() -> None:
    fabric = Fabric()
    with socket.socket() as frozen:
        frozen.bind(("127.0.0.1", 0))
        frozen.listen()
        port = frozen.getsockname()[1]
        later = threading.Timer(0.3, fabric.interrupt, args=(2,))
        later.start()
        with pytest.raises(RuntimeError, match="gives way"):
            fabric.form(1, lambda: fabric.dial("127.0.0.1", port))
        later.join()


def test_what_was_waited_for_is_not_under_way_whatever_it_says_itself() -> None:
    """gloo never calls a reduce-scatter completed: a rank that hangs behind one would seem to wait for others."""
    fresh, work = Fabric(), SimpleNamespace(is_completed=lambda: False)
    fresh.begin(work, "_reduce_scatter_base", "0")
    assert fresh.pending_since() > 0
    fresh.ended(SimpleNamespace(is_completed=lambda: False))
    assert fresh.pending_since() > 0, "that was another one"
    fresh.ended(work)
    assert fresh.pending_since() == 0
