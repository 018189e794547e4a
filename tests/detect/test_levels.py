"""What the user wants to be told: strings of levels, what they do to the catalogue, and how mistakes are named."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from rerail.checks import DETECTORS, check_drop_dir
from rerail.config import Settings, load_settings
from rerail.detect.inventory import VENDORS, all_detectors, all_watchers, areas
from rerail.detect.kernel_log import KernelLog
from rerail.detect.levels import Level, Levels, parse
from rerail.detect.notices import watchers
from rerail.errors import ConfigError
from rerail.faults.catalog import Fault
from rerail.flow import Handling, Role, Severity

HINT = Fault(code="gpu.ecc.corrected", title="t", kind="gpu", role=Role.CONFIRMATION, severity=Severity.INFO)
ROOT = Fault(code="gpu.xid.63", title="t", kind="gpu", action=Handling.RESET_DEVICE)


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("", []),
        (" , ,\n", []),
        ("gpu.xid.63=off", [Level("gpu.xid.63", True)]),
        (" nic.* = warning ", [Level("nic.*", severity=Severity.WARNING)]),
        ("a.b=error/drain_node", [Level("a.b", severity=Severity.ERROR, action=Handling.DRAIN_NODE)]),
        ("a.b=/ignore", [Level("a.b", action=Handling.IGNORE)]),
        (
            "a.b=off,c.d=critical\ne.f=info",
            [Level("a.b", True), Level("c.d", severity=Severity.CRITICAL), Level("e.f", severity=Severity.INFO)],
        ),
    ],
)
def test_strings_of_levels(text: str, levels: list[Level]) -> None:
    assert list(parse(text)) == levels


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("gpu.xid.63", "not understood"),
        ("=off", "not understood"),
        ("a.b=loud", "error, critical"),
        ("a.b=OFF", "not understood"),
        ("a.b=error/dance", "'dance' is not one of"),
        ("a.b=", "not understood"),
        ("a.b=/", "not understood"),
        ("a.b=off/drain_node", "not understood"),
        ("a.b=off, c.d", "'c.d'"),
    ],
)
def test_mistakes_are_named(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match="setting fault_levels") as caught:
        parse(text)
    assert complaint in str(caught.value)


def applied(text: str, fault: Fault) -> Fault | None:
    return Levels(levels=parse(text)).apply(fault)


def test_without_wishes_the_catalogue_holds() -> None:
    assert applied("", ROOT) is ROOT and applied("nic.*=off", ROOT) is ROOT


def test_off_severity_and_handling() -> None:
    assert applied("gpu.*=off", ROOT) is None
    changed = applied("gpu.xid.63=warning/drain_node", ROOT)
    assert changed is not None and (changed.severity, changed.action) == (Severity.WARNING, Handling.DRAIN_NODE)
    only = applied("gpu.xid.63=/human", ROOT)
    assert only is not None and (only.severity, only.action) == (ROOT.severity, Handling.HUMAN)


def test_the_last_level_that_names_it_wins() -> None:
    exception = applied("gpu.*=off, gpu.xid.63=error", ROOT)
    assert exception is not None and exception.severity is Severity.ERROR
    assert applied("gpu.xid.63=error, gpu.*=off", ROOT) is None


def test_a_warning_that_is_raised_becomes_an_alarm() -> None:
    raised, kept = applied("gpu.ecc.*=error", HINT), applied("gpu.ecc.*=warning", HINT)
    assert raised is not None and raised.role is Role.ROOT
    assert kept is not None and kept.role is Role.CONFIRMATION


def test_detectors_are_switched_off_by_name_and_wildcard() -> None:
    levels = Levels.of(Settings(detectors_off="host.smart, nvidia*"))
    assert not levels.wants("host.smart") and not levels.wants("nvidia.nvml")
    assert levels.wants("host.cpu") and levels.wants("kernel_log")


def test_the_catalogue_as_the_user_sees_it(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text("[[fault]]\ncode = 'own.flux'\ntitle = 't'\nclass = 'gpu'\npattern = 'flux capacitor'\n")
    seen = Levels.of(Settings(fault_files=str(own), fault_levels="own.flux=critical, gpu.xid.79=off")).catalog()
    flux = seen.get("own.flux")
    assert flux is not None and flux.severity is Severity.CRITICAL
    assert seen.get("gpu.xid.79") is None and seen.get("gpu.xid.63") is not None


def test_a_level_for_a_fault_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"there is no fault 'gpu\.zzz'.*rerail faults list"):
        Levels.of(Settings(fault_levels="gpu.zzz=off")).catalog()


def test_the_agent_hands_its_settings_down() -> None:
    settings = Settings(fault_levels="gpu.xid.63=off", detectors_off="nvidia", fault_files="/a.toml, /b.toml")
    env = {"RERAIL_SETTINGS": msgspec.json.encode(settings).decode()}
    assert Levels.from_environment(env) == Levels.of(settings)
    assert Levels.from_environment(env).files == (Path("/a.toml"), Path("/b.toml"))


def test_what_is_switched_off_is_known_and_the_last_level_counts() -> None:
    assert not Levels.of(Settings(fault_levels="nic.*=warning")).switched_off().faults
    levels = Levels.of(Settings(fault_levels="gpu.xid.6*=off, gpu.xid.63=error"))
    off = levels.switched_off()
    assert off.get("gpu.xid.64") is not None and off.get("gpu.xid.63") is None and off.get("gpu.xid.79") is None
    assert levels.catalog().get("gpu.xid.64") is None


def test_every_detector_is_known_by_name() -> None:
    every = Settings(notice_files="aws, gcp, azure")
    there = {one.name for one in (*all_detectors(), *all_watchers(), *watchers(every), KernelLog())}
    usable = {name for name in there if name not in areas().values() or name in VENDORS}  # what cannot be imported
    assert usable <= set(DETECTORS) and len(usable) > 20


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("detectors_off", "host.smrt", "there is no detector 'host.smrt'; did you mean host.smart?"),
        ("detectors_off", "host.cpu, smart", "did you mean host.smart?"),
        ("detectors_off", "host.memory", "did you mean host.memory.*?"),
        ("detectors_off", "qqqqq", "(there are: amd ascend dropbox"),
        ("fault_senders", "dcgm gpud", "'dcgm gpud' is no name of a sender"),
        ("fault_senders", "dcgm;gpud", "did you mean dcgm, gpud?"),
        ("fault_senders", "dcgm, *", "did you mean"),
        ("fault_senders", "d" * 200, "is no name of a sender"),
    ],
)
def test_names_that_are_none_are_refused(name: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"setting {name}: ") as caught:
        load_settings(env={f"RERAIL_{name.upper()}": text})
    assert says in str(caught.value)


def test_names_that_are_some_are_taken() -> None:
    env = {
        "RERAIL_DETECTORS_OFF": "host.smart, nvidia*, notice.*\nkernel_log",
        "RERAIL_FAULT_SENDERS": "dcgm, gpud@n-03, a/b:c",
    }
    assert load_settings(env=env).fault_senders == env["RERAIL_FAULT_SENDERS"]


def test_a_directory_for_dropped_faults_must_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_drop_dir({})
    check_drop_dir({"RERAIL_DROP_DIR": str(tmp_path)})
    (tmp_path / "file").touch()
    for name, says in (("file", "is a file, but a directory is needed"), ("none", "does not exist, but")):
        with pytest.raises(ConfigError, match=f"RERAIL_DROP_DIR: .*{name} {says}"):
            check_drop_dir({"RERAIL_DROP_DIR": str(tmp_path / name)})
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="cannot be read and written"):
        check_drop_dir({"RERAIL_DROP_DIR": str(tmp_path)})
