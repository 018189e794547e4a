from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from test_host_memory import lay, values

from rerail.detect.host_services import DeviceFiles, Kernel, Modules, Services

UNIT = "Id={name}.service\nLoadState={load}\nActiveState={state}\nUnitFileState={file}\n"


def test_services_that_should_run_are_told_and_those_nobody_wants_are_not(tmp_path: Path) -> None:
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    states = {"containerd": "active", "nvidia-dcgm": "active"}

    def run(command: Sequence[str], limit_s: float) -> str | None:
        assert "containerd.service" in command
        return "\n".join((
            UNIT.format(name="containerd", load="loaded", state=states["containerd"], file="enabled"),
            UNIT.format(name="nvidia-dcgm", load="loaded", state=states["nvidia-dcgm"], file="disabled"),
            UNIT.format(name="nvidia-imex", load="loaded", state="inactive", file="disabled"),
            UNIT.format(name="kubelet", load="not-found", state="inactive", file=""),
        ))  # fmt: skip

    services = Services(tmp_path, run=run)
    assert services.supported() == ""
    assert {reading.name: reading.value for reading in services.check()} == {
        "os.service.containerd": "active", "os.service.nvidia_dcgm": "active",
    }  # fmt: skip
    states |= {"containerd": "failed", "nvidia-dcgm": "inactive"}
    assert {reading.name: reading.value for reading in services.check()} == {
        "os.service.containerd": "failed", "os.service.nvidia_dcgm": "inactive",
    }  # fmt: skip


def test_without_systemd_or_an_answer_there_is_a_reason(tmp_path: Path) -> None:
    assert "systemd" in Services(tmp_path).supported()
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    for answer in (None, "", "rubbish\n\n=\n"):
        services = Services(tmp_path, run=lambda *_, answer=answer: answer)
        assert "installed" in services.supported() and services.check() == []


def test_modules_are_wanted_where_their_hardware_is(tmp_path: Path) -> None:
    bus = "sys/bus/pci/devices"
    lay(tmp_path, {
        f"{bus}/0000:17:00.0/class": "0x030200", f"{bus}/0000:17:00.0/vendor": "0x10de",
        f"{bus}/0000:18:00.0/class": "0x020700", f"{bus}/0000:18:00.0/vendor": "0x15b3",
        f"{bus}/0000:19:00.0/class": "0x020000", f"{bus}/0000:19:00.0/vendor": "0x1d0f", f"{bus}/0000:19:00.0/device": "0xefa1",
        f"{bus}/0000:1a:00.0/class": "\ufffd", "sys/module/nvidia/refcnt": "1", "sys/module/mlx5_core/refcnt": "1",
    })  # fmt: skip
    modules = Modules(tmp_path)
    assert modules.supported() == ""
    assert {reading.subject: reading.value for reading in modules.check()} == {
        "nvidia": 0,
        "mlx5_core": 0,
        "efa": 1,
        "nvidia_uvm": 1,
    }
    for name in ("nvidia_uvm", "ib_core", "efa"):
        (tmp_path / "sys/module" / name).mkdir()
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    found = {reading.name: reading.value for reading in modules.check()}
    assert (
        found["os.module.nvidia_peermem_missing"]
        == found["os.module.mlx5_ib_missing"]
        == found["os.module.ib_uverbs_missing"]
        == 1
    )
    assert found["os.module.nvidia_uvm_missing"] == found["os.module.efa_missing"] == 0


def test_a_driver_built_into_the_kernel_wants_nothing_without_its_card(tmp_path: Path) -> None:
    lay(tmp_path, {"sys/module/mlx5_core/x": "", "sys/module/ib_core/x": "", "sys/module/nvidia/x": ""})
    assert Modules(tmp_path).check() == []


def test_a_card_given_to_a_guest_needs_no_driver_here(tmp_path: Path) -> None:
    card = tmp_path / "sys/bus/pci/devices/0000:17:00.0"
    lay(card, {"class": "0x030200", "vendor": "0x10de"})
    lay(tmp_path, {"sys/module/kvm/refcnt": "1"})
    (tmp_path / "sys/bus/pci/drivers/vfio-pci").mkdir(parents=True)
    (card / "driver").symlink_to(tmp_path / "sys/bus/pci/drivers/vfio-pci")
    assert Modules(tmp_path).check() == [] and Modules(tmp_path).supported()
    assert "sys/module" in Modules(tmp_path / "none").supported()


def test_a_new_boot_and_what_the_kernel_notes_against_itself(tmp_path: Path) -> None:
    lay(
        tmp_path,
        {
            "proc/sys/kernel/random/boot_id": "aaa\n",
            "proc/sys/kernel/tainted": "4097",
            "proc/stat": "cpu 1\nbtime 1000000\nx 1\n",
        },
    )
    kernel = Kernel(tmp_path)
    before = {reading.name: reading.value for reading in kernel.check()}
    assert before == {
        "os.boot.changed": 0, "os.taint.machine_check": 0, "os.taint.bad_page": 0, "os.taint.oops": 0, "os.taint.soft_lockup": 0,
        "os.pstore.crash_records": 0,
    }  # fmt: skip
    lay(tmp_path, {
        "proc/sys/kernel/random/boot_id": "bbb\n", "proc/sys/kernel/tainted": str(4097 | 1 << 7 | 1 << 4),
        "sys/fs/pstore/dmesg-erst-1": "", "sys/fs/pstore/console-ramoops-0": "", "var/lib/systemd/pstore/old/x": "",
    })  # fmt: skip
    os.utime(tmp_path / "var/lib/systemd/pstore/old", (1, 1))
    after = {reading.name: reading.value for reading in kernel.check()}
    assert after["os.boot.changed"] == after["os.taint.oops"] == after["os.taint.machine_check"] == 1
    assert after["os.taint.soft_lockup"] == 0 and after["os.pstore.crash_records"] == 1


def test_a_node_that_was_seen_under_another_boot_id_has_rebooted(tmp_path: Path) -> None:
    lay(tmp_path, {"proc/sys/kernel/random/boot_id": "bbb"})
    assert values(Kernel(tmp_path, boot_id="aaa").check(), "os.boot.changed") == {"kernel": 1}
    assert values(Kernel(tmp_path, boot_id="bbb").check(), "os.boot.changed") == {"kernel": 0}
    assert Kernel(tmp_path / "none").supported()


def test_device_files_that_were_there_are_missed(tmp_path: Path) -> None:
    lay(
        tmp_path,
        {"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidia-uvm": "", "dev/infiniband/uverbs0": "", "dev/null": ""},
    )
    files = DeviceFiles(tmp_path)
    assert values(files.check(), "os.device_file.gone") == {
        "/dev/nvidia0": 0, "/dev/nvidia1": 0, "/dev/nvidia-uvm": 0, "/dev/infiniband/uverbs0": 0,
    }  # fmt: skip
    (tmp_path / "dev/nvidia1").unlink()
    assert values(files.check(), "os.device_file.gone")["/dev/nvidia1"] == 1
    assert DeviceFiles(tmp_path / "none").supported()
