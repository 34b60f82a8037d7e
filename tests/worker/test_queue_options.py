"""The options with which a worker claims from a queue."""

from __future__ import annotations

from typing import Any

import pytest

from django_mq import handler
from django_mq.conf import get_settings
from django_mq.handlers import isolated
from django_mq.worker.queue_options import ClaimOptionsCache, nonatomic_names


@pytest.mark.parametrize(
    ("of_queue", "option", "longest"), [(4, None, 4), (50, None, 10), (50, 20, 20), (50, 5, 5)]
)
def test_a_list_is_as_long_as_one_call(
    settings: Any, of_queue: int, option: int | None, longest: int
) -> None:
    """As the executors cut it: never longer than BATCH_SIZE, which the command line overrides."""
    settings.DJANGO_MQ = {"BATCH_SIZE": 10, "QUEUES": {"mail": {"batch_size": of_queue}}}

    @handler("#", queue="mail", batch=True, atomic=False)
    def h(deliveries: Any) -> None: ...

    options = ClaimOptionsCache(get_settings(), batch_size=option).of("mail")
    assert options.list_size == longest
    assert options.batch_size == (option or of_queue)


def test_only_handlers_that_begin_with_a_statement_are_named() -> None:
    """A coroutine may begin without one, and an atomic handler does."""

    async def coroutine(delivery: Any) -> None: ...

    def run(delivery: Any) -> None: ...

    with isolated():
        handler("a", name="atomic")(run)
        handler("a", name="async")(coroutine)
        handler("a", name="new", aliases=("old",), atomic=False)(lambda delivery: None)
        handler("a", name="list", atomic=False, batch=True)(lambda deliveries: None)
        assert nonatomic_names() == ["new", "old", "list"]
