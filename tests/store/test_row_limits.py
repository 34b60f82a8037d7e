"""A bad row of another program is refused, or stops only itself."""

from __future__ import annotations

import pytest
from django.db import DataError, IntegrityError, connection, transaction

from django_mq.models import QueuedMessage
from django_mq.store import expiry
from tests.rows import add

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("when", ["infinity", "-infinity", "0044-03-15 BC", "20000-01-01"])
def test_a_time_that_python_cannot_read_is_refused(when: str) -> None:
    """Guarantee 24, S17: a row of another program cannot stop the workers."""
    with (
        pytest.raises((IntegrityError, DataError)),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute("select mq_broadcast('q', 't', '{}', '{}', %s::timestamptz)", [when])


def test_attempts_cannot_overflow() -> None:
    message = add()
    with pytest.raises(IntegrityError), transaction.atomic():
        QueuedMessage.objects.filter(pk=message.pk).update(attempts=2**31 - 1)


@pytest.mark.parametrize("when", ["infinity", "-infinity"])
@pytest.mark.parametrize("column", ["leased_until", "held_since", "dead_at"])
def test_another_time_that_python_cannot_read_is_refused(column: str, when: str) -> None:
    """S17: otherwise claims, or the look for lapsed messages, would fail for ever."""
    message = add()
    claimer = ", claimed_by = 'x:1'" if column == "leased_until" else ""
    with pytest.raises(IntegrityError), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            f"update django_mq_queuedmessage set {column} = %s {claimer} where id = %s",
            [when, message.pk],
        )


def test_expiry_is_returned_for_the_signal() -> None:
    message = add(expires=-1)
    with connection.cursor() as cursor:
        assert [row.id for row in expiry.expire(cursor, limit=10)] == [message.pk]
