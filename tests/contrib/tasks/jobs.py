"""The tasks of these tests, declared like users' tasks: only the backend is this package's."""

from __future__ import annotations

import asyncio
import sys
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import django
from asgiref.sync import sync_to_async
from django.db import connection

from django_mq import Retry
from testproject.shop.models import Product

if django.VERSION >= (6, 0):
    from django.tasks import task
else:
    from django_tasks import task

#: The runs, in order; tests empty it.
ran: list[Any] = []
#: A waiting task holds its worker until this is set.
gate = threading.Event()
second_gate = threading.Event()
started = threading.Event()


@task
def note(*args: Any, **kwargs: Any) -> Any:
    ran.append((args, kwargs))
    return {"args": args, "kwargs": kwargs}


@task(queue_name="second", priority=5)
def elsewhere(value: Any = None) -> Any:
    ran.append(value)
    return value


@task
def write(name: str) -> int:
    return Product.objects.create(name=name, price=1).pk


@task
def write_and_fail(name: str) -> None:
    Product.objects.create(name=name, price=1)
    raise ValueError("this task failed")


@task
def fail(text: str = "this task failed") -> None:
    raise ValueError(text)


@task
def nest() -> None:
    raise ValueError(ValueError("inner"))


class Odd(Exception):
    """An error whose class may no longer exist when its result is read."""


@task
def fail_oddly() -> None:
    raise Odd("odd")


@task
def leave() -> None:
    sys.exit("enough")


@task
def interrupt() -> None:
    ran.append("interrupted")
    raise KeyboardInterrupt


@task
async def coroutine_interrupts() -> None:
    raise KeyboardInterrupt


@task
def unstorable() -> Any:
    return {"rows": [1, object()]}


@task
def return_a_retry() -> Any:
    return Retry(after=1)


@task(takes_context=True)
def in_context(context: Any, *args: Any) -> dict[str, Any]:
    result = context.task_result
    ran.append(result)
    return {"id": result.id, "attempt": context.attempt, "args": list(args)}


@task(takes_context=True)
def second_time_lucky(context: Any) -> int:
    ran.append(context.task_result)
    if context.attempt == 1:
        raise ValueError("not yet")
    return int(context.attempt)


@task
async def coroutine(value: Any) -> Any:
    ran.append(value)
    return value


@task
async def coroutine_writes(name: str) -> int:
    product = await Product.objects.acreate(name=name, price=1)
    return product.pk


@task
async def coroutine_fails() -> None:
    await sync_to_async(ran.append)("failing")
    raise ValueError("this coroutine failed")


@task
def in_block() -> bool:
    return connection.in_atomic_block


@task
async def sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)


@task
def wait() -> str:
    started.set()
    assert gate.wait(60)
    return "waited"


@task(takes_context=True)
def wait_in_context(context: Any) -> None:
    ran.append(context.task_result)
    started.set()
    assert second_gate.wait(60)


@task
def enqueue_and_fail() -> None:
    note.enqueue("from a task")
    raise ValueError("and yet")


def not_a_task() -> None: ...


def in_an_hour() -> datetime:
    return datetime.now(UTC) + timedelta(hours=1)
