"""Operator commands beside a session that has a row locked."""

from __future__ import annotations

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from django_mq import queues
from tests.database import second_connection

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_lock_on_a_row_is_not_blamed_on_the_lock_of_a_table() -> None:
    """An index is created on another table at the same time."""
    queues.pause("mail")
    with (
        second_connection() as owner,
        second_connection() as innocent,
        owner.transaction(),
        innocent.transaction(),
    ):
        owner.execute("select from django_mq_queuestate for update")
        innocent.execute("lock table django_mq_failedattempt in share mode")
        with pytest.raises(CommandError) as raised:
            call_command("mq_resume", "mail", "--yes")
    assert "Another session holds a lock: try again in a moment." in str(raised.value)
    assert "pg_terminate_backend" not in str(raised.value)


def test_a_caller_that_commits_by_hand_keeps_its_transaction() -> None:
    connection.set_autocommit(False)
    try:
        with connection.cursor() as cursor:
            cursor.execute("set local lock_timeout = '20s'")
            call_command("mq_status")
            cursor.execute("show lock_timeout")
            assert cursor.fetchone() == ("20s",)
    finally:
        connection.rollback()
        connection.set_autocommit(True)
