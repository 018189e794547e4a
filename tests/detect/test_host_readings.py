"""The catalogue entries of host readings, and all host detectors together on the machine the test runs on."""

from __future__ import annotations

import re
import time
from importlib import resources
from pathlib import Path

import pytest

from rerail.detect import host_cpu, host_memory, host_network, host_pci, host_services, host_smart, host_storage
from rerail.detect.detector import Detector, Reading
from rerail.detect.judge import Judge
from rerail.faults.catalog import Fault, Sample, load_catalog, parse
from rerail.faults.check import problems

MODULES = (host_memory, host_cpu, host_pci, host_network, host_storage, host_smart, host_services)
FILES = ("host_readings.toml", "host_readings_network.toml")
FAULTS = [fault for name in FILES for fault in parse((resources.files("rerail.faults") / name).read_text(), name)]


def all_detectors(root: Path = Path("/")) -> list[Detector]:
    return [detector for module in MODULES for detector in module.detectors(root)]


def found_after(fault: Fault, sample: Sample) -> bool:
    """Whether the fault is there after the last of the values, which are 10 s apart."""
    assert fault.reading is not None
    judge, there = Judge([fault]), False
    for number, value in enumerate(sample.values):
        for finding in judge.take(Reading(fault.reading.name, "subject", value), number * 10.0):
            there = finding.begins
    return there


def test_the_entries_are_well_formed() -> None:
    assert problems(FAULTS, (fault.code for fault in load_catalog().faults)) == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.code)
def test_samples_are_the_fault_and_near_misses_are_not(fault: Fault) -> None:
    samples = [sample for sample in fault.samples if isinstance(sample, Sample)]
    misses = [sample for sample in fault.near_misses if isinstance(sample, Sample)]
    assert samples and all(found_after(fault, sample) for sample in samples)
    assert misses and not any(found_after(fault, sample) for sample in misses)


def test_every_reading_that_is_judged_is_read_somewhere() -> None:
    source = "".join(Path(module.__file__).read_text() for module in MODULES)
    counters = {f"nic.rdma.{name}" for name in (*host_network.COUNTERS, *host_network.HARDWARE_COUNTERS)}
    fields = {f"nic.eth.{name}" for name, _ in host_network.Interfaces.FIELDS}
    services = {f"os.service.{name.replace('-', '_')}" for name in host_services.SERVICES}
    taints = {f"os.taint.{name}" for name in host_services.TAINTS.values()}
    made = counters | fields | services | taints | {f"pcie.aer.{kind}" for kind, _ in host_pci.ERRORS}
    made |= {f"memory.edac.{kind}_count" for kind in ("ce", "ue")}
    made |= {f"{name}.{kind}_share" for _, name in host_memory.Pressure.FILES for kind in ("some", "full")}
    made |= {"storage.space.free_share", "storage.shm.free_share"}
    for fault in FAULTS:
        assert fault.reading is not None
        name = fault.reading.name
        if name.startswith(("os.module.", "storage.smart.")):
            word = re.sub(r"^os\.module\.|^storage\.smart\.|_missing$", "", name)
            assert f'"{word}"' in source or f'"{name}"' in source, name
        else:
            assert name in made or f'"{name}"' in source, name


def test_detectors_have_names_of_their_own_and_look_often_enough() -> None:
    detectors = all_detectors()
    assert all(isinstance(detector, Detector) for detector in detectors)
    assert len({detector.name for detector in detectors}) == len(detectors)
    assert all(5 <= detector.every_s <= 60 for detector in detectors)


@pytest.mark.parametrize("detector", all_detectors(), ids=lambda detector: detector.name)
def test_every_detector_works_on_this_machine(detector: Detector) -> None:
    reason = detector.supported()
    first, second = detector.check(), detector.check()
    assert isinstance(reason, str) and all(isinstance(spot, str) for spot in detector.blind_spots())
    for reading in (*first, *second):
        assert re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)+", reading.name) and reading.subject
        assert isinstance(reading.value, int | float | str)


@pytest.mark.parametrize("detector", all_detectors(Path("/nonexistent")), ids=lambda detector: detector.name)
def test_a_machine_that_shows_nothing_is_no_error(detector: Detector) -> None:
    detector.check()
    assert isinstance(detector.supported(), str) and isinstance(detector.blind_spots(), list)


def test_all_together_cost_next_to_nothing() -> None:
    cost = 0.0
    for detector in all_detectors():
        if detector.supported():
            continue
        detector.check()
        began = time.process_time()
        for _ in range(5):
            detector.check()
        cost += (time.process_time() - began) / 5 / detector.every_s
    assert cost < 0.04, "a thousandth of a core on a machine with nothing else to do"
