"""A second connection, for what others hold."""

import pytest
from django.db import connection

from django_mq.outbox import notify


@pytest.fixture
def other(transactional_db):
    """A cursor of another connection in an open transaction, rolled back at the end."""
    second = connection.copy()
    second.set_autocommit(False)
    try:
        with second.cursor() as cursor:
            yield cursor
    finally:
        second.rollback()
        second.close()


@pytest.fixture
def lock(other):
    """Lock the row of a message, as a claim or a slice does, until the test ends."""

    def lock(message):
        other.execute(
            "select id from django_mq_queuedmessage where id = %s for no key update", [message.pk]
        )
        assert other.fetchall() == [(message.pk,)]

    return lock


@pytest.fixture
def rings(monkeypatch):
    """The connections that were asked to ring after commit."""
    asked = []
    monkeypatch.setattr(notify, "ring_after_commit", asked.append)
    return asked
