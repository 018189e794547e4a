"""Turns a job's accounts into Chrome trace events, which ui.perfetto.dev opens: one track for the job, its incidents, and each rank.

Called by `cli.report --trace`. What ranks told of their own part of a repair stands on their tracks; steps and loss are counters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import msgspec

from rerail.flow import Recovery
from rerail.report.accounts import Accounts
from rerail.report.partition import Cause, joined

JOB, RANKS, NODES = 1, 2, 3
"""Numbers of the groups of tracks."""
_OF_RANK = re.compile(r"rank (\d+): (.*)")


def as_trace(told: Accounts, recoveries: Iterable[Recovery]) -> bytes:
    """A whole file."""
    events = [*_job(told), *_incidents(told), *_ranks(told, recoveries), *_counters(told)]
    tracks = sorted({(event["pid"], event["tid"]) for event in events})
    nodes = _nodes(told)
    words = {JOB: ("controller", {1: "job", 2: "incidents", 3: "phases"}), RANKS: ("ranks", {}), NODES: ("nodes", {})}
    names = [_named("process_name", pid, 0, words[pid][0]) for pid in sorted({pid for pid, _ in tracks})]
    for pid, tid in tracks:
        name = f"rank {tid}" if pid == RANKS else nodes[tid] if pid == NODES else words[pid][1].get(tid, "")
        names.append(_named("thread_name", pid, tid, name))
    return msgspec.json.encode(
        {"displayTimeUnit": "ms", "otherData": {"job": told.job}, "traceEvents": [*names, *events]}
    )


def _job(told: Accounts) -> Iterator[dict[str, Any]]:
    """Every second by its cause. Waits within steps are shares of a window, and no moments: they stay training here."""
    within = (Cause.DATA, Cause.CHECKPOINT)
    for piece in joined(replace(p, cause=Cause.TRAINING) if p.cause in within else p for p in told.pieces):
        span = (piece.begin - told.begin, piece.end - told.begin)
        yield _slice(JOB, 1, piece.cause.value, span)
        if piece.incident:
            yield _slice(JOB, 3, piece.cause.value, span, incident=piece.incident)


def _incidents(told: Accounts) -> Iterator[dict[str, Any]]:
    nodes = {name: place for place, name in _nodes(told).items()}
    for one in told.incidents:
        begin, facts = (
            one.at - told.begin,
            {"code": one.code, "done": one.rung, "ok": one.ok, "lost_steps": one.lost_steps},
        )
        end = begin + one.detect_s + one.handle_s
        yield _slice(JOB, 2, f"incident {one.number}: {one.summary}", (begin, end), **facts)
        for rank in one.ranks:
            yield _instant(RANKS, rank, one.code, begin)
        if one.node:
            yield _instant(NODES, nodes[one.node], one.code, begin)


def _ranks(told: Accounts, recoveries: Iterable[Recovery]) -> Iterator[dict[str, Any]]:
    """What each rank did until it was parked."""
    for recovery in recoveries:
        whole = max((phase.end for phase in recovery.phases), default=0.0)
        signal = recovery.at - told.begin - whole
        for phase in recovery.phases:
            if (found := _OF_RANK.fullmatch(phase.name)) is not None:
                yield _slice(RANKS, int(found[1]), found[2], (signal + phase.start, signal + phase.end))


def _counters(told: Accounts) -> Iterator[dict[str, Any]]:
    for one in told.samples:
        at = _micro(one.at - told.begin)
        if one.span_s > 0:
            yield {
                "ph": "C",
                "pid": JOB,
                "tid": 1,
                "ts": at,
                "name": "steps per second",
                "args": {"value": one.steps / one.span_s},
            }
        if one.loss is not None:
            yield {"ph": "C", "pid": JOB, "tid": 1, "ts": at, "name": "loss", "args": {"value": one.loss}}


def _nodes(told: Accounts) -> dict[int, str]:
    return dict(enumerate(sorted({one.node for one in told.incidents if one.node})))


def _slice(pid: int, tid: int, name: str, span: tuple[float, float], **facts: Any) -> dict[str, Any]:
    begin, end = map(_micro, span)
    return {"ph": "X", "pid": pid, "tid": tid, "ts": begin, "dur": max(0, end - begin), "name": name, "args": facts}


def _instant(pid: int, tid: int, name: str, at: float) -> dict[str, Any]:
    return {"ph": "i", "s": "t", "pid": pid, "tid": tid, "ts": _micro(at), "name": name, "args": {}}


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)
