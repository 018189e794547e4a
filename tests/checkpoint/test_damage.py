"""No wrong state can be loaded: whatever is changed on the disk is noticed, with a reason, and the step before is used."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from two_ranks import Job, load, start

from rerail.checkpoint import catalog, header, manifest, names, reading, retention
from rerail.checkpoint.catalog import Step
from rerail.checkpoint.files import FileTier
from rerail.checkpoint.names import StepId
from rerail.checkpoint.reshard import Wanted, whole_tensor
from rerail.checkpoint.reshard import load as reshard_load
from rerail.errors import CheckpointError

OLD, NEW = StepId(1, 10, 0), StepId(1, 20, 0)
WIDE = 300_000
"""Columns that make a shard of several chunks."""


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pristine")
    job = Job()
    for version in (OLD.step, NEW.step):
        outcomes = job.save(version, [root])
        assert all(outcome.ok for outcome in outcomes), outcomes
    job.close()
    return root


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    """Two committed steps of two ranks."""
    shutil.copytree(pristine, tmp_path / "root")
    return tmp_path / "root"


def shard(root: Path, rank: int, step: StepId = NEW) -> Path:
    return root / step.folder / names.shard_name(rank, 0)


def rank_file(root: Path, rank: int, step: StepId = NEW) -> Path:
    return root / step.folder / names.manifest_name(rank)


def commit_file(root: Path, step: StepId = NEW) -> Path:
    return root / step.folder / names.COMMIT


def expect_old(root: Path, what: str, *, in_data: bool = False) -> None:
    """The new step is refused with a reason and the old one loaded. `in_data`: it is the bytes of a shard that are bad."""
    tier, reasons = FileTier(root), list[str]()
    loaded = start([tier])
    assert loaded.version == OLD.step, f"{what}: step {loaded.version} was loaded"
    assert loaded.reasons and NEW.folder in loaded.reasons[0], f"{what}: no reason was given"
    newest = catalog.newest([tier], reasons.append)
    assert newest is not None
    if not in_data:
        assert newest.id == OLD and NEW.folder in reasons[0], f"{what}: newest() gave {newest.id}"
        return
    assert newest.id == NEW
    with pytest.raises(CheckpointError):
        for rank_manifest in newest.manifests.values():
            reading.verify(tier, NEW.folder, rank_manifest)
    with pytest.raises(CheckpointError):
        load(newest)


def flips(size: int, count: int) -> Iterator[tuple[int, int]]:
    """Positions over the whole file, ends included, each with one of its bits."""
    for index in range(count):
        yield index * (size - 1) // max(count - 1, 1), 1 << index % 8


def flip(path: Path, at: int, mask: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


# --- damage ---


def test_an_untouched_step_is_loaded(root: Path) -> None:
    assert start([FileTier(root)]) == (NEW.step, [])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_flipped_bit_anywhere_in_a_shard_is_noticed(root: Path, rank: int) -> None:
    tier, path = FileTier(root), shard(root, rank)
    step = catalog.open_step(tier, NEW)
    for at, mask in flips(path.stat().st_size, 150):
        flip(path, at, mask)
        with pytest.raises(CheckpointError):
            reading.verify(tier, NEW.folder, step.manifests[rank])
            pytest.fail(f"byte {at} ^ {mask}: verify() saw nothing")
        with pytest.raises(CheckpointError):
            load(step)
            pytest.fail(f"byte {at} ^ {mask}: load() saw nothing")
        flip(path, at, mask)
    flip(path, 4096, 1)
    expect_old(root, "a flipped bit in a shard", in_data=True)


@pytest.mark.parametrize("which", ["manifest of rank 0", "manifest of rank 1", "COMMIT"])
def test_a_flipped_bit_anywhere_in_manifest_or_commit_is_noticed(root: Path, which: str) -> None:
    path = commit_file(root) if which == "COMMIT" else rank_file(root, int(which[-1]))
    size = path.stat().st_size
    for at, mask in flips(size, size):
        flip(path, at, mask)
        with pytest.raises(CheckpointError):
            catalog.open_step(FileTier(root), NEW)
            pytest.fail(f"byte {at} ^ {mask} of {which} was not noticed")
        flip(path, at, mask)
    flip(path, size // 2, 4)
    expect_old(root, f"a flipped bit in {which}")


def test_a_lost_page_is_noticed(root: Path) -> None:
    path = shard(root, 0)
    pristine = path.read_bytes()
    for at in range(0, len(pristine), 4096):
        lost = pristine[:at] + bytes(len(pristine[at : at + 4096])) + pristine[at + 4096 :]
        path.write_bytes(lost)
        expect_old(root, f"the page at {at} reads as zeros", in_data=True)


@pytest.mark.parametrize("which", ["shard", "manifest", "COMMIT"])
def test_truncated_or_longer_files_are_noticed(root: Path, which: str) -> None:
    path = {"shard": shard(root, 1), "manifest": rank_file(root, 1), "COMMIT": commit_file(root)}[which]
    pristine = path.read_bytes()
    for length in {0, 1, len(pristine) // 2, len(pristine) - 1}:
        path.write_bytes(pristine[:length])
        expect_old(root, f"{which} cut to {length} bytes")
    path.write_bytes(pristine + b"\0")
    expect_old(root, f"{which} with a byte more")
    path.write_bytes(pristine + b"\n")
    expect_old(root, f"{which} with a line more")


def test_damage_in_one_of_several_chunks_is_noticed_by_whoever_reads_it(tmp_path: Path) -> None:
    job = Job(columns=WIDE)
    assert all(outcome.ok for outcome in job.save(NEW.step, [tmp_path], read_back=False))
    job.close()
    tier = FileTier(tmp_path)
    step = catalog.open_step(tier, NEW)
    assert start([tier], WIDE).version == NEW.step
    path, count = shard(tmp_path, 0), len(step.manifests[0].hashes)
    assert count > 1, "this shard is to have several chunks"
    for chunk in range(count):
        at = min(chunk * manifest.CHUNK + 4096, path.stat().st_size - 1)
        flip(path, at, 0x80)
        with pytest.raises(CheckpointError, match=f"chunk {chunk} "):
            load(step, WIDE)
            pytest.fail(f"damage in chunk {chunk} was not noticed")
        flip(path, at, 0x80)


def test_swapped_shards_are_noticed(root: Path) -> None:
    one, other = shard(root, 0), shard(root, 1)
    swap = root / "swap"
    one.rename(swap), other.rename(one), swap.rename(other)
    expect_old(root, "shards of two ranks swapped")


def test_swapped_shards_of_the_same_size_are_noticed(tmp_path: Path) -> None:
    job = Job()
    for version in (OLD.step, NEW.step):
        assert all(outcome.ok for outcome in job.save(version, [tmp_path]))
    job.close()
    shutil.copyfile(shard(tmp_path, 1, OLD), shard(tmp_path, 1, NEW))
    expect_old(tmp_path, "the older shard in place of the newer", in_data=True)


def test_a_stale_manifest_with_new_data_is_noticed(root: Path) -> None:
    shutil.copyfile(rank_file(root, 0, OLD), rank_file(root, 0, NEW))
    expect_old(root, "a stale manifest")


@pytest.mark.parametrize("which", ["shard", "manifest", "COMMIT"])
def test_missing_files_are_noticed(root: Path, which: str) -> None:
    {"shard": shard(root, 1), "manifest": rank_file(root, 1), "COMMIT": commit_file(root)}[which].unlink()
    tier, reasons = FileTier(root), list[str]()
    newest = catalog.newest([tier], reasons.append)
    assert newest is not None and newest.id == OLD
    assert start([tier]).version == OLD.step
    with pytest.raises(CheckpointError):
        catalog.open_step(tier, NEW)
    # a folder without COMMIT was never a checkpoint, so there is nothing to excuse
    assert bool(reasons) == (which != "COMMIT")


def test_commit_of_another_directory_is_noticed(root: Path) -> None:
    shutil.copyfile(commit_file(root, OLD), commit_file(root, NEW))
    expect_old(root, "COMMIT of another step")


def test_a_renamed_directory_is_noticed(root: Path) -> None:
    newer = StepId(2, 30, 0)
    (root / OLD.folder).rename(root / newer.folder)
    loaded = start([FileTier(root)])
    assert loaded.version == NEW.step and newer.folder in loaded.reasons[0]


def test_a_shard_that_vanishes_while_it_is_read_is_a_checkpoint_error(root: Path) -> None:
    step = catalog.open_step(FileTier(root), NEW)
    shard(root, 0).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(step)


def test_without_any_valid_step_there_is_none(root: Path) -> None:
    for step in (OLD, NEW):
        flip(commit_file(root, step), 20, 1)
    reasons: list[str] = []
    assert catalog.newest([FileTier(root)], reasons.append) is None
    assert len(reasons) == 2


# --- hostile descriptions: consistent with their checksums, and wrong ---


def forge(root: Path, data: bytes, rank: int = 0) -> None:
    """Put this manifest in place of the rank's, and let COMMIT vouch for it."""
    rank_file(root, rank).write_bytes(data)

    def vouch(commit: dict[str, Any]) -> None:
        commit["ranks"][str(rank)] = {"size": len(data), "xxh3": manifest.digest(data)}

    forge_commit(root, vouch)


def forge_commit(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = commit_file(root)
    commit = json.loads(path.read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[0])
    change(commit)
    write_commit(path, json.dumps(commit).encode())


def write_commit(path: Path, body: bytes) -> None:
    path.write_bytes(body + b"\n" + manifest.digest(body).encode() + b"\n")


def forge_manifest(root: Path, change: Callable[[dict[str, Any]], object], rank: int = 0) -> None:
    found = json.loads(rank_file(root, rank).read_bytes())
    change(found)
    forge(root, json.dumps(found).encode(), rank)


def box(found: dict[str, Any]) -> dict[str, Any]:
    return found["tensors"]["w"]["boxes"][0]  # type: ignore[no-any-return]


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "a path that leaves the folder": lambda m: m.update(file="../../../etc/passwd"),
    "an absolute path": lambda m: m.update(file="/etc/passwd"),
    "the older step's shard": lambda m: m.update(file=f"../{OLD.folder}/{names.shard_name(0, 0)}"),
    "a name with a line break": lambda m: m.update(file=m["file"] + "\n"),
    "a name with a null": lambda m: m.update(file=m["file"] + "\0"),
    "another rank's shard": lambda m: m.update(file=names.shard_name(1, 0)),
    "no shard but bytes": lambda m: m.update(file=""),
    "a negative place": lambda m: box(m).update(at=-4),
    "a place behind the end": lambda m: box(m).update(at=m["size"]),
    "a huge place": lambda m: box(m).update(at=2**63),
    "an enormous place": lambda m: box(m).update(at=10**400),
    "a place that is no number": lambda m: box(m).update(at=1.5),
    "bytes shared by two tensors": lambda m: m["tensors"].update(
        x={"dtype": "F32", "shape": [2], "boxes": [{"start": [0], "shape": [2], "at": box(m)["at"]}]}
    ),
    "a part that is there twice": lambda m: m["tensors"]["w"].update(boxes=[box(m), box(m)]),
    "a negative size": lambda m: m.update(size=-1, hashes=[]),
    "a huge size": lambda m: m.update(size=2**62),
    "chunks of nothing": lambda m: m.update(chunk=0),
    "negative chunks": lambda m: m.update(chunk=-4096),
    "chunks that are no pages": lambda m: m.update(chunk=5000, hashes=m["hashes"] * 2),
    "huge chunks": lambda m: m.update(chunk=2**40),
    "a huge shape": lambda m: m["tensors"]["w"].update(shape=[2**62, 2**62]),
    "a huge shape of nothing": lambda m: m["tensors"].update(x={"dtype": "F32", "shape": [0, 2**60], "boxes": []}),
    "a shape beyond all numbers": lambda m: m["tensors"].update(x={"dtype": "F32", "shape": [2**62] * 60, "boxes": []}),
    "a million dimensions": lambda m: m["tensors"].update(x={"dtype": "F32", "shape": [2] * 10**6, "boxes": []}),
    "a negative shape": lambda m: m["tensors"]["w"].update(shape=[-8, -96]),
    "a tensor without parts": lambda m: m["tensors"].update(x={"dtype": "F32", "shape": [4], "boxes": []}),
    "a part outside its tensor": lambda m: box(m).update(start=[6, 0]),
    "a part that starts before it": lambda m: box(m).update(start=[-1, 0]),
    "a part of other dimensions": lambda m: box(m).update(start=[0]),
    "a part that is too small": lambda m: box(m).update(shape=[3, 96]),
    "an unknown type": lambda m: m["tensors"]["w"].update(dtype="PICKLE"),
    "another type than on rank 1": lambda m: m["tensors"]["w"].update(dtype="I32"),
    "a type that is no text": lambda m: m["tensors"]["w"].update(dtype=4),
    "no tensors": lambda m: m.update(tensors={}),
    "tensors that are none": lambda m: m.update(tensors=None),
    "checksums too few": lambda m: m.update(hashes=[]),
    "checksums that are numbers": lambda m: m.update(hashes=[1]),
    "small state that is no base64": lambda m: m.update(small="%%%"),
    "another rank": lambda m: m.update(rank=1),
    "another step": lambda m: m.update(step=OLD.step),
    "another epoch": lambda m: m.update(epoch=7),
    "another world size": lambda m: m.update(world_size=3),
    "a newer format": lambda m: m.update(format=2),
    "no format": lambda m: m.pop("format"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_manifest_is_refused(root: Path, what: str) -> None:
    forge_manifest(root, HOSTILE[what])
    expect_old(root, what)


def test_a_forged_checksum_of_a_chunk_is_refused(root: Path) -> None:
    forge_manifest(root, lambda m: m.update(hashes=["0" * 32]))
    expect_old(root, "a wrong checksum", in_data=True)


def test_a_newer_format_says_what_to_do(root: Path) -> None:
    forge(root, b'{"format": 2, "tensors": "in another way"}')
    assert "use a newer rerail" in start([FileTier(root)]).reasons[0]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[" * 10**6,
        b'{"format":1,"x":' + b"[" * 10**6 + b"]" * 10**6 + b"}",
        b"\xff\xfe",
        b'{"a":' * 5000,
    ],
    ids=["nothing", "null", "deep", "deep inside", "no text", "deep objects"],
)
def test_a_json_bomb_is_refused(root: Path, data: bytes) -> None:
    forge(root, data)
    expect_old(root, "a JSON bomb as manifest")
    write_commit(commit_file(root), data)
    expect_old(root, "a JSON bomb as COMMIT")


def test_files_beyond_the_limit_are_not_even_read(root: Path, tmp_path: Path) -> None:
    for path in (rank_file(root, 0), commit_file(root)):
        pristine = path.read_bytes()
        os.truncate(path, 1 << 40)
        expect_old(root, f"{path.name} of a terabyte")
        os.truncate(path, 0)
        path.write_bytes(pristine)


COMMITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a rank missing": lambda c: c["ranks"].pop("1"),
    "a rank too many": lambda c: c["ranks"].update({"2": c["ranks"]["1"]}),
    "a smaller world": lambda c: (c["ranks"].pop("1"), c.update(world_size=1)),
    "a larger world": lambda c: c.update(world_size=3),
    "an empty world": lambda c: c.update(world_size=0, ranks={}),
    "a rank spelt otherwise": lambda c: c["ranks"].update({"00": c["ranks"].pop("0")}),
    "a rank spelt twice": lambda c: c["ranks"].update({"00": c["ranks"]["0"]}),
    "a negative rank": lambda c: c["ranks"].update({"-1": c["ranks"].pop("0")}),
    "a rank of 5000 digits": lambda c: c["ranks"].update({"9" * 5000: c["ranks"].pop("0")}),
    "a rank in other digits": lambda c: c["ranks"].update({"\u0661": c["ranks"].pop("1")}),
    "a manifest of negative size": lambda c: c["ranks"]["0"].update(size=-1),
    "a manifest of huge size": lambda c: c["ranks"]["0"].update(size=2**60),
    "another epoch": lambda c: c.update(epoch=9),
    "a newer format": lambda c: c.update(format=2),
}


@pytest.mark.parametrize("what", COMMITS)
def test_a_hostile_commit_is_refused(root: Path, what: str) -> None:
    forge_commit(root, COMMITS[what])
    expect_old(root, f"COMMIT with {what}")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_a_description_says_only_a_checkpoint_error_comes_of_it(pristine: Path, data: st.DataObject) -> None:
    commit = manifest.decode_commit(commit_file(pristine).read_bytes(), NEW)
    found = json.loads(rank_file(pristine, 0).read_bytes())
    place: Any = found
    while isinstance(place, dict | list) and place:
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        key = data.draw(st.sampled_from(list(keys)))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            place[key] = data.draw(json_values)
            break
        place = place[key]
    text = json.dumps(found).encode()
    vouched = manifest.RankEntry(len(text), manifest.digest(text))
    forged = manifest.Commit(
        epoch=NEW.epoch, step=NEW.step, generation=0, world_size=2, saved_at=0.0, ranks={**commit.ranks, "0": vouched}
    )
    other = manifest.decode_rank(rank_file(pristine, 1).read_bytes(), commit, 1)
    tier = FileTier(pristine)
    try:
        step = Step(tier, NEW, forged, {0: manifest.decode_rank(text, forged, 0), 1: other})
        catalog.check_whole(step)
        tensors = load(step)
    except CheckpointError:
        return
    for name, right in load(catalog.open_step(tier, NEW)).items():
        assert tensors[name].shape == right.shape, f"{name} has another shape"


def test_a_tensor_of_another_type_or_shape_is_refused_before_anything_is_changed(root: Path) -> None:
    step = catalog.open_step(FileTier(root), NEW)
    right = whole_tensor(step, "w")
    for wrong in (right.double(), right[:4], right.int()):
        before = wrong.clone()
        with pytest.raises(CheckpointError, match="'w' is"):
            reshard_load(step, [Wanted("w", wrong, tuple(wrong.shape), (0, 0))])
        assert wrong.equal(before)
    with pytest.raises(CheckpointError, match="not in the checkpoint"):
        reshard_load(step, [Wanted("v", right, tuple(right.shape), (0, 0))])


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "XX", "shape": [4], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]},
        {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]},
    ],
    ids=["unknown type backwards", "negative shape", "too short", "negative place", "behind the end"],
)
def test_a_hostile_safetensors_header_is_refused(entry: dict[str, Any]) -> None:
    text = json.dumps({"w": entry}).encode()
    with pytest.raises(CheckpointError):
        header.parse(len(text).to_bytes(8, "little") + text, 4096)


# --- what is written can be read ---


def test_metrics_that_are_no_numbers_do_not_make_a_commit_unreadable(tmp_path: Path) -> None:
    job = Job()
    told = {"loss": math.nan, "worst": math.inf, "good": 0.5}
    assert all(outcome.ok for outcome in job.save(NEW.step, [tmp_path], metrics=told))
    job.close()
    assert catalog.open_step(FileTier(tmp_path), NEW).commit.metrics == {"good": 0.5}


def test_what_could_not_be_loaded_is_not_committed(tmp_path: Path) -> None:
    job = Job()
    job.stage(NEW.step)
    alone = job.order(NEW.step, [tmp_path], 0, deadline_s=1.0)
    outcome = job.carry_out(msgspec.structs.replace(alone, group=(0,)))
    job.close()
    assert not outcome.ok and "384 of them were saved" in outcome.notes[0]
    assert start([FileTier(tmp_path)]).version == 0


def test_a_step_that_is_not_to_be_trusted_is_passed_over_for_good_and_left_to_people(root: Path) -> None:
    tier = FileTier(root)
    catalog.distrust([tier], NEW, "the training had gone wrong behind step 15")
    expect_old(root, "distrusted")
    with pytest.raises(CheckpointError, match="gone wrong behind step 15"):
        catalog.open_step(tier, NEW)
    assert retention.prune(tier, retention.Keep(last=1), OLD, set()) == []
    assert (root / NEW.folder).is_dir()
    catalog.distrust([tier], StepId(1, 30, 0), "not there")
    assert not (root / StepId(1, 30, 0).folder).exists()
