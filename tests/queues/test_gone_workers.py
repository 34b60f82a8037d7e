"""Commands and orders reach the workers that `states.GONE_AFTER` counts as alive."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from importlib import import_module

import pytest

from django_mq import queues
from tests.rows import add, beat

pytestmark = pytest.mark.django_db


def commanded(id: int) -> bool:
    return bool(queues.ask_stack(id).ids)


def ordered(id: int) -> bool:
    return bool(queues.quiet_workers("w"))


@pytest.mark.parametrize(("module", "ask"), [("running", commanded), ("worker_orders", ordered)])
def test_a_silent_worker_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, module: str, ask: Callable[[int], bool]
) -> None:
    message = add(leased=60, claimed_by="w:1", attempts=1)
    beat("w", seen=-20)
    assert ask(message.pk)
    asking = import_module(f"django_mq.queues.{module}")
    monkeypatch.setattr(asking, "GONE_AFTER", timedelta(seconds=10))
    assert not ask(message.pk)
