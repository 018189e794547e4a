"""The reference of settings says what the code does: same names, same defaults, same words, same order."""

import ast
import itertools
import json
import re
from pathlib import Path

import msgspec

from rerail import config
from rerail.runtime.injections import KINDS

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"^\| `(\w+)` \| `([^`]+)` \| (.+) \|$", re.MULTILINE)


def documented_rows() -> list[tuple[str, str, str]]:
    return ROW.findall((ROOT / "docs" / "settings.md").read_text())


def docstrings_of_settings() -> dict[str, str]:
    """Every field of Settings with the string below it, whitespace folded."""
    tree = ast.parse(Path(config.__file__).read_text())
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Settings")
    found = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant), (
                f"{field.target.id} says nothing"
            )
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def test_settings_reference_has_every_field_with_its_default_and_its_words() -> None:
    words = docstrings_of_settings()
    wanted = [
        (field.name, json.dumps(field.default), words[field.name]) for field in msgspec.structs.fields(config.Settings)
    ]
    assert documented_rows() == wanted, "docs/settings.md is out of date; its rows must be exactly these"


def test_settings_that_the_documents_name_exist() -> None:
    known = {field.name for field in msgspec.structs.fields(config.Settings)}
    named = re.compile(r"setting `(\w+)`")
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        unknown = set(named.findall(path.read_text())) - known
        assert not unknown, f"{path.name} names settings that do not exist"


def test_links_in_the_documents_lead_somewhere() -> None:
    for path in ROOT.glob("docs/**/*.md"):
        links = re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text())
        missing = [link for link in links if not (path.parent / link).exists()]
        assert not missing, f"{path.name} links to what is not there"


def test_the_guide_has_every_kind_of_fault_that_can_be_injected() -> None:
    guide = (ROOT / "docs" / "guide.md").read_text()
    section = guide.partition("## Trying it out")[2].partition("\n## ")[0]
    cells = " ".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`([\w-]+)`", cells)) == set(KINDS)
