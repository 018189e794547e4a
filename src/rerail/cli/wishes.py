"""The catalogue as `rerail run` would use it here: turns the settings of this folder and `--faults` into one.

Called by `cli.diagnose` and `cli.faults`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from rerail.config import load_settings, settings_file
from rerail.detect.levels import Levels
from rerail.faults.catalog import Catalog


def levels_here(command: str, files: Iterable[str] = ()) -> Levels:
    """The user's wishes: rerail.toml and the environment, then the files named on the command line. Says what it found."""
    path = settings_file()
    settings = load_settings(path)
    levels = Levels.of(settings)
    used = {"fault_files": ", ".join(map(str, levels.files)), "fault_levels": settings.fault_levels.strip()}
    told = "; ".join(f"{name} {' '.join(value.split())}" for name, value in used.items() if value)
    if told:
        origin = f"{path} and environment" if path is not None else "environment"
        print(f"rerail {command}: settings used ({origin}): {told}", file=sys.stderr)
    return msgspec.structs.replace(levels, files=(*levels.files, *map(Path, files)))


def catalog_here(command: str, files: Iterable[str] = ()) -> Catalog:
    """What is known of faults, as the user wants to see it."""
    return levels_here(command, files).catalog()
