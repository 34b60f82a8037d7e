"""The options of Worker are checked."""

from __future__ import annotations

from typing import Any

import pytest

from django_mq.worker import Worker

pytestmark = pytest.mark.django_db(transaction=True)


def test_one_queue_may_be_given_as_a_text() -> None:
    assert Worker("mail").queues == ("mail",)


@pytest.mark.parametrize("wrong", [{"threads": "2"}, {"threads": True}, {"batch_size": 10**9}])
def test_numbers_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="whole number"):
        Worker(**wrong)
