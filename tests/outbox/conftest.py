"""Producers: only the handlers of the test exist, and the doorbell has not rung."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from django_mq import Delivery, handler, handlers
from django_mq.outbox import notify


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    with handlers.isolated():
        yield


@pytest.fixture(autouse=True)
def quiet_bell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "_last", {})


def subscribe(*patterns: str, **options: Any) -> None:
    def function(delivery: Delivery) -> None: ...

    handler(*patterns, **options)(function)


def now() -> datetime:
    return datetime.now(UTC)
