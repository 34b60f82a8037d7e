"""The metadata that producers give: a dict of texts, without the keys of django_mq."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from django_mq.exceptions import InvalidOption
from django_mq.policy.metadata import check_metadata


def test_a_stored_message_has_entries_of_django_mq() -> None:
    assert check_metadata({"mq.hops": 1}, stored=True) == {"mq.hops": 1}
    with pytest.raises(InvalidOption, match="use only str keys"):
        check_metadata({1: 1}, stored=True)


def test_any_mapping_with_other_keys() -> None:
    assert check_metadata(None) == {}
    given = {"tier": "gold", "mq": 1, "": None}
    assert check_metadata(MappingProxyType(given)) == given


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ([("a", 1)], "must be a dict, not list"),
        ("text", "must be a dict, not str"),
        ({10**5000: 1}, "the key a value of type int: use only str keys"),
        ({"a": 1, "mq.hops": 1}, "'mq.hops': keys that begin with mq. are reserved"),
    ],
)
def test_refused(metadata: object, problem: str) -> None:
    with pytest.raises(InvalidOption, match=problem):
        check_metadata(metadata)
