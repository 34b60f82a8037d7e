"""Answering handlers, and threads that wait for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from django_mq import PendingReply, gather
from django_mq.requests import waiter
from tests.waiting import until
from tests.worker.conftest import PATIENCE


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """No thread and no connection is left when nobody waits."""
    yield
    until(lambda: "mq-replies" not in names(), "the waiting thread ends")
    assert not any(each._pending for each in waiter._waiters.values())


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def wanted() -> int:
    """The number of messages that this process waits for."""
    return sum(len(each._pending) for each in waiter._waiters.values())


@contextmanager
def waiting(*pendings: PendingReply, **options: Any) -> Iterator[Any]:
    """Wait for `pendings` in a thread while the block runs; yields a future of the replies."""
    with ThreadPoolExecutor(1) as pool:
        replies = pool.submit(lambda: gather(*pendings, timeout=PATIENCE, **options))
        until(lambda: wanted() or replies.done(), "somebody waits")
        yield replies
