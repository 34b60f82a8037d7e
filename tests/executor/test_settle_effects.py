"""Which ends of deliveries have effects on other rows, and so need a transaction."""

from __future__ import annotations

from typing import Any

import pytest

from django_mq.executor import settle_effects
from django_mq.executor.ended import Ended, Settled
from tests.rows import delivery


@pytest.mark.parametrize(
    ("columns", "needs"),
    [
        ({}, False),
        ({"key": "k"}, True),
        ({"unique_id": "u"}, True),
        ({"wants_result": True}, True),
        # After a lost connection, the transaction's id tells whether it was committed.
        ({"ordered": True}, True),
    ],
)
def test_an_end_that_needs_a_transaction(columns: dict[str, Any], needs: bool) -> None:
    ended = [Ended(delivery(**columns), Settled.ACKED)]
    assert settle_effects.needing_transaction(ended) == ended * needs
