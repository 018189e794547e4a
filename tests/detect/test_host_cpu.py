from __future__ import annotations

from pathlib import Path

import pytest
from test_host_memory import lay, values

from rerail.detect.host_cpu import (
    PROCESSES_A_LOOK,
    Clock,
    Limits,
    Processors,
    Sensors,
    Throttling,
    clock_state,
    cpu_list,
)

CPU = "sys/devices/system/cpu"
STAT = (
    "cpu  {user} 0 0 {idle} 0 {irq} 0 {steal} 0 0\ncpu0 1 2 3\nintr 12 0 0\nprocs_running 1\nprocs_blocked {blocked}\n"
)


@pytest.mark.parametrize(("text", "count"), [("0-3,8", 5), ("0", 1), ("", 0), ("0-x", None), ("rubbish", None)])
def test_a_list_of_processors_is_counted(text: str, count: int | None) -> None:
    assert cpu_list(text) == count


def test_processors_before_and_after(tmp_path: Path) -> None:
    lay(tmp_path, {
        f"{CPU}/present": "0-7", f"{CPU}/online": "0-7", "proc/loadavg": "1.0 16.0 2.0 3/456 789",
        "proc/stat": STAT.format(user=100, idle=100, irq=0, steal=0, blocked=0),
        "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.stat": "nr_periods 10\nnr_throttled 2\n",
    })  # fmt: skip
    cpu = Processors(tmp_path)
    before = {reading.name: reading.value for reading in cpu.check()}
    assert before == {"cpu.offline_count": 0, "cpu.load_per_core": 2.0, "os.tasks.blocked": 0}
    lay(tmp_path, {
        f"{CPU}/online": "0-5", "proc/stat": STAT.format(user=140, idle=140, irq=10, steal=10, blocked=40),
        "sys/fs/cgroup/cpu.stat": "nr_periods 30\nnr_throttled 12\n",
    })  # fmt: skip
    after = {reading.name: reading.value for reading in cpu.check()}
    assert after["cpu.offline_count"] == 2 and after["os.tasks.blocked"] == 40
    assert after["cpu.steal_share"] == after["cpu.interrupt_share"] == 0.1
    assert after["cpu.cgroup.throttled_share"] == 0.5


def test_threads_that_were_switched_off_are_not_missing(tmp_path: Path) -> None:
    lay(tmp_path, {f"{CPU}/present": "0-7", f"{CPU}/online": "0-3", f"{CPU}/smt/control": "off"})
    assert values(Processors(tmp_path).check(), "cpu.offline_count") == {"cpu": 0}


def test_garbage_about_processors_is_left_out(tmp_path: Path) -> None:
    lay(tmp_path, {f"{CPU}/present": "\ufffd", f"{CPU}/online": "0", "proc/loadavg": "a b", "proc/stat": "cpu  x y\n"})
    assert Processors(tmp_path).check() == []
    assert Processors(tmp_path / "none").supported()


def test_throttling_is_told_by_package(tmp_path: Path) -> None:
    for cpu, package, core in ((0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 0)):
        lay(tmp_path, {
            f"{CPU}/cpu{cpu}/topology/physical_package_id": str(package), f"{CPU}/cpu{cpu}/topology/core_id": str(core),
            f"{CPU}/cpu{cpu}/thermal_throttle/package_throttle_count": "7",
            f"{CPU}/cpu{cpu}/thermal_throttle/package_throttle_total_time_ms": "900",
            f"{CPU}/cpu{cpu}/thermal_throttle/core_throttle_total_time_ms": str(cpu * 10),
        })  # fmt: skip
    throttling = Throttling(tmp_path)
    assert throttling.supported() == ""
    assert values(throttling.check(), "cpu.throttle.count") == {"package0": 7, "package1": 7}
    assert values(throttling.check(), "cpu.throttle.worst_core_ms") == {"package0": 10, "package1": 20}
    lay(tmp_path, {f"{CPU}/cpu0/thermal_throttle/package_throttle_total_time_ms": "70000"})
    assert values(throttling.check(), "cpu.throttle.total_ms") == {"package0": 70000, "package1": 900}
    assert "virtual" in Throttling(tmp_path / "none").supported()


def test_sensors_give_the_room_that_is_left_and_fans_that_stopped(tmp_path: Path) -> None:
    chip, board, zone = "sys/class/hwmon/hwmon0", "sys/class/hwmon/hwmon1", "sys/class/thermal/thermal_zone0"
    cap = "sys/class/powercap/intel-rapl:0"
    lay(tmp_path, {
        f"{chip}/name": "coretemp", f"{chip}/temp1_input": "60000", f"{chip}/temp1_crit": "100000",
        f"{chip}/temp2_input": "70000", f"{chip}/temp2_crit": "100000", f"{chip}/temp3_input": "10",
        f"{board}/name": "nct6775", f"{board}/fan1_input": "5000", f"{board}/fan2_input": "0", f"{board}/in0_alarm": "0",
        "sys/class/hwmon/hwmon2/name": "nvme", "sys/class/hwmon/hwmon2/temp1_input": "1", "sys/class/hwmon/hwmon2/temp1_crit": "2",
        f"{zone}/type": "acpitz", f"{zone}/temp": "40000", f"{zone}/trip_point_0_type": "passive",
        f"{zone}/trip_point_1_type": "critical", f"{zone}/trip_point_1_temp": "95000",
        f"{cap}/name": "package-0", f"{cap}/constraint_0_power_limit_uw": "200000000",
        "sys/class/powercap/intel-rapl:0:0/name": "dram",
        "sys/class/power_supply/AC/type": "Mains", "sys/class/power_supply/AC/online": "1",
    })  # fmt: skip
    sensors = Sensors(tmp_path)
    assert sensors.supported() == "" and sensors.blind_spots() == []
    found = sensors.check()
    assert values(found, "cpu.temperature.margin_c") == {"hwmon0/coretemp": 30.0}
    assert values(found, "power.temperature.margin_c") == {"thermal_zone0/acpitz": 55.0}
    assert values(found, "power.fan.rpm") == {"hwmon1/nct6775/fan1": 5000}
    assert values(found, "power.cap.lowered_share") == {"intel-rapl:0/package-0": 0.0}
    lay(tmp_path, {
        f"{chip}/temp2_input": "99000", f"{board}/fan1_input": "0", f"{board}/in0_alarm": "1",
        f"{cap}/constraint_0_power_limit_uw": "100000000", "sys/class/power_supply/AC/online": "0",
    })  # fmt: skip
    found = sensors.check()
    assert values(found, "cpu.temperature.margin_c") == {"hwmon0/coretemp": 1.0}
    assert values(found, "power.fan.rpm") == {"hwmon1/nct6775/fan1": 0}
    assert values(found, "power.voltage.alarm") == {"hwmon1/nct6775/in0_alarm": 1}
    assert values(found, "power.cap.lowered_share") == {"intel-rapl:0/package-0": 0.5}
    assert values(found, "power.supply.online") == {"AC": 0}
    assert Sensors(tmp_path / "none").supported() and Sensors(tmp_path / "none").check() == []


def test_a_jump_of_the_wall_clock_is_seen_and_slewing_is_not(tmp_path: Path) -> None:
    lay(tmp_path, {"sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet"})
    wall = iter([1000.0, 1010.002, 1023.0])
    steady = iter([5.0, 5.0, 15.0, 15.0, 25.0, 25.0])
    states = iter([(0, 0x2001), (5, 0x40), None])
    clock = Clock(tmp_path, wall=lambda: next(wall), steady=lambda: next(steady), state=lambda: next(states))
    first, second, third = clock.check(), clock.check(), clock.check()
    assert values(first, "os.clock.jump_s") == {} and values(first, "os.clock.unsynced") == {"clock": 0}
    assert values(second, "os.clock.jump_s") == {"clock": 0.002} and values(second, "os.clock.unsynced") == {"clock": 1}
    assert values(third, "os.clock.jump_s") == {"clock": 2.998} and values(third, "os.clock.unsynced") == {}
    assert values(third, "os.clock.slow_source") == {"clock": 1}


def test_the_kernel_is_asked_for_the_state_of_its_clock() -> None:
    state = clock_state()
    assert state is None or 0 <= state[0] <= 5


def test_limits_are_shares_and_zombies_are_counted_over_several_looks(tmp_path: Path) -> None:
    lay(tmp_path, {
        "proc/loadavg": "1 1 1 2/500 9", "proc/sys/kernel/pid_max": "4000000", "proc/sys/kernel/threads-max": "1000",
        "proc/sys/fs/file-nr": "90\t0\t100", "proc/sys/net/netfilter/nf_conntrack_count": "30",
        "proc/sys/net/netfilter/nf_conntrack_max": "60", "proc/self/cgroup": "0::/pod\n",
        "sys/fs/cgroup/pod/pids.current": "95", "sys/fs/cgroup/pod/pids.max": "100",
    })  # fmt: skip
    for pid in range(1, PROCESSES_A_LOOK + 51):
        lay(tmp_path, {f"proc/{pid}/stat": f"{pid} (a ) Z b) {'Z' if pid % 2 else 'S'} 1 2"})
    limits = Limits(tmp_path)
    found = limits.check()
    assert {reading.name: reading.value for reading in found if reading.name != "os.zombies"} == {
        "os.threads.used_share": 0.5, "os.files.used_share": 0.9, "os.conntrack.used_share": 0.5, "os.cgroup.pids_share": 0.95,
    }  # fmt: skip
    assert values(found, "os.zombies") == {"processes": 0}
    assert values(limits.check(), "os.zombies") == {"processes": (PROCESSES_A_LOOK + 50) // 2}
    assert Limits(tmp_path / "none").supported()
