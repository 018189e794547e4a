"""What settings can be: the words that are known, and turns settings into what cannot be meant by them, one sentence each.

Called by `config` whenever settings are read, and by `rerail run`.
"""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from rerail.errors import ConfigError
from rerail.texts import bytes_of, limits_of, listed, node_memory
from rerail.wording import guess

if TYPE_CHECKING:
    from rerail.config import Settings

DROP_DIR = "RERAIL_DROP_DIR"
"""In the environment: the directory into which other systems of this node put faults (`detect.dropbox`)."""
DETECTORS = (
    "amd",
    "ascend",
    "dropbox",
    "host.bonds",
    "host.clock",
    "host.cpu",
    "host.cpu.throttle",
    "host.device_files",
    "host.drives",
    "host.kernel",
    "host.limits",
    "host.memory.cgroup",
    "host.memory.edac",
    "host.memory.use",
    "host.modules",
    "host.mounts",
    "host.net",
    "host.pci",
    "host.pressure",
    "host.rdma",
    "host.sensors",
    "host.services",
    "host.smart",
    "host.space",
    "host.tcp",
    "kernel_log",
    "notice.aws",
    "notice.azure",
    "notice.files",
    "notice.gcp",
    "notice.kubernetes",
    "notice.slurm",
    "nvidia",
    "nvidia.xid",
)
"""Names of all detectors and watchers, for `detectors_off`."""
ROLL_BACK = ("nan", "spike", "divergence")
"""Faults of the training, for `roll_back`."""
CLOUDS = ("aws", "gcp", "azure")
"""Whose metadata services tell of what is going to happen to a machine."""
HANDLINGS = ("rescheduling", "graceful")
"""Presets of handling: move to healthy devices first, or try to recover the faulty one first."""
FAST = "fast"
FIDELITIES = ("exact", FAST)
"""Whether repairs may give other numbers than a run without faults."""
_SENDER = re.compile(r"[A-Za-z0-9][\w.@:/-]{0,127}", re.ASCII)


def check_drop_dir(env: Mapping[str, str] = os.environ) -> None:
    """Refuse a directory for dropped faults that cannot be used, before anything is started."""
    folder = env.get(DROP_DIR, "")
    if not folder:
        return
    if not os.path.isdir(folder):
        what = "is a file" if os.path.exists(folder) else "does not exist"
        raise ConfigError(
            f"environment variable {DROP_DIR}: {folder} {what}, but a directory is needed; make it, or unset it"
        )
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(
            f"environment variable {DROP_DIR}: {folder} cannot be read and written by this user (faults are removed when taken); "
            "change its mode, or unset it"
        )


def out_of_range(settings: Settings) -> Iterator[str]:
    """Values that cannot be meant, one sentence each."""
    for read in (
        lambda: limits_of(settings.restart_limits),
        lambda: node_memory(settings.node_store) if settings.node_store else 0,
        lambda: bytes_of(settings.snapshot_memory) if settings.snapshot_memory else 0,
        lambda: bytes_of(settings.replay_log, "setting replay_log"),
    ):
        try:
            read()
        except ConfigError as error:
            yield str(error)
    for name, words in (("handling", HANDLINGS), ("fidelity", FIDELITIES)):
        word = getattr(settings, name)
        if word not in words:
            yield f"setting {name} is {word!r}, but must be one of {', '.join(words)}{guess(word, words)}"
    yield from _unknown_items(settings)
    for field in msgspec.structs.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            yield f"setting {field.name} is {value}, but a finite number is needed (default {field.default:g})"
        elif isinstance(value, int | float) and value < 0:
            yield f"setting {field.name} is {value}, but must not be negative"
    if settings.restart_window_s == 0:
        yield (
            "setting restart_window_s is 0, so no restart would ever count; give it seconds, or leave out of restart_limits "
            "what is to have no limit"
        )


def _unknown_items(settings: Settings) -> Iterator[str]:
    """Words in settings that hold several."""
    for item in listed(settings.detectors_off):
        if not fnmatch.filter(DETECTORS, item):
            known = f"; did you mean {item}.*?" if fnmatch.filter(DETECTORS, f"{item}.*") else guess(item, DETECTORS)
            known = known or f" (there are: {' '.join(DETECTORS)})"
            yield f"setting detectors_off: there is no detector {item!r}{known}"
    for item in listed(settings.roll_back):
        if item not in ROLL_BACK:
            known = guess(item, ROLL_BACK) or f" (there are: {', '.join(ROLL_BACK)})"
            yield f"setting roll_back: there is no fault of the training called {item!r}{known}"
    for item in listed(settings.fault_senders):
        if not _SENDER.fullmatch(item):
            parts = ", ".join(_SENDER.findall(item)) or "dcgm, gpud"
            yield (
                f"setting fault_senders: {item!r} is no name of a sender (letters, digits and . _ - @ : /, with commas between "
                f"names); did you mean {parts}?"
            )
    for item in listed(settings.notice_files):
        if item not in CLOUDS and not item.startswith("/"):
            yield f"setting notice_files: {item!r} is neither an absolute file nor one of {', '.join(CLOUDS)}"
