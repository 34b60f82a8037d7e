"""@message and @upcast: valid and refused arguments, and the libraries that make classes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, make_dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Literal

import msgspec
import pydantic
import pytest

from django_mq import InvalidMessage, InvalidName, InvalidPayload, Message, message, upcast
from django_mq.messages.classes import (
    class_of_type,
    isolated,
    message_class,
    message_classes,
)


@pytest.fixture(autouse=True)
def _own_classes() -> Iterator[None]:
    with isolated():
        yield


@dataclass
class Placed:
    order_id: int
    total: Decimal = Decimal(0)


class Model(pydantic.BaseModel):
    order_id: int = pydantic.Field(alias="orderId")
    at: datetime
    prices: list[Decimal] = []


class Struct(msgspec.Struct):
    order_id: int
    at: datetime
    prices: list[Decimal] = []


def test_a_message_takes_type_payload_and_version_from_its_instance() -> None:
    message("shop.orders.placed", version=3)(Placed)
    built = Message(Placed(7, Decimal("1.10")), key="a")
    assert (built.type, built.schema_version, built.key) == ("shop.orders.placed", 3, "a")
    assert built.payload == {"order_id": 7, "total": "1.10"}


def test_the_class_is_unchanged() -> None:
    assert message("a.b")(Placed) is Placed


@pytest.mark.parametrize("options", [{"payload": {}}, {"schema_version": 2}])
def test_instance_excludes_payload_and_version(options: dict[str, Any]) -> None:
    message("a.b")(Placed)
    with pytest.raises(TypeError, match="leave out payload"):
        Message(Placed(1), **options)


def test_an_instance_of_another_class_is_refused() -> None:
    with pytest.raises(InvalidName, match="a Placed"):
        Message(Placed(1))


def test_the_class_itself_is_refused() -> None:
    message("a.b")(Placed)
    with pytest.raises(InvalidName, match="not the class Placed: pass an instance"):
        Message(Placed)  # type: ignore[arg-type]


def test_the_brackets_must_not_be_forgotten() -> None:
    with pytest.raises(InvalidMessage, match=r"say what type Placed is the class of.*@message\('"):
        message(Placed)  # type: ignore[arg-type]


def test_wrong_content_is_refused_with_its_path() -> None:
    message("a.b")(Placed)
    with pytest.raises(
        InvalidPayload, match=r"^Placed: order_id must be a whole number; got text$"
    ):
        Message(Placed("7"))  # type: ignore[arg-type]


def test_a_field_without_a_json_form_is_refused_as_content_is() -> None:
    """With the producer's one class of errors, also where nobody ran the system checks."""
    scanned = make_dataclass("Scanned", [("image", bytes)])
    message("a.b")(scanned)
    with pytest.raises(InvalidPayload, match=r"^Scanned\.image: .* has no JSON form"):
        Message(scanned(b"x"))


@pytest.mark.parametrize("thing", [object(), int, Placed(1), lambda: None])
def test_only_classes_with_fields_are_messages(thing: Any) -> None:
    with pytest.raises(
        InvalidMessage, match="not a dataclass, a pydantic model or a msgspec Struct"
    ):
        message("a.b")(thing)


@pytest.mark.parametrize(
    ("type", "version"), [("a b", 1), ("a", 0), ("a", True), ("a", "1"), ("a", 2**31)]
)
def test_bad_options(type: str, version: Any) -> None:
    with pytest.raises(InvalidMessage):
        message(type, version=version)


def test_a_type_has_one_class() -> None:
    message("a.b")(Placed)
    message("a.b", version=2)(Placed)  # its module was reloaded
    assert [each.version for each in message_classes()] == [2]
    with pytest.raises(InvalidMessage, match=r"a\.b is already the type of Placed"):
        message("a.b")(Struct)


def test_a_class_has_one_type() -> None:
    """The other name, as in a rename, is that of a subclass."""

    class Former(Placed): ...

    message("a.b")(Placed)
    with pytest.raises(InvalidMessage, match=r"already the class of a\.b.*give a\.c a subclass"):
        message("a.c")(Placed)
    message("a.c")(dataclass(Former))
    assert {each.type for each in message_classes()} == {"a.b", "a.c"}


def test_a_version_has_one_upcast() -> None:
    upcast("a.b", 1)(lambda payload: payload)

    def other(payload: dict[str, Any]) -> dict[str, Any]:
        return payload

    with pytest.raises(InvalidMessage, match="already has an upcast"):
        upcast("a.b", 1)(other)
    with pytest.raises(InvalidMessage):
        upcast("a.b", 0)


@pytest.mark.parametrize(
    ("type", "function"),
    [("a.*", lambda payload: payload), ("", lambda payload: payload), ("a.b", 5)],
)
def test_an_upcast_that_no_message_could_reach_is_refused(type: str, function: Any) -> None:
    """A pattern, or a typing error, would otherwise be an upcast that never runs."""
    with pytest.raises(InvalidMessage):
        upcast(type, from_version=1)(function)


def test_old_payloads_go_up_version_by_version() -> None:
    message("a.b", version=3)(Placed)
    upcast("a.b", 1)(lambda payload: {"id": payload["number"]})
    upcast("a.b", 2)(lambda payload: {"order_id": payload["id"]})
    found = message_class(Placed)
    assert found is not None
    assert found.load({"number": 7}, 1) == found.load({"id": 7}, 2) == Placed(7)
    with pytest.raises(InvalidPayload, match="version 1 of the payload must be an object"):
        found.load([], 1)


@pytest.mark.parametrize(
    ("versions", "oldest", "gap"),
    [([1, 2, 3], 1, None), ([2, 3], 2, None), ([1, 3], 1, 2), ([], 3, 3), ([1, 2], 1, 3)],
)
def test_gaps_in_a_chain(versions: list[int], oldest: int, gap: int | None) -> None:
    message("a.b", version=4)(Placed)
    for each in versions:
        upcast("a.b", each)(lambda payload: payload)
    found = message_class(Placed)
    assert found is not None
    assert found.oldest == oldest
    assert found.gap(found.oldest) == gap


def test_two_classes_of_one_name_have_two_schemas() -> None:
    lines = [make_dataclass("Line", [(name, int)]) for name in ("order", "invoice")]
    for each, module in zip(lines, ("shop.order", "shop.invoice"), strict=True):
        each.__module__ = module
    cls = make_dataclass("Both", [("first", lines[0]), ("second", list[lines[1]])])
    message("a.b")(cls)
    found = message_class(cls)
    assert found is not None
    schema = found.codec.schema()
    assert sorted(schema["$defs"]) == ["Both", "shop.invoice.Line", "shop.order.Line"]
    assert list(schema["$defs"]["shop.invoice.Line"]["properties"]) == ["invoice"]
    fields = schema["$defs"]["Both"]["properties"]
    assert fields["first"] == {"$ref": "#/$defs/shop.order.Line"}
    assert fields["second"]["items"] == {"$ref": "#/$defs/shop.invoice.Line"}


@pytest.mark.parametrize("cls", [Model, Struct])
def test_classes_of_other_libraries(cls: Any) -> None:
    message("a.b")(cls)
    id_field = "orderId" if cls is Model else "order_id"
    instance = cls(**{id_field: 7}, at=datetime(2026, 1, 1, tzinfo=UTC), prices=[Decimal("1.10")])
    payload = Message(instance).payload
    assert payload == {id_field: 7, "at": "2026-01-01T00:00:00Z", "prices": ["1.10"]}
    found = message_class(cls)
    assert found is not None
    assert found.load({**payload, "unknown": 1}, 1) == instance
    with pytest.raises(InvalidPayload, match=id_field):
        found.load({**payload, id_field: "7"}, 1)  # strict: text is not a number
    with pytest.raises(InvalidPayload, match=r"prices\[1\]"):
        found.load({**payload, "prices": ["1", "x"]}, 1)
    assert id_field in str(found.codec.schema())


class ModelOfDict(pydantic.BaseModel):
    lines: dict[int, str]


class StructOfDict(msgspec.Struct):
    lines: dict[int, str]


@pytest.mark.parametrize("cls", [ModelOfDict, StructOfDict])
def test_keys_that_json_writes_as_text_come_back(cls: Any) -> None:
    message("a.b")(cls)
    instance = cls(lines={1: "a"})
    stored = json.loads(json.dumps(Message(instance).payload))
    found = message_class(cls)
    assert found is not None
    assert found.load(stored, 1) == instance


@pytest.mark.parametrize("cls", [Model, Struct])
def test_a_changed_instance_is_checked_before_it_is_stored(cls: Any) -> None:
    message("a.b")(cls)
    id_field = "orderId" if cls is Model else "order_id"
    instance = cls(**{id_field: 7}, at=datetime(2026, 1, 1, tzinfo=UTC))
    instance.order_id = "seven"
    with pytest.raises(InvalidPayload, match=id_field):
        Message(instance)


@dataclass
class Limit:
    """Checks itself when it is made, but not when it is changed."""

    most: int
    parts: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.most < 0:
            raise ValueError("below zero")


@dataclass
class Limits:
    each: dict[str, Limit] = field(default_factory=dict)


@dataclass
class Asserts:
    most: int

    def __post_init__(self) -> None:
        assert self.most >= 0, "below zero"


def test_any_error_of_the_checks_of_a_changed_dataclass_is_a_bad_payload() -> None:
    instance = Asserts(7)
    message("a.b")(Asserts)
    instance.most = -1
    with pytest.raises(InvalidPayload, match="is refused: AssertionError"):
        Message(instance)


@pytest.mark.parametrize("depth", [0, 1])
def test_the_checks_of_a_changed_dataclass_run_before_it_is_stored(depth: int) -> None:
    limit = Limit(7, ((1, 2), ()))
    instance = limit if depth == 0 else Limits({"a": limit})
    message("a.b")(type(instance))
    Message(instance)
    limit.most = -1
    with pytest.raises(InvalidPayload, match="is refused by Limit: below zero"):
        Message(instance)


@dataclass
class Share:
    part: float = 0.0
    shares: list[Share] = field(default_factory=list)


class ModelOfAnything(pydantic.BaseModel):
    part: Any = 0.0
    shares: list[Any] = []


class StructOfAnything(msgspec.Struct):
    part: Any = 0.0
    shares: list[Any] = []


@pytest.mark.parametrize("cls", [Share, ModelOfAnything, StructOfAnything])
def test_an_instance_that_contains_itself_is_refused(cls: Any) -> None:
    message("a.b")(cls)
    instance = cls()
    instance.shares.append(instance)
    with pytest.raises(InvalidPayload, match=cls.__name__):
        Message(instance)


@pytest.mark.parametrize(
    ("cls", "part"),
    [
        (Share, 10**400),
        (ModelOfAnything, object()),
        (ModelOfAnything, 10**5000),
        (StructOfAnything, object()),
    ],
    ids=["dataclass", "pydantic", "digits", "msgspec"],
)
def test_values_without_a_json_form_are_refused(cls: Any, part: Any) -> None:
    message("a.b")(cls)
    with pytest.raises(InvalidPayload, match=cls.__name__):
        Message(cls(part=part))


class Line(pydantic.BaseModel):
    sku: int


class Picky(pydantic.BaseModel):
    lines: list[Line] = []
    tags: dict[str, int] = {}
    tier: Literal["gold"] = "gold"
    mail: str = ""

    @pydantic.field_validator("mail")
    @classmethod
    def no_mail(cls, value: str) -> str:
        if value:
            raise ValueError(value)
        return value


class PickyStruct(msgspec.Struct):
    lines: list[dict[str, int]] = []
    tags: dict[str, int] = {}
    tier: Literal["gold"] = "gold"
    mail: str = ""

    def __post_init__(self) -> None:
        if self.mail:
            raise ValueError(self.mail)


SECRET = "joe@example.com"


@pytest.mark.parametrize(
    ("cls", "payload", "told"),
    [
        (Picky, {"tags": {SECRET: "x"}}, "tags... is refused: int_type"),
        (Picky, {"lines": [{"sku": SECRET}]}, "lines[0]... is refused: int_type"),
        (Picky, {"tier": SECRET}, "tier is refused: literal_error"),
        (Picky, {"mail": SECRET}, "mail is refused: value_error"),
        (PickyStruct, {"tags": {SECRET: "x"}}, "tags[...] is refused: Expected `int`, got `str`"),
        (PickyStruct, {"tier": SECRET}, "tier is refused"),
        (PickyStruct, {"mail": SECRET}, "is refused"),
    ],
)
def test_redacted_text_has_nothing_of_the_payload(cls: Any, payload: Any, told: str) -> None:
    message("a.b")(cls)
    found = class_of_type("a.b")
    assert found is not None
    with pytest.raises(InvalidPayload) as caught:
        found.load(payload, 1)
    assert caught.value._redacted_text == f"{cls.__name__}: {told}"
