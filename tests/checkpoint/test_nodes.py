"""The nodes of a job as a place: one node may be lost, and nobody without the key gets in."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from two_ranks import Job, start

from rerail.checkpoint import calls, nodes, places, saving
from rerail.checkpoint.calls import Answer, Call
from rerail.checkpoint.depot import Depot, store_of
from rerail.checkpoint.files import FileTier
from rerail.checkpoint.manifest import digest
from rerail.checkpoint.memory import MemoryTier
from rerail.checkpoint.nodes import NodesTier
from rerail.checkpoint.remote import RemoteTier
from rerail.checkpoint.retention import Keep, prune
from rerail.checkpoint.tiers import Tier, tier_at
from rerail.config import DEPOT_KEY, DEPOTS, Settings, load_settings
from rerail.errors import CheckpointError, ConfigError

KEY, CHUNK = "the key", 1 << 16


class Served:
    """A depot in a thread of this process."""

    def __init__(self, tier: Tier) -> None:
        self.door = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.door.getsockname()[1])
        self._thread = threading.Thread(target=Depot(self.door, tier, KEY).serve, daemon=True)
        self._thread.start()

    def tier(self, key: str = KEY, *, lasting: bool = False) -> RemoteTier:
        return RemoteTier("127.0.0.1", self.port, key, lasting=lasting)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.door.shutdown(socket.SHUT_RDWR)
        self.door.close()
        self._thread.join(10)


@pytest.fixture
def serve() -> Iterator[Callable[[Tier], Served]]:
    made: list[Served] = []

    def begin(tier: Tier) -> Served:
        made.append(Served(tier))
        return made[-1]

    yield begin
    for one in made:
        one.end()


@pytest.fixture(params=["memory", "file", "remote memory", "remote file", "nodes of memory", "nodes of files"])
def tier(request: pytest.FixtureRequest, tmp_path: Path, serve: Callable[[Tier], Served]) -> Tier:
    def one(number: int) -> Tier:
        return MemoryTier(1 << 30) if "memory" in request.param else FileTier(tmp_path / str(number))

    if request.param.startswith("nodes"):
        lasting = "files" in request.param
        return NodesTier([serve(one(number)).tier() for number in range(3)], 1, lasting=lasting)
    return serve(one(0)).tier() if request.param.startswith("remote") else one(0)


def pages(data: bytes) -> memoryview:
    room = memoryview(mmap.mmap(-1, max(len(data), 1) + mmap.PAGESIZE))
    room[: len(data)] = data
    return room


def put_large(tier: Tier, path: str, data: bytes) -> list[str]:
    room = pages(data)
    return tier.put_large(path, lambda offset, size: room[offset : offset + size + 4096], len(data), CHUNK)


def read(tier: Tier, path: str, offset: int, size: int) -> bytes:
    buffer = pages(bytes(size))
    with tier.reading(path) as fill:
        fill(offset, buffer, size)
    return bytes(buffer[:size])


# --- what every tier does ---


def test_small_files(tier: Tier) -> None:
    assert tier.names() == [] and tier.names("step") == []
    tier.make_folder("")
    tier.make_folder("step")
    tier.put("epoch", b"1", exclusive=True)
    tier.put("step/one", b"first")
    tier.put("step/one", b"second")
    assert sorted(tier.names()) == ["epoch", "step"] and tier.names("step") == ["one"]
    assert tier.get("step/one", 100) == b"second" and tier.size("step/one") == 6
    with pytest.raises(FileExistsError):
        tier.put("epoch", b"2", exclusive=True)
    assert tier.get("epoch", 10) == b"1"
    with pytest.raises(CheckpointError, match="more than 3 bytes"):
        tier.get("step/one", 3)
    for missing in (lambda: tier.get("step/two", 10), lambda: tier.size("step/two")):
        with pytest.raises(FileNotFoundError):
            missing()


@pytest.mark.parametrize("size", [0, 1, CHUNK, 5 * CHUNK + 123])
def test_large_files(tier: Tier, size: int) -> None:
    data = os.urandom(size)
    tier.make_folder("step")
    hashes = put_large(tier, "step/shard", data)
    assert hashes == [digest(data[at : at + CHUNK]) for at in range(0, size, CHUNK)]
    assert tier.size("step/shard") == size
    assert b"".join(read(tier, "step/shard", at, min(CHUNK, size - at)) for at in range(0, size, CHUNK)) == data
    with pytest.raises(FileExistsError):
        put_large(tier, "step/shard", data)
    with pytest.raises(CheckpointError):
        read(tier, "step/shard", (size // 4096 + 1) * 4096, 10)


def test_a_folder_goes_as_a_whole(tier: Tier) -> None:
    tier.make_folder("step")
    tier.put("step/one", b"1")
    put_large(tier, "step/shard", b"2" * CHUNK)
    tier.remove("step")
    tier.remove("step")
    assert tier.names("step") == [] and "step" not in tier.names()
    with pytest.raises(FileNotFoundError):
        tier.size("step/shard")


# --- memory ---


def test_memory_has_a_limit_and_gives_back_what_is_removed() -> None:
    tier = MemoryTier(100_000)
    tier.make_folder("a")
    put_large(tier, "a/shard", b"1" * 60_000)
    with pytest.raises(OSError, match="60000 of 100000 are in use"):
        put_large(tier, "a/other", b"2" * 60_000)
    assert tier.names("a") == ["shard"]
    for _ in range(5):
        tier.put("a/small", b"x" * 15_000)  # replaced, not added to
    tier.remove("a")
    tier.make_folder("b")
    put_large(tier, "b/shard", b"3" * 90_000)


def test_memory_keeps_the_newest_step_whatever_the_rules_say(job: Job, serve: Callable[[Tier], Served]) -> None:
    tier = serve(MemoryTier(1 << 30)).tier()
    with reached(job, [tier]):
        for version in (3, 6, 9):
            assert all(outcome.ok for outcome in job.save(version, [nodes.URL]))
    assert len([name for name in tier.names() if name.startswith("step")]) == 1
    assert start([tier]).version == 9
    assert prune(tier, Keep(), saving.StepId(1, 9, 0), set()) == []


# --- a job on several nodes ---


@contextlib.contextmanager
def reached(job: Job, tiers: list[Tier], *, lasting: bool = False) -> Iterator[None]:
    """Each rank of the job is on the node of its number, and `nodes://` means these."""
    own = threading.local()
    carry_out = job.carry_out

    def on_its_node(order: saving.Order) -> saving.Outcome:
        own.rank = order.rank
        return carry_out(order)

    def here(url: str) -> Tier:
        return NodesTier(tiers, getattr(own, "rank", 0), lasting=lasting) if url == nodes.URL else tier_at(url)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "carry_out", on_its_node)
        patch.setattr(places, "tier_at", here)
        yield


@pytest.mark.parametrize("kind", ["memory", "files"])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_any_one_node_may_be_lost(tmp_path: Path, serve: Callable[[Tier], Served], kind: str, lost: int) -> None:
    job, lasting = Job(world_size=4), kind == "files"
    stores = [FileTier(tmp_path / str(n)) if lasting else MemoryTier(1 << 30) for n in range(4)]
    depots = [serve(store) for store in stores]
    with reached(job, [depot.tier(lasting=lasting) for depot in depots], lasting=lasting):
        assert all(outcome.ok for outcome in job.save(5, [nodes.URL])), "saved on four nodes"
    job.close()
    depots[lost].end()
    left = [depot for number, depot in enumerate(depots) if number != lost]
    for own in range(3):
        found = start([NodesTier([depot.tier() for depot in left], own, lasting=lasting)])
        assert found.version == 5, found.reasons
    # and with an empty one in its place, in whatever order
    new = serve(MemoryTier(1 << 30))
    for order in ([new, *left], [*left, new]):
        found = start([NodesTier([depot.tier() for depot in order], 0, lasting=lasting)])
        assert found.version == 5, found.reasons


def test_a_shard_is_on_two_nodes(job: Job, tmp_path: Path) -> None:
    stores: list[Tier] = [FileTier(tmp_path / str(number)) for number in range(3)]
    with reached(job, stores, lasting=True):
        assert all(outcome.ok for outcome in job.save(5, [nodes.URL], read_back=False))
    folder = saving.StepId(1, 5, 0).folder
    shards = [[name for name in store.names(folder) if name.endswith("safetensors")] for store in stores]
    zero, one = "rank-00000.0.safetensors", "rank-00001.0.safetensors"
    assert shards == [[zero], [zero, one], [one]]
    assert [("COMMIT" in store.names(folder)) for store in stores] == [True, True, False]


def test_a_full_node_means_the_next_place(job: Job, tmp_path: Path) -> None:
    with reached(job, [MemoryTier(10), MemoryTier(10)]):
        outcomes = job.save(5, [nodes.URL, tmp_path])
    assert all(outcome.ok and outcome.url == str(tmp_path) for outcome in outcomes)
    assert "bytes do not fit" in outcomes[0].notes[0]
    assert start([FileTier(tmp_path)]).version == 5


def test_a_node_that_is_gone_means_the_next_place(job: Job, tmp_path: Path, serve: Callable[[Tier], Served]) -> None:
    here, gone = serve(MemoryTier(1 << 30)), serve(MemoryTier(1 << 30))
    gone.end()
    with reached(job, [here.tier(), gone.tier()]):
        outcomes = job.save(5, [nodes.URL, tmp_path])
    assert all(outcome.ok and outcome.url == str(tmp_path) for outcome in outcomes)


def test_what_arrives_changed_is_not_taken(serve: Callable[[Tier], Served]) -> None:
    class Flips(MemoryTier):
        def put_large(self, path: str, source: object, size: int, chunk: int) -> list[str]:
            return ["0" * 32 for _ in super().put_large(path, source, size, chunk)]  # type: ignore[arg-type]

    tier = serve(Flips(1 << 20)).tier()
    tier.make_folder("a")
    with pytest.raises(OSError, match="other checksums"):
        put_large(tier, "a/shard", b"1" * 100)


# --- who gets in ---


def test_without_the_key_nothing_is_answered(serve: Callable[[Tier], Served]) -> None:
    depot = serve(MemoryTier(1 << 20))
    with pytest.raises(ConnectionError):
        depot.tier("another key").names()
    assert depot.tier().names() == []


def talk(depot: Served) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", depot.port), 10)
    calls.prove(sock, KEY)
    return sock


@pytest.mark.parametrize("of", ["", calls.SHADOWS])
@pytest.mark.parametrize(
    "path", ["../x", "a/../x", "/etc/passwd", "a/b/c", "..", "a/..", "a//b", "a\0b", "", "x" * 300, "a/b\n", "é"]
)
def test_a_path_that_leads_elsewhere(serve: Callable[[Tier], Served], tmp_path: Path, path: str, of: str) -> None:
    depot, path = serve(FileTier(tmp_path / "in")), of + path
    with talk(depot) as sock:
        for call in (Call("get", path, 10), Call("size", path), Call("read", path, 10), Call("put", path, 1)):
            calls.send(sock, call, b"x" if call.method == "put" else b"")
            assert "no path of a checkpoint" in calls.receive_answer(sock).text
        calls.send(sock, Call("remove", path))
        assert calls.receive_answer(sock).error == "CheckpointError"
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "call",
    [
        Call("eval", "a"),
        Call("read", "a", 1 << 40),
        Call("read", "a", 10, -1),
        Call("put_large", "a", -5, chunk=4096),
        Call("put_large", "a", 5, chunk=0),
        Call("put_large", "a", 5, chunk=1 << 40),
    ],
)
def test_a_call_that_makes_no_sense(serve: Callable[[Tier], Served], call: Call) -> None:
    with talk(serve(MemoryTier(1 << 20))) as sock:
        calls.send(sock, call)
        assert calls.receive_answer(sock).error == "CheckpointError"
        calls.send(sock, Call("names"))
        assert calls.receive_answer(sock) == Answer(names=[])


@pytest.mark.parametrize(
    "noise",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x05hello",
        b"\x00\x00\x00\x01",
        msgspec.msgpack.encode(Call("put", "a", 1 << 50)),
    ],
)
def test_noise_ends_the_connection_and_nothing_else(serve: Callable[[Tier], Served], noise: bytes) -> None:
    depot = serve(MemoryTier(1 << 20))
    with talk(depot) as sock:
        sock.sendall(noise)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(100) == b""
    assert depot.tier().names() == []


def test_a_caller_that_dies_in_the_middle_leaves_nothing(serve: Callable[[Tier], Served]) -> None:
    depot = serve(store := MemoryTier(1 << 20))
    store.make_folder("a")
    with talk(depot) as sock:
        calls.send(sock, Call("put_large", "a/shard", 5 * CHUNK, chunk=CHUNK))
        assert calls.receive_answer(sock).want == 0
        sock.sendall(b"half")
    for _ in range(200):
        if store._used == 0:
            break
        threading.Event().wait(0.02)
    assert store._used == 0 and store.names("a") == []


# --- settings ---


def test_settings(tmp_path: Path) -> None:
    for text, kind in (("memory:1.5GiB", MemoryTier), ("memory:64 MiB", MemoryTier), (str(tmp_path), FileTier)):
        setting = load_settings(env={"RERAIL_NODE_STORE": text}).node_store
        assert setting == text and isinstance(store_of(setting), kind)
    for text in ("memory:", "memory:8", "memory:-1GiB", "8GiB", "relative/path", "s3://bucket"):
        with pytest.raises(ConfigError, match="node_store"):
            load_settings(env={"RERAIL_NODE_STORE": text})


def test_outside_a_job_there_are_no_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEPOTS, raising=False)
    with pytest.raises(CheckpointError, match="RERAIL_NODE_STORE"):
        tier_at("nodes://")


def test_the_nodes_of_this_job(tmp_path: Path, serve: Callable[[Tier], Served]) -> None:
    depots = [serve(MemoryTier(1 << 20)) for _ in range(2)]
    told = {DEPOTS: ",".join(f"127.0.0.1:{depot.port}" for depot in depots), DEPOT_KEY: KEY, "GROUP_RANK": "1"}
    for store, lasting in (("memory:1MiB", False), (str(tmp_path), True)):
        settings = msgspec.json.encode(Settings(node_store=store)).decode()
        tier = nodes.of_this_job({**told, "RERAIL_SETTINGS": settings})
        tier.make_folder("a")
        assert tier.url == "nodes://" and tier.lasting is lasting and tier.names("a") == []
        assert isinstance(tier._own, FileTier) is lasting
