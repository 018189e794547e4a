"""The compile cache beside the checkpoints: what torch.compile has made once, the next process does not make again.

    <root>/compile-cache/<of which torch and device>.<checksum>.cache

What torch gives out here is code, and torch runs it when it is loaded: only for those who ask for it, and only from places
that nobody else writes to. Called by `session.checkpoints`.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable

import torch

from rerail.checkpoint.manifest import digest
from rerail.checkpoint.tiers import Tier
from rerail.errors import CheckpointError

FOLDER = "compile-cache"
LARGEST = 1 << 30
_NAME = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{32})\.cache")


def versions() -> dict[str, str]:
    """Of what a checkpoint is written with."""
    from rerail import __version__

    return {"rerail": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def environment() -> str:
    """What compiled code depends on, as one word: the code of another is of no use."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return digest(f"{torch.__version__} {platform.python_version()} {device}".encode())


def load(tiers: list[Tier], tell: Callable[[str], None]) -> int:
    """Give torch what earlier processes have compiled; how many bytes. What cannot be used is told and left."""
    total, mine = 0, environment()
    for tier in tiers:
        try:
            found = [_NAME.fullmatch(name) for name in tier.names(FOLDER)]
            for name in (match for match in found if match is not None and match[1] == mine):
                data = tier.get(f"{FOLDER}/{name[0]}", LARGEST)
                if digest(data) != name[2]:
                    tell(f"{tier.url}/{FOLDER}/{name[0]} is damaged and not used")
                    continue
                if torch.compiler.load_cache_artifacts(data) is None:
                    tell(f"{tier.url}/{FOLDER}/{name[0]} is not used: torch cannot read it")
                    continue
                total += len(data)
        except (OSError, CheckpointError, RuntimeError) as error:
            tell(f"the compile cache in {tier.url} is not used: {error}")
        if total:
            break
    return total


def save(tiers: list[Tier], tell: Callable[[str], None]) -> None:
    """Write down what this process has compiled, wherever just that is not there."""
    try:
        made = torch.compiler.save_cache_artifacts()
    except RuntimeError as error:
        tell(f"the compile cache was not saved: {error}")
        return
    if made is None:  # nothing was compiled
        return
    name = f"{environment()}.{digest(made[0])}.cache"
    for tier in tiers:
        try:
            if name not in tier.names(FOLDER):
                tier.make_folder(FOLDER)
                tier.put(f"{FOLDER}/{name}", made[0])
        except (OSError, CheckpointError) as error:
            tell(f"the compile cache was not saved to {tier.url}: {error}")
