from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rerail.detect.process import MAX_TEXT, exit_payload, signal_name

RECORD = """
import sys
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise ValueError("bad batch")

main()
"""


def test_a_killed_process_is_named_by_its_signal(tmp_path: Path) -> None:
    assert exit_payload(-9, tmp_path / "none.json", "") == {"signal": "SIGKILL"}
    assert signal_name(63) == "signal 63"


def test_an_exit_code_comes_with_the_last_words(tmp_path: Path) -> None:
    payload = exit_payload(3, tmp_path / "none.json", "x" * 2 * MAX_TEXT + "Segmentation")
    assert payload["exit_code"] == 3
    assert str(payload["evidence"]).endswith("Segmentation") and len(str(payload["evidence"])) == MAX_TEXT


def test_the_error_file_names_exception_message_and_traceback(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    body = {
        "message": {"message": "KeyError: 'x'", "extraInfo": {"py_callstack": "Traceback ..."}},
        "exception": "KeyError",
    }
    file.write_text(json.dumps(body))
    assert exit_payload(1, file, "") == {
        "exit_code": 1,
        "exception": "KeyError",
        "message": "'x'",
        "traceback": "Traceback ...",
    }


def test_what_torch_record_writes_is_understood(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    env = {"TORCHELASTIC_ERROR_FILE": str(file)}
    done = subprocess.run([sys.executable, "-c", RECORD], env=env, capture_output=True, check=False)
    payload = exit_payload(done.returncode, file, "")
    assert payload["exception"] == "ValueError" and payload["message"] == "bad batch"
    assert "in main" in str(payload["traceback"])


def test_a_damaged_error_file_is_no_error_of_ours(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    for text in ("", "{", "[]", '"text"', '{"message": 5}', "\udcff".encode(errors="surrogateescape").decode("latin1")):
        file.write_text(text)
        assert exit_payload(1, file, "") == {"exit_code": 1}
    file.write_text('{"message": "plain text"}')
    assert exit_payload(1, file, "")["message"] == "plain text"
