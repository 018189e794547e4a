"""`rerail ckpt` as a person uses it, on checkpoints that the engine itself has written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from rerail.checkpoint.arena import Arena
from rerail.checkpoint.layout import Piece
from rerail.checkpoint.names import StepId
from rerail.checkpoint.saving import Order, Outcome, carry_out, claim_epoch
from rerail.checkpoint.staging import Stager
from rerail.checkpoint.tiers import tier_at
from rerail.cli.main import main
from rerail.session import plain, rng
from rerail.session.cursor import Position
from rerail.session.small import Small, encode

Capture = pytest.CaptureFixture[str]
SCHEDULE = {"last_epoch": 7, "_step_count": 8, "base_lrs": [0.1]}


def small(step: int) -> bytes:
    objects = plain.encode({"scheduler": SCHEDULE, "optimizer:groups": [{"lr": 0.25}]}, "a test")
    return encode(Small(step, rng.capture(), Position(2, 17), objects, {}, 2))


def whole(tensors: dict[str, torch.Tensor]) -> list[Piece]:
    return [Piece(name, one, tuple(one.shape), (0,) * one.dim(), True) for name, one in tensors.items()]


def save(root: object, step: int, ranks: list[list[Piece]], *, epoch: int = 0, **more: Any) -> str:
    """Save a step with the engine: one arena and one thread for each rank. The folder it is in."""
    url = str(root)
    epoch = epoch or claim_epoch(tier_at(url), "test")
    outcomes: list[Outcome] = []

    def one(rank: int, pieces: list[Piece]) -> None:
        fd = os.memfd_create("arena")
        try:
            arena = Arena(fd)
            Stager(arena, overlap=False).stage(step, pieces, small(step))
            order = Order(
                version=step,
                epoch=epoch,
                generation=0,
                rank=rank,
                group=tuple(range(len(ranks))),
                world_size=len(ranks),
                tiers=(url,),
                **{"job": "test", "versions": {"rerail": "0"}, **more},
            )
            outcomes.extend(carry_out(order, arena, set))
        finally:
            os.close(fd)

    threads = [threading.Thread(target=one, args=(rank, pieces)) for rank, pieces in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [outcome.ok for outcome in outcomes] == [True] * len(ranks), outcomes
    return StepId(epoch, step, 0).folder


def state(value: float = 0.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.w": torch.randn(6, 5, generator=generator) + value,
        "model.half": torch.randn(3, generator=generator).to(torch.bfloat16),
        "model.none": torch.empty(0, 4),
        "model.count": torch.tensor(7),
        "optimizer.state.model.w.exp_avg": torch.randn(6, 5, generator=generator),
    }


def model(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): one for name, one in state(value).items() if name.startswith("model.")}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].dtype == one.dtype and torch.equal(found[name], one) for name, one in wanted.items()
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 10 and 20 of one job; `w` of step 20 is greater by one."""
    place = tmp_path / "root"
    save(place, 10, [whole(state())], metrics={"loss": 2.0})
    save(place, 20, [whole(state(1.0))], epoch=1, metrics={"loss": 3.0})
    return place


def ask(capsys: Capture, *arguments: object, code: int = 0) -> Any:
    """What a command answers with --json."""
    capsys.readouterr()
    assert main(["ckpt", *map(str, arguments), "--json"]) == code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def refused(capsys: Capture, *arguments: object) -> str:
    """What a command says against what it was given; one cause, never a traceback."""
    capsys.readouterr()
    assert main(["ckpt", *map(str, arguments)]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("rerail ckpt: ") and "Traceback" not in shown.err
    return shown.err


def damage(path: Path, at: int = -3) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def shard(root: Path, step: int, rank: int = 0) -> Path:
    return next(root.glob(f"step-{step:010d}-*/rank-{rank:05d}.0.safetensors"))


# --- ls ---


def test_ls_shows_the_newest_first_with_what_is_known(root: Path, capsys: Capture) -> None:
    rows = ask(capsys, "ls", root)
    assert [(row["step"], row["whole"], row["verified"]) for row in rows] == [(20, True, True), (10, True, True)]
    assert rows[1]["metrics"] == {"loss": 2.0} and rows[0]["job"] == "test" and rows[0]["ranks"] == 1
    assert main(["ckpt", "ls", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "when", "size", "ranks", "verified", "job", "metrics", "state"]
    assert lines[1].split()[0] == "20" and lines[1].endswith("whole")
    assert lines[3].startswith("2 of 2 whole")


def test_ls_says_why_something_does_not_count(root: Path, capsys: Capture) -> None:
    damage(next(root.glob("step-0000000010-*/rank-00000.json")))
    torn = root / StepId(1, 30, 0).folder
    torn.mkdir()
    given_up = root / StepId(1, 40, 0).folder
    given_up.mkdir()
    (given_up / "ABORT").write_text("rank 3: no space\x1b[2J left")
    why = {row["step"]: row["why"] for row in ask(capsys, "ls", root)}
    assert why[20] == ""
    assert why[10] == "damaged: rank-00000.json is not the one that COMMIT vouches for"
    assert why[30].startswith("unfinished: no rank has written")
    assert why[40].startswith("given up: rank 3: no space")
    assert main(["ckpt", "ls", str(root)]) == 0
    assert "\x1b" not in capsys.readouterr().out, "a text from a file reached the terminal as a command"


def test_ls_of_several_tiers_names_them(root: Path, tmp_path: Path, capsys: Capture) -> None:
    url = f"memory://{tmp_path.name}"
    save(url, 15, [whole(state())])
    assert [row["step"] for row in ask(capsys, "ls", root, url)] == [20, 15, 10]
    assert main(["ckpt", "ls", str(root), url]) == 0
    assert url in capsys.readouterr().out


def test_ls_of_nothing(tmp_path: Path, capsys: Capture) -> None:
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no checkpoints in {tmp_path}\n"
    assert "does not exist" in refused(capsys, "ls", tmp_path / "missing")
    (tmp_path / "file").touch()
    assert "is a file" in refused(capsys, "ls", tmp_path / "file")
    assert "nosuch" in refused(capsys, "ls", "nosuch://bucket")


@pytest.mark.parametrize("command", [["ls"], ["verify"], ["prune", "--keep-last", "1", "--dry-run"]])
def test_ls_verify_and_prune_do_without_torch(root: Path, command: list[str]) -> None:
    code = (
        "import sys; from rerail.cli.main import main\n"
        f"assert main(['ckpt', {command[0]!r}, {str(root)!r}, *{command[1:]!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# --- show ---


def test_show_says_what_is_in_a_step(root: Path, capsys: Capture) -> None:
    assert main(["ckpt", "show", str(root)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("step 20 ") and "every byte was read back" in shown
    assert "epoch 2, batch 17 is next" in shown
    assert "last_epoch 7, base_lrs [0.1]" in shown and "lr 0.25" in shown
    found = ask(capsys, "show", root, "--step", 10)
    assert found["step"] == 10 and found["small"]["random"].startswith("Python, torch")
    tensors = {one["name"]: (one["dtype"], one["shape"]) for one in found["tensors"]}
    assert tensors["model.half"] == ("BF16", [3]) and tensors["model.count"] == ("I64", [])


def test_show_says_how_tensors_are_split(tmp_path: Path, capsys: Capture) -> None:
    save(tmp_path, 1, sharded())
    split = {one["name"]: one["split"] for one in ask(capsys, "show", tmp_path)["tensors"]}
    assert split["model.rows"] == "2 parts along dimension 0, ranks 0, 1"
    assert split["model.columns"] == "2 parts along dimension 1, ranks 0, 1"
    assert split["model.one"] == "whole, rank 0"
    assert "saved by ranks 0, 1" in refused(capsys, "show", tmp_path, "--rank", 2)


def test_a_small_state_of_another_kind_is_said_to_be_so() -> None:
    from rerail.cli.ckpt_show import small_in_words

    assert small_in_words(b"\xc1 not ours")["small state"].startswith("cannot be read")
    assert small_in_words(small(3))["next step"] == "3"


def test_unknown_step_and_empty_root(root: Path, tmp_path: Path, capsys: Capture) -> None:
    told = refused(capsys, "show", f"{root}@15")
    assert "has no step 15" in told and "20, 10" in told
    assert "no step is committed" in refused(capsys, "show", tmp_path)
    assert "--step x" in refused(capsys, "show", root, "--step", "x")
    assert "another one" in refused(capsys, "show", f"{root}@10", "--step", "20")


def test_the_newest_whole_step_is_meant_and_newer_ones_are_named(root: Path, capsys: Capture) -> None:
    next(root.glob("step-0000000020-*/rank-00000.json")).unlink()
    assert main(["ckpt", "show", str(root)]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("step 10 ") and "passed over: the files of rank 0 are gone" in shown.err
    assert "the files of rank 0 are gone" in refused(capsys, "show", f"{root}@20")


# --- verify ---


def test_verify_reads_every_byte_and_leaves_a_mark(root: Path, capsys: Capture) -> None:
    for mark in root.glob("step-*/*.verified"):
        mark.unlink()
    assert [row["verified"] for row in ask(capsys, "ls", root)] == [False, False]
    assert main(["ckpt", "verify", str(root)]) == 0
    assert "every byte is right" in capsys.readouterr().out
    assert [row["verified"] for row in ask(capsys, "ls", root)] == [True, False]
    assert [one["step"] for one in ask(capsys, "verify", root, "--all")] == [20, 10]
    assert [row["verified"] for row in ask(capsys, "ls", root)] == [True, True]


def test_verify_finds_one_wrong_bit_and_ls_remembers(root: Path, capsys: Capture) -> None:
    damage(shard(root, 10))
    assert main(["ckpt", "verify", str(root), "--all"]) == 1
    shown = capsys.readouterr()
    assert "step 20: " in shown.out and "step 10: damaged: " in shown.err and "checksum" in shown.err
    rows = ask(capsys, "ls", root)
    assert [(row["verified"], row["whole"]) for row in rows] == [(True, True), (False, False)]
    assert "checksum" in rows[1]["why"]
    damage(shard(root, 10))  # the bit is put right again
    assert main(["ckpt", "verify", f"{root}@10"]) == 0
    assert all(row["whole"] for row in ask(capsys, "ls", root))


def test_verify_finds_what_is_cut_short_or_gone(root: Path, capsys: Capture) -> None:
    with open(shard(root, 20), "rb+") as file:
        file.truncate(100)
    shard(root, 10).unlink()
    assert [one["ok"] for one in ask(capsys, "verify", root, "--all", code=1)] == [False, False]
    (torn := root / StepId(1, 30, 0).folder).mkdir()
    assert ask(capsys, "verify", root, "--step", 30, code=1)[0]["why"] == "it was never committed"
    assert torn.is_dir()
    assert "--all means every one" in refused(capsys, "verify", f"{root}@10", "--all")


# --- diff ---


def test_diff_of_equal_and_of_different_steps(root: Path, capsys: Capture) -> None:
    assert main(["ckpt", "diff", str(root), f"{root}@20"]) == 0
    assert capsys.readouterr().out == "equal: 5 tensors, bit for bit\n"
    found = ask(capsys, "diff", f"{root}@10", root, code=1)
    (one,) = found["differ"]
    assert (one["name"], one["differ"], one["elements"]) == ("model.w", 30, 30)
    assert one["largest"] == pytest.approx(1.0, abs=1e-5)
    assert main(["ckpt", "diff", f"{root}@10", str(root), "--what", "optimizer"]) == 0
    capsys.readouterr()
    assert "neither has tensors of 'nothing'" in refused(capsys, "diff", root, root, "--what", "nothing")


def test_diff_names_what_is_missing_or_of_another_kind(root: Path, tmp_path: Path, capsys: Capture) -> None:
    other = state(1.0)
    other["model.half"] = other["model.half"].float()
    other["model.new"] = other.pop("model.count")
    other["model.w"][0, 0] = float("nan")
    save(tmp_path / "other", 1, [whole(other)])
    found = ask(capsys, "diff", root, tmp_path / "other", code=1)
    assert (found["only_in_a"], found["only_in_b"]) == (["model.count"], ["model.new"])
    assert found["other_kind"] == {"model.half": ["BF16 [3]", "F32 [3]"]}
    assert [(one["name"], one["differ"], one["largest"]) for one in found["differ"]] == [("model.w", 1, None)]
    assert main(["ckpt", "diff", str(root), str(tmp_path / "other")]) == 1
    assert "1 of 30 elements, one side is not finite" in capsys.readouterr().out


def test_the_layout_makes_no_difference(tmp_path: Path, capsys: Capture) -> None:
    save(tmp_path / "two", 1, sharded())
    save(tmp_path / "one", 1, [whole(unsharded())])
    assert main(["ckpt", "diff", str(tmp_path / "two"), str(tmp_path / "one")]) == 0


# --- export ---


def unsharded() -> dict[str, torch.Tensor]:
    return {
        "model.rows": torch.arange(40.0).view(10, 4),
        "model.columns": torch.arange(400.0).view(100, 4),
        "model.one": torch.arange(3),
    }


def sharded() -> list[list[Piece]]:
    """The same tensors on two ranks: by rows, by columns, and on one of them only."""
    full = unsharded()
    rows, columns = full["model.rows"], full["model.columns"]
    return [
        [
            Piece("model.rows", rows[:7].clone(), (10, 4), (0, 0), True),
            Piece("model.columns", columns[:, :1].clone(), (100, 4), (0, 0), True),
            Piece("model.one", full["model.one"], (3,), (0,), True),
        ],
        [
            Piece("model.rows", rows[7:].clone(), (10, 4), (7, 0), True),
            Piece("model.columns", columns[:, 1:].clone(), (100, 4), (0, 1), True),
            Piece("model.one", full["model.one"], (3,), (0,), False),
        ],
    ]


def test_export_of_the_model_for_hugging_face(root: Path, tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "hf"
    assert ask(capsys, "export", root, "--to", target, "--as", "hf")["files"] == ["model.safetensors"]
    assert sorted(os.listdir(target)) == ["model.safetensors"]
    assert same(safetensors.torch.load_file(target / "model.safetensors"), model(1.0))
    with safetensors.safe_open(target / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_export_in_shards_has_an_index(root: Path, tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "deep" / "hf"
    told = ask(capsys, "export", f"{root}@10", "--to", target, "--as", "hf", "--shard-gb", "0.0000001")
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert sorted(os.listdir(target)) == sorted(told["files"])
    assert [name for name, file in index["weight_map"].items() if file == "model-00002-of-00003.safetensors"] == ["w"]
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in model().values())
    found: dict[str, torch.Tensor] = {}
    for name in set(index["weight_map"].values()):
        found.update(safetensors.torch.load_file(target / name))
    assert same(found, model())


def test_export_as_one_file_puts_shards_together(tmp_path: Path, capsys: Capture) -> None:
    save(tmp_path / "root", 1, sharded())
    target = tmp_path / "all.safetensors"
    assert ask(capsys, "export", tmp_path / "root", "--to", target, "--as", "safetensors", "--all")["tensors"] == 3
    assert same(safetensors.torch.load_file(target), unsharded())


def test_large_tensors_pass_through_little_memory(tmp_path: Path) -> None:
    from rerail.checkpoint import catalog, export

    save(tmp_path, 1, sharded())
    (found,) = catalog.folders(tier_at(str(tmp_path)))
    step = catalog.open_step(found.tier, found.id)
    pieces: dict[str, list[torch.Tensor]] = {}
    for name, tensor in export.stream(step, list(step.tensors().items()), room=64):
        assert tensor.nbytes <= 64
        pieces.setdefault(name, []).append(tensor)
    assert same({name: torch.cat(some) for name, some in pieces.items()}, unsharded())


def test_export_as_dcp_is_read_by_torch(root: Path, tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "dcp"
    told = ask(capsys, "export", root, "--to", target, "--as", "dcp", "--all")
    assert told["files"] == sorted(os.listdir(target)) == [".metadata", "__0_0.distcp"]
    found = {name: torch.empty_like(one) for name, one in state().items()}
    with pytest.warns(UserWarning, match="single process"):
        torch.distributed.checkpoint.load(found, checkpoint_id=target, no_dist=True)
    assert same(found, state(1.0))


def test_export_of_what_each_rank_has_alone_takes_the_lowest(tmp_path: Path, capsys: Capture) -> None:
    ranks = [whole({f"rank{rank}/model.w": torch.full((2,), float(rank))}) for rank in range(2)]
    save(tmp_path / "root", 1, ranks)
    target = tmp_path / "model.safetensors"
    assert main(["ckpt", "export", str(tmp_path / "root"), "--to", str(target), "--as", "safetensors"]) == 0
    assert "each rank's own" in capsys.readouterr().out
    assert same(safetensors.torch.load_file(target), {"w": torch.zeros(2)})


def test_export_refuses_and_leaves_nothing_behind(root: Path, tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "out"
    told = refused(capsys, "export", root, "--to", target, "--as", "hf", "--what", "modle")
    assert "no tensors of 'modle'" in told and "model, optimizer" in told
    assert "names the file" in refused(capsys, "export", root, "--to", tmp_path, "--as", "safetensors")
    assert "local path" in refused(capsys, "export", root, "--to", "s3://a/b", "--as", "hf")
    assert "more than 0" in refused(capsys, "export", root, "--to", target, "--as", "hf", "--shard-gb", "0")
    damage(shard(root, 20))
    assert "checksum" in refused(capsys, "export", root, "--to", target, "--as", "hf")
    assert "checksum" in refused(capsys, "export", root, "--to", target, "--as", "dcp")
    assert os.listdir(tmp_path) == ["root"]
    target.mkdir()
    assert "exists already" in refused(capsys, "export", f"{root}@10", "--to", target, "--as", "hf")


def test_a_full_disk_is_told_in_one_line(tmp_path: Path) -> None:
    """On a real file system of 64 KiB, where this user may have one."""
    save(tmp_path / "root", 1, [whole({"model.w": torch.zeros(1 << 16)})])
    disk = tmp_path / "disk"
    disk.mkdir()
    command = f"mount -t tmpfs -o size=64k none {disk} || exit 77; "
    command += f"{sys.executable} -m rerail.cli.main ckpt export {tmp_path}/root --to {disk}/out --as hf; "
    command += f"code=$?; ls -A {disk}; exit $code"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", command], capture_output=True, text=True, timeout=60)
    if done.returncode in (1, 77):
        pytest.skip(f"no file system of our own here: {done.stderr}")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"rerail ckpt: {disk}: 262,144 bytes are to be written, and the disk has 65,536 left\n"


# --- import ---


def test_import_of_what_was_exported_is_the_same(root: Path, tmp_path: Path, capsys: Capture) -> None:
    for form, name, flags in (
        ("hf", "hf", ["--shard-gb", "0.0000001"]),
        ("safetensors", "one.safetensors", []),
        ("dcp", "dcp", []),
    ):
        target, back = tmp_path / name, tmp_path / f"from-{form}"
        ask(capsys, "export", root, "--to", target, "--as", form, *flags)
        trust = ["--trust-pickle"] if form == "dcp" else []
        told = ask(capsys, "import", target, "--to", back, "--step", 20, "--scratch", tmp_path, *trust)
        assert told["tensors"] == ["model.count", "model.half", "model.none", "model.w"] and told["left_out"] == []
        assert main(["ckpt", "diff", str(root), str(back), "--what", "model"]) == 0
        (row,) = ask(capsys, "ls", back)[:1]
        assert (row["step"], row["verified"]) == (20, True)


def test_import_of_a_torch_save_file(tmp_path: Path, capsys: Capture) -> None:
    source = tmp_path / "state.pt"
    nested = {"model": {"w": torch.arange(6.0).view(2, 3).t(), "deep": [torch.ones(2)]}, "epoch": 3, "lr": {"x": 0.1}}
    torch.save(nested, source)
    told = ask(capsys, "import", source, "--to", tmp_path / "root", "--part", "model", "--what", "net")
    assert told["tensors"] == ["net.deep.0", "net.w"] and told["left_out"] == ["epoch", "lr.x"]
    ask(capsys, "export", tmp_path / "root", "--to", tmp_path / "o.safetensors", "--as", "safetensors", "--what", "net")
    wanted = {"w": torch.arange(6.0).view(2, 3).t().contiguous(), "deep.0": torch.ones(2)}
    assert same(safetensors.torch.load_file(tmp_path / "o.safetensors"), wanted)
    legacy = tmp_path / "legacy.pt"
    torch.save({"w": torch.ones(3)}, legacy, _use_new_zipfile_serialization=False)
    assert ask(capsys, "import", legacy, "--to", tmp_path / "old")["tensors"] == ["model.w"]


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_import_never_runs_code(root: Path, tmp_path: Path, capsys: Capture) -> None:
    source, ran = tmp_path / "evil.pt", tmp_path / "ran"
    torch.save({"w": torch.ones(2), "x": Evil(ran)}, source)
    assert "without running code" in refused(capsys, "import", source, "--to", tmp_path / "new")
    ask(capsys, "export", root, "--to", tmp_path / "dcp", "--as", "dcp")
    assert "--trust-pickle" in refused(capsys, "import", tmp_path / "dcp", "--to", tmp_path / "new")
    assert not ran.exists() and not (tmp_path / "new").exists()


def test_import_refuses_what_it_cannot_read(root: Path, tmp_path: Path, capsys: Capture) -> None:
    new = tmp_path / "new"
    for name, data in {
        "empty": b"",
        "text": b"hello, this is no checkpoint",
        "torn.safetensors": b"\x40\0\0\0\0\0\0\0{",
        "lies.safetensors": b"\x38\0\0\0\0\0\0\0"
        + b'{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'.ljust(56),
        "zip.pt": b"PK\x03\x04" + b"\0" * 64,
    }.items():
        (tmp_path / name).write_bytes(data)
        assert str(tmp_path / name) in refused(capsys, "import", tmp_path / name, "--to", new)
    assert "does not exist" in refused(capsys, "import", tmp_path / "missing", "--to", new)
    assert "is a checkpoint root already" in refused(capsys, "import", root, "--to", new)
    (tmp_path / "bare").mkdir()
    assert "neither" in refused(capsys, "import", tmp_path / "bare", "--to", new)
    (tmp_path / "bad").mkdir()
    safetensors.torch.save_file({"w": torch.ones(1)}, tmp_path / "bad" / "a.safetensors")
    (tmp_path / "bad" / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../a"}}')
    assert "which is not there" in refused(capsys, "import", tmp_path / "bad", "--to", new)
    assert not new.exists()


def test_import_into_a_root_with_steps_must_be_meant(root: Path, tmp_path: Path, capsys: Capture) -> None:
    source = tmp_path / "w.safetensors"
    safetensors.torch.save_file({"w": torch.ones(3)}, source)
    assert "has steps already" in refused(capsys, "import", source, "--to", root)
    assert "no tensors under 'x'" in refused(capsys, "import", source, "--to", root, "--add", "--part", "x")
    ask(capsys, "import", source, "--to", root, "--add", "--step", 5)
    assert [row["step"] for row in ask(capsys, "ls", root)] == [5, 20, 10], "the import is the newest"


START = """
import sys, torch, rerail
job = rerail.join()
model = torch.nn.Linear(3, 2)
job.track(model=model, optimizer=torch.optim.AdamW(model.parameters()))
job.checkpoints(sys.argv[1], when=100)
for _ in job.steps(until=int(sys.argv[2])):
    print(job.version, model.weight.sum().item(), model.bias.sum().item())
    break
"""


def test_a_job_starts_from_what_was_imported(tmp_path: Path, capsys: Capture) -> None:
    torch.save({"weight": torch.full((2, 3), 0.5), "bias": torch.ones(2)}, tmp_path / "w.pt")
    ask(capsys, "import", tmp_path / "w.pt", "--to", tmp_path / "root", "--step", 7)
    (tmp_path / "train.py").write_text(START)
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "root"), "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout == "7 3.0 2.0\n", done.stderr


# --- prune ---


def steps(capsys: Capture, root: Path) -> list[int]:
    return [row["step"] for row in ask(capsys, "ls", root)]


def test_prune_keeps_what_a_rule_names(tmp_path: Path, capsys: Capture) -> None:
    for step, loss in ((10, 1.0), (15, 4.0), (20, 3.0), (25, 2.0)):
        save(tmp_path, step, [whole(state())], epoch=1, metrics={"loss": loss})
    rules = ["--keep-best", "1", "--metric", "-loss", "--keep-every", "20"]
    told = ask(capsys, "prune", tmp_path, *rules, "--dry-run")
    assert [row["step"] for row in told["removed"]] == [15] and steps(capsys, tmp_path) == [25, 20, 15, 10]
    assert main(["ckpt", "prune", str(tmp_path), *rules]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 removed (")
    assert steps(capsys, tmp_path) == [25, 20, 10]
    ask(capsys, "prune", tmp_path, "--keep-last", 1)
    assert steps(capsys, tmp_path) == [25]


def test_prune_never_removes_the_newest_whole_step_nor_what_a_job_may_be_writing(root: Path, capsys: Capture) -> None:
    next(root.glob("step-0000000020-*/rank-00000.json")).unlink()
    (root / StepId(1, 15, 0).folder).mkdir()
    ask(capsys, "prune", root, "--keep-last", 1)
    assert steps(capsys, root) == [20, 15, 10]


def test_prune_refuses_rules_that_keep_nothing_on_purpose(root: Path, tmp_path: Path, capsys: Capture) -> None:
    assert "what to keep" in refused(capsys, "prune", root)
    assert "go together" in refused(capsys, "prune", root, "--keep-best", "2")
    assert "there are: loss" in refused(capsys, "prune", root, "--keep-best", "2", "--metric", "-acc")
    assert "not a number" in refused(capsys, "prune", root, "--keep-last", "-1")
    assert "is whole" in refused(capsys, "prune", tmp_path, "--keep-last", "1")
    assert steps(capsys, root) == [20, 10]


def test_without_a_command_the_commands_are_named(capsys: Capture) -> None:
    assert "COMMAND" in refused(capsys)
    assert "'lss'" in refused(capsys, "lss")


def test_copy_makes_another_place_have_the_step_and_says_when_it_has_it(
    root: Path, tmp_path: Path, capsys: Capture
) -> None:
    other = tmp_path / "other"
    told = ask(capsys, "copy", f"{root}@10", "--to", other)
    assert told == {"step": 10, "to": str(other), "size": told["size"], "copied": True} and told["size"] > 0
    assert ask(capsys, "copy", f"{root}@10", "--to", other)["copied"] is False
    assert ask(capsys, "diff", f"{root}@10", f"{other}@10")["equal"] is True
    (row,) = ask(capsys, "ls", other)
    assert row["whole"] and row["verified"]


def test_copy_does_not_stop_a_job_that_writes_to_the_target(root: Path, tmp_path: Path, capsys: Capture) -> None:
    other = tmp_path / "other"
    save(other, 5, [whole(state())], epoch=1)
    newer = save(root, 30, [whole(state())], epoch=7)
    assert main(["ckpt", "copy", f"{root}@{newer}", "--to", str(other)]) == 2
    assert "epoch 7" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("to", "words"),
    [("{root}", "is where the step comes from"), ("{file}", "is a file"), ("{other}@50", "under another number")],
)
def test_copy_refuses_targets_that_cannot_be_meant(
    root: Path, tmp_path: Path, capsys: Capture, to: str, words: str
) -> None:
    (tmp_path / "file").write_text("")
    target = to.format(root=root, file=tmp_path / "file", other=tmp_path / "other")
    assert main(["ckpt", "copy", f"{root}@10", "--to", target]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "other@50").exists()
