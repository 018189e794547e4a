"""The journal that the accounts are timed on is one whose accounts add up, with as many incidents and records as were asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

import report as bench
from rerail.report.accounts import accounts
from rerail.report.partition import Cause
from rerail.runtime.journal import FILE_NAME, Journal


def test_it_holds_what_it_says(tmp_path: Path) -> None:
    bench.make(tmp_path / FILE_NAME, 20, 1000)
    journal = Journal(tmp_path / FILE_NAME, read_only=True)
    found = accounts(journal, "bench")
    assert len(journal.records()) == 1000
    journal.close()
    assert found is not None and len(found.incidents) == 20 and found.exit_code == 0
    assert sum(found.parts.values()) == pytest.approx(found.wall_s, rel=0.005)
    assert [one.at for one in found.samples] == sorted(one.at for one in found.samples)
    assert found.parts[Cause.UNKNOWN] == 0 and (found.ettr or 0) > 0.9
