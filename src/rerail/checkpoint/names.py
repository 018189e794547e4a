"""Names of what lies in a checkpoint root. Turns step, epoch and generation into a directory name and back.

    <root>/epoch-000002.json                          one for every job that ever wrote here; the newest may write
    <root>/step-0000000120-e000002-g000001/           immutable once COMMIT is in it
        rank-00000.0.safetensors                      stock safetensors; .1 is the second try of a rank whose disk failed
        rank-00000.json                               manifest of one rank: tensors, boxes, checksums, small state
        rank-00000.verified                           the shard was read back from the disk and is right
        COMMIT                                        written last; without it the directory counts for nothing

Called by everything in `checkpoint`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

COMMIT = "COMMIT"
ABORT = "ABORT"
COPYING = "COPYING"
"""The folder is a copy of a step of another tier, and not for ranks to save to."""
DISTRUSTED = "DISTRUSTED"
"""The step was saved after the training had gone wrong; in it stands why. No start takes it."""
ELSEWHERE = "ELSEWHERE"
"""The step was committed to another tier: ranks that came here need not wait."""
TRASH = ".trash-"
_STEP = re.compile(r"step-(\d{10,18})-e(\d{6,12})-g(\d{6,12})")
_EPOCH = re.compile(r"epoch-(\d{6,12})\.json")
_MANIFEST = re.compile(r"rank-(\d{5,9})\.json")
_RANK = re.compile(r"rank-(\d{5,9})\..+")
SHARD = re.compile(r"rank-(\d{5,9})\.\d{1,3}\.safetensors")


class StepId(NamedTuple):
    """Which save this is. Greater is newer: a later job goes before an earlier one, then steps, then repairs."""

    epoch: int
    step: int
    generation: int

    @property
    def folder(self) -> str:
        return f"step-{self.step:010d}-e{self.epoch:06d}-g{self.generation:06d}"


def step_of(folder: str) -> StepId | None:
    """The save a directory belongs to; None if it is none of ours."""
    found = _STEP.fullmatch(folder)
    return StepId(epoch=int(found[2]), step=int(found[1]), generation=int(found[3])) if found else None


def epoch_name(epoch: int) -> str:
    return f"epoch-{epoch:06d}.json"


def epoch_of(name: str) -> int | None:
    found = _EPOCH.fullmatch(name)
    return int(found[1]) if found else None


def shard_name(rank: int, attempt: int) -> str:
    return f"rank-{rank:05d}.{attempt}.safetensors"


def manifest_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def verified_name(rank: int) -> str:
    return f"rank-{rank:05d}.verified"


def failure_name(rank: int) -> str:
    return f"rank-{rank:05d}.failed"


def here_name(rank: int) -> str:
    """Says that a rank, which had to leave the places before, saves here."""
    return f"rank-{rank:05d}.here"


def rank_of_manifest(name: str) -> int | None:
    found = _MANIFEST.fullmatch(name)
    return int(found[1]) if found else None


def rank_of(name: str) -> int | None:
    """The rank that a file in the folder of a step is of."""
    found = _RANK.fullmatch(name)
    return int(found[1]) if found else None


def owned_name(rank: int, name: str) -> str:
    """The name of a tensor that one rank, or one group of ranks by its lowest, has for itself."""
    return f"rank{rank}/{name}"


def owner_and_name(name: str) -> tuple[int, str]:
    """Whose a tensor is (-1: the whole job's), and its name without that."""
    head, slash, rest = name.partition("/")
    owned = slash and head.startswith("rank") and head[4:].isdigit()
    return (int(head[4:]), rest) if owned else (-1, name)
