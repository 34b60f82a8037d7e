"""An id looks free to put-aside content, or to a dead letter, while a producer changes its holder.

A message that expired while it waited does not hold its id. An open transaction may have given it
more time: who would take the id waits for that transaction, and takes it only after a rollback.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from django.db import connection, transaction

from django_mq import queues
from django_mq.models import QueuedMessage, UniqueKey
from django_mq.store import change_waiting, promotion
from django_mq.store.put_aside import put_aside
from django_mq.store.rows import NewRow
from django_mq.store.unique_ids import UniqueId, UniqueRow
from tests.database import second_connection, until_any_blocked
from tests.outbox.races.conftest import (
    EXPIRES,
    PATIENCE,
    Holder,
    send,
    sleep_until_expired,
)
from tests.rows import add
from tests.slow import slow

pytestmark = pytest.mark.django_db(transaction=True)

ID = UniqueId("default", "", "a.b", "u")
ROW = NewRow("default", "a.b", "2", 20)


def take(together: Callable[..., Future[Any]], taker: Callable[[], Any], *, rollback: bool) -> Any:
    """Run `taker` once the message has expired, while an update gives it another hour."""
    message = QueuedMessage.objects.get(dead_at=None)
    row = UniqueRow(message.pk, ROW._replace(lifetime=3600.0), "u")
    holder = Holder(together, lambda: replace(row))
    sleep_until_expired()
    taking = together(taker)
    until_any_blocked()
    holder.end(rollback=rollback)
    return taking.result(PATIENCE)


def replace(row: UniqueRow) -> None:
    with connection.cursor() as cursor:
        assert change_waiting.replace(cursor, [(row, False)])


def live() -> QueuedMessage:
    """Return the message that may run; there must be one."""
    return QueuedMessage.objects.with_state().exclude(state__in=["expired", "dead"]).get()


@pytest.mark.parametrize("rollback", [False, *slow(True)])
def test_put_aside_content(together: Callable[..., Future[Any]], rollback: bool) -> None:
    waiting = send(1, expires=EXPIRES).copies[0].id
    with second_connection() as other:
        put_aside(other.cursor(), [UniqueRow(0, ROW._replace(payload="3"), "u")])

    def promote() -> list[int]:
        with second_connection() as other:
            return promotion.promote_put_aside(other.cursor(), [ID])

    promoted = take(together, promote, rollback=rollback)
    assert bool(promoted) == rollback
    assert live().payload == (3 if rollback else 2)
    assert [live().pk] == (promoted or [waiting])
    assert UniqueKey.objects.filter(put_aside__isnull=False).exists() != rollback


@pytest.mark.parametrize("rollback", [False, *slow(True)])
def test_a_dead_letter(together: Callable[..., Future[Any]], rollback: bool) -> None:
    dead = add("default", type="a.b", payload=3, unique_id="u", dead=-1, attempts=1)
    waiting = send(1, expires=EXPIRES).copies[0].id

    def requeue() -> tuple[int, ...]:
        with transaction.atomic():
            return queues.requeue([dead.pk]).ids

    assert take(together, requeue, rollback=rollback) == ((dead.pk,) if rollback else ())
    assert live().pk == (dead.pk if rollback else waiting)
    assert live().payload == (3 if rollback else 2)
