"""Turns AMD SMI (`amdsmi`, imported late) into samples of AMD GPUs, under the same names as `detect.nvidia` where it is the same.

The vendor half of `detect.accelerators`. What a device or a driver does not know is left out. Neither driver nor package
is needed to import this module.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Iterator
from typing import Any

from rerail.detect.accelerators import Absent, Accelerator, AcceleratorDetector, Lost, Sample, Unreachable, on_bus

PCI_VENDOR = "0x1002"
NEVER = {
    2,
    3,
    5,
    10,
    53,
    55,
}  # not supported, not implemented, no symbol, no permission, null argument, no such setting
UNREACHABLE = {18, 32, 34}  # init error, not initialised, driver not loaded
CORRUPT_EEPROM = 56
BLOCKS = ("UMC", "SDMA", "GFX", "MMHUB", "PCIE_BIF", "HDP", "XGMI_WAFL", "MP1", "MCA", "MPIO")
"""Parts of the chip that count their own memory errors. The others hold no data of the user."""
PARTITIONED = ("DPX", "TPX", "QPX", "CPX")
HOT, HBM = "HOTSPOT", "VRAM"
_RESIDENCIES = {
    "prochot_residency_acc": "gpu.throttle.hw_power_brake",
    "ppt_residency_acc": "gpu.throttle.sw_power_cap",
    "socket_thm_residency_acc": "gpu.throttle.hw_thermal",
    "vr_thm_residency_acc": "gpu.throttle.regulator_thermal",
    "hbm_thm_residency_acc": "gpu.throttle.memory_thermal",
}
"""Time spent throttled. Read instead of `amdsmi_get_violation_status`, which waits 100 ms for every device."""
_PAGES = {0: "gpu.retired_pages", 1: "gpu.retired_pages.pending", 2: "gpu.retired_pages.unreservable"}
_LINKS = {"U": 1, "D": 0}


class _Gpu:
    """One device of the present connection."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.never: set[object] = set()
        self.answers = 0
        """Since the beginning of this look."""
        self.failures: list[str] = []
        self.corrupt = False
        """Its list of bad pages."""
        self.throttled: dict[str, int] = {}
        self.links_up: set[int] = set()


class Amd:
    """The vendor of `accelerators`. `ours` says which process ids belong to the job: others are foreign."""

    name = "amd"
    word = "gpu"

    def __init__(self, ours: Callable[[int], bool] | None = None) -> None:
        self._ours = ours
        self._lib: Any = None
        self._gpus: dict[str, _Gpu] = {}

    def open(self) -> list[Accelerator]:
        self.close()
        self._lib = _connect()
        try:
            handles = self._lib.amdsmi_get_processor_handles()
        except self._lib.AmdSmiException as error:
            raise Unreachable(f"AMD SMI: {_short(error)}") from None
        found = []
        for index, handle in enumerate(handles):
            gpu = _Gpu(handle)
            device = self._identify(index, gpu)
            self._gpus[device.key] = gpu
            found.append(device)
        return found

    def close(self) -> None:
        if self._lib is not None:
            try:
                self._lib.amdsmi_shut_down()
            except self._lib.AmdSmiException:
                pass  # it is down already
        self._lib, self._gpus = None, {}

    def sample(self, device: Accelerator) -> Iterator[Sample]:
        """A device that answers nothing, and not because it cannot, is lost."""
        gpu = self._gpus[device.key]
        gpu.answers, gpu.failures, gpu.corrupt = 0, [], False
        yield from self._memory(gpu)
        yield from self._metrics(gpu)
        yield from self._pcie(gpu)
        yield from self._links(gpu)
        yield from self._processes(gpu)
        if gpu.failures and not gpu.answers:
            raise Lost(gpu.failures[0])

    def machine(self) -> Iterator[Sample]:
        return iter(())

    def blind_spots(self, device: Accelerator) -> list[str]:
        if device.virtual == "partition":
            return ["is one partition of a GPU: memory errors, links and heat are those of the whole GPU"]
        if device.virtual:
            return [f"is a {device.virtual}: ECC, bad pages, XGMI and PCIe counters belong to the host"]
        gpu = self._gpus[device.key]
        if self._ask(gpu, "amdsmi_get_gpu_total_ecc_count") is None:
            return ["no ECC counters (RAS is off or needs more rights): bad memory shows only as wrong results"]
        return []

    def _identify(self, index: int, gpu: _Gpu) -> Accelerator:
        asic = self._ask(gpu, "amdsmi_get_gpu_asic_info") or {}
        board = self._ask(gpu, "amdsmi_get_gpu_board_info") or {}
        bus = self._ask(gpu, "amdsmi_get_gpu_device_bdf") or ""
        uuid = self._ask(gpu, "amdsmi_get_gpu_device_uuid") or ""
        mode = (self._ask(gpu, "amdsmi_get_gpu_virtualization_mode") or {}).get("mode")
        virtual = "virtual function" if mode is not None and mode.name == "GUEST" else ""
        if self._ask(gpu, "amdsmi_get_gpu_compute_partition") in PARTITIONED:
            part = (self._ask(gpu, "amdsmi_get_gpu_kfd_info") or {}).get("current_partition_id", index)
            virtual, uuid = "partition", f"{uuid}/{part}"  # the partitions of a GPU share its uuid
        serial = _known(board.get("product_serial")) or _known(asic.get("asic_serial"))
        return Accelerator(index, _known(asic.get("market_name")) or "AMD GPU", uuid, bus, serial, virtual)

    def _memory(self, gpu: _Gpu) -> Iterator[Sample]:
        counts = self._ask(gpu, "amdsmi_get_gpu_total_ecc_count")
        if counts is not None:
            yield Sample("gpu.ecc.corrected", counts["correctable_count"])
            yield Sample("gpu.ecc.uncorrected", counts["uncorrectable_count"])
            yield Sample("gpu.ecc.deferred", counts["deferred_count"])
        for block in BLOCKS:
            counts = self._ask(gpu, "amdsmi_get_gpu_ecc_count", getattr(self._lib.AmdSmiGpuBlock, block, None))
            if counts is not None:
                yield Sample("gpu.ecc.block_uncorrected", counts["uncorrectable_count"], block.lower())
                yield Sample("gpu.ecc.block_corrected", counts["correctable_count"], block.lower())
        pages = self._ask(gpu, "amdsmi_get_gpu_bad_page_info")
        if pages is not None:
            for status, name in _PAGES.items():
                yield Sample(name, sum(page["status"] == status for page in pages))
            limit = self._ask(gpu, "amdsmi_get_gpu_bad_page_threshold")
            if limit:
                yield Sample("gpu.retired_pages.over_limit", int(len(pages) >= limit), note=f"{len(pages)} of {limit}")
        self._ask(gpu, "amdsmi_get_gpu_ras_feature_info")
        yield Sample("gpu.inforom_corrupt", int(gpu.corrupt))

    def _metrics(self, gpu: _Gpu) -> Iterator[Sample]:
        """The table that the firmware writes: one file, one read."""
        table = self._ask(gpu, "amdsmi_get_gpu_metrics_info") or {}
        for key, name in _RESIDENCIES.items():
            total = table.get(key)
            if isinstance(total, int):
                before = gpu.throttled.get(key)
                gpu.throttled[key] = total
                if before is not None:
                    yield Sample(name, int(total > before))
        if isinstance(load := table.get("average_gfx_activity"), int):
            yield Sample("gpu.utilization", load)
        power = _first(table, "current_socket_power", "average_socket_power")
        if power is not None:
            yield Sample("gpu.power_w", float(power))
            limit = (self._ask(gpu, "amdsmi_get_power_info") or {}).get("power_limit")
            if isinstance(limit, int) and limit > 0:  # microwatts in some releases, watts in others
                yield Sample("gpu.power_ratio", power / (limit / 1e6 if limit > 100_000 else limit))
        for sensor, name in ((HOT, "gpu.temperature"), (HBM, "gpu.temperature.memory")):
            heat, limit = self._heat(gpu, sensor, "CURRENT"), self._heat(gpu, sensor, "CRITICAL")
            if heat is not None:
                yield Sample(name, heat)
                if limit:
                    yield Sample(f"{name}.margin" if sensor == HOT else "gpu.temperature.memory_margin", limit - heat)

    def _heat(self, gpu: _Gpu, sensor: str, what: str) -> int | None:
        kind, metric = (
            getattr(self._lib.AmdSmiTemperatureType, sensor),
            getattr(self._lib.AmdSmiTemperatureMetric, what),
        )
        value: int | None = self._ask(gpu, "amdsmi_get_temp_metric", kind, metric)
        return value

    def _pcie(self, gpu: _Gpu) -> Iterator[Sample]:
        info = self._ask(gpu, "amdsmi_get_pcie_info")
        if info is None:
            return
        limit, now = info["pcie_static"], info["pcie_metric"]
        width, full_width = now["pcie_width"], limit["max_pcie_width"]
        if _numbers(width, full_width) and width:
            yield Sample("gpu.pcie.lanes_lost", max(0, full_width - width), note=f"x{width} of x{full_width}")
        for key, name in (
            ("pcie_replay_count", "gpu.pcie.replays"),
            ("pcie_l0_to_recovery_count", "gpu.pcie.recoveries"),
            ("pcie_nak_received_count", "gpu.pcie.naks"),
        ):
            if isinstance(now[key], int):
                yield Sample(name, now[key])

    def _links(self, gpu: _Gpu) -> Iterator[Sample]:
        """A link that is down says nothing where no link is up and none has been."""
        error = self._ask(gpu, "amdsmi_gpu_xgmi_error_status")
        if error is not None:
            yield Sample("gpu.link.error_status", int(error))
        links = (self._ask(gpu, "amdsmi_get_gpu_xgmi_link_status") or {}).get("status", ())
        gpu.links_up |= {link for link, state in enumerate(links) if state == "U"}
        for link, state in enumerate(links):
            if gpu.links_up and state in _LINKS:
                yield Sample("gpu.link.up", _LINKS[state], f"link{link}")

    def _processes(self, gpu: _Gpu) -> Iterator[Sample]:
        running = self._ask(gpu, "amdsmi_get_gpu_process_list") if self._ours else None
        if running is None or self._ours is None:
            return
        foreign = [one for one in running if not self._ours(one["pid"])]
        note = ", ".join(f"pid {one['pid']}: {one['memory_usage']['vram_mem'] >> 20} MiB" for one in foreign)
        yield Sample("gpu.foreign_processes", len(foreign), note=note)

    def _ask(self, gpu: _Gpu, function: str, *arguments: Any) -> Any:
        """The answer, or None if there is none. Raises Unreachable."""
        key = (function, arguments)
        if key in gpu.never or None in arguments:
            return None
        try:
            answer = getattr(self._lib, function)(gpu.handle, *arguments)
        except AttributeError:  # the package is older than the function
            gpu.never.add(key)
        except (ValueError, KeyError):  # the library is newer than the package: a word it does not know
            gpu.answers += 1
        except self._lib.AmdSmiException as error:
            code = getattr(error, "err_code", None)
            if code in UNREACHABLE:
                raise Unreachable(f"AMD SMI: {_short(error)}") from None
            if code in NEVER:
                gpu.never.add(key)
            else:
                gpu.corrupt = gpu.corrupt or code == CORRUPT_EEPROM
                gpu.failures.append(f"{function}: {_short(error)}")
        else:
            gpu.answers += 1
            return answer
        return None


def detector(
    ours: Callable[[int], bool] | None = None, *, expected: int = 0, every_s: float = 10.0
) -> AcceleratorDetector:
    """The detector of AMD GPUs."""
    return AcceleratorDetector(Amd(ours), expected=expected, every_s=every_s)


def _connect() -> Any:
    """AMD SMI, ready for use. Raises Absent or Unreachable."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints when its library is not there
            lib = importlib.import_module("amdsmi")
    except ImportError:
        raise Absent("the package amdsmi is not installed") from None
    except (KeyError, AttributeError, OSError) as error:
        raise Absent(f"libamd_smi.so is not there or does not fit the package amdsmi: {error}") from None
    try:
        lib.amdsmi_init(lib.AmdSmiInitFlags.INIT_AMD_GPUS)
    except lib.AmdSmiException as error:
        if not on_bus(PCI_VENDOR):
            raise Absent(f"no AMD GPU can be seen: {_short(error)}") from None
        raise Unreachable(f"AMD SMI: {_short(error)}") from None
    return lib


def _short(error: Any) -> str:
    """`Device Not found` instead of two lines."""
    return str(getattr(error, "err_info", "") or error).rpartition(" - ")[2].strip()


def _known(value: object) -> str:
    return "" if value in (None, "", "N/A") else str(value)


def _numbers(*values: object) -> bool:
    return all(isinstance(value, int) for value in values)


def _first(table: dict[str, Any], *keys: str) -> int | None:
    return next((table[key] for key in keys if isinstance(table.get(key), int)), None)
