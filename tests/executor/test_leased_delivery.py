"""The delivery of a handler outside a transaction."""

from __future__ import annotations

import math
from typing import Any

import pytest

from django_mq import handler
from django_mq.handlers import isolated
from django_mq.testing import deliver

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("seconds", [0, -5, math.nan, math.inf, "x", None, True])
def test_extend_takes_seconds(seconds: Any) -> None:
    with isolated():

        @handler("#", name="h", atomic=False)
        def h(delivery: Any) -> None:
            from django_mq.executor.leased_delivery import LeasedDelivery

            LeasedDelivery.extend(delivery, seconds)

        with pytest.raises(ValueError, match="more than zero"):
            deliver(h)
