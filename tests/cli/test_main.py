import subprocess
import sys

import pytest

from rerail.cli.main import COMMANDS, main


def test_unknown_command_is_answered_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reprot"]) == 2
    assert "did you mean: rerail report" in capsys.readouterr().err


def test_a_script_without_run_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train.py"]) == 2
    assert "did you mean: rerail run train.py" in capsys.readouterr().err


def test_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)
    assert main([]) == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("rerail ")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    done = subprocess.run([sys.executable, "-m", "rerail.cli.main", name, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: rerail {name}")


@pytest.mark.parametrize(
    "module", ["rerail.cli.main", "rerail.cli.run", "rerail.runtime.launcher", "rerail.runtime.agent"]
)
def test_starts_without_torch(module: str) -> None:
    """Importing torch takes longer than everything else a launcher does."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
