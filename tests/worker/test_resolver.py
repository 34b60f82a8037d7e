"""Each claimed row finds its handler or handlers, or is held; no attempt is lost."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from django_mq import RetryPolicy, handler
from django_mq.conf import get_settings
from django_mq.executor.ended import Ended
from django_mq.executor.tasks import Task
from django_mq.messages import Delivery
from django_mq.models import QueuedMessage
from django_mq.store import Cursor
from django_mq.store.claim import Lane, claim
from django_mq.worker import Worker
from django_mq.worker import resolver as resolver_module
from django_mq.worker.resolver import Resolver, settle_held
from tests.database import second_connection
from tests.rows import add, stored
from tests.worker.conftest import Said

pytestmark = pytest.mark.django_db(transaction=True)


def sort(queue: str = "mail") -> list[tuple[int, str]]:
    """Claim the due rows and sort them; return ids and handlers of those that can run."""
    with second_connection() as own:
        rows = claim(
            own.cursor(),
            lanes=[Lane(queue, 0)],
            claimer="me:1",
            lease=60.0,
            limit=100,
            max_bytes=1 << 20,
        ).rows
        resolver = Resolver(get_settings(), batch_size_of=lambda queue: 1)
        deliveries = deque(map(Delivery, rows))
        tasks = resolver.take_ready(deliveries, check_limits=resolver.may_exceed(deliveries))
        assert [resolver.resolve(own.cursor(), task.delivery) for task in tasks] == tasks
        others = [resolver.resolve(own.cursor(), delivery) for delivery in deliveries]
        settle_held(own.cursor(), [each for each in others if isinstance(each, Ended)])
        tasks += [each for each in others if isinstance(each, Task)]
    assert all(task.delivery.handler == task.handler.name for task in tasks)
    return [(task.delivery.id, task.handler.name) for task in tasks]


def subscribe(pattern: str, name: str, **options: Any) -> Callable[[Delivery], None]:
    @handler(pattern, name=name, **options)
    def function(delivery: Delivery) -> None: ...

    return function


def assert_held(message: QueuedMessage, reason: str) -> None:
    """Guarantee 14: held, no attempt used, and a readable reason."""
    stored(message)
    assert (message.attempts, message.claimed_by, message.leased_until) == (0, None, None)
    assert message.held_since is not None
    assert message.dead_at is None
    assert reason in message.last_error
    assert message.processable_after > message.held_since


def test_a_row_names_its_handler() -> None:
    subscribe("a", "first", queue="mail")
    subscribe("a", "second", queue="mail")
    message = add(type="a", handler="second")
    assert sort() == [(message.pk, "second")]


def test_an_old_name_still_finds_the_handler() -> None:
    @handler("a", name="new", aliases=("old",), queue="mail")
    def function(delivery: Delivery) -> None: ...

    message = add(type="a", handler="old")
    with second_connection() as own:
        rows = claim(
            own.cursor(), lanes=[Lane("mail", 0)], claimer="me:1", lease=9.0, limit=9,
            max_bytes=999,
        ).rows  # fmt: skip
        task = Resolver(get_settings(), batch_size_of=lambda queue: 1).resolve(
            own.cursor(), Delivery(rows[0])
        )
    assert isinstance(task, Task)
    assert (task.delivery.id, task.handler.name) == (message.pk, "new")


def test_an_unknown_handler_is_held(said: Said) -> None:
    """PMQ-14, PMQ-31 as changed: another worker may know it; nothing is imported for it."""
    message = add(handler="os.system")
    assert sort() == []
    assert_held(message, "no handler named os.system")
    assert said.all == []


def test_messages_that_cannot_run_are_held_together(caplog: pytest.LogCaptureFixture) -> None:
    """A deploy that adds a type may leave an old worker thousands of its messages.

    The log has a line for each claim, type, queue and reason, with the number of messages.
    """
    for _ in range(30):
        add(type="new")
    other = add(type="newer")
    assert Worker(queues=["mail"]).run(until_empty=True)
    with second_connection() as own:
        held = own.execute(
            "select count(*), count(distinct xmin::text) from django_mq_queuedmessage"
            " where held_since is not null"
        ).fetchone()
    assert held is not None
    assert held[0] == 31
    assert held[1] <= 6, "as many transactions as claims"
    logged = [vars(each) for each in caplog.records if vars(each).get("event") == "message_held"]
    assert len(logged) <= 6
    assert sum(each["messages"] for each in logged) == 31
    assert {each["type"] for each in logged} == {"new", "newer"}
    [alone] = [each for each in logged if each["message_id"] == other.pk]
    assert alone["message"].startswith(f"message {other.pk} (newer, queue mail) is held: this")
    assert any(" like it (new, queue mail) are held: " in each["message"] for each in logged)


def test_held_message_suggests_similar_names() -> None:
    subscribe("shop.orders.placed", "shop.mail", queue="mail")
    subscribe("shop.#", "other", queue="elsewhere")
    typed, named = add(type="shop.order.placed"), add(type="x", handler="shop.mial")
    assert sort() == []
    assert_held(typed, "(did you mean shop.orders.placed? handlers are looked for in handlers.py")
    assert_held(named, "named shop.mial (did you mean shop.mail? handlers are looked for")


def test_a_type_that_is_spelled_well_gets_no_other_suggestion() -> None:
    subscribe("shop.orders.placed", "elsewhere", queue="elsewhere")
    subscribe("shop.orders.placed", "gold", queue="mail", where={"tier": "gold"})
    subscribe("shop.orders.places", "similar", queue="elsewhere")
    message = add(type="shop.orders.placed")
    assert sort() == []
    assert_held(message, "in queue mail (handlers here take it only from other queues or with")


def test_a_handler_does_not_run_in_a_queue_it_did_not_allow() -> None:
    """Guarantee 20, S02, S32: who may insert into `public` cannot trigger `billing` there."""
    subscribe("billing.#", "billing", queue="secure", queues=("audit",))
    public = add("public", type="billing.pay", handler="billing")
    assert sort("public") == []
    assert_held(public, "not allowed in queue public")
    audit = add("audit", type="billing.pay", handler="billing")
    assert sort("audit") == [(audit.pk, "billing")]


def test_an_unrouted_row_goes_to_the_one_handler_that_matches() -> None:
    """RMQ-8 as changed: queue and type identify it."""
    subscribe("a.*", "h", queue="mail", retry=RetryPolicy(max_attempts=3))
    subscribe("a.*", "elsewhere", queue="post")
    message = add(type="a.b", max_attempts=20)
    assert sort() == [(message.pk, "h")]
    stored(message)
    assert (message.handler, message.max_attempts) == ("h", 3)
    assert QueuedMessage.objects.count() == 1


def test_several_handlers_each_get_a_copy() -> None:
    """PMQ-33, split in one statement: the row itself is the first copy."""
    subscribe("a", "h", queue="mail")
    subscribe("#", "i", queue="mail", queues=("post",), retry=RetryPolicy(max_attempts=2))
    subscribe("a", "other", queue="post")
    message = add(type="a", payload={"n": 1}, metadata={"m": 2})
    assert sort() == [(message.pk, "h")]
    copy = QueuedMessage.objects.get(handler="i")
    assert (copy.payload, copy.metadata, copy.max_attempts, copy.attempts) == (
        {"n": 1}, {"m": 2}, 2, 0
    )  # fmt: skip
    assert sort() == [(copy.pk, "i")]
    assert QueuedMessage.objects.count() == 2


def test_metadata_decides_where_asked() -> None:
    subscribe("a", "gold", queue="mail", where={"tier": "gold"})
    subscribe("a", "tin", queue="mail", where={"tier": "tin"})
    message = add(type="a", metadata={"tier": "tin"})
    assert sort() == [(message.pk, "tin")]


def test_no_handler_matches_here(said: Said) -> None:
    subscribe("b", "h", queue="mail")
    subscribe("a", "elsewhere", queue="post")
    message = add(type="a")
    assert sort() == []
    assert_held(message, "no handler for a in queue mail")


def test_in_the_default_queue_handlers_without_a_queue_match() -> None:
    subscribe("a", "h")
    message = add("default", type="a")
    assert sort("default") == [(message.pk, "h")]
    held = add("mail", type="a")
    assert sort("mail") == []
    assert_held(held, "no handler for a")


@pytest.mark.parametrize("routed", [True, False])
def test_a_newer_schema_is_held(routed: bool) -> None:
    """An old worker meets a message of a newer version."""
    subscribe("a", "h", queue="mail", schema_version=2)
    old, same, newer = (
        add(type="a", schema_version=n, handler="h" if routed else "") for n in (1, 2, 3)
    )
    assert sort() == [(old.pk, "h"), (same.pk, "h")]
    assert_held(newer, "schema version 3 is newer than version 2 that handler h understands")


def test_one_of_several_that_is_too_old_holds_the_unsplit_row() -> None:
    subscribe("a", "h", queue="mail", schema_version=2)
    subscribe("a", "i", queue="mail", schema_version=1)
    message = add(type="a", schema_version=2)
    assert sort() == []
    assert_held(message, "that handler i understands")
    assert QueuedMessage.objects.count() == 1


@pytest.mark.parametrize("routed", [True, False])
@pytest.mark.parametrize("metadata", [["tier"], [], "tier", "{}", 5, None, True])
def test_metadata_that_is_no_object_is_held(metadata: Any, routed: bool) -> None:
    """Other programs also write rows: none stops a worker, or surprises the handler it names."""
    subscribe("a", "h", queue="mail")
    message = add(type="a", handler="h" if routed else "")
    with second_connection() as other:
        other.execute(
            "update django_mq_queuedmessage set metadata = %s::jsonb", [json.dumps(metadata)]
        )
    assert sort() == []
    assert_held(message, "its metadata is not a JSON object")


def test_types_of_others_are_no_trouble() -> None:
    subscribe("a.*", "h", queue="mail")
    for type in (".", "..", "a..b", "-", "a:b/c", "0"):
        add(type=type)
    assert sort() == []
    assert QueuedMessage.objects.filter(held_since__isnull=False).count() == 6


def test_held_for_too_long_is_dead(settings: Any, said: Said) -> None:
    """PMQ-14 as changed: with the reason, and reported."""
    settings.DJANGO_MQ = {"HOLD_FOR": 100}
    dead, held = add(type="a", held=-101), add(type="a", held=-50)
    since = held.held_since
    before = timezone.now()
    assert sort() == []
    stored(dead)
    assert dead.dead_at is not None
    assert dead.dead_reason.startswith("held for too long: this worker has no handler")
    assert dead.attempts == 0
    assert said.ids("message_dead") == [dead.pk]
    assert stored(held).held_since == since
    # As long again as it had been held when it was claimed, and 1 s.
    least, most = (at + (at - since) + timedelta(seconds=1) for at in (before, timezone.now()))
    assert least <= held.processable_after <= most


def test_expired_message_is_dead_and_not_held(said: Said) -> None:
    """In a test too, where no chore looks for it."""
    messages = [add(type="a", expires=-1), add(type="a", expires=-1, held=-50)]
    assert sort() == []
    for message in messages:
        stored(message)
        assert (message.dead_reason, message.attempts) == ("expired", 0)
    assert said.ids("message_dead") == [each.pk for each in messages]


@pytest.mark.parametrize("state", [{"expires": -1, "attempts": 3}, {"held": -100_000}])
def test_the_log_names_no_attempt_of_a_message_that_did_not_start(
    caplog: pytest.LogCaptureFixture, state: dict[str, Any]
) -> None:
    message = add(type="a", **state)
    assert sort() == []
    [record] = [each for each in caplog.records if each.event == "message_dead"]  # type: ignore[attr-defined]
    start = (
        f"message {message.pk} (a, queue mail, handler none) is dead: {stored(message).dead_reason}"
    )
    assert record.getMessage() == start
    assert record.attempt is None  # type: ignore[attr-defined]


def test_waits_double(said: Said) -> None:
    message = add(type="a")
    assert sort() == []
    held = stored(message)
    assert held.processable_after - held.held_since == timedelta(seconds=1)
    with second_connection() as other:
        other.execute(
            "update django_mq_queuedmessage"
            " set held_since = now() - interval '1 h', processable_after = now()"
        )
    assert sort() == []
    longest = (stored(message).processable_after - timezone.now()).total_seconds()
    assert 290 < longest <= 300


def test_a_held_row_runs_when_its_handler_is_there_after_all() -> None:
    message = add(type="a", held=-5)
    subscribe("a", "h", queue="mail")
    assert sort() == [(message.pk, "h")]
    assert stored(message).held_since is None


def test_a_row_that_was_taken_meanwhile_is_not_split() -> None:
    subscribe("a", "h", queue="mail")
    subscribe("a", "i", queue="mail")
    message = add(type="a")
    with second_connection() as own:
        rows = claim(
            own.cursor(), lanes=[Lane("mail", 0)], claimer="me:1", lease=9.0, limit=9,
            max_bytes=999,
        ).rows  # fmt: skip
        own.execute("update django_mq_queuedmessage set claimed_by = 'you:1'")
        assert (
            Resolver(get_settings(), batch_size_of=lambda queue: 1).resolve(
                own.cursor(), Delivery(rows[0])
            )
            is None
        )
    assert stored(message).handler == ""
    assert QueuedMessage.objects.count() == 1


def test_an_error_of_any_kind_at_one_held_message_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, bad, last = (add(type="unknown") for _ in range(3))
    settle = resolver_module.settle_all

    def raises(cursor: Cursor, ended: Sequence[Ended]) -> set[int]:
        if bad.pk in {each.delivery.id for each in ended}:
            raise ValueError
        return settle(cursor, ended)

    monkeypatch.setattr(resolver_module, "settle_all", raises)
    assert sort() == []
    assert [stored(each).held_since is None for each in (first, bad, last)] == [False, True, False]
    assert f"message {bad.pk} cannot be held" in caplog.text
