"""A retry is not due before the test moves time, however slow the machine is."""

from __future__ import annotations

from typing import Any

import pytest

from django_mq import RetryPolicy, fixed


@pytest.fixture(autouse=True)
def _retries_wait(settings: Any) -> None:
    later = RetryPolicy(backoff=fixed(3600))
    settings.DJANGO_MQ = {**getattr(settings, "DJANGO_MQ", {}), "RETRY": later}
