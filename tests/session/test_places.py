"""The rank's part in checkpoints, without a job around it: places that cannot be reached, the compile cache, words."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rerail.checkpoint.arena import Arena
from rerail.checkpoint.layout import Piece
from rerail.checkpoint.names import StepId
from rerail.checkpoint.objects import ObjectTier
from rerail.checkpoint.saving import Order, carry_out, claim_epoch
from rerail.checkpoint.schedule import Concurrent
from rerail.checkpoint.staging import Stager
from rerail.checkpoint.tiers import tier_at
from rerail.errors import CheckpointError
from rerail.planner.outlook import Outlook
from rerail.session import checkpoints as session_checkpoints
from rerail.session import compiled, loading
from rerail.session.checkpoints import FIRST_AFTER, Checkpoints
from rerail.session.cursor import Cursor
from rerail.session.foresight import Foresight
from rerail.session.pieces import Pieces
from rerail.session.tracked import Tracked

FAR = "memory://far-away"


def checkpoints(*places: object, **more: Any) -> Checkpoints:
    job: Any = SimpleNamespace(rank=0, world_size=1, _version=0, _rejoin=None, _tracked=Tracked())
    made = Checkpoints(job)
    made.configure([str(place) for place in places], None, None, more.pop("compile_cache", False))
    return made


def save(root: Path, step: int) -> None:
    fd = os.memfd_create("arena")
    arena = Arena(fd)
    Stager(arena, overlap=False).stage(step, [Piece("w", torch.ones(3), (3,), (0,), True)], b"")
    order = Order(version=step, epoch=1, generation=0, rank=0, group=(0,), world_size=1, tiers=(str(root),))
    assert all(outcome.ok for outcome in carry_out(order, arena, set))
    os.close(fd)


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: ObjectTier, folder: str = "") -> list[str]:
        raise OSError("no route to host")

    monkeypatch.setattr(ObjectTier, "names", refused)


# --- places that cannot be reached ---


@pytest.mark.usefixtures("unreachable")
def test_a_start_goes_on_from_the_places_that_can_be_reached_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 20)
    loaded = []
    monkeypatch.setattr(loading, "load", lambda job, step: loaded.append(step.id.step))
    found = checkpoints(tmp_path, FAR)
    found.claim()
    assert found.epoch == 2, "the second place is not asked in vain"
    assert found.restore() and loaded == [20]
    assert "far-away cannot be reached, and what lies there is not considered" in capsys.readouterr().err


@pytest.mark.usefixtures("unreachable")
def test_nothing_begins_anew_while_a_place_that_may_hold_steps_cannot_be_reached(tmp_path: Path) -> None:
    found = checkpoints(tmp_path, FAR)
    with pytest.raises(CheckpointError, match="can be read"):
        found.restore()


def test_a_first_place_that_cannot_be_written_gives_way_to_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    found = checkpoints(tmp_path / "file", tmp_path / "good")
    found.claim()
    assert found.epoch == 1 and os.listdir(tmp_path / "good") == ["epoch-000001.json"]
    assert "nothing can be written to" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="nothing can be written to"):
        checkpoints(tmp_path / "file").claim()


def test_steps_that_were_never_finished_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 20)
    (tmp_path / StepId(1, 20, 0).folder / "COMMIT").unlink()
    assert checkpoints(tmp_path).restore() is False
    assert f"{StepId(1, 20, 0).folder} was never finished and does not count" in capsys.readouterr().err


@pytest.mark.parametrize(("version", "next_save"), [(0, 5), (4, 5), (5, 10), (33, 35)])
def test_every_so_many_steps_means_multiples_wherever_the_job_began(
    tmp_path: Path, version: int, next_save: int
) -> None:
    found = checkpoints(tmp_path)
    found.configure([str(tmp_path)], 5, None, False)
    found._job._version = version
    found._plan_next()
    assert found.next_save == next_save


def test_a_place_given_twice_is_one(tmp_path: Path) -> None:
    assert len(checkpoints(tmp_path, tmp_path / ".." / tmp_path.name, tmp_path).tiers) == 2
    assert len(checkpoints(tmp_path, tmp_path).tiers) == 1


def test_where_all_places_are_empty_a_job_begins_anew(tmp_path: Path) -> None:
    assert checkpoints(tmp_path, FAR).restore() is False


def test_an_epoch_is_newer_than_those_of_all_places(tmp_path: Path) -> None:
    for _ in range(3):
        claim_epoch(tier_at(str(tmp_path / "slow")), "before")
    assert claim_epoch(tier_at(str(tmp_path / "fast")), "now", [tier_at(str(tmp_path / "slow"))]) == 4


# --- the compile cache ---


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What torch is given, in place of what it would run."""
    given: list[bytes] = []

    def load(data: bytes) -> object:
        given.append(data)
        return object() if data.startswith(b"code") else None

    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"code of this machine", None))
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", load)
    return given


def test_what_was_compiled_is_given_to_the_next_process_that_asks(tmp_path: Path, torchs: list[bytes]) -> None:
    said: list[str] = []
    for _ in range(2):
        compiled.save([tier_at(str(tmp_path))], said.append)
    assert len(os.listdir(tmp_path / compiled.FOLDER)) == 1
    checkpoints(tmp_path)
    assert not torchs, "nobody asked for it"
    checkpoints(tmp_path, compile_cache=True)
    assert torchs == [b"code of this machine"] and not said


def test_code_that_is_damaged_or_of_another_machine_is_not_given_to_torch(
    tmp_path: Path, torchs: list[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    compiled.save([tier_at(str(tmp_path))], lambda text: None)
    (file,) = (tmp_path / compiled.FOLDER).iterdir()
    file.write_bytes(b"code of someone else")
    file.with_name(f"{'0' * 32}.{'0' * 32}.cache").write_bytes(b"code of another torch")
    file.with_name("..cache").write_bytes(b"code of nobody")
    checkpoints(tmp_path, compile_cache=True)
    assert not torchs
    assert "is damaged and not used" in capsys.readouterr().err


def test_a_place_without_room_for_the_compile_cache_is_told_and_left(tmp_path: Path, torchs: list[bytes]) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    compiled.save([tier_at(str(tmp_path / "file")), tier_at(str(tmp_path / "good"))], said.append)
    assert len(said) == 1 and "was not saved to" in said[0]
    assert len(os.listdir(tmp_path / "good" / compiled.FOLDER)) == 1


def test_nothing_is_written_when_nothing_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: None)
    compiled.save([tier_at(str(tmp_path))], lambda text: None)
    assert not os.listdir(tmp_path)


# --- what is said and kept ---


def test_a_loader_without_state_is_met_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)))
    Cursor(loader, endless=False).warn_if_stateless()
    assert "WARNING: the data loader (DataLoader) has no state_dict()" in capsys.readouterr().err
    for harmless in (None, [1, 2], range(3)):
        Cursor(harmless, endless=False).warn_if_stateless()
    assert not capsys.readouterr().err


def test_samples_are_counted_over_epochs_and_kept_with_the_place() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(10, 2)), batch_size=4)
    cursor = Cursor(loader, endless=True)
    state: Any = None
    for version in range(4):
        cursor.take(version, state)
    position = cursor.position()
    assert (position.epoch, position.index, position.samples) == (1, 1, 14)
    other = Cursor(loader, endless=True)
    other.go_back(4, position, fresh=True)
    other.take(4, state)
    assert other.position().samples == 18


def test_every_save_that_may_be_under_way_has_a_slot(tmp_path: Path) -> None:
    found = checkpoints(tmp_path)
    assert found.in_flight == 1
    found.configure([str(tmp_path)], Concurrent(in_flight=3), None, False)
    assert found.in_flight == 3


def test_state_that_comes_later_is_found_however_little_is_tracked() -> None:
    """An optimizer has no state before its first step, and a buffer may be None at first: nothing is looked up once for all."""
    model = nn.Linear(3, 3)
    model.register_buffer("seen", None)
    optimizer = torch.optim.AdamW(model.parameters())
    tracked = Tracked()
    tracked.add("model", model)
    tracked.add("optimizer", optimizer)
    pieces = Pieces(tracked, 0, 1)
    found = pieces.all()
    assert {piece.name for piece in found} == {"model.weight", "model.bias"}
    assert pieces.all() is found, "the plan is kept while nothing changes"
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    names = {piece.name for piece in pieces.all()}
    assert {"optimizer.state.model.weight.exp_avg", "optimizer.state.model.bias.step"} <= names
    model.seen = torch.zeros(2)
    assert "model.seen" in {piece.name for piece in pieces.all()}
    model.add_module("more", nn.Linear(2, 2))
    assert "model.more.weight" in {piece.name for piece in pieces.all()}


def test_the_layout_is_told_in_words() -> None:
    tracked = Tracked()
    tracked.add("model", nn.Linear(2, 2))
    assert tracked.layout(1) == {"model": "plain"}
    assert tracked.layout(4) == {"model": "plain on each of 4"}


# --- when the next save is ---


@pytest.fixture
def expecting(monkeypatch: pytest.MonkeyPatch) -> Foresight:
    made = Foresight()
    monkeypatch.setattr(session_checkpoints, "foresight", made)
    return made


def agreeing(tmp_path: Path, version: int, due: int, steps: int) -> Checkpoints:
    """A job of one rank that has computed so many steps of a tenth of a second."""
    found = checkpoints(tmp_path)
    vars(found._job).update(
        _version=version, _durations=[0.1] * steps, _small=SimpleNamespace(saves=(1, due, 0)), rehearsing=False, device=None,
        seats=(0,), _tracked=Tracked(), _writer=None,
    )  # fmt: skip
    return found


def test_who_has_measured_too_little_does_not_decide_when_the_next_save_is(
    tmp_path: Path, expecting: Foresight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_checkpoints, "device_of", lambda job: torch.device("cpu"))
    found = agreeing(tmp_path, version=40, due=40, steps=2)
    found.agree()
    assert found.next_save == 40 + FIRST_AFTER and not expecting.agreed
    found = agreeing(tmp_path, version=40, due=40, steps=30)
    found._saved_s = [3.0]
    found.agree()
    assert found.next_save == 40 + 60, "twice the time of a save"
    assert expecting.agreed == 60


def test_what_a_repair_took_is_not_taken_for_the_time_of_a_save(
    tmp_path: Path, expecting: Foresight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_checkpoints, "device_of", lambda job: torch.device("cpu"))
    expecting.take(Outlook(), 40)
    found = agreeing(tmp_path, version=40, due=900, steps=30)
    found._saved_s, found._since = [3.0], time.monotonic() - 100.0
    found.agree()
    assert found.next_save == 100
