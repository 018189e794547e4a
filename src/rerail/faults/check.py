"""Checks catalogue files: schema, vocabulary, patterns, and that every sample is what it says. `python -m rerail.faults.check [FILE...]`.

Called by `make check` for the shipped files, by `rerail faults check` for the user's own. Without files: the whole catalogue.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rerail.errors import ConfigError
from rerail.faults.anchors import compiled, is_certain
from rerail.faults.catalog import Condition, Fault, Sample, parse, shipped, unknown_causes, unknown_words
from rerail.faults.matcher import fits
from rerail.flow import Handling, Role
from rerail.wording import counted

_CODE = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+|unknown")
_COMPARISONS = ("above", "below", "is_", "is_not", "rises")


def problems_of(fault: Fault) -> list[str]:
    """What is wrong with one entry, as sentences."""
    found = [*_words(fault), *_shape(fault)]
    try:
        return found + (_text(fault) if fault.pattern else [])
    except ConfigError as error:
        return [*found, str(error)]


def _words(fault: Fault) -> list[str]:
    found = []
    if not _CODE.fullmatch(fault.code):
        found.append("code must be words of a-z, 0-9 and _ with dots between")
    found += unknown_words(fault)
    if not fault.title or fault.title.endswith("."):
        found.append("title must be there, without a full stop")
    if fault.advice and not fault.advice.rstrip().endswith((".", "?", "!")):
        found.append("advice must be a sentence")
    if fault.advice.count("\n"):
        found.append("advice must be one line")
    if not fault.advice and fault.role in (Role.ROOT, Role.SYMPTOM):
        found.append("advice is missing")
    return found


def _shape(fault: Fault) -> list[str]:
    found = []
    if not (fault.pattern or fault.reading or fault.sources or fault.code == "unknown"):
        found.append("neither pattern nor reading nor sources: nothing can show it")
    if fault.unless and not fault.pattern:
        found.append("unless without pattern")
    if bool(fault.clears) != (fault.role is Role.CLEAR):
        found.append("clears goes with role clear, and only with it")
    if fault.role is Role.BENIGN and fault.action is not Handling.IGNORE:
        found.append("a benign entry has the action ignore")
    if fault.reading is not None:
        found += _condition(fault.reading)
        if not any(isinstance(sample, Sample) and sample.values for sample in fault.samples):
            found.append("a reading needs a sample with values")
    return found


def _condition(condition: Condition) -> list[str]:
    given = [name for name in _COMPARISONS if getattr(condition, name) is not None]
    if len(given) != 1:
        return [f"reading needs exactly one comparison, not {len(given)}"]
    return []


def _text(fault: Fault) -> list[str]:
    found = []
    for one in (fault.pattern, fault.unless):
        compiled(one)
    if not is_certain(fault.words):
        found.append("pattern: every alternative needs a fixed word of 4 or more characters")
    lines = [sample for sample in fault.samples if isinstance(sample, str)]
    others = [line for line in fault.near_misses if isinstance(line, str)]
    if not lines:
        found.append("a pattern needs a sample line")
    if not others and fault.role is not Role.BENIGN:
        found.append("a pattern needs a near miss")
    found += [f"sample does not match: {line!r}" for line in lines if not fits(fault, line)]
    found += [f"near miss matches: {line!r}" for line in others if fits(fault, line)]
    found += [f"sample has several lines: {line!r}" for line in (*lines, *others) if "\n" in line]
    return found


def problems(faults: Sequence[Fault], known: Iterable[str] = ()) -> list[str]:
    """What is wrong with these entries; `known`: the codes of others that there are."""
    found = [f"{fault.origin}: {fault.code}: {text}" for fault in faults for text in problems_of(fault)]
    codes = Counter(fault.code for fault in faults)
    found += [f"{code} is there {count} times" for code, count in codes.items() if count > 1]
    patterns = Counter((fault.pattern, fault.unless) for fault in faults if fault.pattern)
    found += [f"{count} entries have the pattern {pattern[0]!r}" for pattern, count in patterns.items() if count > 1]
    wrong = unknown_causes(faults, {*codes, *known})
    return found + [f"{fault.origin}: {fault.code}: {text}" for fault, text in wrong]


def main(arguments: Sequence[str]) -> int:
    """Print what is wrong; 1 if anything is."""
    try:
        if arguments:
            faults = [fault for path in arguments for fault in parse(Path(path).read_text(), Path(path).name)]
        else:
            faults = shipped()
        found = problems(faults, (fault.code for fault in shipped()) if arguments else ())
    except (ConfigError, OSError) as error:
        found, faults = [str(error)], []
    for text in found:
        print(text)
    hardware = sum(fault.hardware for fault in faults)
    print(f"{counted(len(faults), 'fault')}, {hardware} of hardware; {counted(len(found), 'problem')}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
