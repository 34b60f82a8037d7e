"""Errors of broadcast(): one class per cause, before any SQL; the transaction stays usable."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pydantic
import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connection, transaction
from django.utils.functional import SimpleLazyObject

from django_mq import (
    BroadcastError,
    InvalidName,
    InvalidOption,
    InvalidPayload,
    Message,
    PayloadTooLarge,
    RetryPolicy,
    broadcast,
    broadcast_many,
    fixed,
)
from django_mq.store.insert import MAX_INSERT_ROWS
from testproject.shop.models import Product
from tests.database import second_connection
from tests.outbox.conftest import now
from tests.rows import the_message


class Unencodable:
    pass


class Unspeakable(str):
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


REFUSED: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "type-empty": (InvalidName, {"type": ""}),
    "type-space": (InvalidName, {"type": "shop orders"}),
    "type-newline": (InvalidName, {"type": "shop\n"}),
    "type-none": (InvalidName, {"type": None}),
    "type-letters": (InvalidName, {"type": "zoë"}),
    "type-unspeakable": (InvalidName, {"type": Unspeakable("shop orders")}),
    "type-long": (InvalidName, {"type": "x" * 129}),
    "queue-empty": (InvalidName, {"queue": ""}),
    "queue-blank": (InvalidName, {"queue": "  "}),
    "queue-number": (InvalidName, {"queue": 5}),
    "queue-sql": (InvalidName, {"queue": "q'; drop table x; --"}),
    "priority-high": (InvalidOption, {"priority": 101}),
    "priority-low": (InvalidOption, {"priority": -101}),
    "priority-bool": (InvalidOption, {"priority": True}),
    "priority-float": (InvalidOption, {"priority": 1.0}),
    "priority-digits": (InvalidOption, {"priority": 10**5000}),
    "priority-unspeakable": (InvalidOption, {"priority": Unspeakable()}),
    "priority-none": (InvalidOption, {"priority": None}),
    "version-0": (InvalidOption, {"schema_version": 0}),
    "version-bool": (InvalidOption, {"schema_version": True}),
    "version-digits": (InvalidOption, {"schema_version": 10**5000}),
    "version-text": (InvalidOption, {"schema_version": "1"}),
    "version-beyond-the-column": (InvalidOption, {"schema_version": 2**31}),
    "metadata-list": (InvalidOption, {"metadata": ["tier"]}),
    "metadata-text": (InvalidOption, {"metadata": "tier"}),
    "metadata-key": (InvalidOption, {"metadata": {1: "x"}}),
    "metadata-key-digits": (InvalidOption, {"metadata": {10**5000: "x"}}),
    "metadata-key-unspeakable": (InvalidOption, {"metadata": {Unspeakable("mq.x"): "x"}}),
    "metadata-reserved": (InvalidOption, {"metadata": {"mq.hops": 0}}),
    "metadata-nan": (InvalidPayload, {"metadata": {"x": float("nan")}}),
    "metadata-large": (PayloadTooLarge, {"metadata": {"x": "y" * 16 * 1024}}),
    "payload-nan": (InvalidPayload, {"payload": {"x": float("nan")}}),
    "payload-nul": (InvalidPayload, {"payload": {"x": "\0"}}),
    "payload-surrogate": (InvalidPayload, {"payload": {"x": "\ud800"}}),
    "payload-object": (InvalidPayload, {"payload": {"x": Unencodable()}}),
    "payload-keys": (InvalidPayload, {"payload": {1: "x", "1": "y"}}),
    "payload-digits": (InvalidPayload, {"payload": 10**5000}),
    "payload-large": (PayloadTooLarge, {"payload": "x" * 2**20}),
    "after-naive": (InvalidOption, {"after": datetime(2030, 1, 1)}),
    "after-negative": (InvalidOption, {"after": -1}),
    "after-nan": (InvalidOption, {"after": float("nan")}),
    "after-bool": (InvalidOption, {"after": True}),
    "after-text": (InvalidOption, {"after": "5"}),
    "after-digits": (InvalidOption, {"after": 10**5000}),
    "after-unspeakable": (InvalidOption, {"after": Unspeakable()}),
    "after-pair": (InvalidOption, {"after": (5, "minutes")}),
    "after-far": (InvalidOption, {"after": timedelta(days=367)}),
    "after-very-far": (InvalidOption, {"after": 1e300}),
    "after-year-9999": (InvalidOption, {"after": datetime(9999, 12, 31, tzinfo=UTC)}),
    "after-before-time": (
        InvalidOption,
        {"after": datetime.min.replace(tzinfo=timezone(timedelta(hours=1)))},
    ),
    "expires-naive": (InvalidOption, {"expires": datetime(2030, 1, 1)}),
    "expires-zero": (InvalidOption, {"expires": 0}),
    "expires-past": (InvalidOption, {"expires": datetime(2020, 1, 1, tzinfo=UTC)}),
    "expires-far": (InvalidOption, {"expires": timedelta(days=367)}),
    "expires-with-after": (InvalidOption, {"after": 60, "expires": 60}),
    "expires-before-after": (InvalidOption, {"after": timedelta(days=1), "expires": 60}),
    "expires-before-moment": (
        InvalidOption,
        {"after": datetime.now(UTC) + timedelta(days=2), "expires": timedelta(days=1)},
    ),
    "retry-number": (InvalidOption, {"retry": 5}),
    "retry-callable": (InvalidOption, {"retry": RetryPolicy(backoff=lambda attempt: 5)}),
    "on-duplicate": (InvalidOption, {"unique_id": "u", "on_duplicate": "never"}),
    "on-duplicate-of-nothing": (TypeError, {"on_duplicate": "update"}),
    "on-duplicate-empty": (InvalidOption, {"unique_id": "u", "on_duplicate": ""}),
    "on-duplicate-none": (InvalidOption, {"unique_id": "u", "on_duplicate": None}),
    "unique-for-nothing": (TypeError, {"unique_for": 5}),
    "unique-for-zero": (InvalidOption, {"unique_id": "u", "unique_for": 0}),
    "unique-for-long": (InvalidOption, {"unique_id": "u", "unique_for": timedelta(days=367)}),
    "unique-for-text": (InvalidOption, {"unique_id": "u", "unique_for": "5"}),
    "unique-for-moment": (InvalidOption, {"unique_id": "u", "unique_for": datetime.now(UTC)}),
    "unique-for-digits": (InvalidOption, {"unique_id": "u", "unique_for": 10**5000}),
    "on-duplicate-digits": (InvalidOption, {"unique_id": "u", "on_duplicate": 10**5000}),
    "unique-id-blank": (InvalidName, {"unique_id": ""}),
    "unique-id-control": (InvalidName, {"unique_id": "order\n1"}),
    "unique-id-number": (InvalidName, {"unique_id": 1}),
    "key-blank": (InvalidName, {"key": ""}),
    "key-unspeakable": (InvalidName, {"key": Unspeakable("\n")}),
    "key-long": (InvalidName, {"key": "k" * 129}),
    "key-number": (InvalidName, {"key": 1}),
    "unknown-option": (TypeError, {"delay": 5}),
}


@pytest.mark.django_db
@pytest.mark.parametrize(("error", "options"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_leaves_the_transaction_usable(
    error: type[Exception], options: dict[str, Any], django_assert_num_queries: Any
) -> None:
    """Guarantee 10, S04, S16, S17, PMQ-5, PMQ-10, NSQ-31, RMQ-3."""
    with transaction.atomic():
        with django_assert_num_queries(0), pytest.raises(error) as caught:
            broadcast(**{"type": "a.b", "payload": {}, **options})
        assert type(caught.value) is error
        assert issubclass(error, BroadcastError | TypeError)
        assert broadcast("fine")
    assert the_message().type == "fine"


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"after": 2**63}, "MAX_DELAY"),
        ({"after": timedelta.max}, "MAX_DELAY"),
        ({"after": datetime.max.replace(tzinfo=timezone(-timedelta(hours=1)))}, "MAX_DELAY"),
        ({"after": datetime.min.replace(tzinfo=timezone(timedelta(hours=1)))}, "from 1900 to"),
        ({"unique_id": "u", "unique_for": -1}, "more than zero"),
        ({"retry": fixed(3)}, "RetryPolicy(backoff="),
        ({"priority": "x" * 1_000_000}, "from -100 to 100"),
    ],
)
def test_a_refusal_names_the_limit_in_a_short_text(options: dict[str, Any], told: str) -> None:
    with transaction.atomic(), pytest.raises(InvalidOption) as caught:
        broadcast("a.b", **options)
    assert told in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.django_db
def test_a_message_that_was_built_before_is_stored_by_broadcast_many() -> None:
    with transaction.atomic(), pytest.raises(InvalidName, match=r"broadcast_many\(\[message\]\)"):
        broadcast(Message("a.b"))  # type: ignore[arg-type]


@pytest.mark.django_db
def test_limits_follow_the_settings(settings: Any) -> None:
    settings.DJANGO_MQ = {
        "MAX_PAYLOAD_BYTES": 20,
        "MAX_DEPTH": 2,
        "MAX_METADATA_BYTES": 10,
        "MAX_DELAY": 60,
        "ENCODER": "json.JSONEncoder",
    }
    refused: list[tuple[type[Exception], dict[str, Any]]] = [
        (PayloadTooLarge, {"payload": "x" * 19}),
        (InvalidPayload, {"payload": [[[]]]}),
        (PayloadTooLarge, {"metadata": {"a": "xxxx"}}),
        (InvalidOption, {"after": 61}),
        (InvalidPayload, {"payload": now()}),
    ]
    with transaction.atomic():
        for error, options in refused:
            with pytest.raises(error):
                broadcast("a.b", **options)
        assert broadcast("a.b", "x" * 18, metadata={"a": "xx"}, after=60)
        assert broadcast("a.b", [[]])


@pytest.mark.django_db
def test_a_payload_that_cannot_be_shown_does_not_break_the_error() -> None:
    with transaction.atomic(), pytest.raises(InvalidPayload) as caught:
        broadcast("a.b", {"x": {"\ud800": 1}})
    str(caught.value).encode()


def test_another_database_than_postgresql_is_refused(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "vendor", "sqlite")
    with pytest.raises(ImproperlyConfigured, match="'default' is PostgreSQL: set DJANGO_MQ"):
        broadcast("a.b")


def test_an_alias_that_does_not_exist_is_refused() -> None:
    for store in (
        lambda: broadcast("shop.orders.placed", using="nowhere"),
        lambda: broadcast_many([Message("shop.orders.placed")], using="nowhere"),
    ):
        with pytest.raises(InvalidOption, match="using='nowhere' is not an alias in DATABASES"):
            store()


@pytest.mark.django_db(transaction=True)
def test_refusal_of_the_database_is_djangos_error() -> None:
    """This includes COPY, whose errors Django does not wrap by itself."""
    with second_connection() as other:
        other.execute(
            "alter table django_mq_queuedmessage add constraint no_evil check (type <> 'evil')"
        )
        try:
            for count in (1, 2, MAX_INSERT_ROWS + 1):
                with pytest.raises(DatabaseError), transaction.atomic():
                    broadcast_many([Message("evil")] * count)
        finally:
            other.execute("alter table django_mq_queuedmessage drop constraint no_evil")


class Unreadable:
    @property
    def _meta(self) -> None:
        raise ValueError("no")


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Product(), "Object of type Product is not JSON serializable: send its pk"),
        (SimpleLazyObject(Product), "Object of type Product is not JSON serializable: send its pk"),
        (Unreadable(), "Object of type Unreadable is not JSON serializable"),
        (Unencodable(), "Object of type Unencodable is not JSON serializable"),
    ],
    ids=["model", "lazy", "unreadable", "other"],
)
def test_a_model_in_a_payload_is_answered_with_its_pk(value: object, text: str) -> None:
    with transaction.atomic(), pytest.raises(InvalidPayload) as caught:
        broadcast("a.b", {"lines": [{"product": value}]})
    assert str(caught.value) == f"payload.lines[0].product: {text}"


@dataclass
class Line:
    product_id: int


class Model(pydantic.BaseModel):
    product_id: int


class Struct(msgspec.Struct):
    product_id: int


@pytest.mark.django_db
@pytest.mark.parametrize(
    "instance", [Line(7), Model(product_id=7), Struct(7)], ids=["dataclass", "pydantic", "msgspec"]
)
def test_an_instance_in_a_payload_is_answered_with_a_dict_or_a_message_class(
    instance: object,
) -> None:
    name = type(instance).__name__
    wrong = f"Object of type {name} is not JSON serializable"
    with transaction.atomic():
        with pytest.raises(InvalidPayload) as caught:
            broadcast("a.b", instance)
        assert str(caught.value) == (
            f"payload: {wrong}: send a dict of its fields, or broadcast an instance of a @message"
            " class alone, without type and payload"
        )
        with pytest.raises(InvalidPayload) as caught:
            broadcast("a.b", {"line": instance})
        assert str(caught.value) == f"payload.line: {wrong}: send a dict of its fields"


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ({7}, "send a list"),
        (frozenset({7}), "send a list"),
        ((n for n in (7,)), "send a list"),
        (Product.objects.all(), "send a list of pks"),
        (b"7", "send text, such as base64"),
    ],
    ids=["set", "frozenset", "generator", "queryset", "bytes"],
)
def test_a_collection_in_a_payload_is_answered_with_a_list(value: object, advice: str) -> None:
    with transaction.atomic(), pytest.raises(InvalidPayload) as caught:
        broadcast("a.b", {"products": value})
    text = f"Object of type {type(value).__name__} is not JSON serializable: {advice}"
    assert str(caught.value) == f"payload.products: {text}"


@pytest.mark.django_db
@pytest.mark.parametrize("given", [{"key": 7}, {"unique_id": 7}])
def test_a_number_as_key_or_unique_id_is_answered_with_str(given: dict[str, Any]) -> None:
    says = r"^(key|unique id) of type int cannot be stored: it must be text; .* use str\(\.\.\.\)$"
    with transaction.atomic(), pytest.raises(InvalidName, match=says):
        broadcast("a.b", **given)
