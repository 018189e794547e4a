"""What stands in settings as text: turns sizes, lists and limits into numbers and names, or says what is wrong with them. Pure.

Called by `config` and by whoever uses such a setting.
"""

from __future__ import annotations

import re

from rerail.errors import ConfigError
from rerail.wording import guess

SUBJECTS = ("rank", "node", "job")
"""What `restart_limits` counts restarts of."""
_BYTES = re.compile(r"(\d+(?:\.\d+)?) ?(KiB|MiB|GiB|TiB)")
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def bytes_of(size: str, origin: str = "setting snapshot_memory") -> int:
    """What a size such as `8GiB`, or `0`, comes to; `origin` is named where it is none."""
    found = 0 if size == "0" else _bytes(size)
    if found is None:
        raise ConfigError(f"{origin} is {size!r}, but a size such as 8GiB, or 0, is needed")
    return found


def node_memory(node_store: str) -> int:
    """Bytes of memory that the setting `node_store` asks for; 0 if it names a directory instead."""
    kind, _, size = node_store.partition(":")
    found = _bytes(size) if kind == "memory" else None
    if found is not None:
        return found
    if node_store.startswith("/"):
        return 0
    raise ConfigError(f"setting node_store is {node_store!r}, but memory:8GiB or an absolute directory is needed")


def _bytes(size: str) -> int | None:
    found = _BYTES.fullmatch(size)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


def listed(text: str) -> list[str]:
    """Items of a setting that has several, with commas or line ends between them."""
    return [item.strip() for item in text.replace("\n", ",").split(",") if item.strip()]


def limits_of(text: str) -> dict[str, int]:
    """The setting `restart_limits`: `rank=20, node=60, job=200`."""
    found = {}
    for item in listed(text):
        name, given, number = (part.strip() for part in item.partition("="))
        if name not in SUBJECTS:
            raise ConfigError(
                f"setting restart_limits: {name!r} is not one of {', '.join(SUBJECTS)}{guess(name, SUBJECTS)}"
            )
        if not given or not number.isdecimal():
            raise ConfigError(f"setting restart_limits: {item!r} is not understood; write {name}=5")
        if not int(number):
            raise ConfigError(
                f"setting restart_limits: with {name}=0 no process could ever be started anew; write 1 or more, leave {name} out for no "
                "limit, or say by the setting rungs what may be done"
            )
        found[name] = int(number)
    return found
