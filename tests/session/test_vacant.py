"""Groups with empty seats: real processes over gloo, whose group keeps its size while some of them are gone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rerail.session.store import serve

PEER = Path(__file__).with_name("seats_peer.py")
WORLD = 4


def meet(seats: tuple[int, ...]) -> dict[int, dict[str, Any]]:
    """What each of four ranks saw."""
    store, port = serve("127.0.0.1")
    told = ",".join(map(str, seats))
    peers = [
        subprocess.Popen([sys.executable, str(PEER), str(rank), str(port), told], stdout=-1, stderr=-1, text=True)
        for rank in range(WORLD)
    ]
    try:
        ends = [peer.communicate(timeout=120) for peer in peers]
    finally:
        for peer in peers:
            peer.kill()
            peer.wait()
        del store
    for peer, (_, err) in zip(peers, ends, strict=True):
        assert peer.returncode == 0, err
    return {rank: json.loads(out) for rank, (out, _) in enumerate(ends)}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("seats", [(0, 1, 2), (1, 2, 3), (1, 3), (2,)])
def test_collectives_and_gradients_among_those_who_are_there(seats: tuple[int, ...]) -> None:
    saw = meet(seats)
    assert all(one["full"] for one in saw.values()), "already in full the gradients were not those of the whole batch"
    parts = [float(seat) if seat in seats else 0.0 for seat in range(WORLD)]
    for seat in seats:
        one = saw[seat]
        half = [other for other in seats if other // 2 == seat // 2]
        assert (one["world"], one["rank"]) == (WORLD, seat), "the world keeps its size and the ranks their numbers"
        assert one["sum"] == [sum(seats)] and one["max"] == [max(seats)]
        assert one["from_root"] == [seats[-1]], (
            "the root is named by its rank, not by its place among those who are there"
        )
        assert one["from_gone"] == [seats[0]], "the lowest seat serves where the root's is empty"
        assert one["single"] == parts and one["listed"] == parts, "empty seats give zeros"
        assert one["half"] == [sum(half)], "a sub-group goes on with those of it who are there"
        assert one["alike"], "the gradient is that of the whole batch"
        assert one["told"] == seats[0]
        for name, word in {
            "send": "not there",
            "scatter": "every rank",
            "swap": "every rank",
            "objects": "job.seats",
        }.items():
            assert word in one[name], f"{name}: {one[name]!r}"
        assert "cannot be gathered" in one["all_objects"] and "before the first job.steps" in one["group"]
    if len(seats) > 1:
        assert saw[seats[-1]]["received"] == 42.0
