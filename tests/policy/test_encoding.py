"""A value in, JSON text out: refused values, and the text of the errors."""

import enum
import json
import sys
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from django.core.serializers.json import DjangoJSONEncoder
from django.utils.translation import gettext_lazy
from hypothesis import given
from hypothesis import strategies as st

from django_mq.exceptions import InvalidPayload, PayloadTooLarge
from django_mq.policy.encoding import encode

USUAL: dict[str, Any] = {
    "what": "payload",
    "max_bytes": 2**20,
    "max_depth": 64,
    "encoder": DjangoJSONEncoder,
}


def encoded(value: object, **changed: Any) -> str:
    return encode(value, **{**USUAL, **changed})


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def itself() -> dict[str, Any]:
    value: dict[str, Any] = {"list": []}
    value["list"].append(value)
    return value


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


class Tier(enum.StrEnum):
    GOLD = "gold"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param({}, "{}", id="empty"),
        pytest.param({"a": [1, 2.5, None, True, "x"]}, '{"a":[1,2.5,null,true,"x"]}', id="plain"),
        pytest.param("Zoë \U0001f600", '"Zoë \U0001f600"', id="text"),
        pytest.param((1, (2,)), "[1,[2]]", id="tuples"),
        pytest.param(OrderedDict(b=1, a=2), '{"a":2,"b":1}', id="dict-like"),
        pytest.param({1: "a", None: "b", False: "c"}, None, id="keys-that-collide-not"),
        pytest.param({"n": 10**4299}, None, id="as-many-digits-as-can-be-read"),
        pytest.param("a backslash and u0000: \\u0000", None, id="not-nul"),
        pytest.param([Level.HIGH, Tier.GOLD], '[3,"gold"]', id="enums-of-plain-values"),
        pytest.param([datetime(2026, 1, 2, tzinfo=UTC)], '["2026-01-02T00:00:00Z"]', id="datetime"),
        pytest.param([Decimal("1.10"), gettext_lazy("x")], '["1.10","x"]', id="decimal-lazy-text"),
        pytest.param(nested(64), None, id="as-deep-as-allowed"),
    ],
)  # fmt: skip
def test_json_values_are_encoded(value: object, text: str | None) -> None:
    found = encoded(value)
    assert text is None or found == text
    json.loads(found)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        pytest.param({"a": [1, float("nan")]}, "payload.a[1]: ", id="nan"),
        pytest.param(float("-inf"), "payload: ", id="infinity"),
        pytest.param({float("inf"): 1}, "payload[inf]: ", id="infinite-key"),
        pytest.param({"a": {"b c": "x\0y"}}, "payload.a['b c'] contains a NUL", id="nul"),
        pytest.param({"a": {"x\0": 1}}, "payload.a['x\\x00'] contains a NUL", id="nul-in-key"),
        pytest.param({"a": ["\ud800"]}, "payload.a[0]: ", id="lone-surrogate"),
        pytest.param(["\ud83d\ude00"], "payload[0]: ", id="surrogate-pair"),
        pytest.param({"\udfff": 1}, "payload['\\udfff']: ", id="lone-surrogate-in-key"),
        pytest.param({"a": {1: "x", "1": "y"}}, "payload.a has 2 keys that are all", id="key-1"),
        pytest.param({True: "x", "true": "y"}, "keys that are all 'true'", id="key-true"),
        pytest.param({None: "x", "null": "y"}, "keys that are all 'null'", id="key-null"),
        pytest.param({(1, 2): 1}, "payload has a key of type tuple", id="key-tuple"),
        pytest.param({"a": {10**4300: 1}}, "payload.a has a key of more", id="key-digits"),
        pytest.param({"n": [-(10**4300)]}, "payload.n[0] is an integer of more", id="digits"),
        pytest.param(itself(), "payload.list[0] contains itself", id="cycle"),
        pytest.param(nested(65), "is nested too deeply: at most 64 levels", id="deep"),
        pytest.param(nested(100_000), "is nested too deeply", id="very-deep"),
        pytest.param({"a": [{1}]}, "payload.a[0]: Object of type set", id="set"),
        pytest.param(b"bytes", "payload: Object of type bytes", id="bytes"),
        pytest.param({"c": Colour.RED}, "payload.c: Object of type Colour", id="enum"),
        pytest.param({"line\n": object()}, "payload['line\\n']: Object", id="key-with-control"),
    ],
)  # fmt: skip
def test_lossy_value_is_refused_with_its_path(value: object, said: str) -> None:
    """S16, PMQ-10."""
    with pytest.raises(InvalidPayload) as caught:
        encoded(value)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


def test_endless_integers_are_refused_even_where_this_interpreter_would_write_them() -> None:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        with pytest.raises(InvalidPayload, match="4,300 digits"):
            encoded({"n": 10**5000})
    finally:
        sys.set_int_max_str_digits(limit)


def test_size_is_counted_in_bytes_of_utf8() -> None:
    assert encoded("é" * 9, max_bytes=20) == f'"{"é" * 9}"'
    with pytest.raises(PayloadTooLarge, match="payload is 22 bytes of JSON, and at most 20"):
        encoded("é" * 10, max_bytes=20)


@pytest.mark.parametrize("levels", [40, 64, 90])
@pytest.mark.parametrize(
    "around",
    [
        lambda each: [each, each],
        lambda each: [0, each, each],
        lambda each: {"a": 0, "b": [each] * 3},
    ],
)
def test_a_small_value_with_endless_json_is_refused_at_once(
    around: Callable[[object], object], levels: int
) -> None:
    value: object = []
    for _ in range(levels):
        value = around(value)
    with pytest.raises(InvalidPayload, match=r"it repeats its parts|nested too deeply"):
        encoded(value)
    with pytest.raises(InvalidPayload, match=r"it repeats its parts|nested too deeply"):
        encoded({"a": [1, value]}, encoder=Own)


def test_a_part_may_occur_often() -> None:
    part = {"a": [1]}
    assert encoded([part] * 2) == '[{"a":[1]},{"a":[1]}]'


class Own(json.JSONEncoder):
    """An encoder with an arbitrary default()."""

    def default(self, o: Any) -> Any:
        if o is Colour.RED:
            return {"colour": "red"}
        if isinstance(o, set):
            return {1: "x", "1": "y"}
        if isinstance(o, frozenset):
            return nested(65)
        raise RuntimeError("a secret of the payload")


def test_output_of_a_custom_encoder_is_checked() -> None:
    """RMQ-5: the serializer can be replaced."""
    assert encoded([Colour.RED], encoder=Own) == '[{"colour":"red"}]'
    with pytest.raises(InvalidPayload, match="key twice"):
        encoded({"a": {1}}, encoder=Own)
    with pytest.raises(InvalidPayload, match="nested too deeply"):
        encoded({"a": frozenset()}, encoder=Own)


def test_an_encoder_that_raises_is_named_and_its_text_is_not_shown() -> None:
    with pytest.raises(InvalidPayload) as caught:
        encoded({"a": {"b": object()}}, encoder=Own)
    assert str(caught.value) == "payload.a.b: the encoder raised RuntimeError"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(JSON)
def test_accepted_value_reads_back_the_same(value: Any) -> None:
    try:
        text = encoded(value)
    except InvalidPayload:
        return
    # Keys that are numbers become text, as JSON requires; none may vanish.
    assert json.loads(text) == json.loads(json.dumps(value))
    assert "\\u0000" not in text.replace("\\\\", "")
