"""docs/deploy/disaster-recovery.md: its statement runs."""

from __future__ import annotations

import pytest
from django.db import connection, transaction

from django_mq import broadcast
from tests.docs.pages import DOCS
from tests.rows import add
from tests.test_docs import snippets

pytestmark = pytest.mark.django_db


def broadcast_one() -> int:
    with transaction.atomic():
        [id] = broadcast("nobody.listens").ids
    return id


def test_ids_begin_where_none_was_given() -> None:
    """Guarantee 21."""
    [statement] = snippets(DOCS / "deploy/disaster-recovery.md", "sql")
    for _ in range(2):  # the second time the sequence is ahead of the table
        last = broadcast_one()
        with connection.cursor() as cursor:
            cursor.execute(statement)
        assert broadcast_one() == last + 10_000_001


def test_a_row_beyond_the_sequence_counts_too() -> None:
    """As where only the rows were restored."""
    [statement] = snippets(DOCS / "deploy/disaster-recovery.md", "sql")
    high = add(id=10**9).pk
    with connection.cursor() as cursor:
        cursor.execute(statement)
    assert broadcast_one() == high + 10_000_001
