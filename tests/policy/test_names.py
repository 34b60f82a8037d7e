"""The rules for names, keys and patterns."""

from __future__ import annotations

from enum import Enum

import pytest

from django_mq.exceptions import InvalidName
from django_mq.policy.column_bounds import MAX_NAME
from django_mq.policy.names import check_name, check_pattern

BAD_NAMES = [
    "",
    " ",
    "a b",
    "a\n",
    "\n",
    "a\0",
    "ä",
    "\uff41",  # a full-width letter, which \w would take
    "a*",
    "a,b",
    "'; drop table",
    "\ud800",
    "a" * (MAX_NAME + 1),
    None,
    5,
    b"a",
    ["a"],
]


@pytest.mark.parametrize("value", BAD_NAMES)
def test_bad_name_is_refused(value: object) -> None:
    """S04, PMQ-5, NSQ-31: one rule, in bytes."""
    with pytest.raises(InvalidName, match=r"^queue .* is not a name") as caught:
        check_name(value, "queue")
    assert len(str(caught.value)) < 600
    str(caught.value).encode()  # can be logged, whatever the name contained


@pytest.mark.parametrize(
    "value", ["a", "shop.orders.placed", "A-z_0:9/.", "a" * MAX_NAME, "..", "-"]
)
def test_good_name_is_returned(value: str) -> None:
    assert check_name(value, "type") == value
    assert check_pattern(value) == value


def test_member_of_a_str_enum_becomes_the_text_that_it_is() -> None:
    class Types(str, Enum):  # noqa: UP042  (its str() is not its text)
        PLACED = "shop.orders.placed"

    found = check_name(Types.PLACED, "type")
    assert (type(found), found) == (str, "shop.orders.placed")


@pytest.mark.parametrize("value", ["*", "#", "a.*", "#.a.#", "*.*", "a.#.b:c"])
def test_good_pattern_is_returned(value: str) -> None:
    assert check_pattern(value) == value


@pytest.mark.parametrize("value", [*BAD_NAMES, "a*.b", "a.b#", "**", "##", "a.*b", "*#"])
def test_bad_pattern_is_refused(value: object) -> None:
    with pytest.raises(InvalidName, match="is not a pattern"):
        check_pattern(value)
