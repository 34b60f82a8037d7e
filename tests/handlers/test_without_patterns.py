"""Handlers without patterns, which only rows that name them reach: tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from django_mq import Message, handler, handlers
from django_mq.checks import check_handlers
from django_mq.conf import get_settings
from django_mq.models import QueuedMessage
from django_mq.outbox.send import send_to


@pytest.fixture(autouse=True)
def named() -> Iterator[handlers.Handler]:
    with handlers.isolated() as registry:

        @handler("a.b", name="named", queue="mail")
        def named(delivery: Any) -> None: ...

        found = replace(registry.all()[0], patterns=())
        with handlers.isolated([found]):
            yield found


def test_it_may_have_any_queue(named: handlers.Handler) -> None:
    settings = get_settings()
    own = handlers.allowed_queues(named, settings)
    every = handlers.allowed_queues(replace(named, any_queue=True), settings)
    assert (list(own), "other" in own) == (["mail"], False)
    assert (list(every), "other" in every) == (["mail"], True)


def test_handler_without_patterns_may_share_any_queue(named: handlers.Handler) -> None:
    """W003 concerns handlers whose queue is declared with the handler."""
    handlers.add(replace(named, name="other", function=print, atomic=False))
    assert check_handlers(None) == []  # type: ignore[operator]


@pytest.mark.django_db(transaction=True)
def test_a_message_for_one_handler(named: handlers.Handler) -> None:
    """The message commits by itself, goes to the requested queue, and carries its options."""
    message = Message("tasks.named", {"args": []}, queue="anywhere")
    receipt, stored_at = send_to(named, message, reserved='{"mq.task": {"timeout": 5}}')
    [row] = QueuedMessage.objects.all()
    assert receipt.ids == (row.pk,)
    assert stored_at == pytest.approx(row.created_at.timestamp(), abs=1e-5)
    assert (row.queue, row.handler, row.wants_result) == ("anywhere", "named", True)
    assert row.metadata == {"mq.task": {"timeout": 5}}
