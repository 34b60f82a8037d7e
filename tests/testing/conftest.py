"""Only the handlers of the test exist, and a retry is not due before the test moves time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from django_mq import RetryPolicy, fixed
from django_mq.handlers import isolated


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    with isolated():
        yield


@pytest.fixture(autouse=True)
def _retries_wait(settings: Any) -> None:
    """However slow the machine is, no retry is due by itself."""
    later = RetryPolicy(backoff=fixed(3600))
    settings.DJANGO_MQ = {**getattr(settings, "DJANGO_MQ", {}), "RETRY": later}
