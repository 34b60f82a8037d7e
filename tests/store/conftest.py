"""Two connections: a worker's and another session's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import psycopg
import pytest

from django_mq.store.claim_lapsed import Lapsed, Mark, claim_lapsed
from tests.database import second_connection


@pytest.fixture
def cursor(transactional_db: None) -> Iterator[psycopg.Cursor[Any]]:
    """A cursor like the worker's own: of the driver, with each statement a transaction."""
    with second_connection() as own, own.cursor() as cursor:
        yield cursor


@pytest.fixture
def other(transactional_db: None) -> Iterator[psycopg.Connection[Any]]:
    """A second connection, in a transaction that is rolled back at the end."""
    with second_connection() as other:
        other.autocommit = False
        yield other
        other.rollback()


def lock(other: psycopg.Connection[Any], *ids: int) -> None:
    """Lock rows in the transaction of `other`, like a claim or a slice."""
    other.execute(
        "select from django_mq_queuedmessage where id = any(%s) for no key update", [list(ids)]
    )


def take_lapsed(
    cursor: psycopg.Cursor[Any],
    *queues: str,
    limit: int = 100,
    window: int = 0,
    max_bytes: int = 4 << 20,
    marks: Mapping[str, Mark] | None = None,
    suspects: bool = True,
) -> Lapsed:
    return claim_lapsed(
        cursor,
        queues=queues or ["mail"],
        claimer="me:8",
        lease=30.0,
        limit=limit,
        window=window,
        max_bytes=max_bytes,
        marks=marks,
        suspects=suspects,
    )
