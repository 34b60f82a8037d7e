"""Other threads than the shared one: how an async handler calls them, and what they leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections, transaction

from django_mq import RetryPolicy, fixed
from django_mq.models import QueuedMessage
from tests.database import second_connection
from tests.rows import add
from tests.slow import slow

#: Runs a function in another thread.
Way = Callable[..., Awaitable[Any]]

#: The retry policy of handlers that must not run again in the test.
LATER = RetryPolicy(backoff=fixed(600))


async def run_in_executor(function: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, function, *args)


async def insensitive(function: Callable[..., Any], *args: Any) -> Any:
    return await sync_to_async(function, thread_sensitive=False)(*args)


ways = pytest.mark.parametrize("way", [asyncio.to_thread, insensitive, *slow(run_in_executor)])


def send(handler: str, **given: Any) -> QueuedMessage:
    """Add a message for `handler` while a worker runs, which may remove it at once."""
    with transaction.atomic():
        return add(handler=handler, **given)


def query(sql: str, alias: str = "default") -> Any:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone()[0]


def own_pid(alias: str = "default") -> int:
    return int(query("select pg_backend_pid()", alias))


def are_gone(pids: list[int]) -> bool:
    with second_connection() as other:
        open_ = other.execute("select 1 from pg_stat_activity where pid = any(%s)", [pids])
        return open_.fetchone() is None


def turn_autocommit_off(alias: str) -> None:
    transaction.set_autocommit(False, using=alias)


def enter_a_block(alias: str) -> None:
    transaction.atomic(using=alias).__enter__()


def begin(alias: str) -> None:
    connections[alias].cursor().execute("begin")
