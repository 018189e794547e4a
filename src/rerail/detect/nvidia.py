"""Turns NVML's answers (`detect.nvml`) into samples of NVIDIA GPUs, and its events into `gpu.xid` readings.

The vendor half of `detect.accelerators`. Neither driver nor package is needed to import this module.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rerail.detect.accelerators import Absent, Accelerator, AcceleratorDetector, Lost, Sample, Unreachable
from rerail.detect.detector import Reading, Watcher
from rerail.detect.nvml import TELLING, Gpu, connect, disconnect, text

RETIRED_PAGES_LIMIT = 60
"""NVIDIA takes cards back from here on (before Ampere; later ones remap rows instead)."""
INFOROM_EVERY_S = 3600.0
"""The check reads the flash of the card."""
SHUTDOWN, SLOWDOWN, MEMORY = 0, 1, 2
"""NVML's numbers of the temperature thresholds."""
BUSY_PERCENT = 10
"""An idle GPU lowers the speed of its PCIe link on purpose."""
EVENT_WAIT_MS = 1000
IMEX_CHANNELS = Path("/dev/nvidia-caps-imex-channels")

_COUNTERS = (
    ("gpu.ecc.corrected", "nvmlDeviceGetTotalEccErrors", (0, 0)),
    ("gpu.ecc.uncorrected", "nvmlDeviceGetTotalEccErrors", (1, 0)),
    ("gpu.ecc.corrected_lifetime", "nvmlDeviceGetTotalEccErrors", (0, 1)),
    ("gpu.ecc.uncorrected_lifetime", "nvmlDeviceGetTotalEccErrors", (1, 1)),
    ("gpu.retired_pages.pending", "nvmlDeviceGetRetiredPagesPendingStatus", ()),
    ("gpu.pcie.replays", "nvmlDeviceGetPcieReplayCounter", ()),
    ("gpu.persistence_mode", "nvmlDeviceGetPersistenceMode", ()),
)
_FIELDS = {
    29: "gpu.retired_pages.corrected",
    30: "gpu.retired_pages.uncorrected",
    82: "gpu.temperature.memory",
    169: "gpu.pcie.recoveries",
    173: "gpu.pcie.correctable_errors",
    179: "gpu.pcie.nonfatal_errors",
    180: "gpu.pcie.fatal_errors",
    230: "gpu.recovery_action",
    307: "gpu.remapped_banks.pending",
}
_MEMORY_HEAT, _LINK_COUNT, _LINK_REPLAYS, _LINK_STATE, _RECOVERY_ACTION = 82, 91, 161, 165, 230
_LINK_FIELDS = {
    165: "gpu.link.up",
    161: "gpu.link.replays",
    162: "gpu.link.recoveries",
    163: "gpu.link.crc_errors",
    214: "gpu.link.failed_recoveries",
    219: "gpu.link.effective_errors",
}
_OLD_LINK_COUNTERS = {0: "gpu.link.replays", 1: "gpu.link.recoveries", 2: "gpu.link.crc_errors"}
_RECOVERY = {
    0: "none",
    1: "gpu_reset",
    2: "node_reboot",
    3: "drain_p2p",
    4: "drain_and_reset",
    5: "recover_imex_domain",
    6: "bus_reset",
    7: "system_reboot",
}
_THROTTLE = {
    0x04: "gpu.throttle.sw_power_cap",
    0x08: "gpu.throttle.hw_slowdown",
    0x10: "gpu.throttle.sync_boost",
    0x20: "gpu.throttle.sw_thermal",
    0x40: "gpu.throttle.hw_thermal",
    0x80: "gpu.throttle.hw_power_brake",
}
_FABRIC_STATES = ("not_supported", "not_started", "in_progress", "completed")
_FABRIC_BITS = {0: "degraded_bandwidth", 2: "route_recovery", 4: "route_unhealthy", 6: "access_timeout"}
_FABRIC_SUMMARY = ("not_supported", "healthy", "unhealthy", "limited_capacity")


class _Gpu(Gpu):
    """What is remembered of one device between two looks."""

    def __init__(self, lib: Any, handle: Any, told: tuple[int, ...] = ()) -> None:
        super().__init__(lib, handle, told)
        self.links_up: set[int] = set()
        """Links that have been up; others may never have been wired."""
        self.limits: dict[int, int] = {}
        """Temperatures by NVML's number of the threshold."""
        self.inforom_at = float("-inf")


class Nvidia:
    """The vendor of `accelerators`. `ours` says which process ids belong to the job: others are foreign."""

    name = "nvidia"
    word = "gpu"

    def __init__(self, ours: Callable[[int], bool] | None = None) -> None:
        self._ours = ours
        self._lib: Any = None
        self._gpus: dict[str, _Gpu] = {}
        self._vbios: dict[str, set[str]] = {}
        """Versions by model."""
        self._multi_node = False

    def open(self) -> list[Accelerator]:
        self.close()
        self._lib = connect()
        found = []
        for index in range(self._lib.nvmlDeviceGetCount()):
            try:
                gpu = _Gpu(self._lib, self._lib.nvmlDeviceGetHandleByIndex(index))
            except self._lib.NVMLError as error:
                if error.value not in TELLING:
                    continue  # gone; if it was known, `accelerators` misses it
                gpu = _Gpu(self._lib, None, (error.value,))
            device = self._identify(index, gpu)
            self._gpus[device.key] = gpu
            found.append(device)
        return found

    def close(self) -> None:
        if self._lib is not None:
            disconnect(self._lib)
        self._lib, self._gpus, self._vbios = None, {}, {}

    def sample(self, device: Accelerator) -> Iterator[Sample]:
        gpu = self._gpus[device.key]
        if gpu.handle is not None:
            yield from self._memory(gpu)
            yield from self._speed(gpu)
            yield from self._links(gpu)
            yield from self._fabric(gpu)
            yield from self._modes(gpu)
            yield from self._processes(gpu)
        yield from (Sample(name, int(code in gpu.told)) for code, name in TELLING.items())
        gpu.told &= {14} if gpu.handle is not None else gpu.told  # the InfoROM is looked at once an hour only

    def machine(self) -> Iterator[Sample]:
        for versions in self._vbios.values():
            yield Sample("gpu.vbios_versions", len(versions), note=", ".join(sorted(versions)))
        if self._multi_node:
            yield Sample("gpu.fabric.imex_missing", int(not IMEX_CHANNELS.is_dir()), note=str(IMEX_CHANNELS))

    def blind_spots(self, device: Accelerator) -> list[str]:
        if device.virtual == "MIG slice":
            return ["in MIG mode: NVLink, load, throttling and ECC counts of a slice, and which slice a fault hits"]
        if device.virtual:
            return [f"is a {device.virtual}: ECC, row remapping, links, PCIe and temperature belong to the host"]
        gpu = self._gpus[device.key]
        try:
            counted = gpu.handle is not None and gpu.ask("nvmlDeviceGetTotalEccErrors", 1, 0) is not None
        except (Lost, Unreachable):
            return []
        return [] if counted else ["no ECC counters: bad memory shows only as wrong results"]

    def _identify(self, index: int, gpu: _Gpu) -> Accelerator:
        if gpu.handle is None:
            return Accelerator(index, "NVIDIA GPU that cannot be opened")
        try:
            pci, mig = gpu.ask("nvmlDeviceGetPciInfo"), gpu.ask("nvmlDeviceGetMigMode")
            virtual = (
                "MIG slice" if mig and mig[0] else "vGPU" if gpu.ask("nvmlDeviceGetVirtualizationMode") == 2 else ""
            )
            name, uuid, serial, vbios = (
                text(gpu.ask(f"nvmlDeviceGet{what}")) for what in ("Name", "UUID", "Serial", "VbiosVersion")
            )
            limits = {kind: gpu.ask("nvmlDeviceGetTemperatureThreshold", kind) for kind in (SHUTDOWN, SLOWDOWN, MEMORY)}
        except Lost:
            return Accelerator(index, "lost NVIDIA GPU")
        gpu.limits = {kind: limit for kind, limit in limits.items() if limit}
        if vbios:
            self._vbios.setdefault(name, set()).add(vbios)
        return Accelerator(index, name, uuid, text(pci.busId) if pci else "", serial, virtual)

    def _memory(self, gpu: _Gpu) -> Iterator[Sample]:
        for name, function, arguments in _COUNTERS:
            value = gpu.ask(function, *arguments)
            if value is not None:
                yield Sample(name, value)
        rows = gpu.ask("nvmlDeviceGetRemappedRows")
        for word, value in zip(("correctable", "uncorrectable", "pending", "failed"), rows or (), strict=False):
            yield Sample(f"gpu.remapped_rows.{word}", value)
        status = gpu.filled("nvmlDeviceGetSramEccErrorStatus", "c_nvmlEccSramErrorStatus_v1_t")
        if status is not None:
            yield Sample("gpu.ecc.sram_threshold", status.bThresholdExceeded)
            yield Sample("gpu.ecc.sram_uncorrected_lifetime", status.aggregateUncParity + status.aggregateUncSecDed)
        repair = gpu.ask("nvmlDeviceGetRepairStatus")
        if repair is not None:
            yield Sample("gpu.repair_pending", int(any(repair)), note="channel, TPC: {}, {}".format(*repair))
        if time.monotonic() - gpu.inforom_at > INFOROM_EVERY_S:
            gpu.inforom_at = time.monotonic()
            gpu.ask("nvmlDeviceValidateInforom")

    def _speed(self, gpu: _Gpu) -> Iterator[Sample]:
        fields = {field: value for (field, _), value in gpu.fields((field, 0) for field in _FIELDS).items()}
        for field, value in fields.items():
            yield Sample(_FIELDS[field], _RECOVERY.get(value, str(value)) if field == _RECOVERY_ACTION else value)
        if 29 in fields and 30 in fields:
            retired = fields[29] + fields[30]
            yield Sample("gpu.retired_pages", retired)
            yield Sample("gpu.retired_pages.over_limit", int(retired >= RETIRED_PAGES_LIMIT))
        yield from self._heat(gpu, fields.get(_MEMORY_HEAT))
        load = gpu.ask("nvmlDeviceGetUtilizationRates")
        if load is not None:
            yield Sample("gpu.utilization", load.gpu)
        clock, highest = (gpu.ask(f"nvmlDeviceGet{word}ClockInfo", 1) for word in ("", "Max"))
        if clock is not None and highest:
            yield Sample("gpu.clock_ratio", clock / highest)
        power, limit = (gpu.ask(f"nvmlDeviceGet{word}") for word in ("PowerUsage", "EnforcedPowerLimit"))
        if power is not None:
            yield Sample("gpu.power_w", power / 1000)
            if limit:
                yield Sample("gpu.power_ratio", power / limit)
        width, full_width = (gpu.ask(f"nvmlDeviceGet{word}PcieLinkWidth") for word in ("Curr", "Max"))
        if width and full_width:
            yield Sample("gpu.pcie.lanes_lost", max(0, full_width - width), note=f"x{width} of x{full_width}")
        speed, full = (gpu.ask(f"nvmlDeviceGet{word}PcieLinkGeneration") for word in ("Curr", "Max"))
        if speed and full and load is not None and load.gpu >= BUSY_PERCENT:
            yield Sample("gpu.pcie.generations_lost", max(0, full - speed), note=f"generation {speed} of {full}")

    def _heat(self, gpu: _Gpu, memory: float | None) -> Iterator[Sample]:
        reasons = gpu.either(
            ("nvmlDeviceGetCurrentClocksEventReasons",), ("nvmlDeviceGetCurrentClocksThrottleReasons",)
        )
        if reasons is not None:
            yield from (Sample(name, int(bool(reasons & bit))) for bit, name in _THROTTLE.items())
        heat = gpu.either(("nvmlDeviceGetTemperatureV", 0), ("nvmlDeviceGetTemperature", 0))
        margin = gpu.ask("nvmlDeviceGetMarginTemperature")
        if heat is not None:
            yield Sample("gpu.temperature", heat)
            if margin is None and SLOWDOWN in gpu.limits:
                margin = gpu.limits[SLOWDOWN] - heat
            if SHUTDOWN in gpu.limits:
                yield Sample("gpu.temperature.shutdown_margin", gpu.limits[SHUTDOWN] - heat)
        if margin is not None:
            yield Sample("gpu.temperature.margin", margin)
        if memory and MEMORY in gpu.limits:
            yield Sample("gpu.temperature.memory_margin", gpu.limits[MEMORY] - memory)

    def _links(self, gpu: _Gpu) -> Iterator[Sample]:
        """A link that is down says nothing where no link is up and none has been: cards without bridge, MIG."""
        links = range(int(gpu.fields([(_LINK_COUNT, 0)]).get((_LINK_COUNT, 0), 0)))
        values = gpu.fields((field, link) for link in links for field in _LINK_FIELDS)
        for link in links:
            if (_LINK_STATE, link) not in values and (state := gpu.ask("nvmlDeviceGetNvLinkState", link)) is not None:
                values[_LINK_STATE, link] = state
            if values.get((_LINK_STATE, link)):
                gpu.links_up.add(link)
        for (field, link), value in values.items():
            if gpu.links_up:
                yield Sample(_LINK_FIELDS[field], int(bool(value)) if field == _LINK_STATE else value, f"link{link}")
        if not gpu.knows_field(_LINK_REPLAYS):  # drivers older than the fields
            for link in gpu.links_up:
                for counter, name in _OLD_LINK_COUNTERS.items():
                    value = gpu.ask("nvmlDeviceGetNvLinkErrorCounter", link, counter)
                    if value is not None:
                        yield Sample(name, value, f"link{link}")

    def _fabric(self, gpu: _Gpu) -> Iterator[Sample]:
        kinds = ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t")
        info = gpu.filled("nvmlDeviceGetGpuFabricInfoV", *kinds)
        if info is None or not 0 < info.state < len(_FABRIC_STATES):
            return
        yield Sample("gpu.fabric.state", _FABRIC_STATES[info.state])
        if info.state == 3:
            yield Sample("gpu.fabric.status", info.status)
        self._multi_node = self._multi_node or any(info.clusterUuid)
        for shift, word in _FABRIC_BITS.items():
            bits = info.healthMask >> shift & 3
            if bits:  # 0: not supported
                yield Sample(f"gpu.fabric.{word}", int(bits == 1))
        wrong = info.healthMask >> 8 & 0xF
        if wrong:  # 0: not supported, 1: none
            yield Sample("gpu.fabric.misconfigured", wrong - 1)
        summary = getattr(info, "healthSummary", 0)
        if 0 < summary < len(_FABRIC_SUMMARY):
            yield Sample("gpu.fabric.health", _FABRIC_SUMMARY[summary])

    def _modes(self, gpu: _Gpu) -> Iterator[Sample]:
        for word, function in (("mig", "nvmlDeviceGetMigMode"), ("ecc", "nvmlDeviceGetEccMode")):
            modes = gpu.ask(function)
            if modes is not None:
                yield Sample(f"gpu.{word}.enabled", modes[0])
                yield Sample(f"gpu.{word}.change_pending", int(modes[0] != modes[1]))

    def _processes(self, gpu: _Gpu) -> Iterator[Sample]:
        running = gpu.ask("nvmlDeviceGetComputeRunningProcesses") if self._ours else None
        if running is None or self._ours is None:
            return
        foreign = [process for process in running if not self._ours(process.pid)]
        note = ", ".join(f"pid {one.pid}: {(one.usedGpuMemory or 0) >> 20} MiB" for one in foreign)
        yield Sample("gpu.foreign_processes", len(foreign), note=note)


class XidWatcher:
    """Waits for NVML's events: gives every Xid as it happens, also where the kernel log cannot be read."""

    name = "nvidia.xid"

    def __init__(self) -> None:
        self._stop = threading.Event()

    def supported(self) -> str:
        try:
            disconnect(connect())
        except (Absent, Unreachable) as reason:
            return str(reason)
        return ""

    def blind_spots(self) -> list[str]:
        return ["NVML tells only critical Xids; informational ones are in the kernel log alone"]

    def stop(self) -> None:
        """End `watch` within a second."""
        self._stop.set()

    def watch(self) -> Iterator[Reading]:
        lib = connect()
        try:
            while not self._stop.is_set():
                names = self._register(lib)
                yield from self._wait(lib, names)
                if not names:
                    return
                self._stop.wait(EVENT_WAIT_MS / 1000)  # a device was lost: go on with the others
        finally:
            disconnect(lib)

    def _register(self, lib: Any) -> dict[int | None, str]:
        """Subjects by handle of those devices that give events."""
        self._set = lib.nvmlEventSetCreate()
        names: dict[int | None, str] = {}
        for index in range(lib.nvmlDeviceGetCount()):
            try:
                handle = lib.nvmlDeviceGetHandleByIndex(index)
                lib.nvmlDeviceRegisterEvents(handle, lib.nvmlEventTypeXidCriticalError, self._set)
            except lib.NVMLError:
                continue
            names[ctypes.cast(handle, ctypes.c_void_p).value] = f"gpu{index}"
        return names

    def _wait(self, lib: Any, names: dict[int | None, str]) -> Iterator[Reading]:
        """Readings until stopped or until waiting fails."""
        try:
            while names and not self._stop.is_set():
                try:
                    event = lib.nvmlEventSetWait_v2(self._set, EVENT_WAIT_MS)
                except lib.NVMLError as error:
                    if error.value == lib.NVML_ERROR_TIMEOUT:
                        continue
                    return
                subject = names.get(ctypes.cast(event.device, ctypes.c_void_p).value)
                if subject and event.eventType == lib.nvmlEventTypeXidCriticalError:
                    yield Reading("gpu.xid", subject, int(event.eventData), momentary=True)
        finally:
            lib.nvmlEventSetFree(self._set)


def detector(
    ours: Callable[[int], bool] | None = None, *, expected: int = 0, every_s: float = 10.0
) -> AcceleratorDetector:
    """The detector of NVIDIA GPUs."""
    return AcceleratorDetector(Nvidia(ours), expected=expected, every_s=every_s)


def watchers() -> list[Watcher]:
    """What waits for events of NVIDIA GPUs."""
    return [XidWatcher()]
