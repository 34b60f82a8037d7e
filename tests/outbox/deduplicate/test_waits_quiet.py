"""A message that was broadcast in a quiet time waits: nothing but an operator ends that time."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db.models.functions import Now

from django_mq import cancel
from django_mq.models import QueuedMessage, UniqueKey
from tests.outbox.deduplicate.conftest import handled, lease, send, told
from tests.rows import the_message

pytestmark = pytest.mark.django_db

MINUTE = timedelta(minutes=1)


@pytest.fixture
def quiet_until() -> datetime:
    """Handle a message; broadcast one that waits for the end of its quiet time, and return that."""
    send(1, unique_for=60)
    handled(lease())
    end: datetime = UniqueKey.objects.get().quiet_until
    assert told(send(2, on_duplicate="requeue")) == ("requeued", "")
    return end


@pytest.mark.parametrize("option", ["debounce", "replace", "update", "rerun"])
@pytest.mark.parametrize("later", [None, timedelta(seconds=1), timedelta(hours=1)])
def test_a_duplicate_moves_it_only_past_the_end(
    quiet_until: datetime, option: Any, later: timedelta | None
) -> None:
    """CAR-11, CAR-23."""
    given = {} if later is None else {"after": later}
    outcome = "debounced" if option == "debounce" else "updated"
    assert told(send(3, on_duplicate=option, **given)) == (outcome, "")
    due = the_message().processable_after
    if option in ("debounce", "replace") and later == timedelta(hours=1):
        assert due > quiet_until + 50 * MINUTE
    else:
        assert due == quiet_until


def test_a_cancel_leaves_the_quiet_time(quiet_until: datetime) -> None:
    assert len(cancel(unique_id="u").ids) == 1
    assert UniqueKey.objects.get().quiet_until == quiet_until
    assert told(send(3)) == ("duplicate", "quiet")
    assert told(send(3, on_duplicate="requeue")) == ("requeued", "")
    assert the_message().processable_after == quiet_until


def test_one_that_expires_in_it_leaves_it(quiet_until: datetime) -> None:
    QueuedMessage.objects.update(expires_at=Now())
    assert told(send(3)) == ("duplicate", "quiet")
    assert told(send(3, on_duplicate="requeue")) == ("requeued", "")
    newest = QueuedMessage.objects.latest("id")
    assert (newest.payload, newest.processable_after) == ({"n": 3}, quiet_until)


@pytest.mark.parametrize("success", [True, False])
def test_one_that_an_operator_runs_in_it_does_not_shorten_it(
    quiet_until: datetime, success: bool
) -> None:
    handled(lease(), success=success)
    assert UniqueKey.objects.get().quiet_until == quiet_until


def test_its_own_quiet_time_may_be_longer(quiet_until: datetime) -> None:
    send(3, on_duplicate="update", unique_for=3600)
    handled(lease())
    assert UniqueKey.objects.get().quiet_until > quiet_until + 50 * MINUTE


def test_put_aside_message_waits_for_the_end_too(quiet_until: datetime) -> None:
    running = lease()
    assert told(send(3, on_duplicate="requeue")) == ("requeued", "")
    [id] = handled(running)
    assert QueuedMessage.objects.get(pk=id).processable_after == quiet_until
    assert UniqueKey.objects.get().quiet_until == quiet_until


def test_after_the_end_it_is_an_ordinary_message(quiet_until: datetime) -> None:
    UniqueKey.objects.update(quiet_until=Now() - MINUTE)
    send(3, on_duplicate="debounce")
    assert the_message().processable_after < quiet_until
    handled(lease(), success=False)
    assert not UniqueKey.objects.exists()
