"""A second connection, for the locks and transactions of other sessions."""

import pytest
from django.db import connection

from django_mq import handlers
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
    """Lock a message's row until the test ends, like a claim or a slice."""

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


@pytest.fixture
def no_handlers():
    """Leave out the handlers of the test project."""
    with handlers.isolated():
        yield
