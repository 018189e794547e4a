"""What `bench/rehab.py` has measured, as tables: its JSON lines become rows of Markdown."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
_STUDENTS = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def records(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Every whole line; one that was cut off by the end of its process is left out."""
    found = []
    for line in lines:
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return found


def title(one: Record) -> str:
    return f"{one['shape']}, {one['lost']} lost, beta2 {one['beta2']}"


def tables(lines: Iterable[str]) -> None:
    found = records(lines)
    priced = [one for one in found if "lag" in one]
    for name in dict.fromkeys(title(one) for one in priced):
        _priced(name, [one for one in priced if title(one) == name])
    hit = [one for one in found if "faults" in one]
    for name in dict.fromkeys(title(one) for one in hit):
        _repeated(name, [one for one in hit if title(one) == name])


def _priced(name: str, priced: Sequence[Record]) -> None:
    stale = {(one["seed"], one["fault"]): one["lag"] for one in priced if one["method"] == "stale"}
    print(f"\n{name}: in shares of the steps since the checkpoint; computing again is 1")
    print("| restored from | n | lag | worst | saved | regain | better than stale | end of run |")
    print("|---|---|---|---|---|---|---|---|")
    for method in dict.fromkeys(one["method"] for one in priced):
        runs = [one for one in priced if one["method"] == method]
        lags = [one["lag"] / one["behind"] for one in runs]
        ends = [one["end"] / one["behind"] for one in runs if "end" in one]
        regain = statistics.fmean(one["regain"] / one["behind"] for one in runs)
        print(
            f"| {method} | {len(runs)} | {mean(lags, 3)} | {max(lags):.3f} | {1 - statistics.fmean(lags):.0%} "
            f"| {regain:.2f} | {better(runs, stale)} | {mean(ends, 2) if ends else '-'} |"
        )
    chose = [one["chose"] for one in priced if one["method"] == "chosen"]
    if chose:
        print("chosen: " + ", ".join(f"{who} {chose.count(who)} times" for who in sorted(set(chose))))
    for share in sorted({round(one.get("at", 0) * 4) / 4 for one in priced}):
        here = [one for one in priced if round(one.get("at", 0) * 4) / 4 == share and one["method"] == "chosen"]
        if here:
            print(f"  at about {share:.0%} of the run better than stale: {better(here, stale)}")


def better(runs: Sequence[Record], stale: Mapping[tuple[int, int], float]) -> str:
    """Against the stale one of the same fault. Whoever chose stale is its equal, however the two were measured."""
    held = [one for one in runs if (one["seed"], one["fault"]) in stale and one["method"] != "stale"]
    equal = [one for one in held if one.get("chose") == "stale"]
    won = [one for one in held if one not in equal and one["lag"] < stale[one["seed"], one["fault"]]]
    return f"{len(won)} of {len(held)}" + (f", {len(equal)} equal" if equal else "") if held else "-"


def _repeated(name: str, hit: Sequence[Record]) -> None:
    print(f"\n{name}: several faults in one run, in steps")
    print("| restored from | faults | runs | behind at the end | computing again |\n|---|---|---|---|---|")
    for method in dict.fromkeys(one["method"] for one in hit):
        runs = [one for one in hit if one["method"] == method]
        ends = [one["end"] for one in runs]
        print(f"| {method} | {runs[0]['faults']} | {len(runs)} | {mean(ends, 1)} | {runs[0]['behind']} |")


def mean(values: Sequence[float], digits: int) -> str:
    """With the half of the interval that holds it in 95 of 100 cases."""
    told = f"{statistics.fmean(values):.{digits}f}"
    return told if len(values) < 2 else f"{told} ± {confidence(values):.{digits}f} (n {len(values)})"


def confidence(values: Sequence[float]) -> float:
    """Half of the interval that holds the mean in 95 of 100 cases."""
    return _STUDENTS.get(len(values), 2.1) * statistics.stdev(values) / len(values) ** 0.5
