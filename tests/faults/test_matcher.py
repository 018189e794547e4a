"""The matcher looks at few lines and must lose none: what a pattern finds alone, it finds among all, in any surroundings."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from rerail.errors import ConfigError
from rerail.faults.anchors import MAX_LENGTH, is_certain, is_telling, words_of
from rerail.faults.catalog import Fault, load_catalog
from rerail.faults.matcher import MAX_LINE, Matcher, fits, plain, unanchored
from rerail.faults.sightings import sightings
from rerail.flow import Role

SHIPPED = Matcher(load_catalog().faults)
PREFIXES = [
    "",
    "[rank3]: ",
    "[2026-11-02 10:00:01,123] ",
    "0: ",
    "Nov  2 10:00:01 node7 train[31]: ",
    "(pid=31) ",
    "[1,2]<stderr>:",
]
RELAXED = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def fault(code: str, pattern: str, **more: object) -> Fault:
    return Fault(code=code, title=code, kind="os", pattern=pattern, words=words_of(pattern), **more)  # type: ignore[arg-type]


def seen(matcher: Matcher, data: bytes) -> list[str]:
    """Codes of everything that is found the fast way, prefix and all."""
    data = plain(data)
    lines = [data[start:end].decode() for start, end in matcher.spans(data)]
    return [one.fault.code for line in lines for one in sightings(matcher, line)]


# --- words ---


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("out of memory", (("out of memory",),)),
        ("Out Of MEMORY", (("out of memory",),)),
        ("(?i)Out of", (("out of",),)),
        (r"cudaMalloc \d+ failed", (("cudamalloc ",), (" failed",))),
        ("alpha|omega", (("alpha", "omega"),)),
        ("(?:very )?slow disk", (("slow disk",),)),
        ("(?:very )+slow disk", (("slow disk",), ("very ",))),
        ("(?:ab|cd)?longer", (("longer",),)),
        (r"\bword\b here", (("word here",),)),
        ("prefix(?:one|two)suffix", (("prefix",), ("suffix",), ("one", "two"))),
        ("alpha|o.*a", (("alpha", "o"),)),
        (r"a{3,5}x", (("a",), ("x",))),
        ("grün kaputt", (("n kaputt",), ("gr",))),
        ('he said "stop now" twice', (("he said ",), ("stop now",), (" twice",))),
        (r"err[[:digit:]]+ in disk", ((" in disk",), ("err",))),
        ("x" * 50, (("x" * MAX_LENGTH,),)),
        ("", ()),
        (r"\d+|word", ()),
        (r".*", ()),
    ],
)
def test_words_are_what_every_match_contains(pattern: str, words: tuple[tuple[str, ...], ...]) -> None:
    assert words_of(pattern) == words


@pytest.mark.parametrize("pattern", ["(", "a{99999999999999}", "[z-a]", "(?i", "*a"])
def test_a_pattern_that_is_none_is_an_error_that_names_it(pattern: str) -> None:
    with pytest.raises(ConfigError, match="not understood"):
        words_of(pattern)


def test_a_pattern_without_a_word_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"own\.short .*no fixed word"):
        Matcher([fault("own.short", r"\d+ab")])


def test_short_and_common_words_do_not_tell() -> None:
    assert is_telling(words_of("device fell off the bus"))
    for pattern in ("loss", "warning", "  exit  ", "timeout|device fell off the bus"):
        assert is_certain(words_of(pattern)) and not is_telling(words_of(pattern)), pattern


# --- nothing is lost ---

LITERALS = st.sampled_from(
    ["loss", "nan", "Error", "device lost", "timeout", "exit", "K", "s", "x", '"', "<", "é", " ", ":"]
)
ATOMS = st.one_of(
    LITERALS,
    st.sampled_from([".", r"\d", r"\s", r"\w", "[abc]", "[\"']", "[^x]", r"\b", "[[:alpha:]]", ".*", r"\S{0,3}"]),
)
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        inner.map(lambda part: f"(?:{part})?"),
        inner.map(lambda part: f"(?:{part})+"),
        inner.map(lambda part: f"(?i:{part})"),
    ),
    max_leaves=6,
)


@st.composite
def pattern_and_line(draw: st.DrawFn) -> tuple[str, str]:
    pattern = draw(st.sampled_from(["", "^", "(?i)", "(?i)^"])) + draw(PATTERNS) + draw(st.sampled_from(["", "$"]))
    assume(is_certain(words_of(pattern)))
    line = draw(st.from_regex(re.compile(pattern.replace("[[:alpha:]]", "[a-z]"))))
    return pattern, re.sub(r"[\r\n\x85\u2028\u2029\x00\x1b]", " ", line)


@given(case=pattern_and_line(), before=st.sampled_from(PREFIXES), crlf=st.booleans())
@example(case=("^loss", "loss"), before="[rank3]: ", crlf=True)
@example(case=("(?i)loss", "loſſ"), before="", crlf=False)
@example(case=("exit.$", "exité"), before="", crlf=True)
@RELAXED
def test_the_words_never_hide_a_line_that_the_pattern_matches(case: tuple[str, str], before: str, crlf: bool) -> None:
    pattern, line = case
    one = fault("own.one", pattern)
    raw = before + line
    wanted = bool(sightings(Alone(one), raw))  # type: ignore[arg-type]
    data = ("first line\n" + raw + ("\r\n" if crlf else "\n") + "last line\n").encode("utf-8", "replace")
    found = "own.one" in seen(Matcher([one]), data)
    assert found or not wanted, f"{pattern!r} matches {raw!r}, but the line is not looked at"


class Alone:
    """A matcher without any shortcut."""

    def __init__(self, one: Fault) -> None:
        self._one = one

    def match(self, line: str) -> tuple[Fault, ...]:
        return (self._one,) if fits(self._one, line) else ()


@given(noise=st.binary(max_size=200), at=st.integers(0, 200))
@RELAXED
def test_bytes_that_are_no_text_hide_nothing(noise: bytes, at: int) -> None:
    noise = re.sub(rb"[\r\n\x1b]", b"", noise)
    data = b"ok\n" + noise[:at] + b" flux capacitor " + noise[at:] + b"\nok\n"
    assert seen(Matcher([fault("own.flux", "flux capacitor")]), data) == ["own.flux"]


@pytest.mark.parametrize("noise", [b"\xff", b"\xe2\x82", b"\xc3\x28", b"\xf0\x9f\x98", b"\x00", b"\xed\xa0\x80"])
def test_broken_characters_within_a_match_are_characters(noise: bytes) -> None:
    matcher = Matcher([fault("own.loss", "loss.{1,3}nan")])
    assert seen(matcher, b"loss" + noise + b"nan\n") == ["own.loss"], f"lost with {noise!r}"


def test_every_shipped_sample_is_found_the_fast_way_in_one_large_log() -> None:
    lost = []
    for one in SHIPPED.faults:
        for sample in one.samples:
            if isinstance(sample, str) and sightings(SHIPPED, sample):
                slow = {seen.fault.code for seen in sightings(SHIPPED, sample)}
                if not slow <= set(seen(SHIPPED, b"step 1\n" + sample.encode() + b"\r\nstep 2\n")):
                    lost.append(f"{one.code}: {sample!r}")
    assert not lost, "\n".join(lost)


# --- where lines begin and end ---


@pytest.mark.parametrize("prefix", [*PREFIXES, "\x1b[31m", '{"log":"', "2026-01-02T03:04:05.678901234Z stderr F "])
def test_a_common_word_at_the_beginning_is_found_behind_prefixes(prefix: str) -> None:
    one = fault("own.loss", r"^loss (?:is|=) nan\b")
    end = '\\n","stream":"stderr"}' if prefix.startswith("{") else ""
    assert not is_telling(one.words)
    assert seen(Matcher([one]), f"{prefix}loss = nan{end}\n".encode()) == ["own.loss"], f"lost behind {prefix!r}"


@pytest.mark.parametrize("tail", ["\r", "\x1b[0m", " ", '\\n","stream":"stderr"}'])
def test_the_end_of_a_line_is_found_before_what_hangs_on_it(tail: str) -> None:
    head = '{"log":"' if tail.startswith("\\n") else ""
    assert seen(Matcher([fault("own.exit", r"^exit \d+\s*$")]), f"{head}exit 7{tail}\n".encode()) == ["own.exit"]


def test_what_is_quoted_in_json_is_found() -> None:
    matcher = Matcher([fault("own.a", 'open "flux" lost'), fault("own.b", "<exit> & stop")])
    data = b'{"log":"cannot open \\"flux\\" lost\\n"}\n{"log":"\\u003cexit\\u003e \\u0026 stop\\n"}\n'
    assert seen(matcher, data) == ["own.a", "own.b"]


def test_progress_bars_and_what_they_overwrite_are_lines_of_their_own() -> None:
    matcher = Matcher([fault("own.flux", "^flux capacitor lost$")])
    assert seen(matcher, b" 1%|#\rflux capacitor lost\r 2%|##\r 3%|###\n") == ["own.flux"]


def test_colours_within_words_are_taken_out() -> None:
    data = b"\x1b[1;31mflux\x1b[0m \x1b[38;5;9mcapac\x1b[Kitor\x1b]0;title\x07\x1b(B\n"
    assert plain(data) == b"flux capacitor\n"
    assert seen(Matcher([fault("own.flux", "flux capacitor")]), data) == ["own.flux"]


@pytest.mark.parametrize("at", [0, 1, MAX_LINE // 2 - 7, MAX_LINE // 2, MAX_LINE - 8, MAX_LINE + 1, 5 * MAX_LINE - 3])
@pytest.mark.parametrize("first", ["", "flux first "])
def test_a_long_line_is_looked_at_everywhere(at: int, first: str) -> None:
    matcher = Matcher([fault("own.flux", "flux capacitor number 7 lost"), fault("own.first", "flux first")])
    line = first + "x" * at + " flux capacitor number 7 lost " + "y" * 3 * MAX_LINE
    found = seen(matcher, line.encode())
    assert set(found) == ({"own.flux", "own.first"} if first else {"own.flux"})
    assert len(found) <= 4


def test_windows_are_bounded_in_order_and_overlap_where_a_line_is_cut() -> None:
    data = b"short flux word\n" + b"flux word " * 4000 + b"\nflux word"
    spans = list(Matcher([fault("own.flux", "flux word")]).spans(data))
    assert spans[0] == (0, 15) and spans[-1] == (len(data) - 9, len(data))
    assert all(0 < end - start <= MAX_LINE for start, end in spans)
    assert all(b"\n" not in data[start:end] for start, end in spans)
    inside = [span for span in spans if 16 <= span[0] < len(data) - 10]
    for before, after in itertools.pairwise(inside):
        assert before[0] <= after[0] < before[1] < after[1], f"between {before} and {after} something is not looked at"


def test_a_match_does_not_reach_over_lines() -> None:
    matcher = Matcher([fault("own.loss", r"loss\s+[^x]*nan")])
    assert seen(matcher, b"loss \nnan\n") == []
    assert seen(matcher, b"loss \nloss 1 nan\nnan\n") == ["own.loss"]


# --- which of several ---


def test_benign_hides_all_and_general_gives_way() -> None:
    special = fault("own.special", "flux capacitor lost")
    general = fault("own.general", "capacitor", general=True)
    benign = fault("own.benign", "expected: .*capacitor", role=Role.BENIGN)
    matcher = Matcher([general, special, benign])
    assert [one.code for one in matcher.match("flux capacitor lost")] == ["own.special"]
    assert [one.code for one in matcher.match("some capacitor")] == ["own.general"]
    assert [one.code for one in matcher.match("expected: flux capacitor lost")] == ["own.benign"]


def test_exceptions_hold_for_the_line_and_for_its_prefix() -> None:
    matcher = Matcher([fault("own.flux", "flux lost", unless="simulated|unit-test")])
    assert seen(matcher, b"flux lost\n") == ["own.flux"]
    assert seen(matcher, b"flux lost (simulated)\n") == []
    assert seen(matcher, b"Nov  2 10:00:01 node7 unit-test[31]: flux lost\n") == []


def test_case_counts_unless_the_pattern_says_otherwise() -> None:
    assert seen(Matcher([fault("own.a", "Flux Lost")]), b"flux lost\n") == []
    assert seen(Matcher([fault("own.a", "(?i)Flux Lost")]), b"fLUX lOST\n") == ["own.a"]


def test_nothing_to_look_for_finds_nothing() -> None:
    assert seen(Matcher([]), b"\x00never and anything else\n" * 3) == []


@pytest.mark.parametrize(
    ("pattern", "loose"),
    [
        ("[^^]^", "[^^](?:^"),
        (r"\^x", r"\^x"),
        ("[]^]x", "[]^]x"),
        ("[[:alpha:]^]x", "[[:alpha:]^]x"),
        ("(?P<name>x)", "(?P<name>x)"),
        (r"[\]^]", r"[\]^]"),
    ],
)
def test_only_real_anchors_are_loosened(pattern: str, loose: str) -> None:
    assert unanchored(pattern).startswith(loose)


# --- no stall ---

MILLION = 1 << 20
BOMBS = {
    "a": b"a" * MILLION,
    "spaces": b" " * MILLION,
    "common words": b"loss Error: exitcode Status: Fan | " * (MILLION // 35),
    "words without end": b"number of nan iterations: " * (MILLION // 26),
    "brackets": b"[" * MILLION,
    "flood": b"loss Error: exitcode Status: Fan |\n" * (MILLION // 35),
    "returns": b"loss Error: exitcode\r" * (MILLION // 21),
    "nul": b"\x00" * MILLION,
    "broken": b"\xff\xfe" * (MILLION // 2),
    "escapes": b"\x1b[" * (MILLION // 2),
    "titles": b"\x1b]0;" * (MILLION // 4),
    "digits": b"1:" * (MILLION // 2),
}


@pytest.mark.parametrize("name", BOMBS)
def test_no_input_stalls(name: str) -> None:
    began = time.process_time()
    data = plain(BOMBS[name])
    for number, (start, end) in enumerate(SHIPPED.spans(data)):
        if number < 100:
            sightings(SHIPPED, data[start:end].decode("utf-8", "replace"))
    spent = time.process_time() - began
    assert spent < 4.0, f"a megabyte of {name} took {spent:.1f} s"


def test_no_pattern_stalls() -> None:
    matcher = Matcher([fault("own.bomb", r"(?:(?:a+)+)+boom|(?:a|aa)*bang$|(?:a*)*(?:a*)*crash")])
    began = time.process_time()
    assert seen(matcher, b"a" * MILLION + b"\n" + b"a" * 2000 + b"bang\n") == ["own.bomb"]
    assert time.process_time() - began < 2.0
