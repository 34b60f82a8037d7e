"""Broadcasting under row-level security, under which the server refuses COPY."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import DatabaseError, connection, transaction

from django_mq import Message, broadcast, broadcast_many
from django_mq.models import QueuedMessage
from django_mq.store import insert
from tests.roles import acting_as, make_role

pytestmark = pytest.mark.django_db

GRANTS = """
alter table django_mq_queuedmessage enable row level security;
grant select, insert on django_mq_queuedmessage to {role};
grant usage on sequence django_mq_queuedmessage_id_seq to {role};
grant select, insert, update, delete on django_mq_uniquekey to {role};
grant usage on sequence django_mq_uniquekey_id_seq to {role};
create policy mail on django_mq_queuedmessage to {role} using (queue = 'mail')
"""


@pytest.fixture
def tenant() -> Iterator[None]:
    """A login that sees and writes only messages of the queue "mail"."""
    role = make_role("mq_test_tenant", *GRANTS.split(";\n"))
    with acting_as(role):
        yield


@pytest.mark.parametrize(
    "n", [1, 2, insert.MAX_INSERT_ROWS, insert.MAX_INSERT_ROWS + 1, insert.COPY_LINES + 7]
)
def test_any_number_is_stored_in_order(tenant: None, n: int) -> None:
    receipts = broadcast_many([Message("a.b", {"n": n}, queue="mail") for n in range(n)])
    ids = [receipt.ids[0] for receipt in receipts]
    assert ids == sorted(ids)
    found = QueuedMessage.objects.filter(pk__in=ids).order_by("pk")
    assert [each.payload["n"] for each in found] == list(range(n))


def test_options_and_delays_arrive(tenant: None) -> None:
    broadcast_many(
        [Message("a.b", queue="mail", after=60, expires=90, key="k", priority=n % 3)
         for n in range(99)]
    )  # fmt: skip
    assert QueuedMessage.objects.filter(key="k", expires_at__isnull=False).count() == 99
    assert QueuedMessage.objects.filter(priority=2).count() == 33


def test_an_iterator_is_stored_in_chunks(tenant: None) -> None:
    assert broadcast_many(Message("a.b", queue="mail") for _ in range(999)).count == 999


def test_long_payloads_are_stored_in_several_statements(
    tenant: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(insert, "COPY_CHARACTERS", 5000)
    statements: list[str] = []

    def note(execute, sql, params, many, context):  # type: ignore[no-untyped-def]
        statements.append(sql)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(note):
        broadcast_many([Message("a.b", {"text": "x" * 1000}, queue="mail") for _ in range(60)])
    assert QueuedMessage.objects.count() == 60
    assert 10 <= sum("insert into" in sql for sql in statements) <= 20


def test_unique_ids_too(tenant: None) -> None:
    messages = [Message("a.b", queue="mail", unique_id=f"u{n % 80}") for n in range(90)]
    assert sum(bool(receipt) for receipt in broadcast_many(messages)) == 80


@pytest.mark.parametrize("n", [1, 5, 90])
def test_a_message_that_the_policy_forbids_is_refused(tenant: None, n: int) -> None:
    with pytest.raises(DatabaseError, match="row-level security"), transaction.atomic():
        broadcast_many([Message("a.b", queue="other") for _ in range(n)])
    assert broadcast("a.b", queue="mail")
