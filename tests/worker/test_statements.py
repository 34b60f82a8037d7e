"""The connection for statements sees what other sessions have committed."""

from __future__ import annotations

import psycopg
import pytest
from django.db import connection

from django_mq.executor.statements import Statements
from tests.database import second_connection

pytestmark = pytest.mark.django_db(transaction=True)


def test_statements_see_what_was_committed_before_them(transactional_db: None) -> None:
    """Guarantee 17: whatever level the alias has, a snapshot must follow a lock."""
    options = connection.settings_dict["OPTIONS"]
    before = dict(options)
    options["isolation_level"] = psycopg.IsolationLevel.REPEATABLE_READ
    statements = Statements("default")
    try:
        cursor = statements.cursor()
        with statements.transaction():
            cursor.execute("select count(*) from django_mq_queuedmessage")
            assert cursor.fetchone() == (0,)
            with second_connection() as other:
                other.execute(
                    "insert into django_mq_queuedmessage (queue, type, payload)"
                    " values ('mail', 'a', '{}')"
                )
            cursor.execute("select count(*) from django_mq_queuedmessage")
            assert cursor.fetchone() == (1,)
    finally:
        statements.close()
        options.clear()
        options.update(before)
