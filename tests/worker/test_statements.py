"""The connection for statements sees what other sessions have committed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pytest
from django.db import connection
from psycopg.pq import TransactionStatus

from django_mq.executor.connections import roll_back
from django_mq.executor.simple_protocol import simple_query
from django_mq.executor.statements import Statements, transaction
from django_mq.store.limits import Limits
from tests.database import second_connection

pytestmark = pytest.mark.django_db(transaction=True)


def test_statements_see_earlier_commits(transactional_db: None) -> None:
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


@contextmanager
def cancelling(driver: psycopg.Connection[Any]) -> Iterator[None]:
    """Cancel what `driver` runs, over and over, as an operator's tool does."""
    enough = threading.Event()

    def cancel() -> None:
        while not (enough.is_set() or driver.closed):
            driver.cancel_safe()

    canceller = threading.Thread(target=cancel)
    canceller.start()
    try:
        yield
    finally:
        enough.set()
        canceller.join()


def test_a_cancelled_commit_leaves_no_transaction_open(transactional_db: None) -> None:
    """If the cancel arrives just before BEGIN or COMMIT runs, the transaction is left aborted.

    Nothing else in a worker would end it. Most cancels arrive there, since the block is empty.
    """
    left = []
    with second_connection() as driver, cancelling(driver):
        while len(left) < 12 and not driver.closed:
            try:
                with transaction(driver, Limits()):
                    pass
            except psycopg.errors.QueryCanceled:
                left.append(driver.info.transaction_status)
    assert TransactionStatus.INERROR not in left


@pytest.mark.slow
def test_a_cancelled_rollback_closes_the_connection(transactional_db: None) -> None:
    """So the next statement connects, instead of failing in the transaction that was left."""
    refused = False
    with second_connection() as driver, cancelling(driver):
        while not refused:
            with suppress(psycopg.errors.QueryCanceled):
                simple_query(driver, "begin")
            try:
                roll_back(driver)
            except psycopg.errors.QueryCanceled:
                refused = True
        assert driver.closed


def test_limits_that_the_server_refuses_leave_no_transaction_open(transactional_db: None) -> None:
    with second_connection() as driver:
        block = transaction(driver, Limits(statement=1e9))
        with pytest.raises(psycopg.errors.InvalidParameterValue), block:
            pass
        assert driver.info.transaction_status == TransactionStatus.IDLE
