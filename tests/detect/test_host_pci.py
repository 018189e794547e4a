from __future__ import annotations

import os
from pathlib import Path

import pytest
from test_host_memory import lay, values

from rerail.detect.host_pci import Pci, kind_of, link_speed, link_width, redirects

PORT, GPU, NIC = "0000:00:01.0", "0000:17:00.0", "0000:18:00.0"
AER = "Undefined 0\nData Link Protocol 0\nTOTAL_ERR_{kind} {count}\n"


def card(root: Path, address: str, port: str, **files: str) -> Path:
    """A card behind a port, as sysfs shows it: a folder under the port's, and a link in the list of the bus."""
    folder = root / "sys/devices/pci0000:00" / port / address
    lay(folder, files)
    bus = root / "sys/bus/pci/devices"
    bus.mkdir(parents=True, exist_ok=True)
    if not (bus / address).is_symlink():
        (bus / address).symlink_to(folder)
    return folder


def gpu(root: Path, **files: str) -> Path:
    lay(
        root / "sys/devices/pci0000:00" / PORT,
        {"max_link_width": "16", "max_link_speed": "32.0 GT/s PCIe", "class": "0x060400"},
    )
    given = {
        "class": "0x030200", "vendor": "0x10de", "device": "0x2330", "config": "\x01\x02\x03\x04",
        "max_link_width": "16", "max_link_speed": "64.0 GT/s PCIe", "current_link_width": "16", "current_link_speed": "32.0 GT/s PCIe",
    }  # fmt: skip
    return card(root, GPU, PORT, **(given | files))


@pytest.mark.parametrize(
    ("code", "vendor", "kind"),
    [("0x030200", "0x10de", "accelerator"), ("0x030000", "0x1a03", ""), ("0x120000", "0x1da3", "accelerator"),
     ("0x020700", "0x15b3", "network"), ("0x010802", "0x144d", "nvme"), ("0x060400", "0x8086", ""), ("", "", "")],
)  # fmt: skip
def test_only_cards_that_training_needs_are_watched(code: str, vendor: str, kind: str) -> None:
    assert kind_of(code, vendor) == kind


def test_links_that_say_nothing_are_none() -> None:
    assert [link_width(text) for text in ("16", "0", "63", "255", "", "x")] == [16, None, None, None, None, None]
    assert [link_speed(text) for text in ("16.0 GT/s PCIe", "8 GT/s", "Unknown", "")] == [16.0, 8.0, None, None]


def test_a_link_is_measured_by_what_card_and_port_can_both_do(tmp_path: Path) -> None:
    gpu(tmp_path)
    pci = Pci(tmp_path)
    assert pci.supported() == ""
    assert values(pci.check(), "pcie.link.width_share") == {GPU: 1.0}
    assert values(pci.check(), "pcie.link.accelerator_speed_share") == {GPU: 1.0}
    gpu(tmp_path, current_link_width="8", current_link_speed="2.5 GT/s PCIe")
    found = pci.check()
    assert values(found, "pcie.link.width_share") == {GPU: 0.5}
    assert values(found, "pcie.link.accelerator_speed_share") == {GPU: 0.0781}
    assert "x8 of x16" in next(reading.note for reading in found if reading.name == "pcie.link.width_share")


def test_a_sleeping_card_is_not_woken_for_its_link(tmp_path: Path) -> None:
    folder = gpu(tmp_path, current_link_width="8")
    lay(folder, {"power/runtime_status": "suspended"})
    assert values(Pci(tmp_path).check(), "pcie.link.width_share") == {}


def test_errors_of_card_and_port_are_told_apart(tmp_path: Path) -> None:
    gpu(tmp_path, aer_dev_correctable=AER.format(kind="COR", count=3), aer_dev_fatal=AER.format(kind="FATAL", count=0))
    port = tmp_path / "sys/devices/pci0000:00" / PORT
    lay(port, {"aer_dev_nonfatal": AER.format(kind="NONFATAL", count=1), "aer_dev_fatal": "rubbish"})
    pci = Pci(tmp_path)
    found = pci.check()
    assert values(found, "pcie.aer.correctable") == {GPU: 3}
    assert values(found, "pcie.aer.nonfatal") == {PORT: 1}
    assert values(found, "pcie.aer.fatal") == {GPU: 0}
    gpu(tmp_path, aer_dev_fatal=AER.format(kind="FATAL", count=1))
    assert values(pci.check(), "pcie.aer.fatal") == {GPU: 1}


def test_a_card_that_vanishes_or_answers_all_ones_is_gone(tmp_path: Path) -> None:
    folder = gpu(tmp_path)
    card(tmp_path, NIC, PORT, **{"class": "0x020700", "vendor": "0x15b3"})
    pci = Pci(tmp_path)
    assert values(pci.check(), "pcie.device.gone") == {GPU: 0, NIC: 0}
    (folder / "config").write_bytes(b"\xff" * 64)
    found = pci.check()
    assert values(found, "pcie.device.gone") == {GPU: 1, NIC: 0}
    assert values(found, "pcie.link.width_share") == {}
    os.unlink(tmp_path / "sys/bus/pci/devices" / NIC)
    assert values(pci.check(), "pcie.device.gone")[NIC] == 1


def test_a_bus_that_cannot_be_seen_any_more_says_nothing(tmp_path: Path) -> None:
    gpu(tmp_path)
    pci = Pci(tmp_path)
    pci.check()
    os.rename(tmp_path / "sys/bus/pci/devices", tmp_path / "sys/bus/pci/hidden")
    assert pci.check() == []
    assert "PCI bus" in pci.supported()


def test_a_card_without_its_driver_is_told_if_it_had_one(tmp_path: Path) -> None:
    folder = gpu(tmp_path)
    pci = Pci(tmp_path)
    assert values(pci.check(), "pcie.device.driver_lost") == {}
    (folder / "driver").mkdir()
    assert values(pci.check(), "pcie.device.driver_lost") == {GPU: 0}
    (folder / "driver").rmdir()
    assert values(pci.check(), "pcie.device.driver_lost") == {GPU: 1}


def test_virtual_functions_are_not_watched(tmp_path: Path) -> None:
    folder = card(tmp_path, NIC, PORT, **{"class": "0x020000", "vendor": "0x15b3"})
    (folder / "physfn").mkdir()
    assert "no accelerator" in Pci(tmp_path).supported()


def config_space(control: int, following: int = 0) -> bytes:
    """A configuration space whose second extended capability is access control."""
    space = bytearray(4096)
    space[0x100:0x104] = (0x0001 | 1 << 16 | 0x140 << 20).to_bytes(4, "little")
    space[0x140:0x144] = (0x000D | 1 << 16 | following << 20).to_bytes(4, "little")
    space[0x146:0x148] = control.to_bytes(2, "little")
    return bytes(space)


def test_access_control_is_found_in_the_configuration_space() -> None:
    assert redirects(config_space(0x1D))
    assert not redirects(config_space(0))
    assert not redirects(config_space(0x1D)[:64])  # what a user who is not root may read
    circle = bytearray(4096)
    circle[0x100:0x104] = (0x0001 | 0x100 << 20).to_bytes(4, "little")
    assert not redirects(bytes(circle))


def test_redirecting_ports_are_counted_on_bare_metal_only(tmp_path: Path) -> None:
    gpu(tmp_path)
    (tmp_path / "sys/devices/pci0000:00" / PORT / "config").write_bytes(config_space(0x1D))
    lay(tmp_path, {"proc/cpuinfo": "flags\t\t: fpu vme\n"})
    assert values(Pci(tmp_path).check(), "pcie.acs.redirecting_ports") == {"pci": 1}
    lay(tmp_path, {"proc/cpuinfo": "flags\t\t: fpu hypervisor\n"})
    assert values(Pci(tmp_path).check(), "pcie.acs.redirecting_ports") == {}


def test_what_a_virtual_machine_hides_is_a_blind_spot(tmp_path: Path) -> None:
    gpu(tmp_path, current_link_width="0")
    assert len(Pci(tmp_path).blind_spots()) == 2
