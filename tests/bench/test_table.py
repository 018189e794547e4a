import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_table_shows_best_median_and_verdict(tmp_path: Path) -> None:
    from table import Figure, render, write

    figures = [
        Figure("recovery / cold start", "ratio", (0.04, 0.06, 0.05), "<= 0.05", True),
        Figure("against torchrun", "x", (14.0, 18.0, 12.0), ">= 15x", False, "", True),
        Figure("survivors kept", "", (), "all", True, "50 of 50"),
        Figure("torchrun", "s", (9.5,)),
    ]
    lines = render(figures).splitlines()
    assert lines[2].split() == [
        "recovery",
        "/",
        "cold",
        "start",
        "0.040",
        "0.050",
        "<=",
        "0.05",
        "reached",
        "0.040",
        "0.060",
        "0.050",
    ]
    assert lines[3].split()[2:7] == ["18.0x", "14.0x", ">=", "15x", "MISSED"]
    assert lines[4].endswith("50 of 50")
    assert "reached" not in lines[5] and "MISSED" not in lines[5]
    write(tmp_path / "new" / "figures.json", figures, {"cores": 2})
    saved = json.loads((tmp_path / "new" / "figures.json").read_text())
    assert [row.get("median") for row in saved["figures"]] == [0.05, 14.0, None, 9.5]


def test_benchmark_names_its_scenarios() -> None:
    done = subprocess.run([sys.executable, str(BENCH / "recovery.py"), "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--only {recovery,large,kills,stop,weights,cost,pairs}" in done.stdout
