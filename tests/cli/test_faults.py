"""`rerail faults` as a user runs it: look up, search, match a line, check a file of one's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

OOM = "RuntimeError: CUDA out of memory. Tried to allocate 2.50 GiB"
OWN = """
[[fault]]
code = "own.flux"
title = "The flux capacitor is out"
class = "gpu"
seen = ["script"]
pattern = 'flux capacitor (?:out|lost)'
advice = "Buy a new one."
aliases = ["my-1"]
samples = ["flux capacitor lost"]
near_misses = ["flux capacitor fine"]
"""


def faults(
    *args: object, stdin: bytes = b"", check: int | None = None, cwd: Path | None = None, **env: str
) -> tuple[int, str, str]:
    command = [
        sys.executable,
        "-m",
        "rerail.cli.main",
        "faults",
        *(a if isinstance(a, bytes) else str(a) for a in args),
    ]
    done = subprocess.run(
        command, input=stdin, capture_output=True, timeout=60, check=False, cwd=cwd, env={**os.environ, **env}
    )
    out, err = done.stdout.decode(), done.stderr.decode()
    assert "Traceback" not in err, err
    assert check is None or done.returncode == check, f"exit code {done.returncode}, not {check}: {out}{err}"
    return done.returncode, out, err


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own.toml"
    file.write_text(OWN)
    return file


# --- list ---


def test_the_list_is_sorted_counted_and_of_the_form_code_severity_handling_title() -> None:
    _, out, err = faults("list", check=0)
    codes = [line.split()[0] for line in out.splitlines()]
    assert codes == sorted(codes) and len(set(codes)) > 1000
    hardware, software = (set(faults("list", flag, check=0)[1].splitlines()) for flag in ("--hardware", "--software"))
    assert {line.split()[0] for line in hardware | software} == set(codes)
    assert f"{len(codes)} faults: {len(hardware)} of hardware, {len(software)} of software" in err


@pytest.mark.parametrize("word", ["xid.79", "XID-79", "fallen off the bus"])
def test_the_list_is_searched_by_code_alias_and_title(word: str) -> None:
    _, out, err = faults("list", word, check=0)
    assert "gpu.xid.79" in [line.split()[0] for line in out.splitlines()] and " of hardware, " in err


def test_a_search_without_a_result_is_empty_and_no_error() -> None:
    assert faults("list", "zzzz", check=0)[1] == ""
    assert json.loads(faults("list", "zzzz", "--json", check=0)[1]) == []


def test_the_list_as_json_has_everything() -> None:
    (only,) = (one for one in json.loads(faults("list", "gpu.xid.79", "--json")[1]) if one["code"] == "gpu.xid.79")
    assert only["hardware"] is True and "GPU-XID-79" in only["aliases"] and only["pattern"]


def test_hardware_and_software_exclude_each_other() -> None:
    assert "not allowed with" in faults("list", "--hardware", "--software", check=2)[2]


# --- show ---


@pytest.mark.parametrize("name", ["gpu.xid.79", "GPU-XID-79", "gpu-xid-79", "GPU.XID.79"])
def test_a_fault_is_shown_by_code_and_by_alias_in_any_case(name: str) -> None:
    _, out, _ = faults("show", name, check=0)
    assert out.startswith("gpu.xid.79: ")
    for label in ("class", "severity", "handling", "advice", "pattern", "also called", "sample"):
        assert any(line.startswith(label) for line in out.splitlines()), f"no {label} in\n{out}"


def test_a_fault_as_json_is_the_same() -> None:
    body = json.loads(faults("show", "GPU-XID-79", "--json", check=0)[1])
    assert body["code"] == "gpu.xid.79" and body["class"] == "pcie"


def test_a_name_that_is_none_is_met_with_a_guess_or_a_way_to_search() -> None:
    assert "did you mean: cuda.oom" in faults("show", "cuda.omm", check=2)[2]
    assert "list WORD" in faults("show", "zzzzzz", check=2)[2]


# --- match ---


def test_a_line_given_as_words_is_matched() -> None:
    assert faults("match", OOM, check=0)[1].startswith("cuda.oom  ")
    assert faults("match", "[rank3]:", *OOM.split(), check=0)[1].startswith("cuda.oom  ")


def test_lines_of_standard_input_are_matched_one_by_one() -> None:
    data = f"step 1\r\n{OOM}\r\n\nNVRM: Xid (PCI:0000:3b:00): 79, off\n".encode()
    _, out, _ = faults("match", stdin=data, check=0)
    assert [line.split()[0] for line in out.splitlines()[::2]] == ["cuda.oom", "gpu.xid.79"]
    assert out.splitlines()[1].strip() == OOM
    body = json.loads(faults("match", "--json", stdin=data, check=0)[1])
    assert (body[0]["line"], body[0]["code"]) == (OOM, "cuda.oom")


def test_nothing_known_is_exit_code_one() -> None:
    assert "no fault that is known" in faults("match", "all is well", check=1)[2]
    assert faults("match", check=1)[1] == ""
    assert json.loads(faults("match", "--json", "all is well", check=1)[1]) == []


@pytest.mark.parametrize("noise", [b"\xff\xfe", b"\xe2\x82", b"\xed\xa0\x80", b"\x1b[31m"])
def test_bytes_that_are_no_text_are_matched_too(noise: bytes) -> None:
    assert "cuda.oom" in faults("match", noise + OOM.encode() + noise, check=0)[1]
    assert "cuda.oom" in faults("match", stdin=noise + b"\n" + OOM.encode() + noise + b"\n", check=0)[1]


def test_a_very_long_line_is_no_problem() -> None:
    assert "cuda.oom" in faults("match", stdin=b"x" * 1_000_000 + b" " + OOM.encode(), check=0)[1]


# --- faults of one's own ---


def test_own_faults_are_listed_shown_and_matched(own: Path) -> None:
    assert "own.flux" in faults("list", "flux", "--faults", own, check=0)[1]
    assert faults("show", "my-1", "--faults", own, check=0)[1].startswith("own.flux: ")
    assert faults("match", "flux capacitor out", "--faults", own, check=0)[1].startswith("own.flux  ")
    assert faults("match", "flux capacitor fine", "--faults", own)[0] == 1


def test_a_good_file_has_no_problems(own: Path) -> None:
    assert faults("check", own, check=0)[1] == "1 fault, 0 problems\n"


def test_replacing_a_shipped_fault_is_allowed_and_told(own: Path) -> None:
    own.write_text(OWN.replace("own.flux", "cuda.oom"))
    assert "replaces what rerail ships: cuda.oom" in faults("check", own, check=0)[1]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('class = "gpu"', 'class = "toaster"', "class 'toaster'"),
        ('"flux capacitor lost"]', '"flux is fine"]', "sample does not match"),
        ('"flux capacitor fine"', '"flux capacitor lost"', "near miss matches"),
        ("(?:out|lost)", "(?=lost)", "not understood"),
        ("flux capacitor (?:out|lost)", r"\w+ \w+ lost|x", "fixed word"),
        ('seen = ["script"]', 'seen = ["moon"]', "seen 'moon'"),
        ('advice = "Buy a new one."', "", "advice is missing"),
        ('"own.flux"', '"Flux!"', "code must be"),
    ],
)
def test_each_problem_is_named_with_file_and_entry(own: Path, old: str, new: str, problem: str) -> None:
    assert old in OWN
    own.write_text(OWN.replace(old, new))
    _, out, _ = faults("check", own, check=1)
    assert problem in out and "own.toml" in out, out
    assert out.splitlines()[-1].startswith("1 fault, ")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            'severity = "criticl"',
            "severity 'criticl' is not one of info warning degraded error critical; did you mean critical?",
        ),
        (
            'role = "sympton"',
            "role 'sympton' is not one of root symptom confirmation clear benign; did you mean symptom?",
        ),
        ('action = "drain"', "action 'drain' is not one of ignore retry_in_place"),
        ('then = "humans"', "did you mean human?"),
        ('severty = "error"', "there is no field 'severty'; did you mean severity?"),
    ],
)
def test_a_word_that_is_none_is_met_with_those_there_are(own: Path, line: str, says: str) -> None:
    own.write_text(OWN + line)
    assert says in faults("check", own, check=2)[2]
    assert says in faults("list", "--faults", own, check=2)[2]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('scope = "proces"', "scope 'proces' is not one of process device link node job; did you mean process?"),
        ('caused_by = ["gpu.xdi.79"]', "caused_by 'gpu.xdi.79' names no fault that is known; did you mean gpu.xid."),
        ('caused_by = ["cuda.*", "qqq.*"]', "caused_by 'qqq.*' names no fault that is known (rerail faults list)"),
        (
            'role = "clear"\nclears = ["own.flx"]',
            "clears 'own.flx' names no fault that is known; did you mean own.flux?",
        ),
    ],
)
def test_words_and_causes_that_are_none_are_refused_by_check_and_by_use(own: Path, line: str, says: str) -> None:
    own.write_text(OWN + line)
    _, out, _ = faults("check", own, check=1)
    assert says in out and "own.toml: own.flux: " in out
    _, _, err = faults("list", "--faults", own, check=2)
    assert says in err and "own.toml, entry own.flux: " in err


def test_causes_may_be_of_ones_own(own: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(
        OWN.replace("own.flux", "own.pump").replace("flux", "pump") + 'caused_by = ["own.fl*", "gpu.xid.*"]'
    )
    faults("check", own, other, check=0)
    faults("match", "pump capacitor out", "--faults", other, "--faults", own, check=0)
    assert "'own.fl*'" in faults("check", other, check=1)[1]
    assert faults("check", other, check=0, RERAIL_FAULT_FILES=str(own))[1] == "1 fault, 0 problems\n"


# --- settings of the folder ---


def test_the_settings_of_the_folder_hold_here_too(own: Path, tmp_path: Path) -> None:
    (tmp_path / "rerail.toml").write_text(
        'fault_files = "own.toml"\nfault_levels = "cuda.oom=off, own.flux=critical"\n'
    )
    _, out, err = faults("match", "flux capacitor out", check=0, cwd=tmp_path)
    assert out.startswith("own.flux  ") and err.count("\n") == 1
    assert "settings used (rerail.toml and environment): fault_files own.toml; fault_levels cuda.oom=off" in err
    assert "critical" in faults("show", "own.flux", check=0, cwd=tmp_path)[1]
    assert "cuda.oom is switched off" in faults("show", "cuda.oom", check=2, cwd=tmp_path)[2]
    assert "cuda.oom" not in faults("match", OOM, cwd=tmp_path)[1]
    assert faults("match", OOM, check=0)[2] == "", "elsewhere nothing is set, and nothing is said"


def test_bad_settings_are_told(tmp_path: Path) -> None:
    assert "no/such.toml cannot be read" in faults("list", check=2, RERAIL_FAULT_FILES="no/such.toml")[2]
    wrong = faults("list", check=2, RERAIL_FAULT_LEVELS="cuda.omm=off")[2]
    assert "setting fault_levels: there is no fault 'cuda.omm'; did you mean cuda.oom?" in wrong
    (tmp_path / "rerail.toml").write_text("fault_fils = 'x'\n")
    assert "unknown setting 'fault_fils'; did you mean fault_files?" in faults("list", check=2, cwd=tmp_path)[2]


def test_the_same_code_twice_is_a_problem(own: Path) -> None:
    own.write_text(OWN + OWN)
    assert "own.flux is there 2 times" in faults("check", own, check=1)[1]


@pytest.mark.parametrize(
    "text",
    [
        b"[[fault",
        b"nothing = 1",
        b"[[fault]]\ncode = 'a'\n",
        b"[[fault]]\ncolour = 'red'\n",
        b"\xff\xfe",
        OWN.encode() + b"pattern = 5",
    ],
)
def test_a_file_that_is_no_catalogue_is_an_error(own: Path, text: bytes) -> None:
    own.write_bytes(text)
    assert "own.toml" in faults("check", own, check=2)[2]
    assert "own.toml" in faults("list", "--faults", own, check=2)[2]


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    wrong: list[tuple[Any, ...]] = [
        (),
        ("dance",),
        ("show",),
        ("check",),
        ("check", tmp_path / "none.toml"),
        ("check", tmp_path),
    ]
    for args in wrong:
        assert faults(*args, check=2)[2].startswith("rerail faults: ")
