"""The engine under torch.distributed.checkpoint: what torch's planners save is durable, verified and free of pickle."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from rerail.checkpoint import catalog
from rerail.checkpoint import dcp as engine
from rerail.checkpoint.dcp import Reader, Writer
from rerail.checkpoint.files import FileTier
from rerail.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*unavailable or uninitialized")


def state() -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "half": torch.randn(3, 4).to(torch.bfloat16).t(),
        "empty": torch.empty(0, 3),
        "number": 42,
        "nested": {"list": [1, 2.5, "three"], "none": None, "text": "x" * 100},
    }


def emptied(value: Any) -> Any:
    """The same structure with nothing of its content."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: emptied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [emptied(item) for item in value]
    return type(value)() if value is not None else "something"


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def save(root: Path, step: int, value: dict[str, Any], **options: Any) -> None:
    dcp.save(value, storage_writer=Writer(root, step, **options), no_dist=True)


def load(root: Path, value: dict[str, Any], step: int | None = None) -> dict[str, Any]:
    dcp.load(value, storage_reader=Reader(root, step), no_dist=True)
    return value


def refused(action: Callable[[], object], match: str) -> None:
    """torch wraps what a rank raises in its own exception, which is no Exception, or lets it through."""
    with pytest.raises((CheckpointException, CheckpointError), match=match):
        action()


def shard_of(root: Path, step: int = 1) -> Path:
    (found,) = root.glob(f"step-{step:010d}-*/rank-00000.*.safetensors")
    return found


def test_everything_comes_back(tmp_path: Path) -> None:
    saved = state()
    save(tmp_path, 1, saved)
    assert same(load(tmp_path, emptied(saved)), saved)
    (found,) = catalog.folders(FileTier(tmp_path))
    assert found.committed
    assert not list(tmp_path.rglob("*.metadata")) and not list(tmp_path.rglob("*.distcp"))


def test_the_newest_step_or_the_one_asked_for(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        save(tmp_path, step, {"w": torch.full((3,), float(step)), "step": step})
    assert load(tmp_path, {"w": torch.zeros(3), "step": 0})["step"] == 10
    assert same(load(tmp_path, {"w": torch.zeros(3), "step": 0}, 2), {"w": torch.full((3,), 2.0), "step": 2})
    refused(lambda: load(tmp_path, {"w": torch.zeros(3)}, 3), "no step 3")
    refused(lambda: load(tmp_path / "elsewhere", {"w": torch.zeros(3)}), "no step in")


def test_a_step_is_never_overwritten_and_old_ones_may_go(tmp_path: Path) -> None:
    save(tmp_path, 1, {"w": torch.ones(3)})
    save(tmp_path, 1, {"w": torch.ones(3)})
    refused(lambda: save(tmp_path, 1, {"w": torch.zeros(3)}), "of another state")
    assert load(tmp_path, {"w": torch.zeros(3)})["w"].all()
    save(tmp_path, 2, {"w": torch.ones(3)}, keep=1)
    assert [found.id.step for found in catalog.folders(FileTier(tmp_path))] == [2]


def test_part_of_a_state_with_another_type(tmp_path: Path) -> None:
    saved = state()
    save(tmp_path, 1, saved)
    weight = torch.zeros(7, 5, dtype=torch.float64)
    load(tmp_path, {"model": {"0.weight": weight}})
    assert torch.equal(weight, saved["model"]["0.weight"].double())


def test_a_state_that_is_not_known_beforehand(tmp_path: Path) -> None:
    """torch puts nested dictionaries together from the paths that its planner left."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    saved = state()
    save(tmp_path, 1, saved)
    found = _load_state_dict_from_keys(storage_reader=Reader(tmp_path))
    assert same(found["model"], dict(saved["model"])) and same(found["nested"], saved["nested"])


def test_much_plain_data_lies_beside_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "ROOM", 2000)
    saved = state()
    save(tmp_path, 1, saved)
    assert same(load(tmp_path, emptied(saved)), saved)


@pytest.mark.parametrize("where", ["tensor", "plain data", "manifest", "commit"])
def test_damage_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(engine, "ROOM", 0 if where == "plain data" else 1 << 20)
    save(tmp_path, 1, {"w": torch.ones(3000), "text": "plain" * 100})
    folder = shard_of(tmp_path).parent
    file = {"manifest": folder / "rank-00000.json", "commit": folder / "COMMIT"}.get(where, shard_of(tmp_path))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    refused(lambda: load(tmp_path, {"w": torch.zeros(3000), "text": ""}), "checksum|vouches")


def test_a_damaged_newest_step_is_passed_over_when_none_is_asked_for(tmp_path: Path) -> None:
    save(tmp_path, 1, {"step": 1, "w": torch.ones(3)})
    save(tmp_path, 2, {"step": 2, "w": torch.ones(3)})
    shard_of(tmp_path, 2).write_bytes(b"short")
    assert load(tmp_path, {"step": 0, "w": torch.zeros(3)})["step"] == 1


class Trap:
    """Runs code when it is unpickled without care."""

    sprung = False

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return spring, ()


def spring() -> None:
    Trap.sprung = True


def test_what_is_not_plain_is_refused_when_it_is_saved_and_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(lambda: save(tmp_path / "first", 1, {"trap": Trap()}), "plain data")
    assert not any(found.committed for found in catalog.folders(FileTier(tmp_path / "first")))

    read_plain = engine._read_plain
    monkeypatch.setattr(engine, "_read_plain", lambda name, data: None)
    save(tmp_path / "second", 1, {"trap": Trap()})
    monkeypatch.setattr(engine, "_read_plain", read_plain)
    refused(lambda: load(tmp_path / "second", {"trap": ""}), "plain data")
    assert not Trap.sprung


def test_a_save_in_the_background(tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        saved = state()
        before = copy.deepcopy(saved)
        answer = dcp.async_save(saved, storage_writer=Writer(tmp_path, 1))
        getattr(answer, "staging_completion", answer).result()
        saved["model"]["0.weight"].zero_()
        getattr(answer, "upload_completion", answer).result()
    finally:
        dist.destroy_process_group()
    assert same(load(tmp_path, emptied(before)), before)


def test_a_step_saved_by_a_job_can_be_read(tmp_path: Path) -> None:
    """Its tensors are there by their names; its small state is the job's own affair."""
    from test_reshard import save as save_pieces

    from rerail.checkpoint.layout import Piece

    tensor = torch.arange(12.0).view(4, 3)
    save_pieces(
        tmp_path, [[Piece("w", tensor[:1], (4, 3), (0, 0), True)], [Piece("w", tensor[1:], (4, 3), (1, 0), True)]]
    )
    assert torch.equal(load(tmp_path, {"w": torch.zeros(4, 3)})["w"], tensor)


TWO_RANKS = """
    import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from rerail.checkpoint.dcp import Reader, Writer

    root, rank = sys.argv[1], int(sys.argv[2])
    store = dist.FileStore(sys.argv[3], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(35.0).view(7, 5)
    state = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole.clone(), mesh, [Shard(1)]),
        "same": distribute_tensor(whole.clone(), mesh, [Replicate()]),
        "plain": torch.ones(3),
        "number": 7,
    }
    dcp.save(state, storage_writer=Writer(root, 1))
    other = {
        "rows": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)]),
        "columns": distribute_tensor(torch.zeros(7, 5), mesh, [Replicate()]),
        "same": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(0)]),
        "plain": torch.zeros(3),
        "number": 0,
    }
    dcp.load(other, storage_reader=Reader(root))
    for name in ("rows", "columns", "same"):
        assert torch.equal(other[name].full_tensor(), whole), name
    assert other["plain"].all() and other["number"] == 7

    class Odd:
        pass

    bad = {"odd": Odd()} if rank == 0 else {}
    try:
        dcp.save({"rows": state["rows"], **bad}, storage_writer=Writer(root, 2))
    except BaseException as error:
        assert "plain data" in str(error), error
    else:
        raise SystemExit("what cannot be read was saved")
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may end the process on their own when the interpreter goes
"""


def test_two_ranks_and_then_one(tmp_path: Path) -> None:
    """Any placements into any others; a rank that cannot save holds up nobody."""
    script = tmp_path / "two.py"
    script.write_text(textwrap.dedent(TWO_RANKS))
    root = tmp_path / "root"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(root), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=90)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(told)

    whole = torch.arange(35.0).view(7, 5)
    alone = {"rows": torch.zeros(7, 5), "columns": torch.zeros(7, 5), "same": torch.zeros(7, 5), "number": 0}
    load(root, alone)
    assert all(torch.equal(alone[name], whole) for name in ("rows", "columns", "same")) and alone["number"] == 7
    (step,) = [found for found in catalog.folders(FileTier(root)) if found.committed]
    opened = catalog.open_step(step.tier, step.id)
    assert all(opened.manifests[rank].file for rank in (0, 1)), "each rank writes its own part"
    assert len(opened.tensors()["same"].parts) == 1, "what all ranks have is saved once"


def test_nothing_read_is_given_to_the_unpickler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's planner loads without care, but only what this process has written itself."""
    save(tmp_path, 1, {"number": 7})
    given: list[bytes] = []
    torch_load = torch.load

    def watched(source: io.BytesIO, **options: Any) -> Any:
        if not options.get("weights_only", True):
            given.append(source.getvalue())
        return torch_load(source, **options)

    monkeypatch.setattr(torch, "load", watched)
    monkeypatch.setattr(engine, "_written", lambda value: io.BytesIO(_saved_as(("fresh", value))))
    assert load(tmp_path, {"number": 0}) == {"number": ("fresh", 7)}
    assert given == [_saved_as(("fresh", 7))]


def _saved_as(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
