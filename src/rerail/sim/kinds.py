"""Kinds of faults: turns `kinds.toml` into typed entries, and codes of the catalogue into how they show and what repairs them.

Called by `sim.faults` and `sim.replay`.
"""

from __future__ import annotations

import functools
import tomllib
from importlib import resources

import msgspec

from rerail.config import Settings
from rerail.detect.levels import Levels
from rerail.diagnose.classify import Classifier
from rerail.errors import UsageError
from rerail.faults.catalog import Fault as Entry
from rerail.flow import Handling
from rerail.planner.units import shown
from rerail.wording import guess

SCOPES = ("device", "node", "batch", "job")
SEEN = ("explicit", "exit", "raised", "hang", "silent")
NEEDS = ("passes", "process", "reboot", "replace", "outage")
TRACE = "trace"
"""Kind of faults whose code no kind has."""


class Kind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row."""

    name: str
    title: str
    count: float
    scope: str
    seen: str
    codes: tuple[tuple[str, float, str], ...]
    """Code of the catalogue, share, what makes it whole."""


@functools.cache
def kinds() -> tuple[Kind, ...]:
    """The shipped table."""
    text = resources.files("rerail.sim").joinpath("kinds.toml").read_text(encoding="utf-8")
    return msgspec.convert([*tomllib.loads(text)["kind"]], tuple[Kind, ...])


@functools.cache
def classifier() -> Classifier:
    """The one that a job with default settings has; made once, since it reads the whole catalogue."""
    return Classifier(Levels.of(Settings()).catalog())


def node_share() -> float:
    """Of faults of hardware, those that take whole nodes."""
    hardware = [kind for kind in kinds() if kind.scope != "job"]
    return sum(kind.count for kind in hardware if kind.scope != "device") / sum(kind.count for kind in hardware)


def titles() -> dict[str, str]:
    """Names of kinds as people read them."""
    return {**{kind.name: kind.title for kind in kinds()}, TRACE: "other faults of the trace", "planned": "planned"}


def seen_as(code: str, seen: str) -> str:
    """Codes of rerail's own show in their own way, whatever the kind."""
    own = {"script.raised": "raised", "process.crashed": "exit", "process.hung": "hang", "node.lost": "exit"}
    return own.get(code, seen)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How a fault with this code shows, and what repairs it."""

    kind: str
    scope: str
    seen: str
    needs: str


def shape_of(code: str, where: str = "") -> Shape:
    """Of a code in a trace: as the kind that has it says, else as the catalogue does."""
    for kind in kinds():
        for own, _, needs in kind.codes:
            if own == code and not (code == "node.lost" and kind.scope == "batch"):
                return Shape(kind=kind.name, scope=kind.scope, seen=seen_as(code, kind.seen), needs=needs)
    known = classifier().catalog
    fault = known.get(code)
    if fault is None:
        close = guess(code[:200], [one.code for one in known.faults])
        raise UsageError(
            f"{where}code is {shown(code)}, which is not in the catalogue{close}", hint="rerail faults list"
        )
    return Shape(kind=TRACE, scope=_scope(fault), seen=_seen(fault), needs=_needs(fault))


def _scope(fault: Entry) -> str:
    if fault.scope == "process":
        return "device"  # one rank, which is its device
    return fault.scope if fault.scope in ("device", "node", "job") else "node"


def _seen(fault: Entry) -> str:
    if "training.vote" in fault.sources:
        return "silent"
    if "step.hang" in fault.sources:
        return "hang"
    if "step.raised" in fault.sources:
        return "raised"
    return "explicit" if fault.hardware else "exit"


def _needs(fault: Entry) -> str:
    by_action = {
        Handling.IGNORE: "passes",
        Handling.RETRY_IN_PLACE: "passes",
        Handling.RESET_DEVICE: "reboot",
        Handling.ISOLATE_DEVICE: "replace",
        Handling.DRAIN_NODE: "replace",
        Handling.HUMAN: "replace",
    }
    return by_action.get(fault.action, "process")
