"""Turns the source tree into a list of modules and functions that are too large; run by `make check`.

A module over 400 lines, a function over 60 or one with more than 7 parameters is an idea that is not cut right yet.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MODULE_LINES = 400
FUNCTION_LINES = 60
PARAMETERS = 7
FOLDERS = ("src", "bench", "examples", "scripts")


def complaints(path: Path) -> Iterator[str]:
    """What is too large in one file, one line each."""
    text = path.read_text(encoding="utf-8")
    lines = text.count("\n")
    if lines > MODULE_LINES:
        yield f"{path}:1: module has {lines} lines, at most {MODULE_LINES}"
    for node in ast.walk(ast.parse(text, filename=str(path))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > FUNCTION_LINES:
            yield f"{path}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}"
        count = parameters(node)
        if count > PARAMETERS:
            yield f"{path}:{node.lineno}: {node.name} has {count} parameters, at most {PARAMETERS}"


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Named parameters, without self and cls: the caller does not write those."""
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([name for index, name in enumerate(names) if not (index == 0 and name in ("self", "cls"))])


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    found = [line for folder in FOLDERS for path in sorted((root / folder).rglob("*.py")) for line in complaints(path)]
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
