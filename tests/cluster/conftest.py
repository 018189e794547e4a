"""Real addresses and real cuts: every test of this folder needs network namespaces, and says so where there are none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / "edges"), str(TESTS.parent / "bench")]

import namespaces  # noqa: E402

WHY_NOT = namespaces.why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).parent == Path(__file__).parent and WHY_NOT and "unneeded" not in item.name:
            item.add_marker(pytest.mark.skip(reason=WHY_NOT))
