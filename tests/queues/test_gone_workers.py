"""Commands and orders reach the workers that `states.GONE_AFTER` counts as alive."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from django_mq import queues
from django_mq.states import GONE_AFTER
from tests.rows import add, beat

pytestmark = pytest.mark.django_db


def commanded(id: int) -> bool:
    return bool(queues.ask_stack(id).ids)


def ordered(id: int) -> bool:
    return bool(queues.quiet_workers("w"))


@pytest.mark.parametrize("ask", [commanded, ordered])
def test_a_silent_worker_is_not_asked(ask: Callable[[int], bool]) -> None:
    message = add(leased=60, claimed_by="w:1", attempts=1)
    seen = GONE_AFTER.total_seconds()
    worker = beat("w", seen=5 - seen)
    assert ask(message.pk)
    worker.delete()
    beat("w", seen=-seen)
    assert not ask(message.pk)
