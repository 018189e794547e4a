"""The catalogue's samples are its test vectors: each must be recognised as the fault it stands under."""

from __future__ import annotations

import pytest

from rerail.detect.classify import classify
from rerail.errors import ConfigError
from rerail.faults.catalog import Fault, Sample, load_catalog, parse
from rerail.flow import Role, Signal

CATALOG = load_catalog()
SAMPLES = [(fault, sample) for fault in CATALOG.faults for sample in fault.samples]


def signal(source: str, **payload: str | int | float | bool) -> Signal:
    return Signal(id="s", job="j", at=1.0, source=source, node="n0", rank=2, generation=4, step=7, payload=payload)


@pytest.mark.parametrize(("fault", "sample"), SAMPLES, ids=[fault.code for fault, _ in SAMPLES])
def test_sample(fault: Fault, sample: Sample) -> None:
    event = classify(signal(sample.source, **sample.payload), CATALOG)
    assert event.code == fault.code
    assert event.message and "{" not in event.message
    assert (event.rank, event.generation, event.step, event.cause_id) == (2, 4, 7, "s")


def test_every_fault_but_the_last_has_a_sample_and_codes_are_unique() -> None:
    assert [fault.code for fault in CATALOG.faults if not fault.samples] == ["unknown"]
    codes = [fault.code for fault in CATALOG.faults]
    assert len(codes) == len(set(codes)) and codes[-1] == "unknown" and len(codes) >= 25


def test_a_killed_rank_is_no_echo_whatever_it_printed_last() -> None:
    event = classify(signal("process.exit", signal="SIGKILL", evidence="Connection closed by peer"), CATALOG)
    assert event.code == "process.killed" and event.role is Role.ROOT and event.message == "rank 2 killed (SIGKILL)"


def test_old_output_does_not_outweigh_the_exception() -> None:
    event = classify(
        signal("process.exit", exit_code=1, exception="ValueError", message="bad", evidence="CUDA out of memory"),
        CATALOG,
    )
    assert event.code == "script.exception" and event.message == "rank 2 ended with ValueError: bad"


def test_unknown_source_is_unknown() -> None:
    assert classify(signal("meteor.strike"), CATALOG).code == "unknown"


def test_long_messages_are_cut_in_the_line_and_whole_in_the_evidence() -> None:
    event = classify(signal("step.raised", exception="E", message="x" * 900, traceback="t" * 900), CATALOG)
    assert len(event.message) < 300 and len(event.evidence) == 900


def test_braces_in_user_text_are_text() -> None:
    assert "{rank} {0}" in classify(signal("step.raised", exception="E", message="{rank} {0}"), CATALOG).message


@pytest.mark.parametrize("text", ["nothing = 1", '[[fault]]\ncode = "a"', "[[fault", '[[fault]]\ncolour = "red"'])
def test_bad_files_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        parse(text, "bad.toml")


def test_bad_pattern_is_named() -> None:
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        parse('[[fault]]\ncode="a"\ntitle="a"\nkind="a"\nsources=[]\nmessage="a"\npattern="("', "bad.toml")
