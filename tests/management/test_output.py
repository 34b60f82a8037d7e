"""The output of the commands is safe for a terminal, and they parse arguments exactly."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime, timedelta

import pytest

from django_mq.management import arguments, output
from django_mq.queues import HorizonHolder


def test_columns():
    text = output.table(("name", "count"), [("a", "10,000+"), ("long name", 3)])
    assert text == "NAME         COUNT\na          10,000+\nlong name        3"


def test_wide_characters_take_two_columns_and_combining_ones_none():
    """Order keys are any text."""
    rows = [("注文", 1), ("e\u0301t", 20), ("🎉x", 3), ("plain", 4)]
    assert output.table(("key", "count"), rows).split("\n") == [
        "KEY    COUNT",
        "注文       1",
        "e\u0301t        20",
        "🎉x        3",
        "plain      4",
    ]


def test_a_number_that_is_missing_leaves_its_column_on_the_right():
    assert output.table(("count",), [("-",), (12,)]) == "COUNT\n    -\n   12"


@pytest.mark.parametrize("cells", [["-", "-"], ["1 min 54 s", "-"], ["7", "2026"]])
def test_a_column_stays_on_its_side_whatever_its_values_are(cells):
    """`mq_status --watch` shows OLDEST every 2 s, a worker's start the queues without handlers."""
    rows = [("mail", cell, cell) for cell in cells]
    lines = output.table(("queue", "oldest", "types"), rows).split("\n")
    starts = {
        (line.index(cell), line.rindex(cell)) for line, cell in zip(lines[1:], cells, strict=True)
    }
    assert starts == {(lines[0].index("OLDEST"), lines[0].index("TYPES"))}


def test_control_characters_are_taken_out():
    """S30: no colours, no cursor, no title, no new lines, no reversed text."""
    text = output.table(("a", "b"), [("\x1b[31mred\x1b]0;title\x07", "x\r\ny\u202ez\x9b2J")])
    row = text.partition("\n")[2]
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 or c == "\u202e" for c in row)
    assert row.startswith("\ufffd[31mred")


def test_a_cell_has_an_end():
    assert len(output.table(("a",), [("x" * 10_000,)])) < 1000


def test_json_is_ascii_and_plain():
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    holder = HorizonHolder("session", "\x1b[2J\u202eé", "", "", "", moment)
    text = output.as_json({"a": [holder, timedelta(seconds=90)], "b": frozenset("ba"), 3: None})
    assert text.isascii()
    assert "\x1b" not in text
    assert json.loads(text) == {
        "a": [
            {
                "kind": "session",
                "name": "\x1b[2J\u202eé",
                "login": "",
                "application": "",
                "state": "",
                "since": "2026-01-02T03:04:05+00:00",
            },
            90.0,
        ],
        "b": ["a", "b"],
        "3": None,
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.9, "59 s"), (60, "1 min"), (3600, "1 h"), (-5, "0 s"), (90061, "1 d 1 h")],
)
def test_span(seconds, text):
    assert output.span(timedelta(seconds=seconds)) == text


@pytest.mark.parametrize("text", ["", "-5", "5 years", "1e9", "nan", "99999999999", "5mm"])
def test_invalid_duration_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        arguments.duration(text)


def test_ports():
    for port in (1, 65535):
        assert arguments.port_and_address(str(port)) == (port, "127.0.0.1")
    for text in ("0", "65536", "0.0.0.0:0"):
        with pytest.raises(argparse.ArgumentTypeError):
            arguments.port_and_address(text)


def test_moments(settings):
    settings.TIME_ZONE = "Europe/Berlin"
    assert arguments.moment("2026-12-24T18:00").isoformat() == "2026-12-24T18:00:00+01:00"
    assert arguments.moment("2026-12-24 18:00Z").isoformat() == "2026-12-24T18:00:00+00:00"


@pytest.mark.parametrize("text", ["", "tomorrow", "2026-13-01T00:00", "\x1b[2J"])
def test_invalid_moment_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        arguments.moment(text)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("text", ["99999999999999", "9999999999d", "1234567890.5h"])
def test_too_long_a_duration_is_refused_as_such(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is too long: at most 9 digits"):
        arguments.duration(text)
