"""The monitor: what detectors bring becomes findings; one that raises or hangs stops nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rerail.detect import monitor as module
from rerail.detect.detector import Line, Reading, Told
from rerail.detect.levels import Levels, parse
from rerail.detect.monitor import BREAKS, RATE, Found, Monitor
from rerail.faults.anchors import words_of
from rerail.faults.catalog import Catalog, Condition, Fault
from rerail.flow import Role

WAIT_S = 30.0


def fault(code: str, pattern: str = "", **more: Any) -> Fault:
    return Fault(
        code=code, title=code, kind="gpu", pattern=pattern, words=words_of(pattern), **{"seen": ("kernel",), **more}
    )


FAULTS = [
    fault("own.flux", "flux capacitor lost"),
    fault("own.often", "corrected error", times=3, within_s=60.0),
    fault("own.hint", "link retrained", role=Role.CONFIRMATION),
    fault("own.benign", "flux capacitor lost in tests", role=Role.BENIGN),
    fault("own.script", "script says so", seen=("script",)),
    fault("link.down.a", "link of a is down"),
    fault("link.down.b", "link of b is down"),
    fault("link.up", "link is up again", role=Role.CLEAR, clears=("link.down.*",)),
    fault("own.hot", reading=Condition(name="temperature", above=90.0)),
]


class Outlet:
    """Everything a monitor has told, awaited by tests."""

    def __init__(self) -> None:
        self.all: list[Found] = []
        self._came = threading.Condition()

    def __call__(self, found: Found) -> None:
        with self._came:
            self.all.append(found)
            self._came.notify_all()

    def wait(self, wanted: Callable[[list[Found]], bool]) -> None:
        with self._came:
            assert self._came.wait_for(lambda: wanted(self.all), WAIT_S), f"only {self.all}"

    @property
    def codes(self) -> list[str]:
        return [found.code + ("!" if found.over else "") for found in self.all]


@pytest.fixture
def told() -> Outlet:
    return Outlet()


@pytest.fixture
def monitor(told: Outlet) -> Monitor:
    return Monitor(Catalog(FAULTS), told)


def kernel(text: str) -> Line:
    return Line("kernel", text)


# --- lines ---


def test_a_line_of_the_kernel_becomes_a_finding(monitor: Monitor, told: Outlet) -> None:
    before = time.time()
    monitor.line(kernel("flux capacitor lost at 0000:3B:00.0"), "kernel_log")
    (found,) = told.all
    assert (found.code, found.detector, found.subject, found.over) == ("own.flux", "kernel_log", "0000:3b:00", False)
    assert found.text == "flux capacitor lost at 0000:3B:00.0" and before <= found.at <= time.time()


def test_what_is_benign_a_hint_or_seen_elsewhere_is_not_told(monitor: Monitor, told: Outlet) -> None:
    for text in ("flux capacitor lost in tests", "link retrained", "script says so", "all is well", ""):
        monitor.line(kernel(text), "kernel_log")
    assert told.codes == []
    monitor.line(Line("script", "script says so"), "x")
    assert told.codes == ["own.script"]


def test_what_must_be_seen_several_times_is_counted_per_device(monitor: Monitor, told: Outlet) -> None:
    for device in ("0000:3b:00", "0000:5e:00", "0000:3b:00", "0000:5e:00"):
        monitor.line(kernel(f"corrected error at {device}.0"), "kernel_log")
    assert told.codes == []
    monitor.line(kernel("corrected error at 0000:5e:00.0"), "kernel_log")
    assert [(found.code, found.subject) for found in told.all] == [("own.often", "0000:5e:00")]
    monitor.line(kernel("corrected error at 0000:5e:00.0"), "kernel_log")
    assert len(told.all) == 1, "the count begins anew"


def test_several_times_means_within_the_time(monitor: Monitor, told: Outlet, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    for _ in range(9):
        monitor.line(kernel("corrected error"), "kernel_log")
        now += 40.0
    assert told.codes == []


def test_an_end_is_told_for_every_fault_that_it_ends(monitor: Monitor, told: Outlet) -> None:
    monitor.line(kernel("link of a is down"), "kernel_log")
    monitor.line(kernel("link is up again"), "kernel_log")
    assert told.codes == ["link.down.a", "link.down.a!", "link.down.b!"], "codes, not the wildcards of the catalogue"


def test_a_flood_is_told_so_often_and_leaves_others_alone(
    monitor: Monitor, told: Outlet, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    for number in range(10 * RATE):
        monitor.line(kernel(f"flux capacitor lost, {number}"), "kernel_log")
    monitor.line(kernel("link of a is down"), "kernel_log")
    assert told.codes == ["own.flux"] * RATE + ["link.down.a"]
    now += module.RATE_S + 1
    monitor.line(kernel("flux capacitor lost"), "kernel_log")
    assert told.codes[-1] == "own.flux"


def test_long_lines_are_cut(monitor: Monitor, told: Outlet) -> None:
    monitor.line(kernel("flux capacitor lost " + "x" * 100_000), "kernel_log")
    assert len(told.all[0].text) <= 4096


# --- readings and reports ---


def test_readings_begin_and_end(monitor: Monitor, told: Outlet) -> None:
    for value in (80, 95, 96, 80):
        monitor.reading(Reading("temperature", "gpu3", value), "thermometer")
    assert told.codes == ["own.hot", "own.hot!"]
    assert told.all[0].text == "gpu3: temperature = 95" and told.all[0].subject == "gpu3"


def test_what_lasts_is_told_when_there_is_room_again(
    monitor: Monitor, told: Outlet, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    subjects = [f"gpu{number}" for number in range(RATE + 4)]
    for _ in range(3):
        for subject in subjects:
            monitor.reading(Reading("temperature", subject, 99), "thermometer")
        now += 1.0
    assert [found.subject for found in told.all] == subjects[:RATE]
    now += module.RATE_S
    for subject in subjects:
        monitor.reading(Reading("temperature", subject, 99), "thermometer")
    assert [found.subject for found in told.all] == subjects, "the last four are as hot as the others"


def test_ends_are_always_told(monitor: Monitor, told: Outlet) -> None:
    for _ in range(2 * RATE):
        monitor.reading(Reading("temperature", "gpu0", 99), "thermometer")
        monitor.reading(Reading("temperature", "gpu0", 20), "thermometer")
    assert told.codes.count("own.hot") == told.codes.count("own.hot!") == RATE


def test_reports_of_others_are_told_as_theirs(monitor: Monitor, told: Outlet) -> None:
    monitor.told(Told("own.flux", "gpu0", "they say so", False, "gpud", 123.0))
    monitor.told(Told("no.such", "gpu0", "nonsense", False, "gpud", 123.0))
    (found,) = told.all
    assert (found.code, found.at) == ("own.flux", 123.0) and "gpud" in found.detector


def test_what_the_user_does_not_want_is_not_told(told: Outlet) -> None:
    quiet = Monitor(Catalog(FAULTS), told, Levels(levels=parse("own.flux=off, own.hint=error")))
    quiet.line(kernel("flux capacitor lost"), "kernel_log")
    quiet.line(kernel("link retrained"), "kernel_log")
    assert told.codes == ["own.hint"]


# --- detectors that behave badly ---


class Stand:
    """A detector; `done` ends its thread."""

    every_s = 0.005

    def __init__(
        self, name: str, done: threading.Event, check: Callable[[], Any], supported: Callable[[], str] = str
    ) -> None:
        self.name, self._done, self._check, self.supported = name, done, check, supported
        self.looks = 0

    def check(self) -> Any:
        self.looks += 1
        if self._done.is_set():
            raise InterruptedError("the test is over")  # until it is given up
        return self._check()

    def blind_spots(self) -> list[str]:
        return []


class Ear:
    """A watcher that gives these items and then waits."""

    def __init__(self, name: str, items: list[Any], done: threading.Event) -> None:
        self.name, self._items, self._done = name, items, done

    def supported(self) -> str:
        return ""

    def watch(self) -> Iterator[Any]:
        for item in self._items:
            if isinstance(item, Exception):
                raise item
            yield item
        self._done.wait(WAIT_S)

    def blind_spots(self) -> list[str]:
        return []


@pytest.fixture
def done() -> Iterator[threading.Event]:
    before, event = set(threading.enumerate()), threading.Event()
    yield event
    event.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
        assert not thread.is_alive(), f"{thread.name} is left behind"


def test_a_detector_that_hangs_or_raises_stops_nobody(
    monitor: Monitor, told: Outlet, done: threading.Event, capfd: pytest.CaptureFixture[str]
) -> None:
    def hang() -> Any:
        done.wait(WAIT_S)
        return []

    def broken() -> Any:
        raise ValueError("no driver")

    heat = iter([99, 20] * 10_000)
    stands = [
        Stand("hangs", done, hang),
        Stand("hangs at once", done, list, lambda: str(done.wait(WAIT_S))),
        Stand("raises", done, broken),
        Stand("raises at once", done, list, broken),
        Stand("gives nothing", done, lambda: None),
        Stand("gives nonsense", done, lambda: [None]),
        Stand("absent", done, list, lambda: "not here"),
        Stand("works", done, lambda: [Reading("temperature", "gpu0", next(heat))]),
    ]
    ears = [
        Ear("breaks", [kernel("link of a is down"), OSError("gone")], done),
        Ear("hears", [kernel("flux capacitor lost")], done),
    ]
    monitor.run(stands, ears)
    told.wait(lambda all_: {"own.hot", "own.flux", "link.down.a"} <= {found.code for found in all_})
    deadline = time.monotonic() + WAIT_S
    while stands[2].looks < BREAKS and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert stands[2].looks == BREAKS, "one that fails again and again is given up"
    assert stands[6].looks == 0 and stands[3].looks == 0
    err = capfd.readouterr().err
    assert "detector raises failed: ValueError: no driver" in err and "raises is given up" in err
    assert "detector breaks ended: OSError: gone" in err and "detector raises at once failed" in err


def test_one_that_hangs_is_named_once(monitor: Monitor, done: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = threading.Event()

    def hang() -> Any:
        inside.set()
        done.wait(WAIT_S)
        return []

    monitor.run([Stand("hangs", done, hang)], [])
    assert inside.wait(WAIT_S) and monitor.stuck() == []
    monkeypatch.setattr(module, "STUCK_S", -1.0)
    assert monitor.stuck() == ["hangs"] and monitor.stuck() == []


def test_detectors_that_are_switched_off_do_not_run(told: Outlet, done: threading.Event) -> None:
    off = Monitor(Catalog(FAULTS), told, Levels(detectors_off=("no*",)))
    unwanted, wanted = Stand("nosy", done, list), Stand("works", done, lambda: [Reading("temperature", "gpu0", 99)])
    off.run([unwanted, wanted], [Ear("noisy", [kernel("flux capacitor lost")], done)])
    told.wait(bool)
    assert unwanted.looks == 0 and told.codes == ["own.hot"]
