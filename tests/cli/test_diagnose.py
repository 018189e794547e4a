"""`rerail diagnose` as a user runs it: a process of its own, on logs of every kind, size and state of decay."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 60
OOM = "RuntimeError: CUDA out of memory. Tried to allocate 2.50 GiB"
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=3171, GPU has fallen off the bus."
STALL = (
    "[Rank {}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000)"
)
HEALTHY = "step {} | loss 2.31 | grad norm 0.51 | 1.2 it/s"
OWN = """
[[fault]]
code = "own.flux"
title = "The flux capacitor is out"
class = "gpu"
action = "drain_node"
seen = ["script"]
pattern = 'flux capacitor (?:out|lost)'
advice = "Buy a new one."
aliases = ["MY-1"]
samples = ["flux capacitor lost"]
near_misses = ["flux capacitor fine"]
"""


def diagnose(*args: object, stdin: bytes | int = b"", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rerail.cli.main", "diagnose", *map(str, args)]
    given: dict[str, Any] = {"input": stdin} if isinstance(stdin, bytes) else {"stdin": stdin}
    done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, cwd=cwd, check=False, **given)
    out, err = done.stdout.decode(), done.stderr.decode()
    assert "Traceback" not in err, err
    return subprocess.CompletedProcess(command, done.returncode, out, err)


def verdict(*args: object, stdin: bytes = b"") -> dict[str, Any]:
    done = diagnose("--json", *args, stdin=stdin)
    assert done.returncode in (0, 1), done.stderr
    body: dict[str, Any] = json.loads(done.stdout)
    assert (body["root"] is not None) == (done.returncode == 1)
    return body


def log(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines))
    return path


def steps(count: int) -> list[str]:
    return [HEALTHY.format(number) for number in range(count)]


# --- where logs are ---


def test_a_merged_log_names_line_rank_and_action(tmp_path: Path) -> None:
    file = log(
        tmp_path / "train.log",
        *steps(3),
        f"[rank0]: {STALL.format(0)}",
        f"[rank3]: {OOM}",
        f"[rank1]: {STALL.format(1)}",
    )
    body = verdict(file)
    root = body["root"]
    assert (root["code"], root["line"], root["rank"], root["file"]) == ("cuda.oom", 5, 3, str(file))
    assert root["text"] == f"[rank3]: {OOM}" and root["count"] == 1 and root["ranks"] == [3]
    assert body["action"] == "stop_job" and body["confidence"] == "high" and body["hardware"] is False
    (echo,) = body["echoes"]
    assert echo["ranks"] == [0, 1] and echo["count"] == 2 and echo["line"] == 4


def test_the_form_of_the_answer_is_kept(tmp_path: Path) -> None:
    body = verdict(log(tmp_path / "a.log", XID))
    assert set(body) == {"root", "echoes", "action", "confidence", "why", "hardware", "unread"}
    fields = {
        "code",
        "aliases",
        "title",
        "class",
        "scope",
        "severity",
        "file",
        "line",
        "text",
        "rank",
        "ranks",
        "count",
        "advice",
    }
    assert set(body["root"]) == fields
    assert "GPU-XID-79" in body["root"]["aliases"] and body["root"]["rank"] is None and body["hardware"] is True


def test_nothing_wrong_is_null_and_zero(tmp_path: Path) -> None:
    file = log(tmp_path / "a.log", *steps(10))
    assert verdict(file) == {**verdict(file), "root": None, "echoes": [], "action": "ignore"}
    done = diagnose(file)
    assert done.returncode == 0 and done.stdout == "nothing wrong found in 10 lines\n"


def test_files_of_ranks_in_a_directory_and_below(tmp_path: Path) -> None:
    for rank in range(3):
        log(tmp_path / "node7" / f"rank{rank}.log", *steps(2), STALL.format(rank))
    log(tmp_path / "node7" / "rank_3.log", *steps(2), OOM)
    (tmp_path / "node7" / "model.pt").write_text(XID)
    body = verdict(tmp_path)
    assert body["root"]["code"] == "cuda.oom" and body["root"]["rank"] == 3, "the rank is in the name of the file"
    assert body["echoes"][0]["ranks"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("gpu4/run/rank7.log", 7),
        ("node3/worker_2.out", 2),
        ("attempt_0/5/stderr.log", 5),
        ("node3/train.log", None),
        ("rank2/rank-11.err", 11),
    ],
)
def test_the_rank_is_the_last_one_that_the_path_names(tmp_path: Path, name: str, rank: int | None) -> None:
    assert verdict(log(tmp_path / name, OOM))["root"]["rank"] == rank


@pytest.mark.parametrize(
    ("pack", "ending"), [(gzip.compress, "gz"), (bz2.compress, "bz2"), (lzma.compress, "xz"), (gzip.compress, "log")]
)
def test_compressed_logs_and_standard_input(tmp_path: Path, pack: Any, ending: str) -> None:
    data = pack("\n".join([*steps(500), OOM, ""]).encode())
    file = tmp_path / f"train.log.{ending}"
    file.write_bytes(data)
    assert verdict(file)["root"]["line"] == 501
    piped = verdict("-", stdin=data)["root"]
    assert (piped["line"], piped["file"]) == (501, "stdin")


def test_a_pipe_that_the_shell_has_opened_is_read(tmp_path: Path) -> None:
    file = log(tmp_path / "a.log", OOM)
    script = f'{sys.executable} -m rerail.cli.main diagnose --json <(cat "{file}")'
    done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 1 and json.loads(done.stdout)["root"]["code"] == "cuda.oom"


def test_a_truncated_archive_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    dice = random.Random(3)
    noise = [f"{dice.getrandbits(200):x}" for _ in range(5000)]
    data = gzip.compress("\n".join([*steps(5), OOM, *noise]).encode())
    file = tmp_path / "cut.log.gz"
    file.write_bytes(data[: len(data) // 2])
    done = diagnose("--json", file)
    assert done.returncode == 1 and json.loads(done.stdout)["root"]["line"] == 6
    assert "cut.log.gz cannot be read: Compressed file ended" in done.stderr


# --- what is no log ---


def test_an_empty_file_has_nothing_wrong(tmp_path: Path) -> None:
    done = diagnose(log(tmp_path / "empty.log"))
    assert done.returncode == 0 and done.stdout == "nothing wrong found in 0 lines\n"
    assert diagnose("-").returncode == 0


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda path: path.mkdir(), "no log in this directory"),
        (lambda path: path.symlink_to("nowhere"), "no such file or directory"),
        (lambda path: path.symlink_to(path), "no such file or directory"),
        (lambda path: None, "no such file or directory"),
        (lambda path: os.mkfifo(path), "it is a pipe"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device"),
        (lambda path: path.write_bytes(Path(sys.executable).read_bytes()[:4096]), "it is a program"),
        (lambda path: path.write_bytes(b"\x28\xb5\x2f\xfd\x00"), "zstdcat"),
        (lambda path: path.write_bytes(gzip.compress(b"x" * 99)[:10]), "ended before"),
        (lambda path: path.write_bytes(b"\x1f\x8bnonsense"), "cannot be read"),
        (lambda path: path.write_bytes(b"BZhnonsense"), "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_said_with_exit_code_two(tmp_path: Path, make: Any, complaint: str) -> None:
    path = tmp_path / "strange"
    make(path)
    done = diagnose("--json", path)
    assert done.returncode == 2 and not done.stdout
    assert complaint in done.stderr and "strange" in done.stderr


def test_what_cannot_be_read_does_not_hide_the_rest(tmp_path: Path) -> None:
    log(tmp_path / "a.log", OOM)
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "gone.log").symlink_to("nowhere")
    (tmp_path / "bad.gz").write_bytes(b"\x1f\x8bnonsense")
    assert verdict(tmp_path)["root"]["code"] == "cuda.oom"
    done = diagnose(tmp_path / "pipe.log", tmp_path / "a.log")
    assert done.returncode == 1 and "pipe.log cannot be read: it is a pipe" in done.stderr


def test_endless_input_without_lines_comes_to_an_end() -> None:
    with open("/dev/zero", "rb") as zeros:
        done = diagnose("-", stdin=zeros.fileno())
    assert done.returncode == 2 and "it is no log" in done.stderr


def test_bytes_that_are_no_text_do_no_harm(tmp_path: Path) -> None:
    dice = random.Random(7)
    file = tmp_path / "noise"
    said = b"step 100, all is well\n" * 5000 + OOM.encode() + b"\n"
    file.write_bytes(dice.randbytes(300_000) + b"\n" + said + b"\0" * 100_000 + dice.randbytes(1000))
    assert verdict(file)["root"]["code"] == "cuda.oom"


def test_a_large_binary_file_is_passed_over_in_no_time(tmp_path: Path) -> None:
    (tmp_path / "core.log").write_bytes(os.urandom(50_000_000))
    (tmp_path / "train.log").write_text(OOM)
    assert verdict(tmp_path)["root"]["code"] == "cuda.oom"


def test_broken_characters_colours_and_carriage_returns(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    file.write_bytes(
        b"caf\xe9 \xff\n 1%|\xe2\x96\x8c\r\x1b[31m[rank2]: RuntimeError: CUDA out\x1b[0m of memory. Tried to\xc3\r 2%|##\r\nok\n"
    )
    root = verdict(file)["root"]
    assert (root["code"], root["line"], root["rank"]) == ("cuda.oom", 2, 2)
    assert "\x1b" not in root["text"] and "\r" not in root["text"], "a terminal would obey it"


def test_lines_of_containers(tmp_path: Path) -> None:
    cri = log(tmp_path / "cri.log", f"2026-01-02T03:04:05.678901234Z stderr F [rank1]: {OOM}")
    assert verdict(cri)["root"]["rank"] == 1
    docker = log(
        tmp_path / "docker.log",
        json.dumps({"log": f"[rank1]: {OOM}\n", "stream": "stderr", "time": "2026-01-02T03:04:05Z"}),
    )
    assert verdict(docker)["root"]["rank"] == 1


@pytest.mark.parametrize(("mark", "coding"), [(b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")])
def test_logs_in_utf_16(tmp_path: Path, mark: bytes, coding: str) -> None:
    data = mark + "\r\n".join([*steps(50_000), "gruß 😀", f"[rank2]: {OOM}", ""]).encode(coding)
    file = tmp_path / "train.log"
    file.write_bytes(data)
    root = verdict(file)["root"]
    assert (root["code"], root["line"], root["rank"]) == ("cuda.oom", 50_002, 2)
    assert verdict("-", stdin=gzip.compress(data + b"\x41"))["root"]["line"] == 50_002, "packed, and cut in a character"
    file.write_bytes(mark)
    assert verdict(file)["root"] is None


SUMMARY = """\
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-02_10:00:02
  rank      : 13 (local_rank: 5)
  exitcode  : {status} (pid: 912)
  traceback : {said}
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-02_10:00:01
  rank      : 11 (local_rank: 3)
  exitcode  : {status} (pid: 910)
  traceback : {said}
============================================================"""


def test_torchruns_summary_names_the_rank(tmp_path: Path) -> None:
    killed = SUMMARY.format(status=-9, said="Signal 9 (SIGKILL) received by PID 910")
    root = verdict(log(tmp_path / "summary.log", killed))["root"]
    assert (root["code"], root["rank"], root["ranks"], root["line"]) == ("process.killed", 11, [11, 13], 15)
    launcher = "E0302 10:11:12.000000 812 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -9) local_rank: 3 (pid: 910)"
    root = verdict(log(tmp_path / "whole.log", launcher, killed))["root"]
    assert (root["rank"], root["ranks"], root["line"]) == (11, [11, 13], 1), "3 is its number on its node"
    said = SUMMARY.format(status=1, said="To enable traceback see: https://pytorch.org")
    assert verdict(log(tmp_path / "oom.log", OOM, said))["root"]["rank"] == 11, "nothing else says whose it was"
    assert verdict(log(tmp_path / "named.log", f"[rank2]: {OOM}", said))["root"]["rank"] == 2
    assert verdict(log(tmp_path / "after.log", *steps(2), said, OOM))["root"]["rank"] is None


def test_data_that_quotes_errors_is_no_alarm(tmp_path: Path) -> None:
    long = json.dumps({"text": "word " * 5000 + OOM + " word" * 5000, "id": 7})
    said = [f'prompt: "{OOM}"', json.dumps({"prompt": OOM, "completion": "x"}), long]
    assert verdict(log(tmp_path / "a.log", *steps(3), *said))["root"] is None
    assert verdict(log(tmp_path / "b.log", *said, json.dumps({"log": f"{OOM}\n"})))["root"]["line"] == 4


# --- size ---


def test_one_error_in_fifty_megabytes_has_the_right_line(tmp_path: Path) -> None:
    block = "".join(line + "\n" for line in steps(20_000))
    copies = 50_000_000 // len(block) + 1
    file = tmp_path / "large.log"
    with open(file, "w") as stream:
        for number in range(copies):
            stream.write(block)
            if number == copies // 2:
                stream.write(f"[rank5]: {OOM}\n")
    root = verdict(file)["root"]
    assert (root["line"], root["rank"]) == ((copies // 2 + 1) * 20_000 + 1, 5)


def test_a_line_of_ten_megabytes(tmp_path: Path) -> None:
    file = tmp_path / "long.log"
    file.write_text("first\n" + "x " * 2_500_000 + OOM + " y" * 2_500_000 + "\nlast\n" + XID + "\n")
    body = verdict(file)
    told = {one["code"]: one for one in (body["root"], *body["echoes"])}
    assert told["cuda.oom"]["line"] == 2 and told["gpu.xid.79"]["line"] == 4
    assert told["cuda.oom"]["count"] == 1 and len(told["cuda.oom"]["text"]) < 10_000


@pytest.mark.parametrize("at", [(1 << 20) - 9, (1 << 20) - 1, (1 << 20), (64 << 10) - 5])
def test_words_across_the_pieces_in_which_a_log_is_read(tmp_path: Path, at: int) -> None:
    one_line, lines = tmp_path / "one.log", tmp_path / "lines.log"
    one_line.write_text("x" * at + OOM)
    assert verdict(one_line)["root"]["code"] == "cuda.oom"
    lines.write_text("x\n" * (at // 2) + OOM + "\n")
    assert verdict(lines)["root"]["line"] == at // 2 + 1


def test_a_flood_of_equal_lines_is_one_fault(tmp_path: Path) -> None:
    file = tmp_path / "flood.log"
    file.write_text(f"[rank0]: {STALL.format(0)}\n" * 200_000 + f"[rank3]: {OOM}\n")
    body = verdict(file)
    assert (body["root"]["code"], body["root"]["line"]) == ("cuda.oom", 200_001)
    assert 0 < body["echoes"][0]["count"] <= 200_000


def test_a_flood_of_healthy_lines_does_not_hide_a_sick_one_like_them(tmp_path: Path) -> None:
    # every line of Megatron's has the words, behind two hundred and forty characters that are always the same
    usual = " [2026-11-02 10:00:01.123456] iteration {:8d}/  500000 | consumed samples: {:12d} | elapsed time per iteration (ms): 512.3 | "
    usual += (
        "learning rate: 3.0E-04 | global batch size:  1024 | lm loss: 2.031E+00 | loss scale: 1.0 | grad norm: 0.512 | "
    )
    usual += "number of skipped iterations:   0 | number of nan iterations:   {} |"
    lines = [usual.format(number, number * 1024, 0) for number in range(3000)]
    assert verdict(log(tmp_path / "well.log", *lines))["root"] is None
    root = verdict(log(tmp_path / "sick.log", *lines, usual.format(3000, 3000 * 1024, 1), *lines))["root"]
    assert root is not None and root["line"] == 3001


def test_a_fault_that_floods_again_after_its_end_stands(tmp_path: Path) -> None:
    down, up = "mlx5_core 0000:3b:00.0 eth2: Link down", "mlx5_core 0000:3b:00.0 eth2: Link up"
    over = verdict(log(tmp_path / "over.log", *[down] * 1500, up, OOM))
    assert over["root"]["code"] == "cuda.oom" and over["echoes"] == []
    again = verdict(log(tmp_path / "again.log", *[down] * 1500, up, OOM, *[down] * 1500))
    assert "nic.link_down" in {one["code"] for one in (again["root"], *again["echoes"])}


# --- several causes ---


def test_two_runs_in_one_file_are_both_told(tmp_path: Path) -> None:
    file = log(
        tmp_path / "appended.log", *steps(5), f"[rank1]: {OOM}", "--- restarted ---", *steps(5), f"[  99.5] {XID}"
    )
    body = verdict(file)
    assert body["root"]["code"] == "cuda.oom" and [echo["code"] for echo in body["echoes"]] == ["gpu.xid.79"]
    assert body["confidence"] == "medium" and "2 causes" in body["why"]


@pytest.mark.parametrize(
    "trace", [[], ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>']]
)
def test_the_earliest_in_time_wins_over_the_order_of_the_files(tmp_path: Path, trace: list[str]) -> None:
    # a traceback has no time of its own: that of the line before it counts
    stamp = "2026-11-02 10:{:02d}:00,000 INFO step"
    late = log(tmp_path / "a.log", stamp.format(30), *trace, OOM)
    early = log(tmp_path / "b.log", stamp.format(10), *trace, "ValueError: mat1 and mat2", f"2026-11-02 10:10:01 {XID}")
    for order in ((late, early), (early, late)):
        assert verdict(*order)["root"]["file"] == str(early), [path.name for path in order]


def test_without_times_the_order_of_the_files_decides(tmp_path: Path) -> None:
    first, second = log(tmp_path / "a.log", OOM), log(tmp_path / "b.log", f"2026-11-02 10:10:01 {XID}")
    assert verdict(first, second)["root"]["code"] == "cuda.oom"
    assert verdict(second, first)["root"]["code"] == "gpu.xid.79"


# --- for people, and with faults of one's own ---


def test_the_text_says_root_place_handling_and_confidence(tmp_path: Path) -> None:
    file = log(tmp_path / "a.log", f"[rank3]: {OOM}", f"[rank0]: {STALL.format(0)}", f"[rank1]: {STALL.format(1)}")
    done = diagnose(file)
    assert done.returncode == 1 and not done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("root cause   cuda.oom on rank 3: ")
    assert lines[1].strip() == f"{file}:1", "a path is there to be copied"
    for label in ("kind  ", "handling  ", "confidence   high", "also seen"):
        assert any(line.startswith(label) for line in lines), f"no {label!r} in\n{done.stdout}"
    assert "on 2 ranks, 2 times" in " ".join(done.stdout.split())


def test_all_lists_what_is_left_out_otherwise(tmp_path: Path) -> None:
    catalog = tmp_path / "own.toml"
    names = [f"thing{number}" for number in "abcdefgh"]
    catalog.write_text(
        "".join(
            OWN.replace("own.flux", f"own.{n}").replace("flux capacitor", f"flux {n}").replace("MY-1", n) for n in names
        )
    )
    file = log(tmp_path / "a.log", *(f"flux {name} lost" for name in names))
    short, long = (diagnose("--faults", catalog, file, *more).stdout for more in ((), ("--all",)))
    assert "own.thingh" in long and "more kinds" not in long
    assert "own.thingh" not in short and "and 2 more kinds (--all lists them)" in short


def test_faults_of_one_s_own_are_found(tmp_path: Path) -> None:
    catalog, file = tmp_path / "own.toml", log(tmp_path / "a.log", "12:00:01 flux capacitor lost")
    catalog.write_text(OWN)
    assert verdict(file)["root"] is None
    body = verdict("--faults", catalog, file)
    assert body["root"]["code"] == "own.flux" and body["root"]["aliases"] == ["MY-1"] and body["action"] == "drain_node"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "cannot be read"),
        (OWN.replace("pattern", "patern"), "own.flux"),
        (OWN.replace("(?:out|lost)", "(?=lost)"), "not understood"),
        (OWN.replace("flux capacitor (?:out|lost)", "[a-z]+"), "no fixed word"),
        ("[[fault", "own.toml"),
        ("\udcff", "cannot be read"),
    ],
    ids=["missing", "field", "lookahead", "no word", "no toml", "no text"],
)
def test_a_bad_file_of_faults_is_named(tmp_path: Path, text: str | None, complaint: str) -> None:
    catalog = tmp_path / "own.toml"
    if text is not None:
        catalog.write_bytes(text.encode("utf-8", "surrogateescape"))
    done = diagnose("--faults", catalog, log(tmp_path / "a.log", OOM))
    assert done.returncode == 2 and not done.stdout and complaint in done.stderr, done.stderr


def test_the_settings_of_the_folder_hold_here_too(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(OWN)
    (tmp_path / "rerail.toml").write_text('fault_files = "own.toml"\nfault_levels = "cuda.oom=off"\n')
    log(tmp_path / "a.log", OOM, "flux capacitor lost")
    done = diagnose("--json", "a.log", cwd=tmp_path)
    body = json.loads(done.stdout)
    assert body["root"]["code"] == "own.flux" and "cuda.oom" not in {echo["code"] for echo in body["echoes"]}
    assert "fault_files own.toml; fault_levels cuda.oom=off" in done.stderr and done.stderr.count("\n") == 1
    (tmp_path / "rerail.toml").write_text('fault_files = "gone.toml"\n')
    done = diagnose("a.log", cwd=tmp_path)
    assert done.returncode == 2 and "gone.toml cannot be read" in done.stderr and not done.stdout


def test_counts_of_one_are_said_as_one(tmp_path: Path) -> None:
    assert diagnose(log(tmp_path / "a.log", "all is well")).stdout == "nothing wrong found in 1 line\n"


def test_wrong_arguments_are_a_usage_error(tmp_path: Path) -> None:
    for args in ((), ("--colour", "red"), (tmp_path / "none.log",)):
        assert diagnose(*args).returncode == 2


def test_logs_that_cannot_be_read_are_no_healthy_logs(tmp_path: Path) -> None:
    (tmp_path / "core").write_bytes(b"\x7fELF" + bytes(100))
    assert diagnose(tmp_path / "core").returncode == 2
    (tmp_path / "train.log").write_text("step 1 loss 2.0\n")
    told = diagnose("--json", tmp_path)
    assert told.returncode == 0 and list(json.loads(told.stdout)["unread"]) == [str(tmp_path / "core")]
