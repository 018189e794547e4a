"""Drawings: well-formed, escaped, with round ticks, and thinned without losing what stands out."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from rerail.report import charts
from rerail.report.scales import Scale, number, thinned, ticks

SVG = "{http://www.w3.org/2000/svg}"
numbers = st.floats(allow_nan=True, allow_infinity=True, width=32)
names = st.text(alphabet='ab<>&"é ', max_size=6)


def parsed(svg: str) -> ElementTree.Element:
    assert "nan" not in re.sub(r">[^<]*<", "><", svg), svg
    return ElementTree.fromstring(svg)


@settings(deadline=None)
@given(
    st.dictionaries(names, st.lists(st.tuples(numbers, numbers), max_size=30), max_size=12),
    st.lists(st.tuples(st.floats(-1e6, 1e6), names), max_size=4),
)
def test_lines_are_well_formed_whatever_is_drawn(
    series: dict[str, list[tuple[float, float]]], marks: list[tuple[float, str]]
) -> None:
    parsed(charts.lines(series, title="<a & b>", x="x", y="y", marks=marks))


@settings(deadline=None)
@given(st.lists(st.tuples(names, st.dictionaries(names, numbers, max_size=12)), max_size=200))
def test_stacked_bars_and_bars_are_well_formed(rows: list[tuple[str, dict[str, float]]]) -> None:
    parsed(charts.stacked(rows, title="t", y="s", order=("a", "b")))
    parsed(charts.bars([(name, sum(parts.values())) for name, parts in rows], title="t", y="s"))


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e7), st.floats(0, 1e4), names), max_size=40))
def test_spans_are_well_formed(found: list[tuple[float, float, str]]) -> None:
    parsed(charts.spans([("job", [(at, at + size, kind) for at, size, kind in found])], title="t", x="s"))


def test_text_is_escaped() -> None:
    svg = charts.lines(
        {"<script>": [(0, 1), (1, 2)], "b": [(0, 1)]}, title="<b>", x="&", y='"', marks=[(0.5, "</svg>")]
    )
    assert "<script>" not in svg and svg.count("</svg>") == 1
    said = [text.text for text in parsed(svg).iter(f"{SVG}text")]
    assert "<b>" in said and "<script>" in said and "&" in said


def test_parts_of_a_bar_are_as_high_as_their_values_and_stand_on_each_other() -> None:
    svg = parsed(charts.stacked([("one", {"a": 30.0, "b": 10.0, "c": -1.0})], title="t", y="s", order=("a", "b", "c")))
    first, second = (box for box in svg.iter(f"{SVG}rect") if (box.find(f"{SVG}title")).text.startswith("one, "))  # type: ignore[union-attr]
    high = [float(box.attrib["height"]) for box in (first, second)]
    assert abs(high[0] - 3 * high[1]) < 0.3
    assert abs(float(second.attrib["y"]) + high[1] - float(first.attrib["y"])) < 0.2


def test_many_bars_become_means_and_their_title_says_so() -> None:
    svg = charts.stacked([(str(n), {"a": 2.0}) for n in range(1000)], title="t", y="s")
    assert "(mean of 17 each)" in svg and len(svg) < 40_000


def test_many_spans_become_columns_in_which_the_most_of_it_shows() -> None:
    row = [(float(n), n + 0.9, "work") for n in range(5000)] + [(n + 0.9, n + 1.0, "stop") for n in range(5000)]
    svg = charts.spans([("job", row)], title="t", x="s")
    assert "work: " in svg and "stop: " not in svg and len(svg) < 20_000


def test_many_marks_are_short_strokes_and_those_that_fall_together_one() -> None:
    line = {"a": [(0.0, 0.0), (10_000.0, 1.0)]}
    few = charts.lines(line, title="t", x="x", y="y", marks=[(5.0, "one")])
    many = charts.lines(line, title="t", x="x", y="y", marks=[(float(n), f"mark {n}") for n in range(10_000)])
    strokes = [one for one in parsed(many).iter(f"{SVG}line") if one.attrib["class"] == "mark"]
    assert len(strokes) < charts.WIDTH and len(many) < 150_000
    (whole,) = [one for one in parsed(few).iter(f"{SVG}line") if one.attrib["class"] == "mark"]
    high = [float(one.attrib["y2"]) - float(one.attrib["y1"]) for one in (whole, strokes[0])]
    assert high[0] > 100 > 10 > high[1]


def test_ticks_are_round() -> None:
    assert ticks(0, 100, 5) == [0, 20, 40, 60, 80, 100]
    assert ticks(0.13, 0.29, 4) == [0.15, 0.2, 0.25]
    assert ticks(-3, 7, 5) == [-2, 0, 2, 4, 6]
    scale = Scale.rounded(0.3, 97.0, 0, 500)
    assert (scale.low, scale.high, scale.at(50)) == (0, 100, 250)


def test_numbers_have_the_digits_that_matter() -> None:
    told = {
        0.0: "0",
        12345.6: "12,346",
        340.25: "340.2",
        0.123456: "0.1235",
        2.5: "2.5",
        1e-5: "1e-05",
        math.nan: "not known",
    }
    assert {value: number(value) for value in told} == told


def test_thinning_keeps_ends_peaks_and_gaps() -> None:
    points = [(float(n), 1.0) for n in range(100_000)]
    points[43_210] = (43_210.0, 99.0)
    points[77_777] = (77_777.0, math.nan)
    kept = thinned(points)
    assert len(kept) < 1400 and kept[0] == points[0] and kept[-1] == points[-1]
    assert points[43_210] in kept and any(math.isnan(value) for _, value in kept)


def test_a_page_needs_nothing_from_elsewhere() -> None:
    page = charts.page("<job>", [charts.bars([("a", 1.0)], title="t", y="s")])
    assert "prefers-color-scheme" in page and "<title>&lt;job&gt;</title>" in page
    assert not re.search(r"<script|<link|src=|@import|url\(", page)
    assert set(re.findall(r"https?://[^\"' ]+", page)) <= {"http://www.w3.org/2000/svg"}


def test_drawings_of_one_page_have_the_same_range() -> None:
    late = charts.lines({"loss": [(8.0, 1.0), (9.0, 2.0)]}, title="t", x="x", y="y", within=(0.0, 40.0))
    row = charts.spans([("job", [(1.0, 30.0, "a")])], title="t", x="x", within=(0.0, 40.0))
    for svg in (late, row):
        texts = [one.text for one in parsed(svg).iter() if one.tag.endswith("text")]
        assert {"0", "10", "20", "30", "40"} <= set(texts), texts


def test_neighbours_of_one_kind_are_one_box() -> None:
    row = [(n / 10, (n + 1) / 10, "a" if n != 50 else "b") for n in range(100)]
    svg = charts.spans([("job", row)], title="t", x="x")
    assert sum(one.tag.endswith("rect") for one in parsed(svg).iter()) == 3 + 2, "a, b, a, and what the colours mean"
