"""Code with tasks for type checkers: mypy and pyright read this, and nothing is executed."""

from __future__ import annotations

from typing import Any, assert_type

from django_mq import fixed
from django_mq.contrib.tasks import MessageTask, task
from django_mq.contrib.tasks.compat import TaskContext


@task
def add(a: int, b: int) -> int:
    return a + b


@task(max_attempts=3, backoff=fixed(5), key=lambda name: f"name/{name}")
def greet(name: str) -> str:
    return name


@task(takes_context=True, atomic=False)
def count(context: TaskContext[..., Any], text: str) -> int:
    return context.attempt + len(text)


assert_type(add.enqueue(1, b=2).return_value, int)
assert_type(greet.using(unique_id="a", expires=60).enqueue("Ada").return_value, str)
assert_type(count.enqueue("text").return_value, int)
moved: MessageTask[[int, int], int] = add.using(queue_name="other", priority=3)
add.enqueue("1", 2)  # type: ignore[arg-type]
greet.enqueue()  # type: ignore[call-arg]
task(retries=3)  # type: ignore[call-overload]
