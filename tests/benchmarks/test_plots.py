"""Charts: well-formed with any names, readable without them, ours in the accent colour."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.plots import Bar, bars, courses, scale

SVG = "{http://www.w3.org/2000/svg}"
EVIL = 'a < b & "c" <script>alert(1)</script>'


def parsed(svg: str) -> ElementTree.Element:
    root = ElementTree.fromstring(svg)  # noqa: S314  (our own)
    assert root.get("viewBox")
    assert root.get("role") == "img"
    ids = {each.get("id") for each in root}
    assert set((root.get("aria-labelledby") or "").split()) <= ids
    assert "prefers-color-scheme: dark" in (root.findtext(f"{SVG}style") or "")
    assert not list(root.iter(f"{SVG}script"))
    return root


def texts(root: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in root.iter(f"{SVG}text")]


def test_a_bar_for_each_with_name_and_figure() -> None:
    shown = [Bar("fast", 75_200.0), Bar("django_mq", 44_000.0, ours=True), Bar("slow", 485.0)]
    root = parsed(bars("Drain", "more is better", "msg/s", shown))
    rects = list(root.iter(f"{SVG}rect"))
    assert [rect.get("class") for rect in rects] == [None, "ours", None]
    widths = [float(rect.get("width", "0")) for rect in rects]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] > 1
    assert {"Drain", "fast", "django_mq", "slow", "75,200", "44,000", "485"} <= set(texts(root))
    assert "msg/s; more is better; logarithmic scale" in texts(root)
    assert root.findtext(f"{SVG}desc") == "fast 75,200, django_mq 44,000, slow 485 msg/s"


def test_near_figures_have_a_scale_from_zero() -> None:
    root = parsed(bars("Drain", "", "msg/s", [Bar("a", 100.0), Bar("b", 50.0)]))
    first, second = (float(rect.get("width", "0")) for rect in root.iter(f"{SVG}rect"))
    assert first == pytest.approx(2 * second, abs=0.2)
    assert not any("logarithmic" in text for text in texts(root))


def test_nothing_at_all_is_a_bar_too() -> None:
    root = parsed(bars("Lost", "", "", [Bar("a", 0.0)]))
    assert [rect.get("width") for rect in root.iter(f"{SVG}rect")] == ["1"]


def test_a_course_for_each_series() -> None:
    series = {"held": [30.0, 20.0, 10.0], "free": [30.0, 30.0, 30.0]}
    root = parsed(courses("Rate", "", "msg/s", series, ["1", "2", "3"]))
    paths = list(root.iter(f"{SVG}path"))
    assert [path.get("class") for path in paths] == ["ours", None]
    assert paths[0].get("stroke-dasharray") is None
    assert paths[1].get("stroke-dasharray")
    assert len(list(root.iter(f"{SVG}circle"))) == 6
    assert {"held", "free", "1", "2", "3", "0"} <= set(texts(root))
    heights = [float(circle.get("cy", "0")) for circle in root.iter(f"{SVG}circle")][:3]
    assert heights == sorted(heights)  # downwards


def test_names_are_text_whatever_they_are() -> None:
    assert EVIL in texts(parsed(bars(EVIL, EVIL, EVIL, [Bar(EVIL, 1.0)])))
    assert EVIL in texts(parsed(courses(EVIL, EVIL, EVIL, {EVIL: [1.0]}, [EVIL])))


@pytest.mark.parametrize("values", [[1, 1], [0.003, 0.004], [7, 140], [0, 5], [1e6, 1e9]])
def test_every_figure_lies_on_its_scale(values: list[float]) -> None:
    axis = scale(values)
    assert all(0 <= axis.at(value) <= 1 for value in values)
    assert 2 <= len(axis.ticks) <= 10
    assert (axis.ticks[0], axis.ticks[-1]) == (axis.low, axis.high)
