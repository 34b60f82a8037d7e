"""A row that the database refuses does not prevent other rows from ending.

A trigger stands in for an unforeseen error: it refuses the message put aside for one unique id.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pytest
from django.db import connection

from django_mq import Delivery, handler
from django_mq.conf import get_settings
from django_mq.executor.ended import Ended
from django_mq.executor.settle_rows import settle_all
from django_mq.models import FailedAttempt, QueuedMessage, QueueState, UniqueKey, WorkerHeartbeat
from django_mq.store import Cursor
from django_mq.worker import Worker, chores, resolver
from tests.database import second_connection
from tests.rows import add, beat, stored
from tests.waiting import until
from tests.worker.conftest import Bench, Said, Start

pytestmark = pytest.mark.django_db(transaction=True)

REFUSE = """
create function refuse() returns trigger language plpgsql as
$$ begin raise exception 'no %', new.unique_id using errcode = 'check_violation'; end $$;
create trigger refuse before insert on django_mq_queuedmessage
   for each row when (new.payload = '"refused"') execute function refuse()
"""


@pytest.fixture(autouse=True)
def _refusing(transactional_db: None) -> Iterator[None]:
    with second_connection() as other:
        other.execute(REFUSE)
    yield
    connection.close()  # whatever rows it has locked
    with second_connection() as other:
        other.execute("drop trigger refuse on django_mq_queuedmessage; drop function refuse")


@pytest.fixture(autouse=True)
def ran() -> list[int]:
    ran: list[int] = []

    @handler("a.b", queue="mail", name="h")
    def h(delivery: Delivery) -> None:
        ran.append(delivery.id)
        if delivery.payload == "commits":
            connection.cursor().execute("commit")

    return ran


def put_aside(unique_id: str, payload: str) -> None:
    UniqueKey.objects.create(
        queue="mail", handler="h", type="a.b", unique_id=unique_id, put_aside={"payload": payload}
    )


def add_unique(unique_id: str, payload: str = "refused", **given: Any) -> QueuedMessage:
    """Insert a message with a unique id, and a message put aside for that id."""
    message = add(handler="h", type="a.b", unique_id=unique_id, **given)
    UniqueKey.objects.create(
        queue="mail", handler="h", type="a.b", unique_id=unique_id, message_id=message.pk
    )
    put_aside(unique_id, payload)
    return message


def add_both(**given: Any) -> list[int]:
    """Insert a message whose end is refused, then another; return their ids."""
    return [add_unique("bad", **given).pk, add_unique("good", "taken", **given).pk]


def forward() -> set[str | None]:
    """Return the unique ids whose put-aside message came forward."""
    found = QueuedMessage.objects.filter(payload="taken")
    return set(found.values_list("unique_id", flat=True))


def run_chores() -> None:
    QueueState.objects.filter(pk=":").delete()
    beat("gone", seen=-1000)
    with second_connection() as other, other.cursor() as cursor:
        assert chores.run(cursor, get_settings())
    assert not WorkerHeartbeat.objects.exists()  # the last of the chores


def test_a_take_over_that_is_refused(ran: list[int]) -> None:
    """Otherwise the claims of the queue would fail until the row is repaired."""
    ids = add_both(leased=-5, attempts=20)
    other = add(handler="h", type="a.b", leased=-5, attempts=1)
    assert Worker(queues=["mail"]).run(until_empty=True)
    assert set(QueuedMessage.objects.dead().values_list("pk", flat=True)) == set(ids)
    assert other.pk in ran


def test_a_held_message_whose_end_is_refused() -> None:
    """Those that are held with it are held all the same."""
    add_both(held=-90_000)
    for model in (QueuedMessage, UniqueKey):
        model.objects.update(type="a.unknown")
    held = add(handler="h", type="a.unknown")
    assert Worker(queues=["mail"]).run(until_empty=True)
    assert forward() == {"good"}
    assert stored(held).held_since is not None


REFUSE_DEATH = """
create trigger refuse_death before update on django_mq_queuedmessage
   for each row when (new.dead_at is not null) execute function refuse()
"""


def test_messages_held_beside_a_refused_dead_letter_stay_held(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """To hold is a statement of its own: it does not stay when the one after it is refused."""
    with second_connection() as other:
        other.execute(REFUSE_DEATH)
    try:
        held = [add(type="a.unknown") for _ in range(3)]
        dying = add(type="a.unknown", held=-90_000)
        assert Worker(queues=["mail"]).run(until_empty=True)
    finally:
        connection.close()
        with second_connection() as other:
            other.execute("drop trigger refuse_death on django_mq_queuedmessage")
    assert all(stored(each).held_since for each in held)
    assert stored(dying).dead_at is None
    events = [getattr(each, "event", "") for each in caplog.records]
    assert (events.count("lease_lost"), events.count("dispatch_failed")) == (0, 1)


def test_a_loss_beside_a_refused_message_loses_no_lease(
    start: Start, said: Said, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The messages that were held before it stay held, and are announced."""
    ends = [psycopg.errors.CheckViolation("one of several"), None, psycopg.OperationalError("gone")]
    held = [add(type="a.unknown") for _ in range(4)]

    def failing(cursor: Cursor, ended: Sequence[Ended]) -> set[int]:
        begun = len(ends) < 3 or len(ended) > 1
        if begun and ends and (error := ends.pop(0)):
            raise error
        return settle_all(cursor, ended)

    monkeypatch.setattr(resolver, "settle_all", failing)
    running = start()
    until(lambda: all(stored(each).held_since for each in held))
    add(handler="h", type="a.b")
    said.wait("message_acked")
    running.stop()
    assert not ends
    events = [vars(each) for each in caplog.records if hasattr(each, "event")]
    assert "lease_lost" not in [each["event"] for each in events]
    announced = [each["messages"] for each in events if each["event"] == "message_held"]
    assert sum(announced) == len(held)


def test_an_expiry_that_is_refused() -> None:
    ids = add_both(expires=-5)
    run_chores()
    assert set(QueuedMessage.objects.dead().values_list("pk", flat=True)) == set(ids)
    assert forward() == {"good"}


def test_a_chore_that_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    put_aside("bad", "refused")
    put_aside("good", "taken")
    run_chores()
    assert forward() == {"good"}
    [error] = [each for each in caplog.records if getattr(each, "event", "") == "chore_failed"]
    assert "unique id bad of type a.b in queue mail" in error.getMessage()


def test_an_ack_that_is_refused(ran: list[int]) -> None:
    """Only the message that it put aside stays where it is."""
    bad, good = add_both(max_attempts=1)
    others = [add(handler="h", type="a.b").pk for _ in range(5)]
    assert Worker(queues=["mail"]).run(until_empty=True)
    assert {bad, good, *others} <= set(ran)
    assert not QueuedMessage.objects.exists()
    assert not FailedAttempt.objects.exists()
    assert UniqueKey.objects.get(put_aside__isnull=False).unique_id == "bad"


def test_one_of_several_that_were_committed_by_a_handler_is_refused(bench: Bench) -> None:
    """Messages whose writes a handler committed are settled, also the refused one."""
    add_both(after=-60)
    breaks = add(handler="h", type="a.b", payload="commits", after=-1)
    bench.run_all(bench.claim())
    left = {each.pk: each for each in QueuedMessage.objects.exclude(payload="taken")}
    assert set(left) == {breaks.pk}
    assert left[breaks.pk].leased_until is None
    assert "HandlerBrokeTransaction" in left[breaks.pk].last_error
    assert forward() == {"good"}
