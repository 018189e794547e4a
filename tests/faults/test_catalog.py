"""The catalogue's samples are its test vectors: each must be recognised, among all faults, as the one it stands under."""

from __future__ import annotations

from pathlib import Path

import pytest

from rerail.detect.detector import Reading
from rerail.detect.judge import Judge
from rerail.diagnose.cascade import judge
from rerail.diagnose.classify import Classifier
from rerail.errors import ConfigError
from rerail.faults.catalog import Fault, Sample, load_catalog, parse, shipped
from rerail.faults.check import problems
from rerail.faults.matcher import Matcher
from rerail.faults.sightings import sightings
from rerail.flow import Role, Signal

CATALOG = load_catalog()
CLASSIFIER = Classifier(CATALOG)
MATCHER = Matcher(CATALOG.faults)
SAMPLE_EVERY_S = 10.0
ENTRY = """
[[fault]]
code = "own.fault"
title = "a fault of mine"
class = "gpu"
advice = "Look at it."
"""


def signal(source: str, **payload: str | int | float | bool) -> Signal:
    return Signal(id="s", job="j", at=1.0, source=source, node="n0", rank=2, generation=4, step=7, payload=payload)


def test_nothing_is_wrong_with_the_shipped_files() -> None:
    assert problems(shipped()) == []


def test_it_is_as_large_as_promised() -> None:
    by_hand = [
        fault for fault in CATALOG.faults if not fault.origin.endswith(("_codes.toml", "_xid.toml", "_sxid.toml"))
    ]
    known = [fault for fault in by_hand if fault.role is not Role.BENIGN]
    assert sum(fault.hardware for fault in known) >= 150 and sum(not fault.hardware for fault in known) >= 120
    assert len({fault.title for fault in known}) == len(known)


def test_every_line_is_recognised_among_all_faults() -> None:
    wrong = []
    for fault in CATALOG.faults:
        for sample in fault.samples:
            if isinstance(sample, str):
                seen = [one.fault for one in sightings(MATCHER, sample)]
                if fault.general and seen:
                    continue
                if fault not in seen:
                    wrong.append(f"{fault.code}: {sample!r} is not seen, but {[one.code for one in seen]}")
                elif fault.matters and (found := judge(sightings(MATCHER, sample)).root) and found.fault is not fault:
                    wrong.append(f"{fault.code}: {sample!r} is taken for {found.fault.code}")
    assert not wrong, "\n".join(wrong)


def test_every_series_of_values_is_recognised() -> None:
    wrong = []
    for fault in CATALOG.with_readings():
        for expected, samples in ((True, fault.samples), (False, fault.near_misses)):
            for sample in samples:
                if isinstance(sample, Sample) and sample.values and _is_found(fault, sample) is not expected:
                    wrong.append(f"{fault.code}: {sample.values} should {'' if expected else 'not '}be found")
    assert not wrong, "\n".join(wrong)


def _is_found(fault: Fault, sample: Sample) -> bool:
    assert fault.reading is not None
    watch, found = Judge([fault]), False
    for number, value in enumerate(sample.values):
        for finding in watch.take(Reading(fault.reading.name, "x", value), number * SAMPLE_EVERY_S):
            found = finding.begins
    return found


def test_every_signal_is_recognised() -> None:
    for fault in CATALOG.faults:
        for sample in fault.samples:
            if isinstance(sample, Sample) and sample.source:
                event = CLASSIFIER.classify(signal(sample.source, **sample.payload))
                assert event.code == fault.code
                assert event.message and "{" not in event.message
                assert (event.rank, event.generation, event.step, event.cause_id) == (2, 4, 7, "s")


def test_a_killed_rank_is_no_echo_whatever_it_printed_last() -> None:
    event = CLASSIFIER.classify(signal("process.exit", signal="SIGKILL", evidence="Connection closed by peer"))
    assert event.code == "process.killed" and event.role is Role.ROOT and event.message == "rank 2 killed (SIGKILL)"


def test_old_output_does_not_outweigh_the_exception() -> None:
    text = {"exception": "StrangeMood", "message": "bad", "evidence": "RuntimeError: CUDA out of memory. Tried to"}
    event = CLASSIFIER.classify(signal("process.exit", exit_code=1, **text))
    assert event.code != "cuda.oom" and event.message.endswith("StrangeMood: bad")


def test_the_last_words_of_a_process_name_its_fault() -> None:
    last = "Traceback (most recent call last):\nRuntimeError: CUDA out of memory. Tried to allocate 2.50 GiB\n"
    assert CLASSIFIER.classify(signal("process.exit", exit_code=1, evidence=last)).code == "cuda.oom"


def test_unknown_source_is_unknown() -> None:
    assert CLASSIFIER.classify(signal("meteor.strike")).code == "unknown"


def test_a_detector_may_say_the_code_itself() -> None:
    event = CLASSIFIER.classify(signal("machine", code="gpu.xid.79", evidence="NVRM: Xid", subject="gpu3"))
    assert event.code == "gpu.xid.79" and event.evidence == "NVRM: Xid"


def test_long_messages_are_cut_in_the_line_and_whole_in_the_evidence() -> None:
    event = CLASSIFIER.classify(signal("step.raised", exception="E", message="x" * 900, traceback="t" * 900))
    assert len(event.message) < 300 and len(event.evidence) == 900


def test_braces_in_user_text_are_text() -> None:
    event = CLASSIFIER.classify(signal("step.raised", exception="E", message="{rank} {0}"))
    assert "{rank} {0}" in event.message


def test_faults_of_ones_own_replace_and_add(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(ENTRY + "pattern = 'flux capacitor'\nsamples = ['flux capacitor low']\nnear_misses = ['flux ok']\n")
    catalog = load_catalog([own])
    assert [one.fault.code for one in sightings(Matcher(catalog.faults), "the flux capacitor is out")] == ["own.fault"]
    own.write_text((ENTRY + "pattern = 'mine alone'").replace("own.fault", "cuda.oom"))
    replaced = load_catalog([own])
    assert replaced.get("cuda.oom") is not None and replaced.get("cuda.oom").pattern == "mine alone"  # type: ignore[union-attr]
    assert len(replaced.faults) == len(CATALOG.faults)


@pytest.mark.parametrize(
    "text",
    [
        "nothing = 1",
        "[[fault]]\ncode = 'a'",
        "[[fault",
        "[[fault]]\ncolour = 'red'",
        ENTRY + "family = 'none'",
        ENTRY + "pattern = '('",
    ],
)
def test_bad_files_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        parse(text, "bad.toml")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("pattern = '(?=ahead)'", "not understood"),
        ("pattern = '.*'", "fixed word"),
        ("pattern = 'a|long enough'", "fixed word"),
        ("unless = 'x'", "unless without pattern"),
        ("scope = 'galaxy'", "scope 'galaxy'"),
        ("reading = { name = 'x' }", "exactly one comparison"),
        ("reading = { name = 'x', above = 1, below = 0 }", "exactly one comparison"),
        ("pattern = 'some words'\nsamples = ['other words']", "sample does not match"),
        ("pattern = 'some words'\nsamples = ['some words']\nnear_misses = ['some words']", "near miss matches"),
        ("role = 'clear'", "clears goes with role clear"),
    ],
)
def test_bad_entries_are_told_why(line: str, complaint: str) -> None:
    assert any(complaint in text for text in problems(parse(ENTRY + line, "own.toml")))


def test_a_broken_cache_is_read_past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = load_catalog()
    (kept,) = (tmp_path / "rerail").glob("faults-*.msgpack")
    kept.write_bytes(b"\x00garbage")
    assert load_catalog().faults == first.faults
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert load_catalog().faults == first.faults
