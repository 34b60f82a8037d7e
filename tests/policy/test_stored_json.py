"""Stored JSON beyond the limits is recognized without decoding it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from django_mq.policy.stored_json import excess

TEXTS = st.text('[]{}"\\a', max_size=4)
JSON: st.SearchStrategy[Any] = st.recursive(
    TEXTS | st.integers(0, 9),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(TEXTS, values, max_size=4),
    max_leaves=12,
)


def depth_of(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(depth_of, value.values() if isinstance(value, dict) else value), default=0)


def is_deeper(text: str, maximum: int) -> bool:
    return bool(excess(text, what="payload", max_bytes=10**6, max_depth=maximum))


@settings(max_examples=100, derandomize=True)
@given(JSON)
def test_the_depth_is_exact(value: Any) -> None:
    depth, text = depth_of(value), json.dumps(value, ensure_ascii=False)
    assert not is_deeper(text, depth)
    assert not depth or is_deeper(text, depth - 1)


@pytest.mark.parametrize("string", ['"]"', '"}\\\\"', '"\\"}"', '"\\\\\\"]"'])
def test_brackets_in_strings_hide_no_level(string: str) -> None:
    opening = string.replace("]", "[").replace("}", "[")
    text = f"[{string}, " * 70 + "7" + f", {opening}]" * 70
    assert depth_of(json.loads(text)) == 70
    assert is_deeper(text, 64)
