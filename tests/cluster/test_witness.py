"""The checker itself: it finds what it is there to find, and nothing else. No namespaces are needed here."""

from __future__ import annotations

from pathlib import Path

from witness import Step, Witness, read, split_brains


def step(rank: int, pid: int, at: int, generation: int = 0) -> Step:
    return Step(rank=rank, pid=pid, step=at, generation=generation, world=2, at=at * 1_000_000)


def test_a_replaced_process_that_falls_silent_is_no_split_brain_unneeded() -> None:
    assert split_brains([step(0, 10, 1), step(1, 11, 2), step(1, 12, 3, 1), step(0, 10, 4, 1), step(1, 12, 5, 1)]) == []


def test_a_process_that_trains_on_after_it_was_replaced_is_found_unneeded() -> None:
    (found,) = split_brains([step(1, 11, 1), step(1, 12, 2), step(1, 11, 3)])
    assert "rank 1 (process 11)" in found and "process 12 had taken its place" in found


def test_a_side_that_trains_on_while_another_has_begun_a_generation_is_found_unneeded() -> None:
    (found,) = split_brains([step(0, 10, 1), step(1, 11, 1), step(0, 10, 2, 1), step(1, 11, 3)])
    assert "generation 0" in found and "generation 1" in found


def test_what_is_written_can_be_read_unneeded(tmp_path: Path) -> None:
    witness = Witness(str(tmp_path / "file"))
    for number in (1, 2):
        witness.completed(rank=3, step=number, generation=1, world=4)
    with open(tmp_path / "file", "ab") as file:
        file.write(b'{"rank": 3, "p')  # cut off by a kill
    assert [(one.rank, one.step) for one in read(tmp_path / "file")] == [(3, 1), (3, 2)]
    assert read(tmp_path / "none") == []
