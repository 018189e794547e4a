"""Faults on purpose: what the controller chooses and records, what an agent does to its ranks, and how machines are broken."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_agent import LIMIT_S, FakeAgent
from fake_controller import FakeController, assignments
from node_helpers import wait_gone
from test_agent import Bench, rank_pid, start, stop
from test_controller import play, training

from rerail.checkpoint.arena import Arena
from rerail.checkpoint.catalog import newest
from rerail.checkpoint.files import FileTier
from rerail.checkpoint.layout import Piece
from rerail.checkpoint.saving import Order, carry_out, claim_epoch
from rerail.checkpoint.staging import Stager
from rerail.detect.kernel_log import parse_record
from rerail.errors import RerailError, UsageError
from rerail.flow import Signal
from rerail.runtime import breaking, injecting, injections, orders, wire
from rerail.runtime.agent import Agent
from rerail.runtime.breaking import Refused
from rerail.runtime.fleet import Agent as FleetAgent
from rerail.runtime.fleet import Fleet, RankState
from rerail.runtime.injecting import Injector
from rerail.runtime.injections import KINDS, Injections, Wanted
from rerail.runtime.processes import process_state
from rerail.runtime.slots import Slot

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


# --- the controller's side ---


def post(port: int, wish: bytes, token: str = "secret") -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/inject", data=wish, headers={"Authorization": f"Bearer {token}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


async def inject(agent: FakeAgent, token: str = "secret", **wish: Any) -> tuple[int, dict[str, Any]]:
    return await asyncio.to_thread(post, agent.port, json.dumps({"seed": 1, **wish}).encode(), token)


def test_an_order_reaches_its_agent_and_what_was_done_is_answered_and_written_down(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder, slots=2, allow_inject=True) as (job, agent):
            asking = asyncio.create_task(inject(agent, kind="bitflip", rank=1, seed=7))
            order = await agent.wait_for(wire.Inject)
            assert (order.kind, order.rank, order.seed, order.for_s) == ("bitflip", 1, 7, 0.0)
            await agent.observe("inject", 1, order=order.id, kind="bitflip", seed=7, message="bit 3 flipped")
            status, answer = await asking
            assert (status, answer["message"], answer["rank"]) == (200, "bit 3 flipped", 1)
            (record,) = [one for one in job.records("signal") if one.source == "inject"]
            assert (record.rank, record.payload["kind"], record.payload["seed"]) == (1, "bitflip", 7)
            assert not job.records("event") and not job.records("report"), "a note is no fault"

            asking = asyncio.create_task(inject(agent, kind="disk-full", folder="/x", node="0"))
            order = await agent.wait_for(wire.Inject, count=2)
            assert (order.folder, order.max_size, order.for_s) == ("/x", 1 << 30, 30.0)
            await agent.observe("inject.refused", -1, order=order.id, message="too large")
            assert await asking == (409, {**(await asking)[1], "refused": "too large"})

    play(scenario, tmp_path)


def test_without_permission_or_token_nothing_is_ordered(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder, slots=2) as (job, agent):
            status, answer = await inject(agent, kind="kill", rank=0)
            assert status == 403 and "rerail run --allow-inject" in answer["refused"]
            assert (await inject(agent, "wrong", kind="kill", rank=0))[0] == 401
            assert not any(isinstance(one, wire.Inject) for one in agent.got)
            assert not [one for one in job.records("signal") if one.source.startswith("inject")]

    play(scenario, tmp_path)


def test_what_cannot_be_ordered_is_refused_with_a_reason(tmp_path: Path) -> None:
    async def scenario(folder: Path) -> None:
        async with training(folder, slots=2, allow_inject=True) as (_, agent):
            for wish, says in (
                ({"kind": "kill", "rank": 2}, "there is no rank 2\n  this job has ranks 0 to 1"),
                ({"kind": "bitflop"}, "did you mean bitflip?"),
                ({"kind": "stop", "node": "n9"}, "there is no node 'n9'"),
                ({"kind": "kill", "for_s": 3.0}, "--for means nothing to kill"),
            ):
                status, answer = await inject(agent, **wish)
                assert status == 422 and says in answer["refused"], answer
            for body in (b"", b"[]", b'{"kind": "kill"}', b'{"kind": "kill", "seed": 1, "x": 2}', b"\xff", b"[" * 5000):
                status, answer = await asyncio.to_thread(post, agent.port, body)
                assert status == 400 and "not a wish" in answer["refused"], answer
            assert not any(isinstance(one, wire.Inject) for one in agent.got)

    play(scenario, tmp_path)


class _Link:
    def send(self, message: orders.ToAgent) -> None: ...

    def close(self) -> None: ...


def fleet(nodes: int = 2, slots: int = 4) -> Fleet:
    made = Fleet()
    for number in range(nodes):
        made.agents[f"n{number}"] = FleetAgent(f"n{number}", "", slots, number, "", 0.0, _Link())
    made.place(made.agents.values())
    return made


def test_the_same_seed_picks_the_same_rank_and_different_seeds_pick_all() -> None:
    orders = Injections(fleet(), allowed=True)

    def pick(seed: int, **more: Any) -> tuple[str, int]:
        agent, order = orders.order(Wanted(kind="kill", seed=seed, **more))
        return agent.node, order.rank

    picked = [pick(seed) for seed in range(100)]
    assert picked == [pick(seed) for seed in range(100)]
    assert {rank for _, rank in picked} == set(range(8))
    assert {pick(seed, node="n1") for seed in range(100)} == {("n1", rank) for rank in range(4, 8)}
    assert {pick(seed, node="1") for seed in range(100)} == {("n1", rank) for rank in range(4, 8)}


def test_a_rank_or_node_that_is_away_is_left_alone() -> None:
    ranks = fleet(nodes=1, slots=2)
    orders = Injections(ranks, allowed=True)
    ranks.ranks[1].state = RankState.LOST
    with pytest.raises(RerailError, match="rank 1 is lost"):
        orders.order(Wanted(kind="kill", seed=1, rank=1))
    assert orders.order(Wanted(kind="kernel-log", line="x", seed=1, rank=1))[0].node == "n0"
    ranks.agents["n0"].link = None
    with pytest.raises(RerailError, match="n0 is away"):
        orders.order(Wanted(kind="kill", seed=1, rank=0))
    with pytest.raises(RerailError, match="not started yet"):
        Injections(Fleet(), allowed=True).order(Wanted(kind="kill", seed=1))


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ({"kind": "kernel-log"}, "kernel-log needs --line"),
        ({"kind": "slow-disk"}, "slow-disk needs --dir"),
        ({"kind": "kernel-log", "line": "a\nb"}, "one line"),
        ({"kind": "kernel-log", "line": "a" * 900}, "at most 800"),
        ({"kind": "slow", "factor": 0.5}, "--factor is 0.5"),
        ({"kind": "stop", "for_s": -1.0}, "--for is -1.0"),
        ({"kind": "kill", "after_s": float("inf")}, "--after is inf"),
        ({"kind": "kill", "after_s": float("nan")}, "--after is nan"),
        ({"kind": "kill", "rank": 1, "node": "n0"}, "exclude one another"),
    ],
)
def test_a_wish_that_makes_no_sense(wish: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Injections(fleet(), allowed=True).order(Wanted(seed=1, **wish))


# --- the agent's side ---


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


async def told(controller: FakeController, source: str) -> Signal:
    (message,) = await controller.wait(orders.Observed, lambda message: message.signal.source == source)
    return message.signal


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def order(kind: str, rank: int = 1, **more: Any) -> wire.Inject:
    return wire.Inject(id="inject-1", kind=kind, rank=rank, seed=5, **more)


def test_a_stopped_rank_goes_on_after_its_time(bench: Bench) -> None:
    async def body(node: Agent, controller: FakeController) -> None:
        await start(controller)
        await controller.send(order("stop", for_s=1.5))
        done = await told(controller, "inject")
        await until(lambda: process_state(rank_pid(node, 1)) == "T")
        assert (done.rank, done.payload["kind"], done.payload["seed"], done.payload["for_s"]) == (1, "stop", 5, 1.5)
        assert f"pid {rank_pid(node, 1)}" in str(done.payload["message"])
        assert (await told(controller, "inject.over")).payload["order"] == "inject-1"
        await until(lambda: process_state(rank_pid(node, 1)) != "T")
        await stop(controller)

    assert bench.run(body, allow_inject=True) == 0


@pytest.mark.parametrize(("kind", "signal"), [("kill", "SIGKILL"), ("term", "SIGTERM"), ("segv", "SIGSEGV")])
def test_the_record_of_a_killed_rank_comes_before_its_end(bench: Bench, kind: str, signal: str) -> None:
    async def body(node: Agent, controller: FakeController) -> None:
        await start(controller)
        pid = rank_pid(node, 1)
        await controller.send(order(kind, after_s=0.2))
        await told(controller, "process.exit")
        seen = [
            one.signal for one in controller.said(orders.Observed) if one.signal.source in ("inject", "process.exit")
        ]
        assert [one.source for one in seen] == ["inject", "process.exit"]
        assert seen[1].payload["signal"] == signal
        assert not await asyncio.to_thread(wait_gone, [pid])
        await stop(controller)

    assert bench.run(body, allow_inject=True) == 0


def test_an_agent_that_was_not_told_to_allow_it_refuses(bench: Bench) -> None:
    async def body(node: Agent, controller: FakeController) -> None:
        await start(controller)
        await controller.send(order("kill"))
        assert "--allow-inject" in str((await told(controller, "inject.refused")).payload["message"])
        assert process_state(rank_pid(node, 1)) in "SR"
        await stop(controller)

    assert bench.run(body) == 0


def test_a_script_without_join_has_no_steps_to_break(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(node: Agent, controller: FakeController) -> None:
        await controller.wait(orders.AgentHello)
        await controller.send(orders.Start(generation=0, assignments=assignments(2, 0)))
        await until(lambda: all(slot.running for slot in node.slots))
        await controller.send(order("nan"))
        early = str((await told(controller, "inject.refused")).payload["message"])
        assert "has not reached rerail.join() yet (it was started 0 s ago); try again" in early, early
        monkeypatch.setattr(injecting, "JOINING_S", 0.0)
        await controller.send(order("nan"))
        messages = await controller.wait(orders.Observed, lambda one: one.signal.source == "inject.refused", 2)
        late = str(messages[-1].signal.payload["message"])
        assert "has not called rerail.join() within 0 s; if it never does, nothing can be done" in late, late
        await stop(controller)

    assert bench.run(body, "unaware", allow_inject=True) == 0


def refusal(*slots: Slot) -> str:
    injector = Injector(slots, lambda *_: None, allowed=True)
    with pytest.raises(Refused) as refused:
        injector._pass_on(order("nan"), slots[0])
    return str(refused.value)


def test_a_rank_that_is_not_at_its_first_step_is_told_from_one_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Slot(0), Slot(1)
    one.rank = 1
    assert "has not reached rerail.join() yet (it was started" in refusal(one, other)
    monkeypatch.setattr(injecting, "JOINING_S", 0.0)
    assert "if it never does, nothing can be done inside its steps; kill" in refusal(one, other)
    other.joined = True
    assert "has not reached rerail.join() yet (other ranks have); try again" in refusal(one, other)
    one.joined = True
    assert "made its process group before rerail.join(), so nothing" in refusal(one, other)


def test_an_order_that_waits_for_the_first_step_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injections, "ANSWER_S", 0.05)
    made = fleet()
    wish = json.dumps({"kind": "nan", "rank": 1, "seed": 1}).encode()
    status, answer = asyncio.run(Injections(made, allowed=True).ask(wish))
    assert status == 504 and "rank 1 has not completed a step yet" in answer["refused"]
    made.ranks[1].version = 3
    status, answer = asyncio.run(Injections(made, allowed=True).ask(wish))
    assert status == 504 and "step yet" not in answer["refused"]


def test_an_unknown_kind_or_rank_does_not_hurt_the_agent(bench: Bench) -> None:
    async def body(node: Agent, controller: FakeController) -> None:
        await start(controller)
        await controller.send(order("flood"))
        await controller.send(order("kill", rank=7))
        refused = await controller.wait(orders.Observed, lambda one: one.signal.source == "inject.refused", 2)
        assert {str(one.signal.payload["message"]).split(" on ")[0] for one in refused} == {
            "this node's rerail knows no kind 'flood'",
            "rank 7 has no process",
        }
        await stop(controller)

    assert bench.run(body, allow_inject=True) == 0


# --- machines ---


@root_only
def test_a_line_in_the_kernel_log_counts_only_where_it_is_allowed() -> None:
    fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.lseek(fd, 0, os.SEEK_END)
        mark = f"NVRM: Xid (PCI:0000:00:00): 79, a test of rerail {os.getpid()}"
        breaking.kernel_log(mark)
        records = []
        with contextlib.suppress(BlockingIOError):
            while True:
                records.append(os.read(fd, 8192))
    finally:
        os.close(fd)
    (record,) = [one for one in records if mark.encode() in one]
    allowed, otherwise = parse_record(record, injected=True), parse_record(record)
    assert allowed is not None and allowed.text == mark
    assert otherwise is not None and otherwise.text == ""


def test_a_kernel_log_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="needs root"):
        breaking.kernel_log("x", tmp_path / "no" / "kmsg")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("no right to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_full_and_then_empty_again(small_disk: Path) -> None:
    broken = breaking.disk_full(str(small_disk), 1 << 30)
    assert os.statvfs(small_disk).f_bavail == 0 and not list(small_disk.iterdir())
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "file").write_bytes(b"x" * 4096)
    (small_disk / "file").unlink(missing_ok=True)
    assert broken.undo is not None
    broken.undo()
    (small_disk / "file").write_bytes(b"x" * 4096)


def test_a_large_disk_and_a_missing_folder_are_not_filled(small_disk: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="--max-size"):
        breaking.disk_full(str(small_disk), 1 << 20)
    with pytest.raises(Refused, match="No such file"):
        breaking.disk_full(str(tmp_path / "none"), 1 << 30)
    assert os.statvfs(small_disk).f_bavail > 0


def test_a_lost_device_of_the_stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(breaking.STUB_NVML, raising=False)
    with pytest.raises(Refused, match="RERAIL_STUB_NVML is not set"):
        breaking.device_lost(3)
    monkeypatch.setenv(breaking.STUB_NVML, str(tmp_path / "stub"))
    (tmp_path / "stub").write_text("gpus=8")
    broken = breaking.device_lost(3)
    assert (tmp_path / "stub").read_text() == "gpus=8 lost3=1"
    assert broken.undo is not None
    broken.undo()
    assert (tmp_path / "stub").read_text() == "gpus=8"


def saved(folder: Path, step: int) -> None:
    """One rank's checkpoint, written by the engine."""
    fd = os.memfd_create("arena")
    try:
        arena, tensor = Arena(fd), torch.arange(5000.0) + step
        Stager(arena, overlap=False).stage(step, [Piece("w", tensor, (5000,), (0,), True)], b"")
        epoch = claim_epoch(FileTier(folder), "test")
        (outcome,) = carry_out(
            Order(
                version=step, epoch=epoch, generation=0, rank=0, group=(0,), world_size=1, tiers=(str(folder),),
                job="test", versions={},
            ),
            arena,
            set,
        )  # fmt: skip
        assert outcome.ok, outcome
    finally:
        os.close(fd)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_one_byte_of_the_newest_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no step is committed"):
        breaking.corrupt_checkpoint(str(tmp_path), 1)
    with pytest.raises(Refused, match="not a directory"):
        breaking.corrupt_checkpoint(str(tmp_path / "none"), 1)
    saved(tmp_path, 1)
    saved(tmp_path, 2)
    before = contents(tmp_path)
    text = breaking.corrupt_checkpoint(str(tmp_path), 9).text
    after = contents(tmp_path)
    ((path, data),) = [(path, data) for path, data in after.items() if data != before[path]]
    assert "step-0000000002" in str(path) and path.name in text
    assert sum(one != other for one, other in zip(data, before[path], strict=True)) == 1
    step = newest([FileTier(tmp_path)], lambda text: None)
    assert step is not None and step.id.step == 2, "its description is still whole: only reading the data can tell"
    assert breaking.corrupt_checkpoint(str(tmp_path), 9).text.split(":")[1].split()[1] in text, "the same byte again"
    assert contents(tmp_path) == before


TALKER = """
import socket, sys
line = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
line.sendall(b"here")
try:
    print("got", line.recv(1), flush=True)
except OSError as error:
    print("cut", error.errno, flush=True)
"""


@root_only
def test_the_connections_of_one_process_are_cut_and_no_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        talkers, lines = [], []
        for _ in range(2):
            talkers.append(
                subprocess.Popen([sys.executable, "-c", TALKER, str(port)], stdout=subprocess.PIPE, text=True)
            )
            line, _ = server.accept()
            assert line.recv(4) == b"here"
            lines.append(line)
        try:
            with pytest.raises(Refused, match="no established TCP connection with port 1"):
                breaking.network_cut(talkers[0].pid, 1)
            assert breaking.network_cut(talkers[0].pid, port).text == "closed 1 TCP connections"
            assert talkers[0].communicate(timeout=30)[0].startswith("cut")
            lines[1].sendall(b"!")
            assert talkers[1].communicate(timeout=30)[0].startswith("got")
        finally:
            for one in (*lines, *(talker.stdout for talker in talkers if talker.stdout is not None)):
                one.close()
            for talker in talkers:
                talker.kill()
                talker.wait()


def test_a_disk_is_not_slowed_for_others(tmp_path: Path) -> None:
    with pytest.raises(Refused):
        breaking.slow_disk(str(tmp_path), [os.getpid()], lambda pid: False)
    with pytest.raises(Refused, match="not on a disk"):
        breaking.slow_disk("/proc", [os.getpid()], lambda pid: True)


@pytest.mark.skipif(not os.access("/sys/fs/cgroup/blkio", os.W_OK), reason="no cgroup v1 that may be written")
def test_a_disk_is_slowed_for_a_rank_and_its_children_and_all_is_put_back(tmp_path: Path) -> None:
    def group_of(pid: int) -> str:
        return next(line for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if ":blkio:" in line)

    with subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        child, before = int(rank.stdout.readline()), group_of(rank.pid)
        broken = breaking.slow_disk(str(tmp_path), [rank.pid], lambda pid: True)
        assert broken.undo is not None
        try:
            assert all("rerail-slow-disk" in group_of(pid) for pid in (rank.pid, child)), broken
            limit = Path("/sys/fs/cgroup/blkio", group_of(rank.pid).split(":", 2)[2].lstrip("/"))
            assert str(breaking.SLOW_DISK) in (limit / "blkio.throttle.write_bps_device").read_text()
        finally:
            broken.undo()
            os.kill(child, signal.SIGKILL)
        assert group_of(rank.pid) == before and not limit.exists()
        rank.kill()


def test_memory_is_only_filled_below_a_small_limit() -> None:
    limit = breaking.memory_limit(os.getpid())
    with pytest.raises(Refused, match="--max-size"):
        breaking.check_memory(os.getpid(), limit or 1 << 40)
    if limit:
        breaking.check_memory(os.getpid(), limit + 1)


def test_every_kind_is_carried_out_somewhere() -> None:
    """By a signal, by the node or by the rank: no kind is left to nobody."""
    from rerail.runtime.injecting import SIGNALS
    from rerail.session import injected

    source = Path(breaking.__file__).with_name("injecting.py").read_text() + Path(injected.__file__).read_text()
    assert [kind for kind in KINDS if kind not in SIGNALS and f'"{kind}"' not in source] == []
