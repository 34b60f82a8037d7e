"""`answering()` where tests commit: a reply comes from this thread, since no worker runs."""

from __future__ import annotations

from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.test import TransactionTestCase

from django_mq import RemoteError, ReplyTimeout, RetryPolicy, aask, ask, gather, handler, request
from django_mq.models import QueuedMessage
from django_mq.testing import answering
from tests.worker.conftest import registry  # noqa: F401  (fixture)


@pytest.mark.usefixtures("registry")
class CommittingTest(TransactionTestCase):
    """Where a test commits, a request does so, too."""

    def setUp(self) -> None:
        @handler("test.double", queue="answers", name="double")
        def double(delivery: Any) -> int:
            return int(2 * delivery.payload)

    def test_ask_gets_a_reply(self) -> None:
        with answering() as errors:
            assert ask("test.double", 4, timeout=60) == 8
        assert (list(errors), QueuedMessage.objects.count()) == ([], 0)

    def test_many_are_gathered(self) -> None:
        with answering():
            pending = [request("test.double", n) for n in range(3)]
            assert gather(*pending, timeout=60) == [0, 2, 4]

    def test_async_code_gets_a_reply(self) -> None:
        with answering():
            assert async_to_sync(aask)("test.double", 4, timeout=60) == 8

    def test_the_database_of_a_request_that_it_cannot_answer_is_named(self) -> None:
        with answering(errors="keep"), pytest.raises(ReplyTimeout, match="using='default'"):
            request("test.double", 4, after=60).result()

    def test_the_error_of_the_handler_is_seen(self) -> None:
        @handler("test.fails", queue="answers", name="fails", retry=RetryPolicy.never())
        def fails(delivery: Any) -> None:
            raise ValueError("no such account")

        with answering(errors="keep"), pytest.raises(RemoteError):
            ask("test.fails", timeout=60)
