"""Handlers that break their transaction or their connection, each in a different way."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest
from django.db import (
    DatabaseError,
    IntegrityError,
    connection,
    transaction,
)

from django_mq.messages import Delivery
from testproject.shop.models import Product
from tests.database import second_connection


def swallow_error(delivery: Delivery) -> None:
    with pytest.raises(DatabaseError):
        connection.cursor().execute("select 1/0")


def swallow_integrity_error(delivery: Delivery) -> None:
    Product.objects.create(name="twice", price=1)
    with pytest.raises(IntegrityError):
        Product.objects.create(name="twice", price=1)


def raw(*statements: str) -> Callable[[Delivery], None]:
    def do(delivery: Delivery) -> None:
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    do.__name__ = "; ".join(statements)
    return do


def close(delivery: Delivery) -> None:
    connection.close()


def close_and_go_on(delivery: Delivery) -> None:
    connection.close()
    with pytest.raises((DatabaseError, psycopg.Error)):
        connection.cursor()


def set_rollback(delivery: Delivery) -> None:
    transaction.set_rollback(True)


def flip_autocommit(delivery: Delivery) -> None:
    connection.cursor().execute("commit")
    connection.connection.autocommit = True


def driver_commit(delivery: Delivery) -> None:
    connection.connection.commit()


def driver_rollback(delivery: Delivery) -> None:
    connection.connection.rollback()


def driver_close(delivery: Delivery) -> None:
    connection.connection.close()


def inner_block_left_open(delivery: Delivery) -> None:
    transaction.atomic().__enter__()


def inner_block_without_savepoint_left_open(delivery: Delivery) -> None:
    transaction.atomic(savepoint=False).__enter__()


def outer_block_left_is_a_commit(delivery: Delivery) -> None:
    connection.atomic_blocks[0].__exit__(None, None, None)


def terminate(delivery: Delivery) -> None:
    with second_connection() as other:
        other.execute(
            "select pg_terminate_backend(%s, 5000)", [connection.connection.info.backend_pid]
        )


def terminate_and_use(delivery: Delivery) -> None:
    terminate(delivery)
    connection.cursor().execute("select 1")


#: Unfinished queries, as the traceback of an error keeps them.
unfinished: list[object] = []


def stream_left_open(delivery: Delivery) -> None:
    connection.ensure_connection()
    rows = connection.connection.cursor().stream("select generate_series(1, 3)")
    next(rows)
    unfinished.append(rows)


def copy_left_open(delivery: Delivery) -> None:
    connection.ensure_connection()
    copy = connection.connection.cursor().copy("copy shop_product (name) from stdin")
    copy.__enter__()
    unfinished.append(copy)


BREAKS = [
    swallow_error,
    swallow_integrity_error,
    raw("commit"),
    raw("commit", "select 1"),
    raw("commit", "begin"),
    raw("commit and chain"),
    raw("rollback"),
    raw("rollback", "select 1"),
    raw("rollback", "begin", "select 1"),
    raw("release savepoint django_mq_delivery"),
    close,
    close_and_go_on,
    set_rollback,
    flip_autocommit,
    driver_commit,
    driver_rollback,
    driver_close,
    inner_block_left_open,
    inner_block_without_savepoint_left_open,
    outer_block_left_is_a_commit,
    terminate,
    terminate_and_use,
    stream_left_open,
    copy_left_open,
]
