"""Tells what a program says from what it only quotes: data that it prints, and sentences about errors.

Pure. Called by `faults.sightings` and `faults.lines` for the few lines that may show a fault, and by `detect.logs`. A job prints
prompts, samples of its data and what a model makes of them; the words of an error that stand there are nobody's error.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_PAIRS = (
    "prompt|completion|question|answer|instruction|chosen|rejected|conversation|message(?=s)|dialog(?:ue)?|utterance"
    "|passage|document|caption|sentence|query|generation|ground_truth|reference_answer"
)
"""Keys that only data has."""
_KEYS = rf"(?:\w{{1,24}}_)?(?:{_PAIRS}|text|content|sample|example|input|generated|decoded|(?:sample|model)[ _]output)s?(?:_(?:text|str|string|\d{{1,6}}))?"
_NEVER = r"(?:exc|exception|err|error|log|stderr|stack|trace|reason)_"
"""What stands before `text` where it is an error after all."""
_STRING = (
    r"""(?:\\"(?:[^\\"]|\\\\(?:\\")?|\\[^"\\])*+(?:\\"|$)|"(?:[^"\\]|\\.)*+(?:"|\\?$)|'(?:[^'\\]|\\.)*+(?:'|\\?$))"""
)
"""In quotes, in quotes within quotes; one that the end of the line cuts off, too."""
_VALUE = re.compile(
    rf"(?<![\w.])(?!{_NEVER}){_KEYS}(?:\[\d{{1,9}}\]|\s?#?\d{{1,9}})?\\?[\"']?\s{{0,8}}(?:[:=]>?|->)\s{{0,8}}[\[(]?\s{{0,8}}"
    rf"(?P<quoted>{_STRING}(?:\s{{0,8}},\s{{0,8}}{_STRING})*+)",
    re.IGNORECASE | re.DOTALL,
)
_OPEN = re.compile(_VALUE.pattern + r"\Z", re.IGNORECASE | re.DOTALL)
_TALK = re.compile(
    r"^(?:<\|(?:im_start\|>\s{0,2})?|\[/?INST\]\s{0,2}|<)?(?:system|user|assistant|human)(?:\|?>)"
    r"|^\W{0,4}(?:prompt|completion|question|answer|instruction|user|assistant|human)s?(?:\[\d{1,9}\]|\s?#?\d{1,9})?\s?[:=]>?\s",
    re.IGNORECASE,
)
"""A line of a conversation, without quotes."""
_BEFORE = re.compile(
    r"(?:\b(?:the|a|an|this|that|any|with|of) (?:phrase|words?|term|string|text|sentence|expression|idiom)"
    r"|\b(?:what (?:is|are|does|do)|why (?:is|does|do|did)|how (?:to|do (?:i|you|we)|can (?:i|you|we)) \w{2,16}|if you (?:see|get|hit|meet)"
    r"|in (?:case|the event) of|such as|for example|e\.g\.|explain|watch out for|(?:protects|guards|helps) against|to (?:avoid|prevent))"
    r"(?: (?:a|an|the|any))?):?\s{1,4}[\"'`“‘(]{0,3}\Z",
    re.IGNORECASE,
)
_AFTER = re.compile(
    r"[\"'`”’)]{0,3}:?[\"'`”’)]{0,3},?\s{1,4}(?:(?:usually|typically|often|generally|always|mostly|simply|just|only|error|errors|message|line)\s){0,2}"
    r"(?:means?\b|(?:happens?|occurs?|appears?|arises?)\s(?:when|if|because|whenever)\b|refers? to\b"
    r"|(?:is|are|will be|would be|can be)\s(?:printed|raised|thrown|shown|displayed|defined|explained|described|handled|simulated|tested)\s"
    r"(?:when|whenever|if|by|as|in|for|on)\b"
    r"|handlers?\b|handling\b|hooks?\b|callbacks?\b|(?:detection|recovery|protection|guard|retries|retry)\s(?:is\s)?(?:on|off|ok|enabled|disabled|active|registered|installed)\b)",
    re.IGNORECASE,
)
_RECORD = re.compile(
    r"level|levelname|severity|lvl|log\.level|PRIORITY|stream|record|logger|logger_name|name|host|hostname|pid|rank|process|thread"
    r"|pod|container_name|container_id|kubernetes|service|component|caller"
)
"""Keys of a line that a logger wrote."""
_STAMP = re.compile(r"@?timestamp|time|ts|asctime|__REALTIME_TIMESTAMP")
_SAID = re.compile(r"log|msg|MESSAGE|err|errors?|exception|exc_info|exc_text|traceback|stack|stack_trace|stderr|reason")
"""Keys with what a program said itself."""
_DATA = re.compile(rf"(?:{_PAIRS})s?|input_ids|tokens", re.IGNORECASE)
_OF_DATA = re.compile(r"url|meta|metadata|id|labels?|source|lang|language|score|title")
TEXT = "text"
"""A logger's message in one program, the data itself in another."""


def unquoted(text: str) -> str:
    """The line with blanks in place of the data that it quotes."""
    if _TALK.match(text):
        return ""
    return _VALUE.sub(_blank, text) if '"' in text or "'" in text else text


def _blank(found: re.Match[str]) -> str:
    start, end = found.start("quoted") - found.start(), found.end("quoted") - found.start()
    return f"{found[0][:start]}{' ' * (end - start)}{found[0][end:]}"


def said_after(head: str, text: str) -> str:
    """Of `text`, which follows `head` in a line that is too long to be read at once, what is not part of data that `head` quotes."""
    found = _OPEN.search(head)
    if found is None:
        return text
    last = list(re.finditer(_STRING, found["quoted"], re.DOTALL))[-1][0]
    close = '\\"' if last.startswith("\\") else last[0]
    if len(last) > len(close) and last.endswith(close) and not last.endswith("\\" + close):
        return text  # it ends where the head does
    end = re.search(rf"(?<!\\){re.escape(close)}", text)
    return text[end.end() :] if end else ""


def is_sample(keys: Collection[str]) -> bool:
    """Whether an object with these keys is a piece of data, not what a logger wrote."""
    if _any(_SAID, keys) or _any(_RECORD, keys):
        return False
    if _any(_DATA, keys):
        return True
    return TEXT in keys and "message" not in keys and (not _any(_STAMP, keys) or _any(_OF_DATA, keys))


def _any(pattern: re.Pattern[str], keys: Collection[str]) -> bool:
    return any(map(pattern.fullmatch, keys))


def is_spoken_of(text: str, start: int, end: int) -> bool:
    """Whether the words from `start` to `end` are the subject of a sentence: `... means that`, `how to avoid ...`."""
    return _AFTER.match(text, end) is not None or _BEFORE.search(text[max(0, start - 64) : start]) is not None
