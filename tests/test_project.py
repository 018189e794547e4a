"""The promises the repository makes about itself."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_modules_and_functions_stay_small() -> None:
    done = subprocess.run([sys.executable, "scripts/check_sizes.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_size_check_finds_what_is_too_large(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from check_sizes import complaints
    finally:
        sys.path.pop(0)
    large = tmp_path / "large.py"
    body = "\n".join("    pass" for _ in range(60))
    large.write_text(f"def f(a, b, c, d, e, f, g, *, h):\n{body}\n" + "\n" * 400)
    assert [text.split(": ")[1].split()[0] for text in complaints(large)] == ["module", "f", "f"]
    large.write_text("class A:\n    def f(self, a, b, c, d, e, f, g):\n        pass\n")
    assert not list(complaints(large))


def test_readme_fits_two_screens_and_begins_with_a_command() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert any(line.startswith("$ ") for line in lines[:30]), "the first screen shows a command and its output"


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_path_and_link_in_the_documents_exists(name: str) -> None:
    text = (ROOT / name).read_text()
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    tour = re.findall(r"`((?:src|tests|bench|docs|examples|scripts)/[\w./-]+)`", text)
    missing = [path for path in [*links, *tour] if not (ROOT / path).exists()]
    assert not missing


def test_exported_members_exist_and_need_no_torch_to_be_listed() -> None:
    code = (
        "import sys, rerail\n"
        "assert 'torch' not in sys.modules, 'import rerail must not import torch'\n"
        "assert list(rerail.__all__) == sorted(rerail.__all__), rerail.__all__\n"
        "missing = [name for name in rerail.__all__ if not hasattr(rerail, name)]\n"
        "assert not missing, missing\n"
        "assert 'join' in rerail.__all__\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    names = {re.split(r"[\[<>=]", one)[0].lower() for one in wanted} - {"rerail"}
    assert names <= pinned


def test_nothing_is_unpickled_and_nothing_left_for_later() -> None:
    banned = re.compile(
        r"^\s*(import|from) (pickle|cloudpickle|dill)\b|\bTODO\b|\bFIXME\b|NotImplementedError", re.MULTILINE
    )
    found = [str(path) for path in (ROOT / "src").rglob("*.py") if banned.search(path.read_text())]
    assert not found


PLAIN = {"Any", "Raw", "bool", "bytes", "dict", "float", "int", "list", "msgspec", "set", "str", "tuple"}
"""Types that msgspec keeps nothing of."""
ONE_THREAD = ("cli/", "detect/deep_tests.py")
"""Programs that decode in their main thread alone."""


def decoders_made_late(tree: ast.Module) -> Iterator[str]:
    """Where a decoder of a struct is made when something is to be decoded."""
    for function in (one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)):
        for call in (one for one in ast.walk(function) if isinstance(one, ast.Call)):
            words = ast.unparse(call.func)
            kinds: list[ast.expr] = [keyword.value for keyword in call.keywords if keyword.arg == "type"]
            if words in ("msgspec.json.Decoder", "msgspec.msgpack.Decoder"):
                kinds = call.args
            elif words not in ("msgspec.json.decode", "msgspec.msgpack.decode"):
                continue
            named = {one.id for kind in kinds for one in ast.walk(kind) if isinstance(one, ast.Name)}
            if named - PLAIN:
                yield f"{call.lineno}: {ast.unparse(call)}"


def test_decoders_of_structs_are_made_when_a_module_is_imported() -> None:
    """msgspec looks at the fields of a struct when it meets it first, and another thread that decodes the same type meanwhile crashes
    the process: it finds fields without a type (msgspec 0.22, SIGSEGV)."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "src" / "rerail").rglob("*.py"))
        if not str(path.relative_to(ROOT / "src" / "rerail")).startswith(ONE_THREAD)
        for line in decoders_made_late(ast.parse(path.read_text()))
    ]
    assert not found, "make these decoders at the top of their modules: " + ", ".join(found)
