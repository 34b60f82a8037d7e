"""The chain of a message, built from stored and handled messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db.models.functions import Now

from django_mq import broadcast, handler, handlers, queues
from django_mq.models import FailedAttempt, HandledMessage
from django_mq.queues import causes
from django_mq.testing import drain
from tests.rows import add
from tests.slow import mostly_slow

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _chain_of_handlers(settings: Any) -> Iterator[None]:
    settings.DJANGO_MQ = {"QUEUES": {"kept": {"history": 60}}, "REQUIRE_ATOMIC": False}
    with handlers.isolated():

        @handler("order", queue="kept", name="order")
        def order(delivery: Any) -> None:
            broadcast("mail")
            broadcast("stock")
            broadcast("later", after=60)

        @handler("mail", queue="forgotten", name="mail")
        def mail(delivery: Any) -> None:
            broadcast("opened")

        @handler("stock", "opened", queue="kept", name="others")
        def others(delivery: Any) -> None: ...

        yield


def shown(chain: queues.Chain) -> list[tuple[int, str, str]]:
    return [(each.depth, each.type, each.state) for each in chain.links]


WHOLE = [
    (0, "order", "handled"),
    (1, "", "gone"),
    (2, "opened", "handled"),
    (1, "stock", "handled"),
    (1, "later", "delayed"),
]


def test_any_message_of_a_chain_shows_the_tree() -> None:
    """A message handled without a history is known from the messages that it caused."""
    broadcast("order")  # of another chain
    assert drain() == 4
    (id,) = broadcast("order").ids
    assert drain() == 4
    found = queues.chain(id)
    assert (shown(found), found.correlation_id, found.complete) == (WHOLE, str(id), True)
    for link in found.links:
        if link.state != "gone":
            assert queues.chain(link.id) == found


def test_a_failed_attempt_names_a_message_that_is_gone() -> None:
    (id,) = broadcast("order").ids
    drain()
    gone = next(each for each in queues.chain(id).links if each.state == "gone")
    FailedAttempt.objects.create(
        message_id=gone.id, queue="forgotten", type="mail", handler="mail", attempt=1
    )
    named = next(each for each in queues.chain(id).links if each.state == "gone")
    assert (named.type, named.handler, named.queue) == ("mail", "mail", "forgotten")


def test_a_first_message_that_is_stored_is_shown_from_its_effects() -> None:
    """A handler without a transaction may have failed after it had broadcast them."""
    first = add(type="order", dead=-5)
    effect = add(
        type="mail",
        metadata={"mq.correlation_id": f"{first.pk}", "mq.causation_id": f"{first.pk}"},
    )
    for message in (first, effect):
        tree = [(0, "order", "dead"), (1, "mail", "processable")]
        assert shown(queues.chain(message.pk)) == tree


def test_a_message_alone() -> None:
    row = add()
    assert shown(queues.chain(row.pk)) == [(0, row.type, "processable")]
    assert queues.chain(row.pk + 1).links == ()


def test_truncated_chain_is_marked_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causes, "MAX_EXAMINED", 3)
    monkeypatch.setattr(causes, "MAX_MESSAGES", 4)
    first = add()
    for n in range(5):
        HandledMessage.objects.create(
            id=first.pk + 10 + n, queue="q", type="t", keep_until=Now(), causation_id=first.pk,
            correlation_id=str(first.pk),
        )  # fmt: skip
    assert not queues.chain(first.pk).complete
    monkeypatch.setattr(causes, "MAX_MESSAGES", 9)
    assert queues.chain(first.pk).complete
    for _ in range(3):
        add()
    assert not queues.chain(first.pk).complete


@pytest.mark.parametrize(
    ("cause", "chain"),
    mostly_slow(
        ["{id}", "x", "-1", "9" * 30, 7, None, {}, ["1"]],
        ["{id}", "\u202e", "9" * 30, 7, None, {}],
    ),
)
def test_odd_metadata(cause: Any, chain: Any) -> None:
    row = add()
    values = (each.format(id=row.pk) if isinstance(each, str) else each for each in (cause, chain))
    row.metadata = dict(zip(("mq.causation_id", "mq.correlation_id"), values, strict=True))
    row.save()
    assert row.pk in [each.id for each in queues.chain(row.pk).links]


def test_messages_that_cause_each_other() -> None:
    one, two = add(), add()
    for row, cause in ((one, two), (two, one)):
        row.metadata = {"mq.causation_id": str(cause.pk), "mq.correlation_id": str(one.pk)}
        row.save()
    assert [(each.depth, each.id) for each in queues.chain(two.pk).links] == [
        (0, one.pk),
        (1, two.pk),
    ]


def test_a_chain_that_comes_from_another_database() -> None:
    """Its messages are not taken for those of a chain of this database with the same number."""
    other, first, second = add(), add(), add()
    for row, cause in ((first, f"default:{other.pk}"), (second, str(first.pk))):
        row.metadata = {
            "mq.causation_id": cause,
            "mq.correlation_id": f"default:{other.pk}",
        }
        row.save()
    found = queues.chain(first.pk)
    assert [(each.depth, each.id) for each in found.links] == [(0, first.pk), (1, second.pk)]
    assert (found.correlation_id, found.complete) == (f"default:{other.pk}", False)
    assert [each.id for each in queues.chain(other.pk).links] == [other.pk]
