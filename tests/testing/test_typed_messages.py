"""Messages of a class, from broadcast() through jsonb and the worker's code to a handler."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from io import StringIO
from itertools import chain
from typing import Any, Protocol, TypedDict, TypeVar

import pytest
from django.core.management import CommandError, call_command
from django.db import transaction

from django_mq import (
    Delivery,
    InvalidPayload,
    Message,
    UnexpectedPayload,
    ask,
    broadcast,
    broadcast_many,
    handler,
    handlers,
    message,
    queues,
    signals,
    upcast,
)
from django_mq.checks.message_classes import (
    check_arguments,
    check_message_classes,
    check_versions,
)
from django_mq.exceptions import InvalidMessage
from django_mq.messages import classes
from django_mq.models import FailedAttempt, QueuedMessage
from django_mq.testing import answering, assert_broadcast, deliver, drain
from django_mq.worker import Worker
from testproject.shop.models import Order
from tests.rows import add

pytestmark = pytest.mark.django_db

T = TypeVar("T")


@dataclass
class Placed:
    order_id: int
    at: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    total: Decimal = Decimal("1.10")
    weight: float = 1e16
    tags: tuple[str, ...] = field(default_factory=tuple)


@dataclass
class Ordered(Placed):
    """The class of the type's former name."""


@dataclass
class Cancelled:
    order_id: int


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    with handlers.isolated(), classes.isolated():
        message("shop.orders.placed", version=2)(Placed)
        message("shop.orders.cancelled")(Cancelled)
        yield


def send(instance: Any, **options: Any) -> Any:
    with transaction.atomic():
        return broadcast(instance, **options)


def problems() -> list[tuple[str, str]]:
    return [(str(each.id), each.msg) for each in check_message_classes(None) or ()]


def test_a_handler_gets_the_instance() -> None:
    got: list[Placed] = []

    @handler("shop.orders.placed")
    def write_invoice(event: Placed) -> None:
        got.append(event)

    sent = Placed(7, tags=("a", "b"))
    send(sent)
    stored = QueuedMessage.objects.get()
    assert (stored.type, stored.schema_version) == ("shop.orders.placed", 2)
    assert_broadcast(sent, times=1)
    assert_broadcast("shop.orders.placed", times=1)
    assert drain() == 1
    assert got == [sent]
    assert type(got[0].weight) is float


def test_a_delivery_with_the_instance_as_payload() -> None:
    got: list[Any] = []
    seen: list[Any] = []

    @handler("shop.orders.placed")
    def write_invoice(delivery: Delivery[Placed]) -> None:
        got.append((delivery.payload, delivery.raw["order_id"], delivery.attempt))

    def receiver(sender: object, delivery: Delivery, **kwargs: Any) -> None:
        seen.append(delivery.payload["order_id"])

    signals.message_acked.connect(receiver)
    try:
        send(Placed(7))
        assert drain() == 1
    finally:
        signals.message_acked.disconnect(receiver)
    assert got == [(Placed(7), 7, 1)]
    assert seen == [7]  # other code gets the JSON


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.django_db(transaction=True)
def test_a_hook_after_the_commit_has_the_instance(batch: bool) -> None:
    got: list[Any] = []

    def later(delivery: Delivery[Placed]) -> None:
        transaction.on_commit(lambda: got.append(delivery.payload))

    def write_invoices(deliveries: list[Delivery[Placed]]) -> None:
        for delivery in deliveries:
            later(delivery)

    handler("shop.orders.placed", batch=batch)(write_invoices if batch else later)
    send(Placed(7))
    assert drain() == 1
    assert got == [Placed(7)]


def test_a_handler_is_called_with_json_of_its_class() -> None:
    got: list[Any] = []

    @handler("shop.orders.cancelled")
    def refund(event: Cancelled) -> None:
        got.append(event)

    deliver(refund, {"order_id": 7})
    assert got == [Cancelled(7)]


def refund_by(mailer: str, event: Cancelled) -> tuple[str, Cancelled]:
    return mailer, event


def wrapping(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(function)(lambda *args: function(*args))


class Refunds:
    @wrapping
    def refund(self, event: Cancelled) -> tuple[str, Cancelled]:
        return "method", event

    @wrapping
    def __call__(self, event: Cancelled) -> tuple[str, Cancelled]:
        return "instance", event

    def refund_by(self, mailer: str, event: Cancelled) -> tuple[str, Cancelled]:
        return mailer, event


@pytest.mark.parametrize(
    ("function", "mailer"),
    [
        (functools.partial(refund_by, "partial"), "partial"),
        (wrapping(functools.partial(refund_by, "wrapped")), "wrapped"),
        (functools.partial(wrapping(refund_by), "inside"), "inside"),
        (functools.partial(Refunds().refund_by, "bound"), "bound"),
        (Refunds().refund, "method"),
        (Refunds(), "instance"),
    ],
)
def test_the_annotation_is_that_of_the_argument_that_the_delivery_becomes(
    function: Any, mailer: str
) -> None:
    handler("shop.orders.cancelled", name="refund")(function)
    assert deliver("refund", {"order_id": 7}) == (mailer, Cancelled(7))


def test_a_union_takes_several_types() -> None:
    got: list[Any] = []

    @handler("shop.orders.placed", "shop.orders.cancelled")
    def audit(event: Placed | Cancelled) -> None:
        got.append(event)

    with transaction.atomic():
        broadcast_many([Message(Placed(7)), Message(Cancelled(7))])
    assert drain() == 2
    assert got == [Placed(7), Cancelled(7)]


@pytest.mark.parametrize(
    "annotation", [Delivery[Placed | Cancelled], Delivery[Placed] | Delivery[Cancelled]], ids=str
)
def test_a_union_of_deliveries(annotation: Any) -> None:
    def audit(delivery: Any) -> Any:
        return delivery.payload

    audit.__annotations__["delivery"] = annotation
    handler("shop.orders.placed", "shop.orders.cancelled")(audit)
    for instance in (Placed(7), Cancelled(7)):
        assert deliver(audit, instance) == instance


def test_a_renamed_type() -> None:
    """docs/deploy/upgrades.md: the old type gets a subclass, and an upcast of its payload."""
    ids: list[int] = []

    message("shop.orders.ordered", version=2)(Ordered)

    @upcast("shop.orders.ordered", from_version=1)
    def rename(payload: Any) -> Any:
        return {"order_id": payload["id"]}

    @handler("shop.orders.placed", "shop.orders.ordered")
    def h(event: Placed | Ordered) -> None:
        assert isinstance(event, Placed)
        ids.append(event.order_id)

    with transaction.atomic():
        broadcast("shop.orders.ordered", {"id": 7})
        broadcast(Placed(8))
    assert drain() == 2
    assert ids == [7, 8]


def test_async_handlers_and_handlers_without_transaction() -> None:
    got: list[Any] = []

    @handler("shop.orders.placed")
    async def push(event: Placed) -> None:
        got.append(event)

    @handler("shop.orders.cancelled", atomic=False)
    def refund(delivery: Delivery[Cancelled]) -> None:
        got.append(delivery.payload)

    for function, instance in ((push, Placed(7)), (refund, Cancelled(8))):
        deliver(function, instance)
    assert got == [Placed(7), Cancelled(8)]


def test_batches() -> None:
    got: list[Any] = []

    @handler("shop.orders.placed", batch=True)
    def count(events: list[Placed]) -> None:
        got.append(events)

    @handler("shop.orders.cancelled", batch=True)
    def refund(deliveries: list[Delivery[Cancelled]]) -> None:
        got.append([each.payload for each in deliveries])

    with transaction.atomic():
        broadcast_many([Message(Placed(1)), Message(Placed(2)), Message(Cancelled(3))])
    assert drain() == 3
    assert sorted(chain(*got), key=lambda each: each.order_id) == [
        Placed(1),
        Placed(2),
        Cancelled(3),
    ]


def test_wrong_content_is_refused_before_sql() -> None:
    with transaction.atomic():
        with pytest.raises(InvalidPayload, match="order_id must be a whole number"):
            broadcast(Placed("7"))  # type: ignore[arg-type]
        assert not QueuedMessage.objects.exists()  # and the transaction is usable


def test_wrong_content_is_dead_at_once_at_the_consumer() -> None:
    """S03."""

    @handler("shop.orders.placed", name="invoice")
    def write_invoice(event: Placed) -> None:
        raise AssertionError("it has no order")

    add(
        type="shop.orders.placed",
        handler="invoice",
        queue="default",
        payload={"order": 7},
        schema_version=2,
    )
    [error] = drain(errors="keep")
    assert isinstance(error, UnexpectedPayload)
    dead = QueuedMessage.objects.get()
    assert dead.dead_reason == "InvalidPayload: Placed: order_id is missing"
    assert dead.attempts == 1


@pytest.mark.django_db(transaction=True)
def test_wrong_content_in_the_list_of_an_atomic_handler_is_dead_alone() -> None:
    got: list[int] = []

    @handler("shop.orders.cancelled", name="refund", queue="default", batch=True)
    def refund(events: list[Cancelled]) -> None:
        got.extend(event.order_id for event in events)

    for number in (1, "wrong", 3):
        add("default", handler="refund", type="shop.orders.cancelled", payload={"order_id": number})
    assert Worker().run(until_empty=True)
    assert sorted(got) == [1, 3]
    dead = QueuedMessage.objects.get()
    assert dead.dead_reason.startswith("InvalidPayload: Cancelled: order_id must be")


def test_the_annotation_of_further_arguments_is_not_that_of_the_delivery() -> None:
    @handler("shop.orders.cancelled")
    def refund(*deliveries: Cancelled) -> Any:
        return deliveries[0].payload  # type: ignore[attr-defined]

    assert deliver(refund, {"order_id": 7}) == {"order_id": 7}


def test_old_versions_are_upcast() -> None:
    got: list[Any] = []
    upcast("shop.orders.placed", 1)(lambda payload: {"order_id": payload["id"]})

    @handler("shop.orders.placed")
    def write_invoice(event: Placed) -> None:
        got.append(event)

    send("shop.orders.placed", payload={"id": 7})
    assert drain() == 1
    assert got == [Placed(7)]
    assert problems() == []


def test_an_upcast_that_raises_is_wrong_content() -> None:
    """Dead at once, since a second attempt would raise again."""
    upcast("shop.orders.placed", 1)(lambda payload: {"order_id": int(payload["id"])})

    @handler("shop.orders.placed")
    def write_invoice(event: Placed) -> None:
        raise AssertionError("nobody can read it")

    send("shop.orders.placed", payload={"id": "secret"})
    [error] = drain(errors="keep")
    assert isinstance(error, UnexpectedPayload)
    dead = QueuedMessage.objects.get()
    assert dead.dead_reason == (
        "InvalidPayload: shop.orders.placed: the upcast from version 1 raised ValueError"
    )
    assert (dead.attempts, error._redacted_text) == (
        1,
        dead.dead_reason.removeprefix("InvalidPayload: "),
    )
    attempt = FailedAttempt.objects.get()
    assert "<lambda>" in attempt.traceback


def test_an_upcast_that_returns_no_object_is_wrong_content() -> None:
    upcast("shop.orders.placed", 1)(lambda payload: None)  # type: ignore[arg-type,return-value]

    @handler("shop.orders.placed")
    def write_invoice(event: Placed) -> None:
        raise AssertionError("nobody can read it")

    with pytest.raises(UnexpectedPayload, match="Placed: must be an object; got null"):
        deliver(write_invoice, {"id": 7})


def test_a_gap_and_a_newer_version_are_held() -> None:
    @handler("shop.orders.placed")
    def write_invoice(event: Placed) -> None:
        raise AssertionError("nobody can read it")

    [old] = send("shop.orders.placed", payload={"id": 7}).ids
    [new] = send("shop.orders.placed", payload={"id": 7}, schema_version=3).ids
    assert drain() == 0
    assert set(QueuedMessage.objects.filter(held_since=None)) == set()
    assert "@upcast('shop.orders.placed', 1) is missing" in str(queues.why(old))
    assert "newer than version 2" in str(queues.why(new))
    assert [id for id, _ in problems()] == ["django_mq.E011"]
    assert "A message shop.orders.placed of version 1 cannot become version 2" in problems()[0][1]


def test_w010_a_handler_without_the_class_holds_its_version(capsys: Any) -> None:
    """It gets a plain delivery, so the class says nothing about what it understands."""

    @handler("shop.orders.placed", name="typed")
    def typed(event: Placed) -> None: ...

    handler("shop.#", name="wild")(lambda delivery: None)
    handler("shop.orders.*", name="ready", schema_version=2)(lambda delivery: None)
    handler("shop.invoices.*", name="elsewhere")(lambda delivery: None)
    [warning] = check_versions(None) or ()
    assert (warning.id, warning.msg) == (
        "django_mq.W010",
        "The handler wild holds new messages shop.orders.placed: it understands version 1, and"
        " their class Placed has version 2.",
    )
    assert "Set schema_version=2 on the handler" in str(warning.hint)
    call_command("mq_routes", "shop.orders.placed")
    [line] = [each for each in capsys.readouterr().out.splitlines() if "held" in each]
    assert line.startswith("wild")
    assert "newer than version 1 that handler wild understands" in line


@pytest.mark.parametrize(
    ("patterns", "advice"),
    [
        (("shop.orders.placed",), ", or annotate its argument with Placed."),
        (("shop.orders.*",), "."),
        (("shop.orders.placed", "shop.orders.paid"), "."),
    ],
)
def test_w010_advises_no_annotation_that_e012_would_refuse(
    patterns: tuple[str, ...], advice: str
) -> None:
    """A handler of other types, too, would get them without a class."""
    handler(*patterns, name="plain")(lambda delivery: None)
    [warning] = check_versions(None) or ()
    assert warning.hint == (
        f"Set schema_version=2 on the handler once it can read that version{advice}"
    )


def test_a_reply_to_an_instance() -> None:
    @handler("shop.orders.cancelled", queue="answers")
    def refund(event: Cancelled) -> int:
        return event.order_id + 1

    with answering():
        assert ask(Cancelled(7), timeout=30) == 8


class Own(Delivery[Any]): ...


def nameless(delivery: Nowhere) -> None:  # type: ignore[name-defined]  # noqa: F821
    ...


@dataclass
class Unregistered:
    order_id: int


def unregistered(event: Unregistered) -> None: ...


def narrow(event: Placed) -> None: ...


def test_an_upcast_of_a_type_without_a_class_is_an_error_of_check() -> None:
    upcast("shop.orders.placed", 1)(lambda payload: payload)
    upcast("shop.orders.plcaed", 1)(lambda payload: payload)
    [(id, text)] = problems()
    assert id == "django_mq.E011"
    assert "Version 1 of shop.orders.plcaed" in text


@pytest.mark.parametrize("function", [lambda: {}, lambda payload, version: payload])
def test_an_upcast_that_does_not_take_one_argument_is_refused(function: Any) -> None:
    with pytest.raises(InvalidMessage, match="cannot be called with one argument, the payload"):
        upcast("shop.orders.placed", 1)(function)


@pytest.mark.parametrize(
    ("function", "patterns", "text"),
    [
        (nameless, ["a.b"], "name 'Nowhere' is not defined"),
        (unregistered, ["a.b"], "Unregistered, which has no @message"),
        (narrow, ["shop.orders.placed", "shop.#"], "subscribes to shop.#"),
        (narrow, ["shop.#"], "subscribes to shop.#"),
        (narrow, ["shop.orders.cancelled"], "to which it does not subscribe"),
    ],
)
def test_annotations_that_no_message_can_follow(
    function: Any, patterns: list[str], text: str
) -> None:
    upcast("shop.orders.placed", 1)(lambda payload: payload)
    handler(*patterns)(function)
    found = problems()
    assert {id for id, _ in found} == {"django_mq.E012"}
    assert any(text in each for _, each in found)
    elsewhere = any("does not subscribe" in each for _, each in found)
    assert elsewhere == (patterns == ["shop.orders.cancelled"])


@pytest.mark.parametrize(
    ("annotation", "batch", "text"),
    [
        (list[Placed], False, "list[Placed], but without batch=True it is one message: add batch"),
        (list[Delivery[Placed]], False, "or annotate it with Delivery[Placed]"),
        (Placed, True, "Placed, but with batch=True it is a list: annotate it with list[Placed]"),
        (Delivery[Placed], True, "annotate it with list[Delivery[Placed]]"),
        (Placed | Cancelled, True, "annotate it with list[Placed | Cancelled]"),
    ],
    ids=str,
)
def test_annotations_that_contradict_batch(annotation: Any, batch: bool, text: str) -> None:
    def count(events: Any) -> None: ...

    upcast("shop.orders.placed", 1)(lambda payload: payload)
    count.__annotations__["events"] = annotation
    handler("shop.orders.placed", "shop.orders.cancelled", batch=batch)(count)
    [(id, found)] = problems()
    assert id == "django_mq.E012"
    assert text in found


@pytest.mark.parametrize(
    "annotation",
    [Delivery[Placed] | None, Sequence[Placed], Iterable[Delivery[Placed]], dict[str, Placed]],
    ids=str,
)
@pytest.mark.parametrize("batch", [False, True])
def test_annotation_with_a_misplaced_class_is_refused(annotation: Any, batch: bool) -> None:
    """The handler would get plain deliveries."""

    def count(events: Any) -> None: ...

    upcast("shop.orders.placed", 1)(lambda payload: payload)
    count.__annotations__["events"] = annotation
    handler("shop.orders.placed", batch=batch)(count)
    [(id, found)] = problems()
    assert id == "django_mq.E012"
    assert "use a message class, Delivery[...] or a list of them" in found


def test_lists_of_others_are_not_ours() -> None:
    upcast("shop.orders.placed", 1)(lambda payload: payload)
    for annotation, batch in ((list[dict[str, Any]], False), (dict, True), (int, True)):

        def count(events: Any) -> None: ...

        count.__annotations__["events"] = annotation
        handler("a.b", name=f"h{len(handlers.all_handlers())}", batch=batch)(count)
    assert problems() == []


def test_other_annotations_are_not_ours() -> None:
    upcast("shop.orders.placed", 1)(lambda payload: payload)

    handler("a.b", name="1")(lambda delivery: None)

    @handler("a.b", name="2")
    def second(delivery: Own) -> None: ...

    @handler("a.b", name="3")
    def third(delivery: Delivery[dict[str, int]]) -> None: ...

    @handler("a.b", name="4")
    def fourth(delivery: django_mq.Delivery) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    send("a.b", payload={"a": 1})
    assert drain() == 4
    assert problems() == []


def test_mq_types() -> None:
    @handler("shop.#", name="audit")
    def audit(delivery: Delivery) -> None: ...

    out = StringIO()
    call_command("mq_types", stdout=out)
    lines = out.getvalue().split("\n")
    assert lines[0].split() == ["TYPE", "VERSION", "CLASS", "HANDLERS"]
    assert lines[2].split() == ["shop.orders.placed", "2", f"{__name__}.Placed", "audit"]
    out = StringIO()
    call_command("mq_types", "--json", stdout=out)
    found = json.loads(out.getvalue())[1]
    assert (found["type"], found["handlers"]) == ("shop.orders.placed", ["audit"])
    assert found["schema"]["$defs"]["Placed"]["required"] == ["order_id"]


def test_mq_types_names_a_class_that_cannot_be_stored() -> None:
    """As a program the system check reports it; call_command() runs none."""

    @message("shop.files")
    @dataclass
    class File:
        content: bytes

    with pytest.raises(CommandError, match=r"shop\.files cannot be stored: .*content"):
        call_command("mq_types", stdout=StringIO())


def test_mq_types_without_any() -> None:
    with classes.isolated():
        classes._by_type.clear()
        out = StringIO()
        call_command("mq_types", stdout=out)
    assert "No class is registered" in out.getvalue()


class HasPayload(Protocol):
    payload: Any


class Fields(TypedDict):
    order_id: int


def on_dict(payload: dict[str, Any]) -> None: ...
def on_plain_dict(payload: dict) -> None: ...  # type: ignore[type-arg]
def on_fields(payload: Fields) -> None: ...
def on_number(order_id: int) -> None: ...
def on_model(order: Order) -> None: ...
def on_deliveries(deliveries: list[Delivery]) -> None: ...
def on_delivery(delivery: Delivery) -> None: ...
def on_text_or_delivery(delivery: str | Delivery) -> None: ...
def on_protocol(delivery: HasPayload) -> None: ...
def on_anything(delivery: Any) -> None: ...
def on_unnamed(delivery) -> None: ...  # type: ignore[no-untyped-def]
def on_sequence(deliveries: Sequence[Delivery]) -> None: ...
def on_list(deliveries: list) -> None: ...  # type: ignore[type-arg]
def on_dicts(payloads: list[dict[str, Any]]) -> None: ...
def on_variable(delivery: T) -> None: ...


@functools.wraps(on_dict)
def unpacked(delivery: Delivery) -> None:
    on_dict(delivery.payload)


@pytest.mark.parametrize(
    ("function", "batch", "given"),
    [
        (on_dict, False, "a Delivery"),
        (on_plain_dict, False, "a Delivery"),
        (on_fields, False, "a Delivery"),
        (on_number, False, "a Delivery"),
        (on_model, False, "a Delivery"),
        (on_deliveries, False, "a Delivery"),
        (on_sequence, False, "a Delivery"),
        (functools.partial(on_dict), False, "a Delivery"),
        (on_delivery, True, "a list of deliveries, because of batch=True"),
        (on_dict, True, "a list of deliveries, because of batch=True"),
        (on_dicts, True, "a list of deliveries, because of batch=True"),
    ],
)
def test_w012_an_annotation_that_is_not_what_the_handler_gets(
    function: Callable[..., Any], batch: bool, given: str
) -> None:
    handler("shop.#", name="odd", batch=batch)(function)
    [warning] = check_arguments(None) or ()
    assert warning.id == "django_mq.W012"
    assert str(warning.msg).startswith("The argument of the handler odd is annotated with ")
    assert str(warning.msg).endswith(f", but the handler gets {given}.")


@pytest.mark.parametrize(
    ("function", "batch"),
    [
        (on_delivery, False),
        (on_text_or_delivery, False),
        (on_protocol, False),
        (on_anything, False),
        (on_unnamed, False),
        (on_variable, False),
        (unpacked, False),
        (on_deliveries, True),
        (on_sequence, True),
        (on_list, True),
        (on_anything, True),
        (on_unnamed, True),
    ],
)
def test_w012_leaves_out_annotations_that_may_be_right(
    function: Callable[..., Any], batch: bool
) -> None:
    handler("shop.#", name="even", batch=batch)(function)

    @handler("shop.orders.placed", name="typed")
    def typed(event: Placed) -> None: ...

    @handler("shop.orders.placed", name="unresolved")
    def unresolved(event: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    assert list(check_arguments(None) or ()) == []
