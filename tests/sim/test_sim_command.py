"""`rerail simulate`: what it prints, what it writes, and what it refuses."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rerail.cli.main import main
from rerail.flow import Diagnosis
from rerail.runtime.journal import FILE_NAME, Journal
from rerail.runtime.samples import Mark, MarkKind, Sample
from rerail.sim.policies import POLICIES
from rerail.sim.run import Result
from rerail.sim.text import middle

SMALL = ["simulate", "--preset", "node8", "--days", "2"]


def test_the_table_the_losses_and_the_assumptions_are_printed(capsys) -> None:
    assert main([*SMALL, "--seeds", "2", "--set", "faults=50"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("node8: 8 devices, 2 days, 2 seeds")
    for plan in POLICIES:
        assert plan.name in out
    assert "rerail loses" in out
    given = out.split("\n  given\n")[1].splitlines()[:2]
    assert [line.split()[0] for line in given] == ["days", "faults"]
    for word in ("measured", "published", "derived", "assumed"):
        assert f"\n  {word}\n" in out
    assert "reported for the real run" not in out


def test_json_holds_every_run_and_every_assumption(capsys) -> None:
    assert main([*SMALL, "--policies", "hourly,rerail", "--seeds", "3", "--seed", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["policy"], one["seed"]) for one in found["results"]] == [
        (name, seed) for seed in (5, 6, 7) for name in ("hourly", "rerail")
    ]
    assert all(one["goodput"] == pytest.approx(one["productive_s"] / one["wall_s"]) for one in found["results"])
    assert {"key", "value", "unit", "about", "source"} == set(found["assumptions"][0])


def test_the_same_command_says_the_same(capsys) -> None:
    said = []
    for _ in range(2):
        assert main([*SMALL, "--set", "faults=30"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_sweeps_are_tables_and_lines(capsys, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    command = [*SMALL, "--policies", "hourly,rerail", "--sweep", "faults=0,50,500", "--html", str(page)]
    assert main(command) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "node8: goodput by faults, one seed"
    assert out[2].split()[-2:] == ["hourly", "rerail"]
    assert [line.split()[0] for line in out[3:6]] == ["0", "50", "500"]
    text = page.read_text()
    assert text.startswith("<!doctype html>") and "<svg" in text and "http" not in text.replace("http://www.w3.org", "")


def test_a_page_shows_where_the_time_goes(capsys, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main([*SMALL, "--set", "faults=50", "--html", str(page)]) == 0
    text = page.read_text()
    assert "where the time goes" in text and "published" in text and "<script" not in text


def test_files_give_values_and_the_command_line_goes_before(capsys, tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text('preset = "node8"\ndays = 1\nstep_s = 2\n')
    assert main(["simulate", "--config", str(config), "--policies", "hourly", "--days", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("node8: 8 devices, 3 days")
    assert "2 s" in next(line for line in out.splitlines() if line.strip().startswith("step_s"))


def test_another_size_has_spares_in_proportion(capsys) -> None:
    assert main(["simulate", "--preset", "mid-1024", "--gpus", "4096", "--days", "1", "--policies", "hourly"]) == 0
    assert "4,096 devices and 28 spare nodes" in capsys.readouterr().out


def test_the_list_names_all(capsys) -> None:
    assert main(["simulate", "--list"]) == 0
    out = capsys.readouterr().out
    for name in ("llama3-405b", "mid-1024", "node8", "repair_factor", *(plan.name for plan in POLICIES)):
        assert name in out
    assert main(["simulate", "--list", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"presets", "policies", "assumptions"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "llama"], ["no preset 'llama'", "llama3-405b"]),
        (["--policies", "hourly,rail"], ["no policy 'rail'", "policies:"]),
        (["--policies", "hourly,"], ["no policy ''"]),
        (["--seed", "-1"], ["--seed", "-1", "whole number"]),
        (["--seed", "x"], ["--seed", "'x'"]),
        (["--seeds", "0"], ["--seeds", "'0'", "1 or more"]),
        (["--gpus", "-8"], ["gpus", "-8"]),
        (["--gpus", "100"], ["gpus is 100", "104"]),
        (["--days", "0"], ["days is 0"]),
        (["--days", "3parsecs"], ["days", "parsecs", "min", "weeks"]),
        (["--set", "faults=-2"], ["faults is -2"]),
        (["--set", "faults"], ["KEY=VALUE"]),
        (["--sweep", "gpus"], ["--sweep", "KEY=VALUE"]),
        (["--sweep", "gpus=8,,16"], ["--sweep"]),
        (["--sweep", "gpu=8,16"], ["'gpu'", "did you mean gpus"]),
        (["--sweep", "gpus=8,9"], ["gpus is 9"]),
        (["--trace", "/nowhere.csv"], ["/nowhere.csv", "no such file"]),
        (["--config", "/nowhere.toml"], ["/nowhere.toml", "no such file"]),
        (["--html", "/nowhere/page.html", "--policies", "hourly"], ["/nowhere/page.html", "cannot be written"]),
        (["--html", "/nowhere/page.html", "--seeds", "100000"], ["/nowhere/page.html", "no folder /nowhere"]),
        (["--html", "/tmp", "--seeds", "100000"], ["/tmp", "it is a folder"]),
        (["--policies", "gemini"], ["gemini is left out", "there is only 1 node"]),
        (["--trace", "/nowhere.csv", "--seeds", "3"], ["--seeds is 3", "nothing to seed"]),
        (["--frobnicate"], ["--frobnicate"]),
    ],
)
def test_bad_options_are_refused_without_a_traceback(capsys, arguments: list[str], words: list[str]) -> None:
    start = [] if "--preset" in arguments else ["--preset", "node8"]
    assert main(["simulate", *start, *arguments]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("rerail simulate: ") and "Traceback" not in said.err
    for word in words:
        assert word in said.err


def test_a_mistake_in_a_file_is_told_with_its_name(capsys, tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text("step_s = -2\n")
    assert main(["simulate", "--config", str(config)]) == 2
    assert f"--config {config}: step_s is -2" in capsys.readouterr().err


def test_without_simpy_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['simpy'] = None\n"
        "from rerail.cli.main import main\n"
        "sys.exit(main(['simulate', '--preset', 'node8']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'rerail[sim]'" in done.stderr and "Traceback" not in done.stderr


def test_what_needs_other_nodes_is_left_out_where_there_are_none(capsys) -> None:
    assert main([*SMALL, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "gemini" not in {one["policy"] for one in told["results"]} and "gemini is left out" in told["notes"][0]
    assert main([*SMALL, "--gpus", "16", "--json"]) == 0
    assert "gemini" in {one["policy"] for one in json.loads(capsys.readouterr().out)["results"]}
    assert main([*SMALL, "--sweep", "gpus=8,16", "--policies", "gemini,rerail"]) == 0
    assert capsys.readouterr().out.splitlines()[3].split()[1] == "-"


def test_of_two_runs_the_median_is_shown_and_its_parts_add_up(capsys) -> None:
    command = [*SMALL, "--set", "faults=50", "--seeds", "2", "--policies", "hourly"]
    assert main([*command, "--json"]) == 0
    results = [msgspec.convert(one, Result) for one in json.loads(capsys.readouterr().out)["results"]]
    one = middle(results)
    assert one.goodput == pytest.approx(statistics.median(result.goodput for result in results))
    assert one.productive_s + sum(one.by_stage.values()) == pytest.approx(one.wall_s)
    assert sum(one.by_stage.values()) == pytest.approx(sum(one.by_cause.values()))
    assert main(command) == 0
    assert f"{one.goodput:.2%}" in capsys.readouterr().out


def test_a_sweep_shows_ranges_and_not_the_value_that_is_swept(capsys, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    command = [*SMALL, "--policies", "hourly,rerail", "--sweep", "faults=5,50", "--seeds", "2", "--html", str(page)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert out.count(" to ") >= 4 and "\n    faults " not in out
    assert "faults (per 1000 device-days)" in page.read_text() and '<td class="l">faults</td>' not in page.read_text()
    assert main([*SMALL, "--policies", "rerail", "--sweep", "elastic=no,yes"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:5]
    assert [row.split()[0] for row in rows] == ["elastic", "no", "yes"]


def test_a_journal_gives_the_size_and_the_length_of_the_run(capsys, tmp_path: Path) -> None:
    journal = Journal(tmp_path / FILE_NAME)
    record = Diagnosis(id="d", job="j", at=1000.0, code="process.killed", root="", node="n0", ranks=(3,), lost=(3,))
    sample = Sample(at=8100.0, span_s=600.0, step=60, steps=60, moved=8100.0, compute=10.0, told=60, joined=4)
    places = [["n0", n] for n in range(4)]
    journal.append([(1, record)], {"placement": places}, [sample], [Mark(900.0, MarkKind.BEGIN)])
    journal.close()
    assert main(["simulate", "--trace", str(tmp_path), "--policies", "rerail"]) == 0
    out = capsys.readouterr().out
    assert ": 4 devices, 2 h, one seed" in out and "measured" in out
    assert main(["simulate", "--trace", str(tmp_path), "--policies", "rerail", "--days", "2", "--gpus", "8"]) == 0
    assert ": 8 devices, 2 days" in capsys.readouterr().out


def test_numbers_are_written_for_people(capsys) -> None:
    assert main(["simulate", "--preset", "node8", "--days", "1min", "--policies", "hourly"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("node8: 8 devices, 60 s") and "0.000694" not in out and "/1000 d " not in out
    assert "0.4103/1000 device-days" in out
