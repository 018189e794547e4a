"""Faults of machines as causes of incidents, and the lookout that keeps a node's monitor running."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from rerail.config import Settings
from rerail.detect import kernel_log
from rerail.detect.monitor import SOURCE as MACHINE
from rerail.detect.monitor import Found
from rerail.diagnose.classify import Classifier
from rerail.diagnose.rootcause import Facts, diagnose
from rerail.faults.catalog import Catalog, load_catalog
from rerail.flow import Diagnosis, Event, Role, Severity, Signal
from rerail.runtime import lookout as lookout_module
from rerail.runtime.incident import Incident
from rerail.runtime.lookout import Lookout
from rerail.runtime.machines import KEPT, NEAR_S, PASSING_S, WINDOW_S, Machines

CLASSIFIER = Classifier(load_catalog())
XID = {"code": "gpu.xid.79", "subject": "0000:3b:00", "evidence": "NVRM: Xid (PCI:0000:3b:00): 79, fallen off the bus"}
MILD = {"code": "gpu.xid.63", "subject": "0000:3b:00", "evidence": "NVRM: Xid (PCI:0000:3b:00): 63, row remapped"}
DIED_AT = 10_000.0
WAIT_S = 30.0
NOW = DIED_AT + 60.0


def machine(at: float, node: str = "n0", over: bool = False, **payload: str | int) -> Signal:
    said = {**(payload or XID), "over": over}
    return Signal(id=f"sig-{at}-{node}-{over}", job="j", at=at, source=MACHINE, node=node, payload=said)


def death(node: str = "n0", at: float = DIED_AT) -> Event:
    signal = Signal(
        id="sig-exit", job="j", at=at, source="process.exit", node=node, rank=3, payload={"signal": "SIGKILL"}
    )
    return CLASSIFIER.classify(signal)


def incident(*events: Event) -> Incident:
    """One that has been diagnosed and is being repaired."""
    found = diagnose(events, Facts(gone=frozenset([3])), at=DIED_AT, waited=True)
    assert found is not None
    return Incident(number=7, opened=0.0, fault_version=1, echo_deadline=0.0, events=list(events), diagnosis=found)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def machines(told: list[str]) -> Machines:
    return Machines(CLASSIFIER, told.append)


# --- causes ---


@pytest.mark.parametrize("before_s", [0.0, 1.0, NEAR_S - 1])
def test_a_fault_shortly_before_the_end_of_a_rank_is_its_cause(machines: Machines, before_s: float) -> None:
    event = machines.take(machine(DIED_AT - before_s))
    assert machines.causes_of([death()]) == [event]
    found = diagnose([death(), event], Facts(gone=frozenset([3])), at=DIED_AT, waited=True)
    assert found is not None and (before_s == 0.0 or found.code == "gpu.xid.79")


def test_a_fault_of_the_device_of_another_rank_is_not_why_this_one_has_ended(told: list[str]) -> None:
    machines = Machines(CLASSIFIER, told.append, elsewhere=lambda node, subject, rank: subject != f"gpu{rank}")
    machines.take(machine(DIED_AT - 3, code="gpu.xid.48", subject="gpu0", evidence="DBE"))
    own = machines.take(machine(DIED_AT - 2, code="gpu.xid.79", subject="gpu3", evidence="gone"))
    failed = Signal(id="sig-c", job="j", at=DIED_AT, source="collective.failed", node="n0", rank=0, payload={})
    echo = CLASSIFIER.classify(failed)
    assert machines.causes_of([death()]) == [own] and machines.causes_of([echo, death()]) == [own]
    assert len(machines.causes_of([echo])) == 2, "where nobody has ended, either may be the reason"


@pytest.mark.parametrize("after_s", [0.0, 0.1, NEAR_S - 1])
def test_a_fault_shortly_after_becomes_the_cause_of_the_open_incident(machines: Machines, after_s: float) -> None:
    end = death()
    open_ = incident(end)
    signal = machine(DIED_AT + after_s)
    records = machines.heard(signal, open_)
    kinds = [type(record) for _, record in records]
    assert kinds == [Signal, Event, Diagnosis] and {number for number, _ in records} == {7}
    event, changed = records[1][1], open_.diagnosis
    assert changed is not None and changed is records[2][1] and isinstance(event, Event)
    assert (changed.code, changed.root, changed.cause_id, changed.rule) == ("gpu.xid.79", event.id, event.id, "machine")
    assert changed.echoes == (end.id,) and changed.ranks == (3,) and changed.lost == (3,)
    assert "fallen off the bus" in changed.evidence[0] and event.message in changed.summary
    assert {signal.id, event.id} <= set(open_.links)


@pytest.mark.parametrize(
    "signal",
    [
        machine(DIED_AT - WINDOW_S - 1),
        machine(DIED_AT + WINDOW_S + 1),
        machine(DIED_AT, node="n1"),
        machine(DIED_AT, **MILD),
        machine(DIED_AT, code="no.such.fault", evidence="?"),
        machine(DIED_AT, over=True),
    ],
    ids=["long before", "long after", "another node", "not grave", "unknown", "over"],
)
def test_what_has_nothing_to_do_with_it_is_no_cause(machines: Machines, signal: Signal) -> None:
    open_ = incident(death())
    before = open_.diagnosis
    assert len(machines.heard(signal, open_)) == 2
    assert open_.diagnosis is before and machines.causes_of(open_.events) == []


def test_the_catalogue_names_causes_that_are_not_grave() -> None:
    faults = load_catalog().faults
    effect = next(fault for fault in faults if fault.code == "process.killed")
    named = [
        f for f in faults if f.role is Role.ROOT and effect.is_caused_by(f.code) and f.severity is not Severity.CRITICAL
    ]
    assert named, "of a killed process the catalogue names no cause: then this test has lost its subject"
    machines = Machines(CLASSIFIER, lambda _: None)
    open_ = incident(death())
    machines.heard(machine(DIED_AT + 1, code=named[0].code, evidence="x"), open_)
    assert open_.diagnosis is not None and open_.diagnosis.code == named[0].code


def test_a_cause_that_is_told_again_changes_nothing(machines: Machines) -> None:
    open_ = incident(death())
    machines.heard(machine(DIED_AT + 1), open_)
    first = open_.diagnosis
    for number in range(3):
        assert len(machines.heard(machine(DIED_AT + 2 + number), open_)) == 2
    assert open_.diagnosis is first, "echoes and summary would grow with every line of the kernel"


def test_without_an_incident_it_is_recorded_and_remembered(machines: Machines) -> None:
    assert [number for number, _ in machines.heard(machine(DIED_AT), None)] == [0, 0]
    assert [event.code for event in machines.standing(NOW)] == ["gpu.xid.79"]


def test_an_incident_without_a_diagnosis_is_left_to_the_diagnosis(machines: Machines) -> None:
    fresh = Incident(number=7, opened=0.0, fault_version=1, echo_deadline=0.0, fresh=[death()])
    machines.heard(machine(DIED_AT), fresh)
    assert fresh.diagnosis is None and len(machines.causes_of(fresh.fresh)) == 1


# --- the out-of-memory killer ---

RANK_PID, OTHER_PID = 4711, 815


def out_of_memory(at: float, pid: int, node: str = "n0") -> Signal:
    line = f"Out of memory: Killed process {pid} (python3) total-vm:98811200kB, anon-rss:61000448kB"
    signal = machine(at, node, code="memory.oom_global", detector="kernel_log", evidence=line, victim=pid)
    return msgspec.structs.replace(signal, id=f"sig-{at}-{node}-{pid}")


def counted(at: float) -> Signal:
    return machine(at, code="memory.oom.cgroup_kill_count", detector="cgroup", evidence="rose by 1")


@pytest.fixture
def knowing(told: list[str]) -> Machines:
    """They know which process rank 3 is."""
    return Machines(CLASSIFIER, told.append, {3: RANK_PID}.__getitem__)


def root_of(machines: Machines, end: Event) -> str:
    found = diagnose([end, *machines.causes_of([end])], Facts(gone=frozenset([3])), at=DIED_AT, waited=True)
    assert found is not None
    return found.code


@pytest.mark.parametrize("after_s", [-30.0, -0.01, 0.0, 0.01, 1.0])
def test_the_kernels_word_on_the_ranks_own_process_is_its_cause(knowing: Machines, after_s: float) -> None:
    knowing.take(out_of_memory(DIED_AT + after_s, RANK_PID))
    knowing.take(out_of_memory(DIED_AT + after_s, OTHER_PID))
    assert root_of(knowing, death()) == "memory.oom_global"
    assert [one.evidence for one in knowing.causes_of([death()])] == [
        out_of_memory(0.0, RANK_PID).payload["evidence"]
    ], "the newer record of another process does not hide it"


@pytest.mark.parametrize("after_s", [-30.0, -0.01, 1.0])
def test_the_end_of_another_process_for_want_of_memory_is_not_the_ranks(knowing: Machines, after_s: float) -> None:
    knowing.take(out_of_memory(DIED_AT + after_s, OTHER_PID))
    knowing.take(counted(DIED_AT + after_s + 5))
    assert knowing.causes_of([death()]) == [] and root_of(knowing, death()) == "process.killed"
    open_ = incident(death())
    assert len(knowing.heard(out_of_memory(DIED_AT + 2, OTHER_PID), open_)) == 2
    assert open_.diagnosis is not None and open_.diagnosis.code == "process.killed"


def test_the_kernels_word_on_the_ranks_process_goes_before_what_was_only_counted(knowing: Machines) -> None:
    knowing.take(counted(DIED_AT - 1))
    end = death()
    assert root_of(knowing, end) == "memory.oom.cgroup_kill_count"
    open_ = incident(end)
    knowing.heard(out_of_memory(DIED_AT + 0.5, RANK_PID), open_)
    assert open_.diagnosis is not None and open_.diagnosis.code == "memory.oom_global"


def test_where_nobody_knows_the_process_time_alone_counts(told: list[str]) -> None:
    machines = Machines(CLASSIFIER, told.append)  # the rank's is not known
    machines.take(out_of_memory(DIED_AT - 1, OTHER_PID))
    assert root_of(machines, death()) == "memory.oom_global"
    open_ = incident(death())
    machines.heard(out_of_memory(DIED_AT + 1, RANK_PID), open_)
    assert open_.diagnosis is not None and open_.diagnosis.code == "memory.oom_global", "several records are one cause"
    machines = Machines(CLASSIFIER, told.append, lambda rank: RANK_PID)  # in a container, the victim's is not
    machines.take(machine(DIED_AT - 1, code="memory.oom_global", detector="kernel_log", evidence="x"))
    assert root_of(machines, death()) == "memory.oom_global"


# --- what stands, and what is said ---


def test_a_fault_is_said_once_and_its_end_once(machines: Machines, told: list[str]) -> None:
    for at in (1.0, 2.0, 3.0):
        machines.take(machine(at))
    assert len(told) == 1 and "gpu.xid.79" in told[0] and "fallen off the bus" in told[0]
    fault = CLASSIFIER.catalog.get("gpu.xid.79")
    assert fault is not None and told[0].splitlines()[1:] == [f"  {fault.advice}"]
    machines.take(machine(4.0, over=True))
    machines.take(machine(5.0, over=True))
    assert told[1:] == ["n0: gpu.xid.79 is over (0000:3b:00)"] and not machines.standing(NOW)
    machines.take(machine(6.0))
    assert len(told) == 3 and len(told[2].splitlines()) == 1, "advice is given once"
    machines.take(machine(7.0, node="n1"))
    assert len(told) == 4 and len(told[3].splitlines()) == 1


def test_an_end_is_that_of_one_device_on_one_node(machines: Machines) -> None:
    other = {**XID, "subject": "0000:5e:00"}
    for signal in (machine(1.0), machine(1.0, **other), machine(1.0, node="n1")):
        machines.take(signal)
    machines.take(machine(2.0, over=True))
    assert len(machines.standing(NOW)) == 2
    machines.take(machine(2.0, over=True, **other))
    assert [event.node for event in machines.standing(NOW)] == ["n1"]


def test_an_end_that_names_no_device_is_that_of_all(machines: Machines, told: list[str]) -> None:
    machines.take(machine(1.0))
    machines.take(machine(1.0, **{**XID, "subject": "0000:5e:00"}))
    machines.take(machine(1.0, node="n1"))
    machines.take(machine(2.0, over=True, **{**XID, "subject": ""}))
    assert [event.node for event in machines.standing(NOW)] == ["n1"] and told[-1] == "n0: gpu.xid.79 is over"


def test_slight_faults_are_remembered_in_silence(told: list[str]) -> None:
    catalog = load_catalog()
    slight = next(fault for fault in catalog.faults if fault.severity is Severity.WARNING and fault.role is Role.ROOT)
    machines = Machines(Classifier(Catalog(catalog.faults)), told.append)
    machines.take(machine(1.0, code=slight.code, evidence="x"))
    assert told == [] and len(machines.standing(NOW)) == 1


def test_a_flood_of_faults_does_not_grow_for_ever(machines: Machines) -> None:
    for number in range(KEPT + 50):
        machines.take(machine(float(number), **{**XID, "subject": f"gpu{number}"}))
    standing = machines.standing(NOW)
    assert len(standing) == KEPT and standing[-1].at == KEPT + 49.0


def test_what_a_log_said_once_is_history_after_a_while_and_what_is_read_stands(machines: Machines) -> None:
    machines.take(machine(DIED_AT, **{**XID, "detector": "kernel_log"}))
    machines.take(machine(DIED_AT, node="n1", **{**XID, "detector": "nvidia"}))
    assert len(machines.standing(DIED_AT + 1)) == 2
    assert [event.node for event in machines.standing(DIED_AT + PASSING_S + 1)] == ["n1"]


# --- the lookout ---


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until(what: Callable[[], Any], why: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, why
        await asyncio.sleep(0.02)


def pid_of(lookout: Lookout) -> int:
    return lookout._process.pid if lookout._process is not None else 0


@contextlib.asynccontextmanager
async def running(settings: Settings, heard: list[Signal]) -> AsyncIterator[Lookout]:
    lookout = Lookout(settings, "j", "n0", heard.append)
    task = asyncio.create_task(lookout.run())
    try:
        yield lookout
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookout_module, "START_S", 0.0)
    monkeypatch.setattr(lookout_module, "AGAIN_S", (0.05, 0.05, 0.05))


@pytest.mark.usefixtures("fast")
def test_a_monitor_that_dies_is_started_again_and_none_is_left_behind() -> None:
    async def scene() -> list[int]:
        pids = []
        async with running(Settings(), []) as lookout:
            for _ in range(3):
                await until(lambda: pid_of(lookout) not in (0, *pids), "no monitor was started")
                pids.append(pid_of(lookout))
                assert psutil.Process(pids[-1]).ppid() == psutil.Process().pid
                if len(pids) < 3:
                    psutil.Process(pids[-1]).kill()
            assert alive(pids[-1])
        await until(lambda: not any(map(alive, pids)), f"of {pids} one lives on")
        return pids

    assert len(set(asyncio.run(scene()))) == 3


def test_without_detectors_there_is_no_monitor() -> None:
    async def scene() -> None:
        lookout = Lookout(Settings(detectors=False), "j", "n0", lambda _: None)
        await asyncio.wait_for(lookout.run(), WAIT_S)
        assert pid_of(lookout) == 0

    asyncio.run(scene())


@pytest.mark.usefixtures("fast")
def test_what_a_monitor_says_becomes_signals_and_nonsense_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in = tmp_path / "monitor"
    stand_in.write_text(
        f"#!{sys.executable}\n"
        "import sys, time\n"
        "for line in ('nonsense', '{\"code\": 5}', 'x' * 200_000, '\\xff',\n"
        '             \'{"code":"gpu.xid.79","detector":"kernel_log","subject":"gpu3","text":"t","at":5.0}\',\n'
        '             \'{"code":"gpu.xid.79","detector":"kernel_log","subject":"gpu3","over":true,"at":6.0}\'):\n'
        "    print(line, flush=True)\n"
        "time.sleep(60)\n"
    )
    stand_in.chmod(0o755)
    monkeypatch.setattr(lookout_module.sys, "executable", str(stand_in))
    heard: list[Signal] = []

    async def scene() -> int:
        async with running(Settings(), heard) as lookout:
            await until(lambda: len(heard) == 2, f"only {heard}")
            return pid_of(lookout)

    pid = asyncio.run(scene())
    assert [(one.source, one.node, one.job, one.at) for one in heard] == [
        (MACHINE, "n0", "j", 5.0),
        (MACHINE, "n0", "j", 6.0),
    ]
    first, second = (dict(one.payload) for one in heard)
    assert first == {"code": "gpu.xid.79", "detector": "kernel_log", "subject": "gpu3", "evidence": "t", "over": False}
    assert second["over"] is True and not alive(pid)


@pytest.mark.usefixtures("fast")
def test_a_monitor_that_ends_again_and_again_is_complained_of_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lookout_module.sys, "executable", "/bin/false")
    starts: list[int] = []

    async def scene() -> None:
        async with running(Settings(), []) as lookout:
            while len(set(starts)) < 6:
                starts.append(pid_of(lookout))
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(scene(), WAIT_S))
    assert capfd.readouterr().err.count("ends again and again") == 1


@pytest.mark.usefixtures("fast")
def test_a_monitor_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    later = tmp_path / "python"
    monkeypatch.setattr(lookout_module.sys, "executable", str(later))

    async def scene() -> None:
        async with running(Settings(), []) as lookout:
            await asyncio.sleep(0.2)
            later.symlink_to("/bin/true")
            await until(lambda: pid_of(lookout), "it gave up")

    asyncio.run(scene())


def test_grave_but_unrelated_faults_are_not_blamed(machines: Machines) -> None:
    """An exception says itself what it is, and what concerns the training breaks no connection."""
    machines.take(machine(DIED_AT - 1))
    raised = Signal(
        id="sig-r",
        job="j",
        at=DIED_AT,
        source="step.raised",
        node="n0",
        rank=0,
        payload={"exception": "RuntimeError", "message": "mine"},
    )
    assert machines.causes_of([CLASSIFIER.classify(raised)]) == []
    differs = Signal(id="sig-v", job="j", at=DIED_AT, source="training.vote", node="n0", payload={"state": "tie"})
    book = Machines(CLASSIFIER, lambda text: None)
    book.take(differs)
    failed = Signal(id="sig-c", job="j", at=DIED_AT, source="collective.failed", node="n0", rank=1, payload={})
    assert book.causes_of([CLASSIFIER.classify(failed), death()]) == []


@pytest.mark.parametrize(("detector", "victim"), [("kernel_log", 4711), ("nvidia", None)])
def test_the_lookout_names_the_process_that_the_kernel_has_ended(
    detector: str, victim: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = tmp_path / "pid"
    namespace.symlink_to(kernel_log.FIRST_NAMESPACE)
    monkeypatch.setattr(kernel_log, "NAMESPACE", namespace)
    found = Found(
        code="memory.oom_global", detector=detector, text="Out of memory: Killed process 4711 (python3)", at=1
    )
    assert Lookout(Settings(), "j", "n0", lambda _: None)._signal(found).payload.get("victim") == victim
