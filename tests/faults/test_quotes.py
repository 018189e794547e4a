"""Text that quotes an error or talks about one is no error; what a program says itself is, in whatever it is wrapped."""

from __future__ import annotations

import json
import time

import pytest

from rerail.faults.catalog import load_catalog
from rerail.faults.matcher import Matcher
from rerail.faults.quotes import said_after, unquoted
from rerail.faults.sightings import sightings

MATCHER = Matcher(load_catalog().faults)
OOM = "RuntimeError: CUDA out of memory. Tried to allocate 2.50 GiB"
SLOW_S = 0.5

QUOTED = [
    'prompt: "CUDA out of memory means that ..."',
    f"[rank0]: sample 3: {{'text': '{OOM}', 'label': 0}}",
    f"[rank1]: batch texts=['hello', '{OOM}']",
    f"decoded: '{OOM}'",
    f'2026-11-02 10:00:01 ERROR generated text: "{OOM}"',
    f'Sample output: "{OOM}"',
    f'example 5 -> "{OOM}"',
    f"Prompt #3: {OOM}",
    "User: why do I get CUDA out of memory?",
    f'input_text="{OOM} and the line is cut off',
    json.dumps({"prompt": OOM, "completion": "Lower the batch size."}),
    json.dumps({"text": OOM}),
    json.dumps({"text": OOM, "timestamp": "2019-04-25T12:57:54Z", "url": "https://example.org"}),
    json.dumps({"messages": [{"role": "user", "content": f'How to fix "{OOM}"?'}]}),
    json.dumps({"conversations": [{"from": "human", "value": OOM}]}),
    json.dumps({"question": "What is it?", "message": OOM}),
    json.dumps({"level": "error", "msg": "sample skipped", "prompt": OOM}),
    json.dumps({"log": f'prompt: "{OOM}"\n', "stream": "stdout"}),
    json.dumps({"log": json.dumps({"prompt": OOM}) + "\n", "stream": "stdout"}),
]
SPOKEN_OF = [
    "Received SIGTERM handler registration ok",
    "The phrase Traceback (most recent call last) is printed when an exception ends a script",
    "CUDA out of memory usually means that the batch is too large",
    "hint: how to avoid CUDA out of memory errors: https://example.org",
    "In case of CUDA out of memory, lower the batch size",
    "Segmentation fault handler installed",
]
SAID = [
    json.dumps({"log": f"{OOM}\n", "stream": "stderr"}),
    json.dumps({"message": OOM}),
    json.dumps({"msg": OOM}),
    json.dumps({"event": OOM}),
    json.dumps({"error": OOM}),
    json.dumps({"level": "error", "text": OOM}),
    json.dumps({"text": OOM, "record": {"line": 3}}),
    json.dumps({"time": "2026-11-02T10:00:01Z", "text": OOM}),
    json.dumps({"prompt": "a poem", "error": OOM}),
    json.dumps({"level": "error", "msg": "request failed", "prompt": "a poem", "error": OOM}),
    f'failed on prompt="a poem": {OOM}',
    f'worker said "{OOM}"',
    f'exc_text="{OOM}"',
    f"error_message: '{OOM}'",
    f"text: {OOM}",
    f"ERROR sample 3 failed: {OOM}",
    "[rank3]: torch.OutOfMemoryError was raised: CUDA out of memory",
    "CUDA out of memory occurred in step 3",
    "Received SIGTERM, saving",
]


@pytest.mark.parametrize("line", QUOTED + SPOKEN_OF)
def test_what_is_quoted_or_talked_about_is_no_fault(line: str) -> None:
    assert [one.fault.code for one in sightings(MATCHER, line)] == []


@pytest.mark.parametrize("line", SAID)
def test_what_a_program_says_itself_is_heard(line: str) -> None:
    assert sightings(MATCHER, line)


def test_the_rest_of_the_line_keeps_its_place() -> None:
    line = f'prompt="{OOM}" and then {OOM}'
    assert unquoted(line).index(OOM) == line.rindex(OOM) and len(unquoted(line)) == len(line)


@pytest.mark.parametrize(
    ("head", "text", "said"),
    [
        ('{"text": "a long', f'{OOM}", "error": "x"', ', "error": "x"'),
        ('{"text": "a long', f'\\"{OOM}\\" and on', ""),
        ('{"text": "a long story", ', OOM, OOM),
        ('{"text": "a long story"', OOM, OOM),
        ('{"log": "', OOM, OOM),
        ('{"log":"prompt: \\"a long', f'{OOM}\\" ok', " ok"),
        ("no quotes", OOM, OOM),
    ],
)
def test_the_middle_of_a_long_line(head: str, text: str, said: str) -> None:
    assert said_after(head, text) == said


@pytest.mark.parametrize(
    "unit", ['"', "'", "\\", '\\"', 'text="', 'text="",', "text: ['',", "prompt ", "a_", "text=\\\\"]
)
def test_eight_kilobytes_of_anything_take_no_time(unit: str) -> None:
    for head in ("", 'text="', "text: ['", 'text=\\"'):
        began = time.process_time()
        unquoted((head + unit * 8192)[:8192])
        said_after((head + unit * 65536)[:65536], unit * 1000)
        assert time.process_time() - began < SLOW_S, f"{head!r} and {unit!r} again and again"
