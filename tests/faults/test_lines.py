"""What launchers, schedulers, kernels and loggers put in front of a line, and what must come out when it is taken off."""

from __future__ import annotations

import time
from calendar import timegm
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rerail.faults.lines import Line, take_apart

OOM = "RuntimeError: CUDA out of memory"
XID = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
NONE = -1.0
SLOW_S = 0.05
"""Much more than the few milliseconds it takes, for a machine under load."""


def at(year: int, month: int = 1, day: int = 1, hour: int = 0, minute: int = 0, second: float = 0.0) -> float:
    return timegm((year, month, day, hour, minute, 0, 0, 0, 0)) + second


FULL = at(2026, 11, 2, 10, 0, 1.0)
FULL_123 = at(2026, 11, 2, 10, 0, 1.123)
NO_YEAR = at(1970, 11, 2, 10, 0, 1.0)
NO_DATE = at(1970, 1, 1, 10, 0, 1.0)


class Want(NamedTuple):
    text: str = OOM
    rank: int = -1
    level: str = ""
    time: float = NONE
    clock: str = ""
    kernel: bool = False


KERNEL = Want(XID, kernel=True)
TABLE: dict[str, tuple[str, Want]] = {
    # kernels
    "kmsg": (f"4,1219,16597737869,-;{XID}", KERNEL._replace(level="warning")),
    "kmsg with a subsystem": (f"3,99,16597737869,-,caller=T31;{XID}", KERNEL._replace(level="error")),
    "console": (f"<3>{XID}", KERNEL._replace(level="error")),
    "dmesg": (f"[16597.737869] {XID}", KERNEL),
    "dmesg, young machine": (f"[    7.737869] {XID}", KERNEL),
    "dmesg with the thread": (f"[16597.737869][   T31] {XID}", KERNEL),
    "dmesg -x": (f"kern  :err   : [16597.737869] {XID}", KERNEL._replace(level="error")),
    "dmesg -T": (f"[Mon Nov  2 10:00:01 2026] {XID}", Want(XID, time=FULL, clock="date")),
    "dmesg -x -T": (f"kern  :warn  : [Mon Nov  2 10:00:01 2026] {XID}", Want(XID, -1, "warning", FULL, "date", True)),
    "dmesg --time-format iso": (f"2026-11-02T10:00:01,123000+00:00 {XID}", Want(XID, time=FULL_123, clock="utc")),
    "dmesg -d": (f"[  +0.000013] {XID}", KERNEL),
    # journals
    "journalctl": (f"Nov 02 10:00:01 node7 kernel: {XID}", Want(XID, time=NO_YEAR, clock="day", kernel=True)),
    "journalctl -o short-precise": (
        f"Nov 02 10:00:01.000000 node7 kernel: {XID}",
        Want(XID, -1, "", NO_YEAR, "day", True),
    ),
    "journalctl -o short-iso": (
        f"2026-11-02T10:00:01+0100 node7 kernel: {XID}",
        Want(XID, -1, "", FULL - 3600, "utc", True),
    ),
    "journalctl -o short-monotonic": (f"[16597.737869] node7 kernel: {XID}", KERNEL),
    "journalctl -o json": (
        f'{{"MESSAGE":"{XID}","PRIORITY":"3","_TRANSPORT":"kernel","__REALTIME_TIMESTAMP":"1793613601000000"}}',
        Want(XID, -1, "error", FULL, "utc", True),
    ),
    "syslog": (f"Nov  2 10:00:01 node7 python3[3171]: {OOM}", Want(time=NO_YEAR, clock="day")),
    "syslog with a domain": (
        f"Nov  2 10:00:01 node7.cluster.local slurmstepd[1]: {OOM}",
        Want(time=NO_YEAR, clock="day"),
    ),
    "rsyslog, rfc 5424": (
        f"<13>1 2026-11-02T10:00:01Z node7 train 3171 - - {OOM}",
        Want(OOM, -1, "info", FULL, "utc", True),
    ),
    "rsyslog, iso": (f"2026-11-02T10:00:01+00:00 node7 train[3171]: {OOM}", Want(time=FULL, clock="utc")),
    "systemd": (
        "Nov 02 10:00:01 node7 systemd[1]: train.service: Main process exited, code=killed, status=9/KILL",
        Want("train.service: Main process exited, code=killed, status=9/KILL", time=NO_YEAR, clock="day"),
    ),
    # launchers
    "torchrun": (f"[rank3]: {OOM}", Want(rank=3)),
    "torchrun, old": (f"[default3]:{OOM}", Want(rank=3)),
    "torchrun, large": (f"[rank1023]:{OOM}", Want(rank=1023)),
    "srun -l": (f"3: {OOM}", Want(rank=3)),
    "srun -l, padded": (f" 03: {OOM}", Want(rank=3)),
    "mpirun --tag-output": (f"[1,3]<stderr>:{OOM}", Want(rank=3)),
    "prterun --tag-output": (f"[prterun-node7-3171@1,3]<stderr>: {OOM}", Want(rank=3)),
    "ray": (f"(RayTrainWorker pid=3171, ip=10.0.0.7) {OOM}", Want()),
    "ray, in colour": (f"\x1b[36m(RayTrainWorker pid=3171)\x1b[0m {OOM}", Want()),
    "lightning": (f"[rank: 3] {OOM}", Want(rank=3)),
    "two launchers": (f"3: [rank3]: {OOM}", Want("[rank3]: " + OOM, rank=3)),
    # loggers
    "logging": (f"ERROR:root:{OOM}", Want(level="error")),
    "logging with a name": (f"WARNING:torch.distributed.run:{OOM}", Want(level="warning")),
    "logging with a time": (
        f"2026-11-02 10:00:01,123 - trainer.loop - ERROR - {OOM}",
        Want(OOM, -1, "error", FULL_123, "date"),
    ),
    "logging, short": (f"2026-11-02 10:00:01,123 ERROR {OOM}", Want(OOM, -1, "error", FULL_123, "date")),
    "logging, in brackets": (f"[2026-11-02 10:00:01,123] [ERROR] {OOM}", Want(OOM, -1, "error", FULL_123, "date")),
    "deepspeed": (
        f"[2026-11-02 10:00:01,123] [ERROR] [launch.py:315:sigkill_handler] {OOM}",
        Want(OOM, -1, "error", FULL_123, "date"),
    ),
    "loguru": (
        f"2026-11-02 10:00:01.123 | ERROR    | trainer.loop:fit:31 - {OOM}",
        Want(OOM, -1, "error", FULL_123, "date"),
    ),
    "glog": (f"E1102 10:00:01.000000 3171 loop.cc:31] {OOM}", Want(OOM, -1, "error", NO_YEAR, "day")),
    "klog": (f"E1102 10:00:01.000000       1 loop.go:31] {OOM}", Want(OOM, -1, "error", NO_YEAR, "day")),
    "absl": (f"W1102 10:00:01.000000 140123456789 loop.py:31] {OOM}", Want(OOM, -1, "warning", NO_YEAR, "day")),
    "torch": (
        f"[rank3]:[E1102 10:00:01.000000000 ProcessGroupNCCL.cpp:616] {OOM}",
        Want(OOM, 3, "error", NO_YEAR, "day"),
    ),
    "tensorflow": (
        f"2026-11-02 10:00:01.123000: E external/xla/loop.cc:31] {OOM}",
        Want(OOM, -1, "error", FULL_123, "date"),
    ),
    "nemo": (f"[NeMo E 2026-11-02 10:00:01 exp_manager:31] {OOM}", Want(OOM, -1, "error", FULL, "date")),
    "transformers": (
        f"[ERROR|trainer.py:31] 2026-11-02 10:00:01,123 >> {OOM}",
        Want(OOM, -1, "error", FULL_123, "date"),
    ),
    "vllm": (f"ERROR 11-02 10:00:01 [core.py:390] {OOM}", Want(OOM, -1, "error", NO_YEAR, "day")),
    "time of day": (f"10:00:01 {OOM}", Want(time=NO_DATE, clock="hour")),
    "nccl": (
        "node7:3171:3205 [3] NCCL WARN Call to connect failed",
        Want("NCCL WARN Call to connect failed", level="warning"),
    ),
    "nccl info": (
        "node7:3171:3205 [0] NCCL INFO Bootstrap timed out",
        Want("NCCL INFO Bootstrap timed out", level="info"),
    ),
    "hccl plog": (
        "[ERROR] HCCL(3171,python3):2026-11-02-10:00:01.123.456 [task.cc:89] notify wait timeout",
        Want("notify wait timeout", -1, "error", FULL_123, "date"),
    ),
    # containers
    "docker logs -t": (f"2026-11-02T10:00:01.123000000Z {OOM}", Want(time=FULL_123, clock="utc")),
    "kubernetes": (f"2026-11-02T10:00:01.123000000Z stderr F {OOM}", Want(time=FULL_123, clock="utc")),
    "kubernetes, elsewhere": (f"2026-11-02T12:00:01.123000000+02:00 stdout P {OOM}", Want(time=FULL_123, clock="utc")),
    "kubernetes and torchrun": (
        f"2026-11-02T10:00:01.123000000Z stderr F [rank3]: {OOM}",
        Want(OOM, 3, "", FULL_123, "utc"),
    ),
    "kubectl logs --prefix": (f"[pod/trainer-0/main] {OOM}", Want()),
    "docker compose": (f"trainer-1  | {OOM}", Want()),
    "docker json-file": (
        f'{{"log":"{OOM}\\n","stream":"stderr","time":"2026-11-02T10:00:01.123000000Z"}}',
        Want(time=FULL_123, clock="utc"),
    ),
    "docker and torchrun": (f'{{"log":"[rank3]: \\u003c{OOM}\\u003e\\n","stream":"stderr"}}', Want(f"<{OOM}>", rank=3)),
    "structured": (f'{{"ts":1793613601.0,"level":"error","rank":3,"msg":"{OOM}"}}', Want(OOM, 3, "error", FULL, "utc")),
    "structured with a traceback": (
        f'{{"levelname":"ERROR","message":"step failed","exc_info":"Traceback:\\n  File x\\n{OOM}\\n"}}',
        Want(level="error"),
    ),
    "json in kubernetes": (
        f'2026-11-02T10:00:01.123000000Z stderr F {{"severity":"WARNING","message":"{OOM}"}}',
        Want(OOM, -1, "warning", FULL_123, "utc"),
    ),
    # terminals
    "colours": (f"\x1b[1;31mERROR\x1b[0m: \x1b[33m{OOM}\x1b[0m", Want(level="error")),
    "windows": (f"[rank3]: {OOM}\r\n", Want(rank=3)),
    "a progress bar": (f"  5%|▌         | 5/100 [00:01<00:19, 4.9it/s]\r{OOM}", Want()),
    "a progress bar that is overwritten": (f" 5%|▌ | 5/100\r 6%|▌ | 6/100\r[rank3]: {OOM}\r\n", Want(rank=3)),
    "a byte order mark": (f"\ufeff[rank3]: {OOM}", Want(rank=3)),
    # others
    "grep": (f"logs/run.log:31:{OOM}", Want()),
    "nothing": (OOM, Want()),
}


@pytest.mark.parametrize("name", TABLE)
def test_what_is_said_comes_out_without_what_stands_before_it(name: str) -> None:
    raw, want = TABLE[name]
    line = take_apart(raw)
    got = Want(line.text, line.rank, line.level, line.time, line.clock, line.kernel)
    assert got._replace(time=NONE) == want._replace(time=NONE), f"of {raw!r}"
    assert got.time == pytest.approx(want.time, abs=1e-4), f"of {raw!r}"


PLAIN = [
    "loss: nan at step 3",
    "[12] Poisoned TLP received",
    "{'loss': 'nan', 'step': 5}",
    '{"loss": 1.5, "step": 5}',
    '{"loss": NaN, "step": 5}',
    '{"message": 5}',
    '{"message": "cut off',
    "Error: 10.0.0.7:29500 refused",
    '  File "/a/train.py", line 3, in <module>',
    "E   assert 1 == 2",
    "",
    "    ",
]


@pytest.mark.parametrize("raw", PLAIN)
def test_what_only_looks_like_a_prefix_stays(raw: str) -> None:
    assert take_apart(raw).text == raw.rstrip()


def test_the_first_of_several_times_and_the_uptime_are_kept() -> None:
    line = take_apart("2026-11-02T10:00:01Z stderr F [Mon Nov  9 10:00:01 2026] [  12.5] words")
    assert (line.time, line.clock, line.uptime, line.text) == (FULL, "utc", 12.5, "words")
    assert take_apart(f"4,1219,16597737869,-;{XID}").uptime == pytest.approx(16597.737869)


@pytest.mark.parametrize("date", ["2026-13-40 10:00:01", "0000-01-01 10:00:01", "2026-02-31 99:99:99"])
def test_dates_that_are_none_do_no_harm(date: str) -> None:
    assert take_apart(f"{date} {OOM}").text == OOM


@pytest.mark.parametrize(
    ("raw", "rank"),
    [
        ("[PG ID 0 PG GUID 0(default_pg) Rank 5] Watchdog caught collective operation timeout", 5),
        ("exitcode: 1 (pid: 31) local_rank: 4 (pid: 3)", 4),
        ("crank 7 is fine", -1),
        ("step 10 of 20", -1),
    ],
)
def test_a_rank_within_the_line_counts_where_no_prefix_names_one(raw: str, rank: int) -> None:
    assert take_apart(raw).rank == rank


PIECES = st.one_of(
    st.sampled_from([raw for raw, _ in TABLE.values()]).flatmap(
        lambda raw: st.integers(0, len(raw)).map(lambda n: raw[:n])
    ),
    st.text(max_size=40),
    st.sampled_from(
        ["[", '{"log":"', "\\u0000", "\r", "\x1b[", "2026-", "rank", "9" * 30, "٣: ", "²", "[rank٣]: ", '{"rank":"²",']
    ),
)


@given(st.lists(PIECES, max_size=30).map("".join))
@settings(max_examples=300, deadline=None)
def test_no_line_does_harm(raw: str) -> None:
    began = time.process_time()
    line = take_apart(raw[:8192])
    assert time.process_time() - began < SLOW_S
    assert isinstance(line, Line) and line.level in ("", "debug", "info", "warning", "error")
    assert -1 <= line.rank < 1_000_000
    assert (line.time >= 0) == bool(line.clock)


BOMBS = [
    "[",
    "a",
    " ",
    "1:",
    "[1",
    "<1>",
    "1-",
    "a.",
    "./",
    "::",
    "\x1b[",
    "\x1b]",
    "\r",
    '{"',
    '{"a":[',
    "ERROR ",
    "[a.py:",
    "- ",
]


@pytest.mark.parametrize("unit", BOMBS)
def test_eight_kilobytes_of_anything_take_no_time(unit: str) -> None:
    for head in ("", "[", "(pid=", '{"log":"', "2026-11-02 10:00:01 "):
        raw = (head + unit * 8192)[:8192]
        began = time.process_time()
        take_apart(raw)
        take_apart(raw[:-1] + "}")
        assert time.process_time() - began < SLOW_S, f"{head!r} and {unit!r} again and again"
