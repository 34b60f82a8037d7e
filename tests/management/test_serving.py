"""Names and patterns that an operator misspelled."""

from __future__ import annotations

from typing import Any

import pytest

from django_mq import handler, handlers
from django_mq.conf import get_settings
from django_mq.management.serving import served, unmatched

KNOWN = ["default", "mail", "reports.daily", "reports.weekly", "shop.orders.placed"]


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("mial", "mail"),
        ("report.*", "reports.*"),
        ("reports.*.*", "reports.*"),
        ("rports.#", "reports.#"),
        ("*.dayly", "*.daily"),
        ("mail.*", "mail.#"),
        ("shop.*", "shop.#"),
        ("#.wekly", "#.weekly"),
        ("shop.order.*", "shop.orders.*"),
        ("shop.*.plaecd", "shop.*.placed"),
    ],
)
def test_similar_name_is_suggested(pattern: str, meant: str) -> None:
    warning = unmatched(pattern, KNOWN)
    assert repr(pattern) in warning
    assert warning.endswith(f"did you mean {meant!r}?")


@pytest.mark.parametrize("pattern", ["payments.*", "x.#"])
def test_nothing_is_offered_that_is_not_alike(pattern: str) -> None:
    assert unmatched(pattern, KNOWN).endswith(f"matches {pattern!r}")


@pytest.mark.parametrize("pattern", ["mail", "#", "*", "mail.#", "reports.*", "shop.#.placed"])
def test_a_pattern_that_matches_is_no_typo(pattern: str) -> None:
    assert unmatched(pattern, KNOWN) == ""


def test_a_worker_shows_its_queues_also_those_without_a_handler(settings: Any) -> None:
    settings.DJANGO_MQ = {"QUEUES": {"mail.in": {}, "mail.out": {}, "other": {}}}
    with handlers.isolated():
        handler(*"abcdef", queue="mail.out", name="h")(print)
        table = served(["mail.*"], get_settings())
    rows = [line.split(maxsplit=2) for line in table.splitlines()[1:]]
    assert rows == [["mail.in", "-", "-"], ["mail.out", "h", "a, b, c, d, e, ..."]]


def test_a_handler_with_several_queues_is_shown_once(settings: Any) -> None:
    names = [f"q{number}" for number in range(8)]
    with handlers.isolated():
        handler("a", queue=names[0], queues=names[1:], name="h")(print)
        assert served(["#"], get_settings()).splitlines()[2:] == [
            "q0, q1, q2, q3, q4, ...  h        a"
        ]
        assert served(["q1"], get_settings()).splitlines()[1:] == ["q1     h        a"]
