"""Keeps Python from looking for reference cycles while many small objects are made that have none.

A manifest of thousands of tensors makes tens of thousands of them; each look goes through all objects of the training
process, and takes longer than the reading itself. Called by `checkpoint.catalog` and `checkpoint.reshard`.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Around work that makes no cycles; usable as a decorator."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
