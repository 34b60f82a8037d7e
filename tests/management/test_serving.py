"""Names and patterns that an operator misspelled."""

from __future__ import annotations

import pytest

from django_mq.management.serving import unmatched

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
def test_what_was_meant_is_offered(pattern: str, meant: str) -> None:
    warning = unmatched(pattern, KNOWN)
    assert repr(pattern) in warning
    assert warning.endswith(f"did you mean {meant!r}?")


@pytest.mark.parametrize("pattern", ["payments.*", "x.#"])
def test_nothing_is_offered_that_is_not_alike(pattern: str) -> None:
    assert unmatched(pattern, KNOWN).endswith(f"matches {pattern!r}")


@pytest.mark.parametrize("pattern", ["mail", "#", "*", "mail.#", "reports.*", "shop.#.placed"])
def test_a_pattern_that_matches_is_no_typo(pattern: str) -> None:
    assert unmatched(pattern, KNOWN) == ""
