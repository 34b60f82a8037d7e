"""Patterns, names, `where`: which handlers get a message, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from django_mq.exceptions import InvalidName
from django_mq.policy.routing import REMEMBERED_TYPES, Pattern, RoutingTable


@dataclass(frozen=True)
class To:
    name: str
    patterns: tuple[str, ...]
    where: Mapping[str, Any] | None = None
    match: str = "all"


def names(type: str, metadata: Mapping[str, Any], to: Sequence[To]) -> list[str]:
    return [each.name for each in RoutingTable(to).match(type, metadata)]


@pytest.mark.parametrize(
    ("pattern", "type", "expected"),
    [
        # RMQ-11, the examples of the talk
        ("mailer.ad.expired", "mailer.ad.expired", True),
        ("mailer.ad.expired", "mailer.ad.created", False),
        ("mailer.ad.*", "mailer.ad.expired", True),
        ("mailer.user.*", "mailer.ad.expired", False),
        ("mailer.#", "mailer.ad.expired", True),
        # PMQ-28, PMQ-29: `*` is one word of any text, and the number of words counts
        ("*", "a", True),
        ("*", "a.b", False),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("*.b", "a.b", True),
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.b.d", False),
        ("*.*", "a.b", True),
        ("*.*", "a.b.c", False),
        ("a.b", "a", False),
        ("a.b", "a.b.c", False),
        # RMQ-10: `#` is zero or more words; alone it is fanout
        ("#", "a", True),
        ("#", "a.b.c", True),
        ("a.#", "a", True),
        ("a.#", "ab", False),
        ("#.c", "c", True),
        ("#.c", "a.b.c", True),
        ("#.c", "a.c.b", False),
        ("a.#.c", "a.c", True),
        ("a.#.c", "a.b.b.c", True),
        ("a.#.c", "a.c.b", False),
        ("a.#.b.#.c", "a.x.b.b.c", True),
        ("a.#.b.#.c", "a.x.c", False),
        ("#.*", "a", True),
        ("#.#", "a", True),
        ("*.#.*", "a", False),
        ("*.#.*", "a.b", True),
        ("#.a.b", "a.a.b", True),
        # Words are compared whole and with their case
        ("a.B", "a.b", False),
        ("a", "ab", False),
        ("a.*", "a.", True),
        # Wildcards in a type that did not come through broadcast() are plain text
        ("a", "#", False),
        ("a.b", "a.*", False),
    ],
)
def test_pattern_matches(pattern: str, type: str, expected: bool) -> None:
    """PMQ-28, PMQ-29, RMQ-10, RMQ-11."""
    assert Pattern(pattern).matches(type) is expected


@cache
def by_definition(pattern: tuple[str, ...], words: tuple[str, ...]) -> bool:
    if not pattern:
        return not words
    if pattern[0] == "#":
        return any(by_definition(pattern[1:], words[n:]) for n in range(len(words) + 1))
    return bool(words) and pattern[0] in ("*", words[0]) and by_definition(pattern[1:], words[1:])


@given(
    st.lists(st.sampled_from(["a", "b", "*", "#"]), min_size=1, max_size=8),
    st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=8),
)
@example(["#", "a", "#", "a", "b"], ["a", "a", "b", "a", "b"])
def test_pattern_matches_as_defined(pattern: list[str], words: list[str]) -> None:
    expected = by_definition(tuple(pattern), tuple(words))
    assert Pattern(".".join(pattern)).matches(".".join(words)) is expected


def test_many_hashes_do_not_blow_up() -> None:
    """Backtracking at each of the 31 `#` would take longer than the age of the universe."""
    pattern = Pattern(".".join(["#.a"] * 31 + ["b"]))
    assert not pattern.matches(".".join(["a"] * 64))


def test_pattern_without_wildcards_is_plain() -> None:
    assert [Pattern(each).is_plain for each in ("mail", "mail.eu", "mail.*", "#")] == [
        True,
        True,
        False,
        False,
    ]


def test_all_matching_subscriptions_in_order_each_once() -> None:
    """PMQ-30, RMQ-12: only once even when two patterns of one subscription match."""
    to = [
        To("statistics", ("#",)),
        To("mailer", ("shop.orders.*", "shop.#", "shop.orders.placed")),
        To("other", ("shop.users.*",)),
        To("direct", ("shop.orders.placed",)),
    ]
    assert names("shop.orders.placed", {}, to) == ["statistics", "mailer", "direct"]
    assert names("billing.paid", {}, to) == ["statistics"]
    assert names("billing.paid", {}, to[1:]) == []
    assert names("billing.paid", {}, []) == []


@pytest.mark.parametrize(
    ("where", "match", "metadata", "expected"),
    [
        (None, "all", {}, True),
        ({}, "all", {}, True),
        ({}, "any", {}, True),
        ({"tier": "gold"}, "all", {"tier": "gold", "more": 1}, True),
        ({"tier": "gold"}, "all", {"tier": "silver"}, False),
        ({"tier": "gold"}, "all", {}, False),
        ({"tier": "gold", "eu": True}, "all", {"tier": "gold", "eu": True}, True),
        ({"tier": "gold", "eu": True}, "all", {"tier": "gold"}, False),
        ({"tier": "gold", "eu": True}, "any", {"tier": "gold"}, True),
        ({"tier": "gold", "eu": True}, "any", {"tier": "silver", "eu": False}, False),
        ({"tier": "gold"}, "any", {}, False),
        # Compared as JSON: true is not 1, 1 is 1.0, and null must be present
        ({"eu": True}, "all", {"eu": 1}, False),
        ({"n": 1}, "all", {"n": True}, False),
        ({"n": 0}, "all", {"n": False}, False),
        ({"n": 1}, "all", {"n": 1.0}, True),
        ({"n": 1}, "all", {"n": "1"}, False),
        ({"n": None}, "all", {}, False),
        ({"n": None}, "all", {"n": None}, True),
        # ... at every depth
        ({"n": {"x": [1]}}, "all", {"n": {"x": [True]}}, False),
        ({"n": {"x": [True]}}, "all", {"n": {"x": [1]}}, False),
        ({"n": [{"x": False}]}, "all", {"n": [{"x": 0}]}, False),
        ({"n": {"x": [1, True, None]}}, "all", {"n": {"x": [1.0, True, None]}}, True),
        ({"n": {"x": 1}}, "all", {"n": {"x": 1, "y": 2}}, False),
        ({"n": [1, 2]}, "all", {"n": [1]}, False),
        ({"n": [1]}, "all", {"n": {"x": 1}}, False),
    ],
)
def test_where_matches_metadata(
    where: Mapping[str, Any] | None, match: str, metadata: Mapping[str, Any], expected: bool
) -> None:
    """RMQ-10: headers, all or any of them."""
    to = [To("it", ("a",), where, match)]
    assert names("a", metadata, to) == (["it"] if expected else [])
    assert names("b", metadata, to) == []
    assert [each.matches for each in RoutingTable(to).explain("a", metadata)] == [expected]


def test_table_answers_by_metadata_also_when_it_remembers_the_type() -> None:
    table = RoutingTable([To("gold", ("a",), {"tier": "gold"}), To("all", ("#",))])
    for _ in range(2):
        assert [each.name for each in table.match("a", {"tier": "gold"})] == ["gold", "all"]
        assert [each.name for each in table.match("a", {})] == ["all"]


def test_table_does_not_remember_every_type_it_meets() -> None:
    table = RoutingTable([To("all", ("#",))])
    for number in range(REMEMBERED_TYPES + 100):
        assert table.match(f"hostile.{number}", {})
    assert table._candidates.cache_info().currsize == REMEMBERED_TYPES


def test_explain_gives_the_reasons() -> None:
    to = [
        To("direct", ("shop.orders.placed",)),
        To("topic", ("billing.*", "shop.#")),
        To("elsewhere", ("billing.*", "users.#")),
        To("gold", ("#",), {"tier": "gold", "eu": True}),
        To("rich", ("#",), {"tier": "gold", "eu": True}, "any"),
    ]
    explained = RoutingTable(to).explain("shop.orders.placed", {"tier": "gold"})
    assert [(each.subscription.name, each.matches, each.reason) for each in explained] == [
        ("direct", True, "shop.orders.placed matches"),
        ("topic", True, "shop.# matches"),
        ("elsewhere", False, "no pattern matches: billing.*, users.#"),
        (
            "gold",
            False,
            "# matches, but the metadata lacks eu=True (all of where is wanted)",
        ),
        ("rich", True, "# matches, and so does the metadata (any of where)"),
    ]


WORDS = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=4).map(".".join)
PATTERNS = st.lists(st.sampled_from(["a", "b", "*", "#"]), min_size=1, max_size=4).map(".".join)
METADATA = st.dictionaries(st.sampled_from("xy"), st.sampled_from([1, True, None]), max_size=2)


@given(
    WORDS,
    METADATA,
    st.lists(
        st.builds(
            To,
            st.just("it"),
            st.lists(PATTERNS, min_size=1, max_size=3).map(tuple),
            METADATA,
            st.sampled_from(["all", "any"]),
        )
    ),
)
def test_explanation_agrees_with_the_match(
    type: str, metadata: Mapping[str, Any], to: list[To]
) -> None:
    explained = RoutingTable(to).explain(type, metadata)
    assert [each.subscription for each in explained] == to
    assert tuple(each.subscription for each in explained if each.matches) == RoutingTable(to).match(
        type, metadata
    )


def test_table_refuses_a_bad_pattern() -> None:
    with pytest.raises(InvalidName, match="is not a pattern"):
        RoutingTable([To("it", ("a*.b",))])
