"""Permitted field values go to JSON and come back equal; others are refused with their path."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any, Literal, NewType, Optional
from uuid import UUID

import pytest

from django_mq.messages.codec_builder import CodecBuilder
from django_mq.messages.codecs import Unsupported
from django_mq.messages.scalars import Mismatch

UserId = NewType("UserId", int)
BERLIN = timezone(timedelta(hours=1))


class Tier(enum.Enum):
    GOLD = "gold"
    FIRST = 1


class Level(enum.IntEnum):
    LOW = 0


class Color(str, enum.Enum):  # noqa: UP042  # as older code writes it
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Item:
    name: str
    price: Decimal = Decimal("1.50")
    parts: list[Item] = field(default_factory=list)


@dataclass
class Positive:
    number: int

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError("below 1")


@dataclass
class Odd:
    value: complex


@dataclass
class Seeded:
    value: int
    seed: InitVar[int]


@dataclass(slots=True)
class Scaled:
    value: int
    scale: InitVar[int] = 1

    def __post_init__(self, scale: int) -> None:
        self.value *= scale


@dataclass
class Unknown:
    value: Nowhere  # type: ignore[name-defined]  # noqa: F821


def there_and_back(hint: Any, value: Any) -> Any:
    codec = CodecBuilder().build(hint)
    return codec.load(json.loads(json.dumps(codec.dump(value), allow_nan=False)))


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (None.__class__, None),
        (bool, True),
        (int, 2**60),
        (float, 0.1),
        (str, "ä"),
        (Any, {"a": [1, None]}),
        (object, [1]),
        (datetime, datetime(2026, 3, 29, 2, 30, 0, 123, tzinfo=BERLIN)),
        (datetime, datetime(2026, 3, 29, tzinfo=UTC)),
        (date, date(2026, 2, 28)),
        (time, time(23, 59, 59, 999)),
        (timedelta, timedelta(days=3, microseconds=1)),
        (timedelta, -timedelta(days=3, seconds=1.5)),
        (timedelta, timedelta(0)),
        (Decimal, Decimal("1.10")),
        (Decimal, Decimal("-1E+30")),
        (UUID, UUID(int=7)),
        (Tier, Tier.GOLD),
        (Tier, Tier.FIRST),
        (Level, Level.LOW),
        (Literal["a", 1], 1),
        (Literal[0, False], 0),
        (Literal[0, False], False),
        *((Literal[1, "a", None, True], each) for each in (1, "a", None, True)),
        (Literal[Color.RED, Color.BLUE], Color.BLUE),
        (Literal[Tier.GOLD, Tier.FIRST, True], Tier.FIRST),
        (Literal[Level.LOW, False, "red"], Level.LOW),
        (list[Literal[Color.RED] | None], [Color.RED, None]),
        (Optional[int], None),  # noqa: UP045  # as older code writes it
        (int | None, 3),
        (list[date], [date(2026, 1, 1)]),
        (list, [1, "a"]),
        (Sequence[int], [1]),
        (tuple[int, str], (1, "a")),
        (tuple[int, ...], (1, 2, 3)),
        (dict[str, Decimal], {"a b": Decimal(1)}),
        (Mapping[str, int], {}),
        (dict, {"a": 1}),
        (UserId, 5),
        (Annotated[int, "cents"], 5),
        (list[Annotated[int, {"unit": "cents"}]], [5]),
        (Item, Item("box", parts=[Item("lid")])),
        (Scaled, Scaled(5)),
    ],
)
def test_values_come_back_equal(hint: Any, value: Any) -> None:
    found = there_and_back(hint, value)
    assert found == value
    assert type(found) is type(value)


class Day(date):
    """As freezegun makes them."""


def test_a_date_may_be_of_a_subclass() -> None:
    assert there_and_back(date, Day(2026, 1, 1)) == date(2026, 1, 1)


def test_a_float_comes_back_as_float_although_jsonb_reads_a_whole_number() -> None:
    found = CodecBuilder().build(float).load(10**16)
    assert (found, type(found)) == (1e16, float)
    assert type(there_and_back(float, 3)) is float


@pytest.mark.parametrize(
    ("hint", "raw"),
    [
        (bool, 1),
        (int, True),
        (int, "1"),
        (int, 1.0),
        (float, "1"),
        (float, True),
        (str, 1),
        (str, None),
        (datetime, "2026-03-29T02:30:00"),  # naive
        (datetime, 1774744200),
        (date, "2026-02-30"),
        (date, "2026-03-29T00:00:00+00:00x"),
        (time, "25:00"),
        (timedelta, "3 days"),
        (timedelta, 3),
        (timedelta, ""),
        (Decimal, 1),
        (Decimal, "NaN"),
        (Decimal, "much"),
        (UUID, "7"),
        (Tier, "silver"),
        (Tier, True),  # equals 1
        (Literal[1], True),
        (Literal[False], 0),
        (Literal[Color.RED], "blue"),
        (int | None, "x"),
        (list[int], "x"),
        (list[int], {"0": 1}),
        (tuple[int, str], [1]),
        (dict[str, int], []),
        (Item, []),
        (Positive, {"number": 0}),
    ],
)
def test_nothing_is_coerced(hint: Any, raw: Any) -> None:
    with pytest.raises(Mismatch):
        CodecBuilder().build(hint).load(raw)


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (datetime, datetime(2026, 3, 29)),  # naive
        (date, datetime(2026, 3, 29, tzinfo=UTC)),
        (int, True),
        (Decimal, Decimal("Infinity")),
        (Decimal, 1.5),
        (Tier, "gold"),
        (Literal[Color.RED], "red"),
        (Literal[Color.RED], Color.BLUE),
        (Literal["red"], Color.RED),
        (Literal[0], False),
        (dict[str, int], {1: 1}),
        (list[int], {1}),
        (Item, {"name": "box"}),
    ],
)
def test_unreadable_values_cannot_be_stored(hint: Any, value: Any) -> None:
    with pytest.raises(Mismatch):
        CodecBuilder().build(hint).dump(value)


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ({}, "name"),
        ({"name": 5}, "name"),
        ({"name": "a", "parts": [{"name": "b"}, {"name": "c", "price": 5}]}, "parts[1].price"),
        ({"name": "a", "parts": [5]}, "parts[0]"),
    ],
)
def test_the_path_leads_to_the_field(raw: Any, path: str) -> None:
    with pytest.raises(Mismatch) as caught:
        CodecBuilder().build(Item).load(raw)
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path} ")


def test_errors_do_not_quote_the_payload() -> None:
    """They are stored as the reason of a dead letter, which more people see than payloads."""
    with pytest.raises(Mismatch) as caught:
        CodecBuilder().build(Item).load({"name": "a", "price": "4111 1111"})
    assert "4111" not in str(caught.value)
    assert str(caught.value) == "price must be a finite decimal number, as text; got text"


def test_a_log_does_not_quote_the_keys_of_a_dict() -> None:
    with pytest.raises(Mismatch) as caught:
        CodecBuilder().build(dict[str, int]).load({"4111 1111": "x"})
    assert "4111" in str(caught.value)
    assert caught.value.redacted_text.startswith("[...] must be ")


def test_a_subclass_is_not_stored_as_its_base() -> None:
    """Its own fields would be lost."""

    @dataclass
    class Base:
        n: int

    @dataclass
    class Extended(Base):
        m: int = 1

    with pytest.raises(Mismatch, match="must be a "):
        CodecBuilder().build(Base).dump(Extended(1))


def test_unknown_fields_are_ignored_and_missing_ones_defaulted() -> None:
    codec = CodecBuilder().build(Item)
    assert codec.load({"name": "a", "colour": "red"}) == Item("a")


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (Odd, "Odd.value"),
        (Unknown, "Nowhere"),
        (Seeded, "Seeded.seed: an InitVar is not stored"),
        (set[int], "no JSON form"),
        (int | str, "no JSON form"),
        (dict[int, str], "keys"),
        (bytes, "no JSON form"),
        (Literal[b"x"], "b'x' has no JSON form"),
        (Literal["a", 1.5], "1.5 has no JSON form"),
        (Literal[Color.RED, "red"], "'red'> and 'red' have the same JSON form"),
        (Literal[1, Tier.FIRST], "1 and <Tier.FIRST: 1> have the same JSON form"),
    ],
)
def test_types_without_a_json_form_are_refused(hint: Any, text: str) -> None:
    with pytest.raises(Unsupported, match=text):
        CodecBuilder().build(hint)


def test_schema_describes_the_stored_json() -> None:
    codecs = CodecBuilder()
    assert codecs.build(dict[str, int | None]).schema() == {
        "type": "object",
        "additionalProperties": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    }
    literal = codecs.build(Literal[0, False, None, Color.RED]).schema()
    assert json.dumps(literal) == '{"enum": [0, false, null, "red"]}'
    codecs.build(Item)
    assert codecs.dataclasses[Item].definition() == {
        "type": "object",
        "title": "Item",
        "properties": {
            "name": {"type": "string"},
            "price": {"type": "string"},
            "parts": {"type": "array", "items": {"$ref": "#/$defs/Item"}},
        },
        "required": ["name"],
    }


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"at": datetime(2026, 1, 1)}, "at must be an aware datetime; got a naive datetime,"),
        ({"at": "2026-01-01T00:00:00+00:00"}, "at must be an aware datetime; got text"),
        ({"price": "1.5"}, "price must be a finite Decimal; got text: pass Decimal"),
        ({"price": 10}, r"got a whole number: pass Decimal\(\.\.\.\), or call refresh_from_db\(\)"),
        ({"price": None}, "price must be a finite Decimal; got null$"),
        ({"price": Decimal("NaN")}, "price must be a finite Decimal; got a Decimal that is not"),
        ({"wait": 5}, "wait must be a timedelta; got a whole number$"),
    ],
)
def test_mismatch_names_the_expected_python_type(fields: dict[str, Any], text: str) -> None:
    @dataclass
    class Given:
        at: datetime = datetime(2026, 1, 1, tzinfo=UTC)
        price: Decimal = Decimal(1)
        wait: timedelta = timedelta(1)

    with pytest.raises(Mismatch, match=text):
        CodecBuilder().build(Given).dump(Given(**fields))
